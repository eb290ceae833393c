"""Low-latency reduce-scatter in one kernel, after an FFN over the rows of all ranks (mode dp)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.overlap import pdl_options, start_successor, wait_for_predecessor
from kernels.peers.ll_protocol import (
    DTYPES,
    end_epoch,
    epoch,
    high,
    ll_buffer,
    low,
    pack,
    peer_ll_buffers,
    poll_limit,
    receive,
    send,
)

SLICE_WORDS = 256


@triton.jit
def _reduce_scatter_kernel(
    x, out, peers, count, status, rank, n, spins,
    RANKS: tl.constexpr, BLOCK_RANKS: tl.constexpr, PIECES: tl.constexpr, SIZE: tl.constexpr, DTYPE: tl.constexpr,
    PHASES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    start_successor(PDL)
    piece = tl.program_id(0)
    w = tl.arange(0, SIZE)
    at = piece * SIZE + w
    tag = epoch(count)
    if PHASES & 1:
        for step in tl.static_range(RANKS):
            to = (rank + 1 + step) % RANKS
            words = tl.load(x + to * n + at, mask=at < n, other=0)
            send(ll_buffer(peer_ll_buffers(peers, to), tag, rank, piece, RANKS, PIECES, SIZE) + w, words, tag, at < n)
    if PHASES & 4:
        source = tl.arange(0, BLOCK_RANKS)
        inside = (source < RANKS)[:, None] & (at < n)[None, :]
        here = ll_buffer(peer_ll_buffers(peers, rank), tag, source, piece, RANKS, PIECES, SIZE)[:, None] + w[None, :]
        words = receive(here, tag, inside, source[:, None], status, poll_limit(status, spins))
        words = tl.where(inside, words, 0)
        tl.store(out + at, pack(tl.sum(low(words, DTYPE), 0), tl.sum(high(words, DTYPE), 0), DTYPE), mask=at < n)
        end_epoch(count, piece, tl.num_programs(0))


def reduce_scatter(
    x: torch.Tensor,
    peers: torch.Tensor,
    count: torch.Tensor,
    status: torch.Tensor,
    *,
    rank: int,
    pieces: int,
    spins: int,
    phases: int = 7,
) -> torch.Tensor:
    """Sums x over ranks in fp32, rounded once; returns row `rank` of the sum.

    Args:
        x: [W, ...], contiguous, each row a multiple of 4 bytes; the same shape on all ranks.
        peers: [W] int64, addresses of the ranks' LL buffers: int64 [2, W, pieces, SLICE_WORDS], zeroed before first
            use.
        count: int64 [1], zeroed: epoch counter.
        status, rank, pieces, spins, phases: see `kernels.peers.all_reduce_norm`.
    """
    ranks, out = len(peers), x.new_empty(x.shape[1:])
    words = out.numel() * x.itemsize // 4
    assert x.is_contiguous() and len(x) == ranks and words * 4 == out.numel() * x.itemsize
    assert triton.cdiv(words, SLICE_WORDS) <= pieces
    _reduce_scatter_kernel[(triton.cdiv(words, SLICE_WORDS),)](
        x.view(-1).view(torch.int32), out.view(-1).view(torch.int32), peers, count, status, rank, words, spins,
        RANKS=ranks, BLOCK_RANKS=triton.next_power_of_2(ranks), PIECES=pieces, SIZE=SLICE_WORDS,
        DTYPE=DTYPES[x.dtype], PHASES=phases, num_warps=4, **pdl_options(x),
    )  # fmt: skip
    return out
