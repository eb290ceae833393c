"""The exchange on all transports: exact attention over all shards, whatever the shares."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from comm.base import Communicator, pack_partials, partial_views
from comm.loopback import LoopbackWorld, run_ranks
from kernels.attention.split_kv import PartialAttention
from tests.dist.ranks import (
    DTYPES,
    balanced,
    every_case,
    on_ranks,
    values,
)

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
    send = pack_partials(PartialAttention(out, lse), shares, torch.tensor([0, *shares]).cumsum(0).int())
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
