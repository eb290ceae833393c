"""One conformance suite for all transports: every check runs inside a rank and sees only a `Communicator`."""

from __future__ import annotations

import operator
import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from comm.base import Communicator, pack_partials, partial_views, sum_in_rank_order
from comm.loopback import LoopbackWorld, run_ranks
from comm.symm_mem import SymmMemCommunicator
from comm.torch_dist import TorchDistCommunicator
from tests.pool import PoolError, pool

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float64)
SHAPES = ((), (5,), (3, 7), (0, 4))

Check = Callable[..., Any]


def kvp_groups(world_size: int, kvp: int) -> list[tuple[int, ...]]:
    return [tuple(range(first, first + kvp)) for first in range(0, world_size, kvp)]


def in_worker(rank: int, world_size: int, kind: type[TorchDistCommunicator], kvp: int, check: Check, *args: Any) -> Any:
    device = torch.device("cuda", rank) if dist.get_backend() == "nccl" else "cpu"
    comm = kind(kvp_groups(world_size, kvp), device, timedelta(seconds=20))
    result = check(comm, *args)
    comm.close()
    return result


def on_ranks(transport: str, world_size: int, kvp: int, check: Check, *args: Any) -> list[Any]:
    """Results of `check(comm, *args)` on every rank."""
    if transport == "loopback":
        groups = kvp_groups(world_size, kvp)
        return run_ranks(world_size, lambda world, rank: check(world.communicator(rank, groups[rank // kvp]), *args))
    kind = SymmMemCommunicator if transport == "symm_mem" else TorchDistCommunicator
    return pool(world_size, "gloo" if transport == "gloo" else "nccl").run(in_worker, kind, kvp, check, *args)


CASES = [
    *[("loopback", *case) for case in ((1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (4, 4), (6, 3), (8, 4), (8, 8))],
    *[("gloo", *case) for case in ((1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (4, 4))],
    *[pytest.param("nccl", *case, marks=pytest.mark.gpu(case[0])) for case in ((1, 1), (2, 1), (2, 2), (4, 2), (4, 4))],
    *[
        pytest.param("symm_mem", *case, marks=pytest.mark.gpu(case[0]))
        for case in ((2, 1), (2, 2), (4, 2), (4, 4), (8, 4), (8, 8))
    ],
]
every_case = pytest.mark.parametrize("transport, world_size, kvp", CASES)


def check_places(comm: Communicator) -> tuple[int, tuple[int, ...], int]:
    assert comm.kvp_group[comm.kvp_rank] == comm.rank
    return comm.rank, comm.kvp_group, comm.world_size


@every_case
def test_ranks_and_groups(transport: str, world_size: int, kvp: int) -> None:
    expected = [(r, kvp_groups(world_size, kvp)[r // kvp], world_size) for r in range(world_size)]
    assert on_ranks(transport, world_size, kvp, check_places) == expected


# all_reduce


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What a rank brings along: random, different on each rank, negative too."""
    generator = torch.Generator().manual_seed(rank)
    if dtype == torch.int64:
        return torch.randint(-(2**55), 2**55, shape, generator=generator)
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul(100).to(dtype)


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


# all_gather, all_to_all


def check_all_gather(comm: Communicator) -> None:
    for dtype in (*DTYPES, torch.uint8, torch.int32):
        for shape in SHAPES:
            x = values(comm.rank, shape, torch.float32).abs().to(comm.device, dtype)
            before = x.clone()
            gathered = comm.all_gather(x)
            expected = [values(r, shape, torch.float32).abs().to(dtype) for r in range(comm.world_size)]
            assert gathered.dtype == dtype and torch.equal(gathered.cpu(), torch.stack(expected))
            assert torch.equal(x, before)
    strided = torch.arange(6, device=comm.device).view(2, 3).t() + comm.rank
    expected = torch.arange(6).view(2, 3).t() + torch.arange(comm.world_size).view(-1, 1, 1)
    assert torch.equal(comm.all_gather(strided).cpu(), expected)


@every_case
def test_all_gather(transport: str, world_size: int, kvp: int) -> None:
    on_ranks(transport, world_size, kvp, check_all_gather)


def check_all_to_all(comm: Communicator) -> None:
    K = len(comm.kvp_group)
    for dtype in (*DTYPES, torch.uint8):
        for shape in SHAPES:
            # Element values name the source and the destination: 10 * source + destination.
            send = (10 * comm.kvp_rank + torch.arange(K)).view(K, *(1 for _ in shape)).expand(K, *shape)
            send = send.to(comm.device, dtype).contiguous()
            received = comm.all_to_all(send)
            expected = (10 * torch.arange(K) + comm.kvp_rank).view(K, *(1 for _ in shape)).expand(K, *shape)
            assert received.dtype == dtype and torch.equal(received.cpu(), expected.to(dtype))
    for wrong in (torch.zeros(K + 1, 2), torch.zeros(2, K).t()):
        if wrong.shape[0] != K or not wrong.is_contiguous():  # K = 1 has no strided [K, 2]
            with pytest.raises(AssertionError, match="all_to_all needs a contiguous"):
                comm.all_to_all(wrong.to(comm.device))


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


def check_close(comm: Communicator) -> None:
    comm.barrier()
    comm.close()
    comm.close()


@every_case
def test_close_twice(transport: str, world_size: int, kvp: int) -> None:
    on_ranks(transport, world_size, kvp, check_close)


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


# exchange

KEYS, BLOCK, D = 13, 4, 6


def attention(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(scores [N, H, S]) @ v [H, S, D] in float64; a query without keys: NaN (poison), lse -inf."""
    lse = scores.logsumexp(-1)
    return torch.einsum("nhs,hsd->nhd", (scores - lse[..., None]).exp(), v), lse


def exchange_error(
    comm: Communicator, dtype: torch.dtype, N: int, shares: list[int], lse_shift: float = 0.0
) -> tuple[float, Tensor]:
    """Error of the exchange, as a multiple of what rounding explains, against attention over all keys; its result.

    Keys go round the kvp ranks in blocks of 4. Query n reads the first `5 n mod 14` keys: at 0 every shard is empty,
    and there are queries for which some shards are.
    """
    kvp_rank, K, heads = comm.kvp_rank, len(comm.kvp_group), sum(shares)
    generator = torch.Generator().manual_seed(comm.kvp_group[0])  # other heads in another group
    scores = torch.randn(N, heads, KEYS, generator=generator, dtype=torch.float64)
    v = torch.randn(heads, KEYS, D, generator=generator, dtype=torch.float64)
    lengths = 5 * torch.arange(N) % (KEYS + 1)
    scores.masked_fill_(torch.arange(KEYS) >= lengths.view(N, 1, 1), -torch.inf)

    local = torch.arange(KEYS) // BLOCK % K == kvp_rank
    out, lse = attention(scores[:, :, local], v[:, local])
    assert (lse[lse.isfinite()].abs() < 8).all()
    # Strided, as slices of something larger.
    wide_out = torch.full((N, heads + 1, D + 2), torch.nan, dtype=dtype, device=comm.device)
    wide_lse = torch.full((heads, N), torch.nan, device=comm.device)
    given_out, given_lse = wide_out[:, :heads, :D], wide_lse.t()
    given_out.copy_(out)
    given_lse.copy_(lse + lse_shift)

    result = comm.exchange(given_out, given_lse, shares).cpu()
    mine = slice(sum(shares[:kvp_rank]), sum(shares[: kvp_rank + 1]))
    expected, _ = attention(scores[:, mine], v[mine])
    expected[lengths == 0] = 0
    assert result.dtype == dtype and result.shape == expected.shape == (N, shares[kvp_rank], D)
    if result.numel() == 0:
        return 0.0, result
    # Partials and result are rounded to dtype: eps/2 of max|v| each, since the weights sum to 1. LSEs below 8 are
    # rounded to fp32 (2^-22), exp adds as much, both in numerator and denominator, and K <= 8 terms are summed in
    # fp32: below 2^-18 in all.
    tolerance = (torch.finfo(dtype).eps + 2**-18) * v.abs().max()
    return ((result.double() - expected).abs().max() / tolerance).item(), result


def balanced(heads: int, K: int) -> list[int]:
    return [heads // K + (k < heads % K) for k in range(K)]


def all_shares(K: int) -> list[list[int]]:
    """7 over 2 is 4 + 3; 1 over 2 leaves a rank without heads; also all on one rank, growing shares, and no heads."""
    return [balanced(h, K) for h in (8, 7, 5, 1)] + [[3] + [0] * (K - 1), list(range(K)), [0] * K]


def check_exchange(comm: Communicator, dtype: torch.dtype) -> list[tuple[int, list[int], float, Tensor]]:
    """(N, shares, error, result) of every combination."""
    K = len(comm.kvp_group)
    return [(N, s, *exchange_error(comm, dtype, N, s)) for N in (0, 1, 15) for s in all_shares(K)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_case
def test_exchange_is_attention_over_all_shards(transport: str, world_size: int, kvp: int, dtype: torch.dtype) -> None:
    for rank, results in enumerate(on_ranks(transport, world_size, kvp, check_exchange, dtype)):
        for N, shares, error, _ in results:
            assert error <= 1, f"rank {rank}, {N} queries, shares {shares}: {error} times the tolerance"


@pytest.mark.parametrize("transport", ["loopback", "gloo"])
def test_a_shifted_lse_is_seen(transport: str) -> None:
    results = on_ranks(transport, 2, 2, check_shifted_lse)
    assert all(error > 1 for error in results), results


def check_shifted_lse(comm: Communicator) -> float:
    return exchange_error(comm, torch.bfloat16, 15, [4, 3], lse_shift=0.1 * comm.kvp_rank)[0]


@pytest.mark.parametrize("transport", ["loopback", "gloo"])
def test_an_identity_in_place_of_the_all_to_all_is_seen(transport: str) -> None:
    results = on_ranks(transport, 2, 2, check_identity)
    assert all(error > 1 for error in results), results


def check_identity(comm: Communicator) -> float:
    comm.all_to_all = lambda send: send  # type: ignore[method-assign]
    return exchange_error(comm, torch.bfloat16, 15, [4, 4])[0]


def check_nan(comm: Communicator) -> Tensor:
    K = len(comm.kvp_group)
    out = torch.ones(2, 2 * K, 3, device=comm.device)
    lse = torch.zeros(2, 2 * K, device=comm.device)
    if comm.kvp_rank == K - 1:
        lse[1, 0] = torch.nan  # a head that kvp rank 0 keeps
    return comm.exchange(out, lse, [2] * K).isnan().cpu()


@every_case
def test_a_nan_surfaces_where_it_belongs(transport: str, world_size: int, kvp: int) -> None:
    for rank, nan in enumerate(on_ranks(transport, world_size, kvp, check_nan)):
        expected = torch.zeros(2, 2, 3, dtype=torch.bool)
        expected[1, 0] = rank % kvp == 0
        assert torch.equal(nan, expected)


def check_bits(comm: Communicator) -> list[Tensor]:
    reduced = [comm.all_reduce(values(comm.rank, (1001,), dtype)) for dtype in DTYPES]
    return reduced + [result for *_, result in check_exchange(comm, torch.bfloat16)]


@pytest.mark.parametrize("world_size, kvp", [(3, 3), (8, 4)])
def test_gloo_and_loopback_agree_bitwise(world_size: int, kvp: int) -> None:
    gloo = on_ranks("gloo", world_size, kvp, check_bits)
    loopback = on_ranks("loopback", world_size, kvp, check_bits)
    for a, b in zip(gloo, loopback, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@given(
    N=st.integers(0, 4),
    shares=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_exchange_with_any_shares(N: int, shares: list[int], dtype: torch.dtype) -> None:
    K = len(shares)
    for error, _ in on_ranks("loopback", K, K, exchange_error, dtype, N, shares):
        assert error <= 1


# messages of the exchange


@given(
    N=st.integers(0, 3),
    shares=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    head_dim=st.sampled_from([1, 5, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_messages_hold_each_share_then_padding(N: int, shares: list[int], head_dim: int, dtype: torch.dtype) -> None:
    heads = sum(shares)
    out = torch.arange(1, 1 + N * heads * head_dim).view(N, heads, head_dim).to(dtype)
    lse = torch.arange(N * heads).view(N, heads).float()
    send = pack_partials(out, lse, shares)
    to_out, to_lse = partial_views(send, N, max(shares), head_dim, dtype)
    assert send.is_contiguous() and send.shape[0] == len(shares) and send.shape[1] % 64 == 0
    payload = N * max(shares) * (head_dim * dtype.itemsize + 4)
    assert payload <= send.shape[1] < payload + 128, "one message: no more than the payload and two gaps"
    assert send.shape[1] > 0
    assert to_out.storage_offset() == 0 and to_lse.storage_offset() % 16 == 0
    for k, (h, end) in enumerate(zip(shares, torch.tensor(shares).cumsum(0).tolist(), strict=True)):
        assert torch.equal(to_out[k, :, :h], out[:, end - h : end])
        assert torch.equal(to_lse[k, :, :h], lse[:, end - h : end])
        assert (to_out[k, :, h:] == 0).all() and (to_lse[k, :, h:] == -torch.inf).all()


@pytest.mark.parametrize(
    "out, lse, shares, message",
    [
        (torch.zeros(2, 4), torch.zeros(2, 4), [2, 2], r"out must be a floating-point \[N, heads, D\]"),
        (torch.zeros(2, 4, 3, dtype=torch.int64), torch.zeros(2, 4), [2, 2], "torch.int64"),
        (torch.zeros(2, 4, 3), torch.zeros(2, 3), [2, 2], r"lse must be torch.float32 \[2, 4\].*got.*\[2, 3\]"),
        (torch.zeros(2, 4, 3), torch.zeros(2, 4, dtype=torch.bfloat16), [2, 2], "got torch.bfloat16"),
        (torch.zeros(2, 4, 3), torch.zeros(2, 4), [2, 1], r"shares \[2, 1\].*the 4 heads"),
        (torch.zeros(2, 4, 3), torch.zeros(2, 4), [5, -1], r"shares \[5, -1\] must be >= 0"),
        (torch.zeros(2, 4, 3), torch.zeros(2, 4), [4], r"shares \[4\] must have one entry for each rank .*\(0, 1\)"),
    ],
)
def test_exchange_says_what_does_not_fit(out: Tensor, lse: Tensor, shares: list[int], message: str) -> None:
    def body(world: LoopbackWorld, rank: int) -> None:
        with pytest.raises(ValueError, match=message):
            world.communicator(rank, (0, 1)).exchange(out, lse, shares)

    run_ranks(2, body)


def check_graph(comm: Communicator) -> None:
    """A captured exchange and all-reduce, replayed on new inputs, give the bits of the eager ones."""
    K = len(comm.kvp_group)
    out = torch.empty(5, 3 * K + 1, 64, dtype=torch.bfloat16, device=comm.device)
    lse = torch.empty(5, 3 * K + 1, device=comm.device)
    shares = balanced(3 * K + 1, K)

    def refill(seed: int) -> None:
        torch.manual_seed(100 * seed + comm.rank)
        out.normal_()
        lse.normal_()

    def step() -> tuple[Tensor, Tensor]:
        return comm.exchange(out, lse, shares), comm.all_reduce(out.clone())

    refill(0)
    step()  # connections, and the kernel's compilation
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = step()
    for seed in (1, 2):
        refill(seed)
        graph.replay()
        replayed = [x.clone() for x in captured]
        assert all(torch.equal(a, b) for a, b in zip(replayed, step(), strict=True))


@pytest.mark.gpu(2)
@pytest.mark.parametrize("transport", ["nccl", "symm_mem"])
def test_collectives_in_a_cuda_graph(transport: str) -> None:
    on_ranks(transport, 2, 2, check_graph)


def check_replays(comm: Communicator, replays: int) -> int:
    """Wrong elements over many replays of graphs of several sizes, a random rank late now and then."""
    K, H, D = len(comm.kvp_group), 3584, 128
    shares = balanced(2 * K + 1, K)
    number = torch.zeros((), dtype=torch.int64, device=comm.device)
    wrong = torch.zeros((), dtype=torch.int64, device=comm.device)
    weight = torch.ones(H, dtype=torch.bfloat16, device=comm.device)

    def value(rank: int, *shape: int) -> Tensor:
        """Small integers that bf16 holds, as do their sums over 8 ranks; another in each place, step and rank."""
        place = torch.arange(torch.Size(shape).numel(), device=comm.device).view(shape)
        return (7 * number + 3 * place + 5 * rank) % 29

    def step(N: int) -> None:
        number.add_(1)
        total = comm.all_reduce_norm(value(comm.rank, N, H).bfloat16(), None, weight, 1e-5)[1]
        wrong.add_((total != sum(value(r, N, H) for r in range(comm.world_size))).sum())
        gathered = comm.all_gather(value(comm.rank, N, 2))
        wrong.add_((gathered != torch.stack([value(r, N, 2) for r in range(comm.world_size)])).sum())
        # Equal weights of a power of two of ranks: the mean is exact.
        out = value(comm.rank, N, 2 * K + 1, D).bfloat16()
        result = comm.exchange(out, torch.zeros(out.shape[:2], device=comm.device), shares)
        first = sum(shares[: comm.kvp_rank])
        wanted = sum(value(r, N, 2 * K + 1, D) for r in comm.kvp_group) / K
        wrong.add_((result != wanted[:, first : first + shares[comm.kvp_rank]].bfloat16()).sum())

    graphs = {}
    for N in (1, 2, 7, 16, 40):
        step(N)
        torch.cuda.synchronize()
        graphs[N] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[N], capture_error_mode="thread_local"):
            step(N)
    same, own = random.Random(0), random.Random(comm.rank)
    for _ in range(replays):
        if own.random() < 0.01:
            torch.cuda._sleep(own.randrange(2_000_000))  # up to a millisecond
        graphs[same.choice(list(graphs))].replay()
    torch.cuda.synchronize()
    comm.check()
    assert int(number) == replays + len(graphs)
    for graph in graphs.values():
        graph.reset()
    return int(wrong)


@pytest.mark.parametrize(
    "world_size, kvp",
    [pytest.param(*case, marks=pytest.mark.gpu(case[0])) for case in ((2, 2), (4, 2), (4, 4), (8, 8))],
)
@pytest.mark.timeout(200)
def test_ten_thousand_replays(world_size: int, kvp: int) -> None:
    assert on_ranks("symm_mem", world_size, kvp, check_replays, 10_000) == [0] * world_size


def check_recovery(comm: Communicator) -> str:
    """Rank 1 leaves a collective out; what rank 0 is told, and that all is well after a reset."""
    assert isinstance(comm, SymmMemCommunicator)
    comm._spins = 100_000
    x = torch.full((3,), comm.rank, dtype=torch.int32, device=comm.device)
    comm.all_gather(x)
    told = ""
    if comm.rank == 0:
        comm.all_gather(x)
        with pytest.raises(RuntimeError) as error:
            comm.check()
        told = str(error.value)
    comm.reset()
    comm.check()
    for _ in range(3):
        assert comm.all_gather(x)[:, 0].tolist() == [0, 1]
    return told


@pytest.mark.gpu(2)
def test_a_rank_that_stays_away_is_named_and_a_reset_recovers() -> None:
    assert "for rank 1 " in on_ranks("symm_mem", 2, 2, check_recovery)[0]


# failures


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
    comm._timeout = timedelta(seconds=0.3)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=r"Ranks 1 failed"):
        comm.barrier()


def test_gloo_barrier_has_a_deadline_and_names_who_is_missing() -> None:
    on_ranks("gloo", 2, 1, check_barrier_timeout)
