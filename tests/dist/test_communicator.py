"""One conformance table for all transports: every check runs inside a rank and sees only a `Communicator`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from comm.base import Communicator, sum_in_rank_order
from comm.torch_dist import CONTROL_TIMEOUT, TorchDistCommunicator
from tests.dist.ranks import CASES, DTYPES, SHAPES, check_all_to_all, exchanged, kvp_groups, on_ranks, values
from tests.pool import pool


def check_all_reduce(comm: Communicator) -> list[Tensor]:
    results = []
    for dtype in DTYPES:
        for shape in SHAPES:
            x = values(comm.rank, shape, dtype).to(comm.device)
            assert comm.all_reduce(x) is x and x.dtype == dtype and x.shape == shape
            results.append(x := x.cpu())
            if comm.rank > 0:  # the others have the same bits
                continue
            parts = torch.stack([values(r, shape, dtype) for r in range(comm.world_size)])
            if dtype == torch.int64:
                assert torch.equal(x, parts.sum(0))
                continue
            # Any order of W-1 additions, each rounded once, and one rounding to the dtype: W * eps / 2 of the sum of
            # magnitudes at most. The CPU's transports do better below fp32: one rounding after a sum in fp32.
            error = (x.double() - parts.double().sum(0)).abs()
            assert (error <= comm.world_size * torch.finfo(dtype).eps / 2 * parts.double().abs().sum(0)).all()
            if comm.device.type == "cpu":
                assert torch.equal(x, sum_in_rank_order(parts))
    with pytest.raises(AssertionError, match="non-contiguous"):
        comm.all_reduce(torch.zeros(4, 2, device=comm.device).t())
    return results


def check_all_reduce_norm(comm: Communicator) -> list[Tensor]:
    """One shot and two shots, several slices a row, with a residual and without."""
    results = []
    for call, (dtype, N, H) in enumerate(NORM_CASES):
        eps, weight = torch.finfo(dtype).eps, values(7, (H,), dtype)
        mine = values(comm.rank + 10 * call, (N, H), dtype).to(comm.device)
        for residual in (None, values(99, (N, H), dtype)):
            given = None if residual is None else residual.to(comm.device)
            y, total = (t.cpu() for t in comm.all_reduce_norm(mine.clone(), given, weight.to(comm.device), 1e-5))
            results += [y, total]
            if comm.rank > 0:  # the others have the same bits
                continue
            parts = torch.stack([values(r + 10 * call, (N, H), dtype) for r in range(comm.world_size)])
            added = torch.zeros(N, H).double() if residual is None else residual.double()
            # W - 1 additions and two roundings to the dtype, each half a unit of a partial sum at most.
            bound = (comm.world_size + 1) * eps / 2 * (added.abs() + parts.double().abs().sum(0))
            assert ((total.double() - added - parts.double().sum(0)).abs() <= bound).all()
            kept = total.double()
            normed = kept * (kept.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight.double()
            # Two roundings to the dtype, and fp32 statistics: 2^-18 is far above their error.
            assert ((y.double() - normed).abs() <= (eps + 2**-18) * normed.abs() + 1e-30).all()
    return results


NORM_CASES = [
    (torch.float32, 1, 6), (torch.float32, 3, 1100), (torch.bfloat16, 1, 3584), (torch.bfloat16, 5, 514),
    (torch.bfloat16, 17, 4096), (torch.float32, 9, 3000), (torch.bfloat16, 200, 4096), (torch.bfloat16, 2, 7),
]  # fmt: skip


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


def check_gathers(comm: Communicator) -> None:
    for dtype in (*DTYPES, torch.uint8, torch.int32):
        for shape in SHAPES:
            rank_values = [values(r, shape, torch.float32).abs().to(dtype) for r in range(comm.world_size)]
            x = rank_values[comm.rank].to(comm.device, copy=True)
            gathered = comm.all_gather(x)
            assert gathered.dtype == dtype and torch.equal(gathered.cpu(), torch.stack(rank_values))
            group_values = torch.stack([rank_values[r] for r in comm.kvp_group])
            assert torch.equal(comm.gather_in_group(x).cpu(), group_values)
            assert torch.equal(x.cpu(), rank_values[comm.rank])
            if x.dim():
                assert torch.equal(comm.gather_rows(x).cpu(), torch.stack(rank_values, 1))
    strided = torch.arange(6, device=comm.device).view(2, 3).t() + comm.rank
    expected = torch.arange(6).view(2, 3).t() + torch.arange(comm.world_size).view(-1, 1, 1)
    assert torch.equal(comm.all_gather(strided).cpu(), expected)
    assert torch.equal(comm.gather_rows(strided).cpu(), expected.transpose(0, 1))


def check_exchange(comm: Communicator) -> None:
    """It is attention over all shards; a NaN surfaces where it belongs."""
    for dtype in (torch.float32, torch.bfloat16):
        exchanged(comm, dtype)
    K = len(comm.kvp_group)
    out, lse = torch.ones(2, 2 * K, 3, device=comm.device), torch.zeros(2, 2 * K, device=comm.device)
    if comm.kvp_rank == K - 1:
        lse[1, 0] = torch.nan  # a head that kvp rank 0 keeps
    nan = torch.zeros(2, 2, 3, dtype=torch.bool)
    nan[1, 0] = comm.kvp_rank == 0
    assert torch.equal(comm.exchange(out, lse, [2] * K).isnan().cpu(), nan)


def check_objects(comm: Communicator) -> None:
    decision = {"step": 3, "slots": [1, 2], "text": "é" * 1000}
    assert comm.broadcast_object(decision if comm.rank == 0 else None) == decision
    gathered = comm.all_gather_object([comm.rank] * comm.rank)
    assert gathered == [[r] * r for r in range(comm.world_size)]
    gathered[0].append("mine")
    K = len(comm.kvp_group)
    assert comm.all_gather_object(comm.kvp_rank) == [r % K for r in range(comm.world_size)]
    assert gathered[0] == ["mine"], "ranks share no object"
    if comm.rank == 0:
        time.sleep(0.05)  # or ranks that do not wait for each other may well arrive at once
    arrived = time.monotonic()
    comm.barrier()
    left = time.monotonic()
    assert left >= max(comm.all_gather_object(arrived))


def check_late_ranks(comm: Communicator) -> list[Tensor]:
    """They are waited for."""
    total, K = torch.zeros(4, device=comm.device), len(comm.kvp_group)
    for step in range(30):
        if step % 3 == comm.rank and step % 5 == 0:
            time.sleep(0.01)
        total += comm.all_reduce(values(comm.rank + 10 * step, (4,), torch.float32).to(comm.device))
        received = comm.all_to_all(torch.full((K, 1), float(step), device=comm.device))
        assert received.tolist() == [[step]] * K
    return [total.cpu()]


def check_reports(comm: Communicator) -> None:
    """Reports of any size arrive in each rank's order, from any thread, while collectives run."""
    comm.enable_reports()
    sent = [bytes([comm.rank]) * size for size in (0, 10, 1 << 20, 3)]
    threads = [threading.Thread(target=comm.report, args=(sent[0],))]
    threads[0].start()
    threads[0].join()
    for obj in sent[1:]:
        comm.report(obj)
        assert comm.all_gather_object(comm.rank) == [*range(comm.world_size)]
    if comm.rank == 0:
        found: list[tuple[int, bytes]] = []
        deadline = time.monotonic() + 20
        while len(found) < 4 * comm.num_processes and time.monotonic() < deadline:
            found += comm.reports()
            time.sleep(0.001)
        for rank in range(comm.world_size):
            assert [obj for of, obj in found if of == rank] == [bytes([rank]) * size for size in (0, 10, 1 << 20, 3)]
    comm.barrier()
    assert not comm.reports()


