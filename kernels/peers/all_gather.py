"""Low-latency all-gather in one kernel, over the LL protocol."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.overlap import pdl_options, start_successor, wait_for_predecessor
from kernels.peers.ll_protocol import end_epoch, epoch, ll_buffer, peer_ll_buffers, poll_limit, receive, send

SLICE_WORDS = 256


@triton.jit
def _all_gather_kernel(
    x, out, peers, count, status, rank, n, row_words, spins,
    RANKS: tl.constexpr, BLOCK_RANKS: tl.constexpr, PIECES: tl.constexpr, SIZE: tl.constexpr, PHASES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    start_successor(PDL)
    piece = tl.program_id(0)
    w = tl.arange(0, SIZE)
    at = piece * SIZE + w
    tag = epoch(count)
    if PHASES & 1:
        words = tl.load(x + at, mask=at < n, other=0)
        for step in tl.static_range(RANKS):
            to = (rank + 1 + step) % RANKS
            send(ll_buffer(peer_ll_buffers(peers, to), tag, rank, piece, RANKS, PIECES, SIZE) + w, words, tag, at < n)
    if PHASES & 4:
        source = tl.arange(0, BLOCK_RANKS)
        inside = (source < RANKS)[:, None] & (at < n)[None, :]
        here = ll_buffer(peer_ll_buffers(peers, rank), tag, source, piece, RANKS, PIECES, SIZE)[:, None] + w[None, :]
        words = receive(here, tag, inside, source[:, None], status, poll_limit(status, spins))
        to = at // row_words * (RANKS * row_words) + at % row_words
        tl.store(out + source[:, None] * row_words + to[None, :], words, mask=inside)
        end_epoch(count, piece, tl.num_programs(0))


def all_gather(
    x: torch.Tensor,
    peers: torch.Tensor,
    count: torch.Tensor,
    status: torch.Tensor,
    *,
    rank: int,
    pieces: int,
    spins: int,
    interleave: bool = False,
    phases: int = 7,
) -> torch.Tensor:
    """Gathers x of every rank, in rank order: [W, *x.shape], with `interleave` [N, W, ...].

    Args:
        x: contiguous, a multiple of 4 bytes; the same shape on all ranks.
        peers: [W] int64, addresses of the ranks' LL buffers: int64 [2, W, pieces, SLICE_WORDS], zeroed before first
            use.
        count: int64 [1], zeroed: epoch counter.
        status, rank, pieces, spins, phases: see `kernels.peers.all_reduce_norm`.
        interleave: concatenate rows of x [N, ...], a multiple of 4 bytes each, along a new dim 1.
    """
    ranks = len(peers)
    words, rows = x.numel() * x.itemsize // 4, len(x) if interleave else 1
    out = x.new_empty(rows, ranks, *x.shape[1:]) if interleave else x.new_empty(ranks, *x.shape)
    assert x.is_contiguous() and words * 4 == x.numel() * x.itemsize and triton.cdiv(words, SLICE_WORDS) <= pieces
    assert words % rows == 0
    _all_gather_kernel[(triton.cdiv(words, SLICE_WORDS),)](
        x.view(-1).view(torch.int32), out.view(-1).view(torch.int32), peers, count, status,
        rank, words, words // rows, spins,
        RANKS=ranks, BLOCK_RANKS=triton.next_power_of_2(ranks), PIECES=pieces, SIZE=SLICE_WORDS, PHASES=phases,
        num_warps=4, **pdl_options(x),
    )  # fmt: skip
    return out
