"""One conformance suite for all transports: every check runs inside a rank and sees only a `Communicator`."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from comm.base import Communicator, sum_in_rank_order
from comm.torch_dist import TorchDistCommunicator
from tests.dist.ranks import (
    DTYPES,
    SHAPES,
    check_all_to_all,
    every_case,
    kvp_groups,
    on_ranks,
    values,
)
from tests.pool import pool


def check_places(comm: Communicator) -> tuple[int, tuple[int, ...], int]:
    assert comm.kvp_group[comm.kvp_rank] == comm.rank
    return comm.rank, comm.kvp_group, comm.world_size


@every_case
def test_ranks_and_groups(transport: str, world_size: int, kvp: int) -> None:
    expected = [(r, kvp_groups(world_size, kvp)[r // kvp], world_size) for r in range(world_size)]
    assert on_ranks(transport, world_size, kvp, check_places) == expected


# all_reduce


def check_all_reduce(comm: Communicator) -> list[Tensor]:
    results = []
    for dtype in DTYPES:
        for shape in SHAPES:
            x = values(comm.rank, shape, dtype).to(comm.device)
            assert comm.all_reduce(x) is x
            assert x.dtype == dtype and x.shape == shape
            results.append(x.cpu())
    return results


@every_case
def test_all_reduce_sums_and_ranks_agree_bitwise(transport: str, world_size: int, kvp: int) -> None:
    results = on_ranks(transport, world_size, kvp, check_all_reduce)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)
    got = iter(results[0])
    for dtype in DTYPES:
        for shape in SHAPES:
            parts = torch.stack([values(r, shape, dtype) for r in range(world_size)])
            x = next(got)
            if dtype == torch.int64:
                assert torch.equal(x, parts.sum(0))
                continue
            # Any order of W-1 additions, each rounded once, and one rounding to the dtype: W * eps / 2 of the sum of
            # magnitudes at most. The CPU's transports do better below fp32: one rounding after a sum in fp32.
            error = (x.double() - parts.double().sum(0)).abs()
            assert (error <= world_size * torch.finfo(dtype).eps / 2 * parts.double().abs().sum(0)).all()
            if transport not in ("nccl", "symm_mem"):
                assert torch.equal(x, sum_in_rank_order(parts))


def test_rank_order_sum_rounds_once() -> None:
    # In bf16 (8 bits) 256 + 1 = 256, whatever follows; in fp32 the sum is 260 exactly, which bf16 holds.
    parts = torch.tensor([256, 1, 1, 1, 1], dtype=torch.bfloat16)
    assert sum_in_rank_order(parts).item() == 260
    assert parts[0].item() == 256, "the input stays"
    big = torch.tensor([2**62, 1, -(2**62)])
    assert sum_in_rank_order(big).item() == 1 and big[0].item() == 2**62


def check_reduce_refuses_strided(comm: Communicator) -> None:
    with pytest.raises(AssertionError, match="non-contiguous"):
        comm.all_reduce(torch.zeros(4, 2, device=comm.device).t())


@every_case
def test_all_reduce_refuses_strided_tensors(transport: str, world_size: int, kvp: int) -> None:
    on_ranks(transport, world_size, kvp, check_reduce_refuses_strided)


def check_all_reduce_norm(comm: Communicator) -> list[tuple[Tensor, Tensor]]:
    """(y, sum) of several shapes; one shot and two shots, several slices a row, with a residual and without."""
    results = []
    for call, (dtype, N, H) in enumerate(NORM_CASES):
        for residual in (None, values(99, (N, H), dtype).to(comm.device)):
            parts = values(comm.rank + 10 * call, (N, H), dtype).to(comm.device)
            weight = values(7, (H,), dtype).to(comm.device)
            results.append(tuple(t.cpu() for t in comm.all_reduce_norm(parts, residual, weight, 1e-5)))
    return results


NORM_CASES = [
    (torch.float32, 1, 6), (torch.float32, 3, 1100), (torch.bfloat16, 1, 3584), (torch.bfloat16, 5, 514),
    (torch.bfloat16, 17, 4096), (torch.float32, 9, 3000), (torch.bfloat16, 200, 4096), (torch.bfloat16, 2, 7),
]  # fmt: skip


@every_case
def test_all_reduce_norm(transport: str, world_size: int, kvp: int) -> None:
    ranks = on_ranks(transport, world_size, kvp, check_all_reduce_norm)
    for other in ranks[1:]:
        for a, b in zip(ranks[0], other, strict=True):
            assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]), "ranks differ"
    got = iter(ranks[0])
    for call, (dtype, N, H) in enumerate(NORM_CASES):
        eps = torch.finfo(dtype).eps
        for residual in (torch.zeros(N, H), values(99, (N, H), dtype)):
            y, total = next(got)
            parts = torch.stack([values(r + 10 * call, (N, H), dtype) for r in range(world_size)]).double()
            wanted = residual.double() + parts.sum(0)
            # W - 1 additions and two roundings to the dtype, each half a unit of a partial sum at most.
            bound = (world_size + 1) * eps / 2 * (residual.double().abs() + parts.abs().sum(0))
            assert ((total.double() - wanted).abs() <= bound).all()
            weight = values(7, (H,), dtype).double()
            kept = total.double()
            normed = kept * (kept.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight
            # Two roundings to the dtype, and fp32 statistics: 2^-18 is far above their error.
            assert ((y.double() - normed).abs() <= (eps + 2**-18) * normed.abs() + 1e-30).all()


# reduce_scatter


def check_reduce_scatter(comm: Communicator) -> None:
    W, too_large = comm.world_size, (40, 8192)  # for boxes, which GPUs have
    for dtype in DTYPES:
        for shape in (*SHAPES, too_large) if comm.device.type == "cuda" else SHAPES:
            parts = [values(W * comm.rank + to, shape, dtype) for to in range(W)]
            got = comm.reduce_scatter(torch.stack(parts).to(comm.device)).cpu()
            mine = torch.stack([values(W * r + comm.rank, shape, dtype) for r in range(W)])
            assert got.dtype == dtype and got.shape == shape
            if dtype == torch.int64:
                assert torch.equal(got, mine.sum(0))
                continue
            # As for all_reduce.
            error = (got.double() - mine.double().sum(0)).abs()
            assert (error <= W * torch.finfo(dtype).eps / 2 * mine.double().abs().sum(0)).all()


@every_case
def test_reduce_scatter(transport: str, world_size: int, kvp: int) -> None:
    on_ranks(transport, world_size, kvp, check_reduce_scatter)


# all_gather, gather_in_group, all_to_all


def check_gather_in_group(comm: Communicator) -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            x = values(comm.rank, shape, dtype).to(comm.device)
            expected = torch.stack([values(r, shape, dtype) for r in comm.kvp_group])
            assert torch.equal(comm.gather_in_group(x).cpu(), expected)


@every_case
def test_gather_in_group(transport: str, world_size: int, kvp: int) -> None:
    on_ranks(transport, world_size, kvp, check_gather_in_group)


def check_all_gather(comm: Communicator) -> None:
    for dtype in (*DTYPES, torch.uint8, torch.int32):
        for shape in SHAPES:
            x = values(comm.rank, shape, torch.float32).abs().to(comm.device, dtype)
            before = x.clone()
            gathered = comm.all_gather(x)
            expected = [values(r, shape, torch.float32).abs().to(dtype) for r in range(comm.world_size)]
            assert gathered.dtype == dtype and torch.equal(gathered.cpu(), torch.stack(expected))
            assert torch.equal(x, before)
            if x.dim():
                assert torch.equal(comm.gather_rows(x).cpu(), torch.stack(expected, 1))
    strided = torch.arange(6, device=comm.device).view(2, 3).t() + comm.rank
    expected = torch.arange(6).view(2, 3).t() + torch.arange(comm.world_size).view(-1, 1, 1)
    assert torch.equal(comm.all_gather(strided).cpu(), expected)
    assert torch.equal(comm.gather_rows(strided).cpu(), expected.transpose(0, 1))


@every_case
def test_all_gather(transport: str, world_size: int, kvp: int) -> None:
    on_ranks(transport, world_size, kvp, check_all_gather)


@every_case
def test_all_to_all_stays_in_the_group_and_keeps_its_order(transport: str, world_size: int, kvp: int) -> None:
    on_ranks(transport, world_size, kvp, check_all_to_all)


# control plane


def check_objects(comm: Communicator) -> tuple[Any, Any, float, float]:
    decision = {"step": 3, "slots": [1, 2], "text": "é" * 1000}
    received = comm.broadcast_object(decision if comm.rank == 0 else None)
    assert received == decision
    gathered = comm.all_gather_object([comm.rank] * comm.rank)
    assert gathered == [[r] * r for r in range(comm.world_size)]
    gathered[0].append("mine")
    again = comm.all_gather_object(comm.kvp_rank)
    if comm.rank == 0:
        time.sleep(0.05)
    arrived = time.monotonic()
    comm.barrier()
    return again, gathered[0], arrived, time.monotonic()


@every_case
def test_objects_and_barrier(transport: str, world_size: int, kvp: int) -> None:
    results = on_ranks(transport, world_size, kvp, check_objects)
    for kvp_ranks, changed, _, left in results:
        assert kvp_ranks == [r % kvp for r in range(world_size)]
        assert changed == ["mine"], "ranks share no object"
        assert left >= max(arrived for _, _, arrived, _ in results)


def check_patience(comm: Communicator) -> None:
    def pause() -> None:
        if comm.rank == 0:
            time.sleep(2.5)

    pause()
    assert comm.broadcast_object(comm.rank) == 0
    pause()
    comm.barrier()
    pause()
    assert comm.all_gather_object(comm.rank) == [0, 1]


def impatient(rank: int, world_size: int) -> None:
    dist.barrier()  # under the deadline of the pool: a worker may just have been started
    comm = TorchDistCommunicator(kvp_groups(world_size, 2), "cpu", timedelta(seconds=2))
    check_patience(comm)
    comm.close()


def test_the_control_plane_waits_for_longer_than_a_collective() -> None:
    pool(2).run(impatient)


def check_close(comm: Communicator) -> None:
    comm.barrier()
    comm.close()
    comm.close()


@every_case
def test_close_twice(transport: str, world_size: int, kvp: int) -> None:
    on_ranks(transport, world_size, kvp, check_close)


LARGE = 1 << 22  # numbers of a message that goes over NCCL


def check_halves(comm: Communicator) -> list[bool]:
    """Launches the first half's messages, then the second's; returns whether these arrived before the others did."""
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    found = []

    def each(half: int) -> list[Tensor]:
        comm.half = half
        x = torch.full((LARGE,), float(comm.rank + half), device=comm.device)
        return [comm.all_reduce(x.clone()), comm.gather_in_group(x).sum(0), comm.all_to_all(torch.stack((x, x))).sum(0)]

    for _ in range(2):  # the first time NCCL connects
        ends = [torch.cuda.Event(), torch.cuda.Event()]
        results = []
        for half, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if half == 0:
                    torch.cuda._sleep(1_000_000_000)  # half a second
                results.append(each(half))
                ends[half].record()
        ends[1].synchronize()
        overtaken = not ends[0].query()
        torch.cuda.synchronize()
        right = all((x == 1.0 + 2 * half).all() for half in (0, 1) for x in results[half])
        found.append(overtaken and right)
    comm.half = 0
    return found


@pytest.mark.gpu(2)
@pytest.mark.parametrize("transport", ["nccl", "symm_mem"])
def test_messages_of_one_half_do_not_wait_for_the_other_s(transport: str) -> None:
    for _, again in on_ranks(transport, 2, 2, check_halves):
        assert again


def create_slowly(rank: int, world_size: int) -> tuple[float, float]:
    """When this rank had created its last group, and when it had its communicator; rank 1 comes late."""
    created = [0.0]
    new_group = dist.new_group

    def slow_new_group(*args: Any, **kwargs: Any) -> Any:
        group = new_group(*args, **kwargs)
        time.sleep(0.1 * (rank == 1))
        created.append(time.monotonic())
        return group

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", slow_new_group)
        comm = TorchDistCommunicator(kvp_groups(world_size, 1), "cpu", timedelta(seconds=20))
    returned = time.monotonic()
    comm.close()
    return created[-1], returned


def test_no_gloo_rank_can_close_before_all_have_connected() -> None:
    # new_group returns when this rank has connected; closing then cuts off a peer that is still connecting.
    created, returned = zip(*pool(2).run(create_slowly), strict=True)
    assert min(returned) >= max(created)