CHECKS = (
    check_all_reduce,
    check_all_reduce_norm,
    check_reduce_scatter,
    check_gathers,
    check_all_to_all,
    check_exchange,
    check_objects,
    check_reports,
    check_late_ranks,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("transport, world_size, kvp", CASES)
def test_conformance(transport: str, world_size: int, kvp: int, check: Any) -> None:
    """What a check returns is the same on all ranks, bit for bit."""
    first, *others = on_ranks(transport, world_size, kvp, check)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first or [], other or [], strict=True))


def test_rank_order_sum_rounds_once() -> None:
    # In bf16 (8 bits) 256 + 1 = 256, whatever follows; in fp32 the sum is 260 exactly, which bf16 holds.
    parts = torch.tensor([256, 1, 1, 1, 1], dtype=torch.bfloat16)
    assert sum_in_rank_order(parts).item() == 260
    assert parts[0].item() == 256, "the input stays"
    big = torch.tensor([2**62, 1, -(2**62)])
    assert sum_in_rank_order(big).item() == 1 and big[0].item() == 2**62


def bits(comm: Communicator) -> list[Tensor]:
    reduced = [comm.all_reduce(values(comm.rank, (1001,), dtype)) for dtype in DTYPES]
    return reduced + exchanged(comm, torch.bfloat16)


@pytest.mark.parametrize("world_size, kvp", [(3, 3), (4, 2)])
def test_gloo_and_loopback_agree_bitwise(world_size: int, kvp: int) -> None:
    gloo, loopback = (on_ranks(transport, world_size, kvp, bits) for transport in ("gloo", "loopback"))
    for a, b in zip(gloo, loopback, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def meetings(rank: int, world_size: int) -> list[tuple[str, timedelta | None]]:
    """The groups that a communicator creates, and each time that its ranks meet, with its deadline."""
    noted: list[tuple[str, timedelta | None]] = []

    def noting(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: noted.append((name, options.get("timeout"))) or run(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("new_group", "monitored_barrier"):
            patch.setattr(dist, name, noting(name, getattr(dist, name)))
        comm = TorchDistCommunicator(kvp_groups(world_size, 2), "cpu", timedelta(seconds=61))
        comm.barrier()
    comm.close()
    return noted


def test_ranks_meet_when_all_have_connected_and_the_control_plane_is_patient() -> None:
    """Closing earlier would cut off a peer that is still connecting; and rank 0's host may be busy for minutes.

    Groups of collectives, and ranks that start, have the deadline.
    """
    short = timedelta(seconds=61)
    group_calls = [("new_group", short), ("new_group", short), ("new_group", CONTROL_TIMEOUT)]
    met = [("monitored_barrier", short), ("monitored_barrier", CONTROL_TIMEOUT)]
    assert pool(4).run(meetings) == [group_calls + met] * 4


LARGE = 1 << 22  # numbers of a message that goes over NCCL


def check_halves(comm: Communicator) -> list[bool]:
    """Launches the first half's messages, then the second's; returns whether these arrived before the others did."""
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    found = []

    def each(half: int) -> list[Tensor]:
        comm.micro_batch = half
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
    comm.micro_batch = 0
    return found


@pytest.mark.gpu(2)
@pytest.mark.parametrize("transport", ["nccl", "symm_mem"])
def test_messages_of_one_half_do_not_wait_for_the_other_s(transport: str) -> None:
    for _, again in on_ranks(transport, 2, 2, check_halves):
        assert again
