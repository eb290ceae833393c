"""The worker pools: failures that do not spread, and no process left behind; other tests here show their results."""

from __future__ import annotations

import atexit
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.e2e.checkpoints import checkpoint
from tests.pool import Pool, PoolError, pool


def _settings(rank: int, world_size: int) -> tuple[int, Path, tuple[int, bool, str]]:
    here = torch.get_num_threads(), torch.cuda.is_available(), os.environ["TRITON_INTERPRET"]
    return os.getpid(), Path(tempfile.mkdtemp()), here


def _die(rank: int, world_size: int) -> None:
    if rank == 0:
        os._exit(7)
    dist.all_reduce(torch.zeros(1))


def _oversleep(rank: int, world_size: int) -> None:
    dist.barrier()
    if rank == 1:
        time.sleep(600)  # the pool ends it


def _unpicklable(rank: int, world_size: int) -> object:
    return lambda: None


def _outlives_a_copy(rank: int, world_size: int) -> tuple[Path, bool]:
    """The folder of a checkpoint made here, and whether it stands after a copy of this process has ended."""
    directory = checkpoint("qwen3")
    copy = os.fork()
    if copy == 0:
        atexit._run_exitfuncs()  # as the interpreter does where a process ends
        os._exit(0)
    assert os.waitpid(copy, 0)[1] == 0
    return directory, (directory / "config.json").exists()


@pytest.mark.parametrize(
    "fails, reason",
    [(_die, "rank 0 of 3: died with exit code 7"), (_unpicklable, "pickle"), (_oversleep, "in _oversleep")],
)
def test_a_failure_is_reported_and_the_next_run_works(
    fails: Callable[..., None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`test_failing_ranks.py` has a rank that raises; the deadline of one that hangs has passed when the others end."""
    with monkeypatch.context() as patch:
        if fails is _oversleep:
            patch.setattr("tests.pool.wait", lambda pending, timeout: wait(pending) if len(pending) > 1 else [])
        with pytest.raises(PoolError, match=reason) as caught:
            pool(3).run(fails)
    if fails is _oversleep:
        message = str(caught.value)
        assert message.startswith("--- rank 1 of 3: no result within 200.0 s") and message.count("--- rank") == 1
    assert len(pool(3).run(_settings)) == 3


def test_a_pool_stays_until_it_is_closed_or_a_rank_dies() -> None:
    own = Pool(2)
    (*places, here), (*others, there) = own.run(_settings)
    assert here == there == (1, False, "1"), "one thread, on the CPU"
    with pytest.raises(AttributeError, match="pickle"):  # a task that cannot be sent costs no worker
        own.run(lambda rank, world_size: None)
    assert [pid for pid, *_ in own.run(_settings)] == [places[0], others[0]]
    left = [own._directory, places[1], others[1], Path(f"/proc/{places[0]}"), Path(f"/proc/{others[0]}")]
    assert all(path.exists() for path in left)
    own.close()
    assert not any(path.exists() for path in left)
    own.close()
    own.run(_settings)
    own.processes[1].kill()
    own.processes[1].join()
    with pytest.raises(PoolError, match="rank 1 of 2: died with exit code -9"):
        own.run(_settings)
    own.close()


def test_a_checkpoint_stands_until_the_process_that_made_it_ends() -> None:
    """A copy of that process has its handlers too, and ends before it."""
    directory, stands = pool(1).run(_outlives_a_copy)[0]
    assert stands and directory.exists()
