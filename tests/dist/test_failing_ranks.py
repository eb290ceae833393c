"""Ranks that raise, differ or stay away: everybody ends, with the reason; no deadline is what ends them."""

from __future__ import annotations

import operator
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm import torch_dist
from comm.base import Communicator
from comm.loopback import LoopbackWorld, run_ranks
from comm.torch_dist import TorchDistCommunicator
from tests.dist.ranks import check_all_to_all, on_ranks
from tests.pool import PoolError


def check_refused_groups(comm: Communicator) -> None:
    """Refused before the first collective, so that the group stays usable."""
    for groups, message in (([(0,)], "exactly once"), ([(0, 1), (1,)], "exactly once"), ([(1, 0)], "ascending")):
        with pytest.raises(ValueError, match=message):
            TorchDistCommunicator(groups, "cpu", timedelta(seconds=60))
    comm.barrier()


def test_kvp_groups_must_partition_the_world() -> None:
    on_ranks("gloo", 2, 2, check_refused_groups)
    with pytest.raises(ValueError, match=r"rank 2 .* kvp group"):
        LoopbackWorld(4).communicator(2, (0, 1))


def check_raise_midway(comm: Communicator) -> None:
    comm.all_reduce(torch.zeros(3))
    if comm.rank == 1:
        raise KeyError("planted failure")
    comm.barrier()
    comm.all_to_all(torch.zeros(len(comm.kvp_group), 2))


def test_gloo_rank_that_raises_ends_all() -> None:
    with pytest.raises(PoolError) as caught:
        on_ranks("gloo", 3, 3, check_raise_midway)
    message = str(caught.value)
    assert message.startswith("--- rank 1 of 3") and "KeyError: 'planted failure'" in message
    assert message.count("in check_raise_midway") == 3, "rank 1's error reached the others' collectives"
    assert "Timed out" not in message and "timed out" not in message, "before any deadline"
    on_ranks("gloo", 3, 3, check_all_to_all)


def test_loopback_rank_that_raises_ends_all() -> None:
    """The others are woken, with the reason."""
    threads, woken = threading.active_count(), dict[int, str]()

    def body(world: LoopbackWorld, rank: int) -> None:
        try:
            check_raise_midway(world.communicator(rank, (0, 1, 2)))
        except RuntimeError as error:
            woken[rank] = str(error)
            raise

    with pytest.raises(KeyError, match="planted failure") as caught:
        run_ranks(3, body, timeout_s=60.0)
    assert caught.value.__notes__ == ["raised by rank 1 of 3"]
    assert woken == dict.fromkeys((0, 2), "rank 1 failed: KeyError: 'planted failure'")
    assert threading.active_count() == threads


@pytest.mark.parametrize(
    "calls, message",
    [
        ((("all_reduce", torch.zeros(2)), ("all_gather", torch.zeros(2))), r"rank 0 called all_reduce.*all_gather"),
        ((("all_reduce", torch.zeros(2)), ("all_reduce", torch.zeros(3))), r"float32 \[2\].*float32 \[3\]"),
        ((("all_gather", torch.zeros(2)), ("all_gather", torch.zeros(2).long())), r"float32 \[2\].*int64 \[2\]"),
        ((("barrier",), ("all_gather_object", 1)), r"barrier.*all_gather_object"),
    ],
)
def test_loopback_names_calls_that_differ(calls: tuple[Any, ...], message: str) -> None:
    def body(world: LoopbackWorld, rank: int) -> None:
        name, *args = calls[rank]
        operator.methodcaller(name, *args)(world.communicator(rank, (0, 1)))

    with pytest.raises(RuntimeError, match=message):
        run_ranks(2, body, timeout_s=60.0)


def test_loopback_sees_deadlocks() -> None:
    def crossed(world: LoopbackWorld, rank: int) -> None:  # the world's collective against the group's
        comm = world.communicator(rank, (rank // 2 * 2, rank // 2 * 2 + 1))
        if rank == 0:
            comm.barrier()
        comm.all_to_all(torch.zeros(2))

    def early_return(world: LoopbackWorld, rank: int) -> None:
        if rank != 1:
            world.communicator(rank, (rank,)).barrier()

    with pytest.raises(RuntimeError, match=r"deadlock.*rank 0 in barrier.*rank 1 in all_to_all.*rank 2 returned"):
        run_ranks(4, crossed, timeout_s=60.0)
    with pytest.raises(RuntimeError, match=r"deadlock.*rank 0 in barrier.*rank 1 returned"):
        run_ranks(3, early_return, timeout_s=60.0)


@pytest.mark.parametrize("waited", [False, True])
def test_loopback_has_a_deadline(waited: bool) -> None:
    """For ranks that wait for one that stays away, and for it alone."""
    over = threading.Event()

    def body(world: LoopbackWorld, rank: int) -> None:
        if rank == 1:
            over.wait(60.0)
        elif waited:
            world.communicator(rank, (rank,)).barrier()

    late = r"waited 0.2 s in barrier for ranks \[1\]|" if waited else ""
    with pytest.raises(RuntimeError, match=late + r"ranks \[(0, )?1\] did not finish within 0.2 s"):
        run_ranks(2, body, timeout_s=0.2)
    over.set()


def meet() -> None:
    """Waits for the other processes, by other means than those of a communicator; does nothing between threads."""
    if dist.is_initialized():
        dist.barrier()


def check_silence(comm: Communicator, silent: int) -> None:
    if comm.rank != silent:
        comm.set_control_timeout(0.3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_dist, "CONTROL_TIMEOUT", timedelta(seconds=0.3))
            message = "Ranks 1 failed" if silent else r"rank 1 waited 0.3 s \(comm.timeout_s\) for a message"
            with pytest.raises(RuntimeError, match=message):
                comm.barrier() if silent else comm.broadcast_object(None)
    meet()


@pytest.mark.parametrize("silent", [0, 1])
def test_who_is_silent_is_named_at_the_deadline(silent: int) -> None:
    on_ranks("gloo", 2, 1, check_silence, silent)


def check_abort(comm: Communicator, culprit: int) -> None:
    if comm.rank == culprit:
        comm.abort("planted")
        with pytest.raises(RuntimeError):
            comm.barrier()
    else:
        with pytest.raises(RuntimeError):
            comm.broadcast_object(None) if comm.rank else comm.barrier()
    meet()  # what ended the other's wait is not the end of this process


@pytest.mark.parametrize("culprit", [0, 1])
def test_who_gives_the_control_plane_up_keeps_nobody_waiting(culprit: int) -> None:
    on_ranks("gloo", 2, 2, check_abort, culprit)
    with pytest.raises(RuntimeError, match="planted"):
        on_ranks("loopback", 2, 2, check_abort, culprit)
