"""Checks that run inside a rank through a `Communicator`, on every transport."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from comm.base import Communicator
from comm.loopback import LoopbackWorld, run_ranks
from comm.symm_mem import SymmMemCommunicator
from comm.torch_dist import TorchDistCommunicator
from tests.pool import pool

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float64)
SHAPES = ((), (5,), (3, 7), (0, 4))
KEYS, BLOCK, D = 13, 4, 6  # sizes of the exchanged attention

Check = Callable[..., Any]


def kvp_groups(world_size: int, kvp: int) -> list[tuple[int, ...]]:
    """Splits ranks into consecutive kvp groups."""
    return [tuple(range(first, first + kvp)) for first in range(0, world_size, kvp)]


def checked(comm: Communicator, rank: int, world_size: int, kvp: int, check: Check, *args: Any) -> Any:
    """Runs a check on a communicator of the expected rank and group, then closes it twice."""
    group = kvp_groups(world_size, kvp)[rank // kvp]
    assert (comm.rank, comm.world_size, comm.kvp_group) == (rank, world_size, group)
    assert comm.kvp_group[comm.kvp_rank] == rank
    result = check(comm, *args)
    comm.close()
    comm.close()  # idempotent
    return result


def in_worker(rank: int, world_size: int, kind: type[TorchDistCommunicator], kvp: int, check: Check, *args: Any) -> Any:
    """Runs a check in a worker process."""
    device = torch.device("cuda", rank) if dist.get_backend() == "nccl" else "cpu"
    comm = kind(kvp_groups(world_size, kvp), device, timedelta(seconds=60))
    return checked(comm, rank, world_size, kvp, check, *args)


def on_ranks(transport: str, world_size: int, kvp: int, check: Check, *args: Any) -> list[Any]:
    """Returns the results of `check(comm, *args)` on every rank."""
    if transport == "loopback":

        def body(world: LoopbackWorld, rank: int) -> Any:
            comm = world.communicator(rank, kvp_groups(world_size, kvp)[rank // kvp])
            return checked(comm, rank, world_size, kvp, check, *args)

        return run_ranks(world_size, body, timeout_s=60.0)
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


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns a rank's random input, also negative, different on each rank."""
    generator = torch.Generator().manual_seed(rank)
    if dtype == torch.int64:
        return torch.randint(-(2**55), 2**55, shape, generator=generator)
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul(100).to(dtype)


def check_all_to_all(comm: Communicator) -> None:
    """Checks all_to_all for all dtypes and shapes, and its errors."""
    K = len(comm.kvp_group)
    for dtype in (*DTYPES, torch.uint8):
        for shape in SHAPES:
            # Values encode source and destination: 10 * source + destination.
            send = (10 * comm.kvp_rank + torch.arange(K)).view(K, *(1 for _ in shape)).expand(K, *shape)
            send = send.to(comm.device, dtype).contiguous()
            received = comm.all_to_all(send)
            expected = (10 * torch.arange(K) + comm.kvp_rank).view(K, *(1 for _ in shape)).expand(K, *shape)
            assert received.dtype == dtype and torch.equal(received.cpu(), expected.to(dtype))
    for wrong in (torch.zeros(K + 1, 2), torch.zeros(2, K).t()):
        if wrong.shape[0] != K or not wrong.is_contiguous():  # with K = 1 no [K, 2] is strided
            with pytest.raises(AssertionError, match="all_to_all needs a contiguous"):
                comm.all_to_all(wrong.to(comm.device))


def balanced(heads: int, K: int) -> list[int]:
    """Splits heads evenly over K ranks."""
    return [heads // K + (k < heads % K) for k in range(K)]


def attention(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Computes softmax(scores [N, H, S]) @ v [H, S, D] in float64; without keys: NaN (poison), lse -inf."""
    lse = scores.logsumexp(-1)
    return torch.einsum("nhs,hsd->nhd", (scores - lse[..., None]).exp(), v), lse


def exchange_error(
    comm: Communicator, dtype: torch.dtype, N: int, shares: list[int], lse_shift: float = 0.0
) -> tuple[float, Tensor]:
    """Returns the exchange's error against attention over all keys, in units of the rounding tolerance, and its result.

    Keys are spread over the kvp ranks in blocks of 4. Query n reads the first `5 n mod 14` keys: at 0 every shard is
    empty, and for some queries only some shards are.
    """
    kvp_rank, K, heads = comm.kvp_rank, len(comm.kvp_group), sum(shares)
    generator = torch.Generator().manual_seed(comm.kvp_group[0])  # other heads per group
    scores = torch.randn(N, heads, KEYS, generator=generator, dtype=torch.float64)
    v = torch.randn(heads, KEYS, D, generator=generator, dtype=torch.float64)
    lengths = 5 * torch.arange(N) % (KEYS + 1)
    scores.masked_fill_(torch.arange(KEYS) >= lengths.view(N, 1, 1), -torch.inf)

    local = torch.arange(KEYS) // BLOCK % K == kvp_rank
    out, lse = attention(scores[:, :, local], v[:, local])
    assert (lse[lse.isfinite()].abs() < 8).all()
    # Strided slices of larger tensors.
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


def exchanged(comm: Communicator, dtype: torch.dtype) -> list[Tensor]:
    """Returns checked results of the exchange for several numbers of tokens and head splits.

    7 over 2 is 4 + 3; 1 over 2 leaves a rank without heads; also all on one rank, growing shares, and no heads.
    """
    K, results = len(comm.kvp_group), []
    for shares in [balanced(heads, K) for heads in (8, 7, 5, 1)] + [[3] + [0] * (K - 1), list(range(K)), [0] * K]:
        for N in (0, 1, 15):
            error, result = exchange_error(comm, dtype, N, shares)
            assert error <= 1, f"rank {comm.rank}, {N} queries, shares {shares}: {error} times the tolerance"
            results.append(result)
    return results
