"""The worker pools: results, failures that do not spread, and no process left behind."""

from __future__ import annotations

import atexit
import os
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.e2e.checkpoints import checkpoint
from tests.pool import Pool, PoolError, pool


def _sum_of_ranks(rank: int, world_size: int, scale: float) -> tuple[int, torch.Tensor]:
    x = torch.full((3,), rank * scale)
    dist.all_reduce(x)
    return os.getpid(), x


def _fail_on(rank: int, world_size: int, culprit: int) -> None:
    if rank == culprit:
        raise ValueError("planted failure")
    dist.all_reduce(torch.zeros(1))


def _die(rank: int, world_size: int) -> None:
    if rank == 0:
        os._exit(7)
    dist.all_reduce(torch.zeros(1))


def _oversleep(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(60)


def _unpicklable(rank: int, world_size: int) -> object:
    return lambda: None


def _settings(rank: int, world_size: int) -> tuple[int, bool, str]:
    return torch.get_num_threads(), torch.cuda.is_available(), os.environ["TRITON_INTERPRET"]


def _outlives_a_copy(rank: int, world_size: int) -> tuple[Path, bool]:
    """The folder of a checkpoint made here, and whether it stands after a copy of this process has ended."""
    directory = checkpoint("qwen3")
    copy = os.fork()
    if copy == 0:
        atexit._run_exitfuncs()  # as the interpreter does where a process ends
        os._exit(0)
    assert os.waitpid(copy, 0)[1] == 0
    return directory, (directory / "config.json").exists()


def _scratch(rank: int, world_size: int) -> Path:
    return Path(tempfile.mkdtemp())


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_come_in_rank_order_from_workers_that_stay(world_size: int) -> None:
    first = pool(world_size).run(_sum_of_ranks, 1.0)
    second = pool(world_size).run(_sum_of_ranks, 0.5)
    assert [pid for pid, _ in first] == [pid for pid, _ in second]
    assert len({pid for pid, _ in first} | {os.getpid()}) == world_size + 1
    total = world_size * (world_size - 1) / 2
    assert all(x.tolist() == [total] * 3 for _, x in first)
    assert all(x.tolist() == [total / 2] * 3 for _, x in second)


def test_workers_run_one_thread_on_the_cpu() -> None:
    assert pool(2).run(_settings) == [(1, False, "1")] * 2


def test_every_rank_reports_its_traceback_and_the_next_run_works() -> None:
    start = time.monotonic()
    with pytest.raises(PoolError) as caught:
        pool(3).run(_fail_on, 1)
    # Far below the 60 s of the collective: ranks 0 and 2 saw rank 1's connections close.
    assert time.monotonic() - start < 20
    message = str(caught.value)
    assert message.startswith("--- rank 1 of 3: Traceback"), "the culprit reports first"
    assert "ValueError: planted failure" in message
    assert message.count("in _fail_on") == 3
    assert len(pool(3).run(_sum_of_ranks, 1.0)) == 3


def test_a_rank_that_dies_is_named_with_its_exit_code() -> None:
    with pytest.raises(PoolError, match="rank 0 of 2: died with exit code 7"):
        pool(2).run(_die)
    assert len(pool(2).run(_sum_of_ranks, 1.0)) == 2


def test_a_rank_that_died_between_two_runs_is_named() -> None:
    own = Pool(2)
    own.run(_sum_of_ranks, 1.0)
    own.processes[1].kill()
    own.processes[1].join()
    with pytest.raises(PoolError, match="rank 1 of 2: died with exit code -9"):
        own.run(_sum_of_ranks, 1.0)
    assert len(own.run(_sum_of_ranks, 1.0)) == 2
    own.close()


def test_a_hung_rank_ends_at_the_deadline_with_its_stack() -> None:
    start = time.monotonic()
    with pytest.raises(PoolError) as caught:
        pool(2).run(_oversleep, timeout_s=2.0)
    assert time.monotonic() - start < 15
    assert "rank 1 of 2: no result within 2.0 s" in str(caught.value)
    assert "in _oversleep" in str(caught.value)
    assert "rank 0" not in str(caught.value)
    assert len(pool(2).run(_sum_of_ranks, 1.0)) == 2


def test_an_unpicklable_result_is_an_error() -> None:
    with pytest.raises(PoolError, match="pickle"):
        pool(2).run(_unpicklable)


def test_an_unpicklable_task_costs_no_worker() -> None:
    before = pool(2).run(_sum_of_ranks, 1.0)
    with pytest.raises(AttributeError, match="pickle"):
        pool(2).run(lambda rank, world_size: None)
    after = pool(2).run(_sum_of_ranks, 1.0)
    assert [pid for pid, _ in before] == [pid for pid, _ in after]


def test_close_leaves_no_process_and_no_file() -> None:
    own = Pool(2)
    pids = [pid for pid, _ in own.run(_sum_of_ranks, 1.0)]
    directory, *others = [own._directory, *own.run(_scratch)]
    assert all(path.exists() for path in (directory, *others)) and not any(_gone(pid) for pid in pids)
    own.close()
    assert all(_gone(pid) for pid in pids) and not any(path.exists() for path in (directory, *others))
    own.close()
    assert len(own.run(_sum_of_ranks, 1.0)) == 2
    own.close()


def test_a_checkpoint_stands_until_the_process_that_made_it_ends() -> None:
    """A copy of that process has its handlers too, and ends before it."""
    directory, stands = pool(1).run(_outlives_a_copy)[0]
    assert stands and directory.exists()
