"""Ranks that raise, differ, are late or stay away: everybody ends, with the reason."""

from __future__ import annotations

import operator
import threading
import time
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from comm.base import Communicator
from comm import torch_dist
from comm.loopback import LoopbackWorld, run_ranks
from comm.torch_dist import TorchDistCommunicator
from tests.dist.ranks import (
    check_all_to_all,
    on_ranks,
    values,
)
from tests.pool import PoolError


def check_refused_groups(comm: Communicator) -> None:
    """Refused before the first collective, so that the group stays usable."""
    for groups, message in (([(0,)], "exactly once"), ([(0, 1), (1,)], "exactly once"), ([(1, 0)], "ascending")):
        with pytest.raises(ValueError, match=message):
            TorchDistCommunicator(groups, "cpu", timedelta(seconds=20))
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
    start = time.monotonic()
    with pytest.raises(PoolError) as caught:
        on_ranks("gloo", 3, 3, check_raise_midway)
    assert time.monotonic() - start < 15
    assert str(caught.value).startswith("--- rank 1 of 3") and "KeyError: 'planted failure'" in str(caught.value)
    assert str(caught.value).count("in check_raise_midway") == 3, "rank 1's error reached the others' collectives"
    on_ranks("gloo", 3, 3, check_all_to_all)


def test_loopback_rank_that_raises_ends_all() -> None:
    threads = threading.active_count()
    start = time.monotonic()
    with pytest.raises(KeyError, match="planted failure") as caught:
        on_ranks("loopback", 3, 3, check_raise_midway)
    assert time.monotonic() - start < 2
    assert caught.value.__notes__ == ["raised by rank 1 of 3"]
    assert threading.active_count() == threads, "the others were woken"
    on_ranks("loopback", 3, 3, check_all_to_all)


def test_loopback_wakes_the_others_with_the_reason() -> None:
    woken: dict[int, str] = {}

    def body(world: LoopbackWorld, rank: int) -> None:
        if rank == 0:
            raise ZeroDivisionError("planted")
        try:
            world.communicator(rank, (rank,)).barrier()
        except RuntimeError as error:
            woken[rank] = str(error)
            raise

    with pytest.raises(ZeroDivisionError):
        run_ranks(3, body)
    assert woken == dict.fromkeys((1, 2), "rank 0 failed: ZeroDivisionError: planted")


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
        run_ranks(2, body)


def test_loopback_sees_deadlocks_at_once() -> None:
    def crossed(world: LoopbackWorld, rank: int) -> None:  # the world's collective against the group's
        comm = world.communicator(rank, (rank // 2 * 2, rank // 2 * 2 + 1))
        if rank == 0:
            comm.barrier()
        comm.all_to_all(torch.zeros(2))

    def early_return(world: LoopbackWorld, rank: int) -> None:
        if rank != 1:
            world.communicator(rank, (rank,)).barrier()

    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"deadlock.*rank 0 in barrier.*rank 1 in all_to_all.*rank 2 returned"):
        run_ranks(4, crossed)
    with pytest.raises(RuntimeError, match=r"deadlock.*rank 0 in barrier.*rank 1 returned"):
        run_ranks(3, early_return)
    assert time.monotonic() - start < 2


def test_loopback_deadlines() -> None:
    def slow(world: LoopbackWorld, rank: int) -> None:
        if rank == 1:
            time.sleep(0.6)
        else:
            world.communicator(rank, (rank,)).barrier()

    def stuck(world: LoopbackWorld, rank: int) -> None:
        if rank == 1:
            time.sleep(0.6)

    with pytest.raises(RuntimeError, match=r"did not finish within 0.2 s|waited 0.2 s in barrier for ranks \[1\]"):
        run_ranks(2, slow, timeout_s=0.2)
    with pytest.raises(RuntimeError, match=r"ranks \[1\] did not finish within 0.2 s"):
        run_ranks(2, stuck, timeout_s=0.2)


@pytest.mark.parametrize("transport", ["loopback", "gloo"])
def test_a_late_rank_is_waited_for(transport: str) -> None:
    results = on_ranks(transport, 3, 3, check_straggler)
    assert all(torch.equal(a, b) for a, b in pairwise(results))


def check_straggler(comm: Communicator) -> Tensor:
    total = torch.zeros(4)
    for step in range(30):
        if step % 3 == comm.rank and step % 5 == 0:
            time.sleep(0.02)
        x = values(comm.rank + 10 * step, (4,), torch.float32)
        total += comm.all_reduce(x)
        received = comm.all_to_all(torch.full((3, 1), float(step)))
        assert received.tolist() == [[step]] * 3
    return total


def check_barrier_timeout(comm: Communicator) -> None:
    if comm.rank == 1:
        time.sleep(0.8)
        return
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match=r"Ranks 1 failed"):
        patch.setattr(torch_dist, "CONTROL_TIMEOUT", timedelta(seconds=0.3))
        comm.barrier()


def check_abort(comm: Communicator, culprit: int) -> float:
    begin = time.monotonic()
    if comm.rank == culprit:
        time.sleep(0.2)
        comm.abort("planted")
        with pytest.raises(RuntimeError):
            comm.barrier()
        time.sleep(0.5)  # what ends the others' waits is not the end of this process
    else:
        with pytest.raises(RuntimeError):
            comm.broadcast_object(None) if comm.rank else comm.barrier()
    return time.monotonic() - begin


@pytest.mark.parametrize("culprit", [0, 1])
def test_who_gives_the_control_plane_up_keeps_nobody_waiting(culprit: int) -> None:
    waited = on_ranks("gloo", 2, 2, check_abort, culprit)
    assert waited[1 - culprit] < 0.6
    with pytest.raises(RuntimeError, match="planted"):
        on_ranks("loopback", 2, 2, check_abort, culprit)


def test_gloo_barrier_has_a_deadline_and_names_who_is_missing() -> None:
    on_ranks("gloo", 2, 1, check_barrier_timeout)
