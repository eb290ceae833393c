"""Variant of `kernels.peers.all_reduce_norm` for a few hundred rows: one program per row, whatever its width.

A program sends its row to an owner, which sums and broadcasts. It waits only for the same row on other ranks, and all
ranks launch rows in the same order, so programs need not be co-resident. (Slices of a row have to be, as they exchange
sums of squares.)
"""

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

ROW_WORDS = 4096  # per row of an LL buffer: 8192 elements of 16 bits
MANY_WORDS = 1024  # from here on a program has eight warps


@triton.jit
def _all_reduce_norm_rows_kernel(
    x, residual, weight, y, total, peers, count, status,
    rank, H, eps, spins,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
    DTYPE: tl.constexpr, RESIDUAL: tl.constexpr, EMULATED: tl.constexpr, PHASES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    start_successor(PDL)
    n = tl.program_id(0)
    owner, owner_row = n % RANKS, n // RANKS  # index among the owner's rows
    w = tl.arange(0, BLOCK)
    inside = w < WORDS
    at = n.to(tl.int64) * WORDS + w
    tag = epoch(count)
    polls = poll_limit(status, spins)
    if PHASES & 1:
        words = tl.load(x + at, mask=inside, other=0)
        send(
            ll_buffer(peer_ll_buffers(peers, owner), tag, rank, owner_row, RANKS, ROWS // RANKS, SIZE) + w,
            words,
            tag,
            inside,
        )
    if PHASES & 2:
        if owner == rank:
            first, second = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
            for source in range(RANKS):
                here = ll_buffer(peer_ll_buffers(peers, rank), tag, source, owner_row, RANKS, ROWS // RANKS, SIZE) + w
                words = receive(here, tag, inside, source, status, polls)
                first += low(words, DTYPE)
                second += high(words, DTYPE)
            words = pack(first, second, DTYPE)
            for step in range(RANKS):
                to = (rank + 1 + step) % RANKS
                send(ll_buffer(peer_ll_buffers(peers, RANKS + to), tag, 0, n, 1, ROWS, SIZE) + w, words, tag, inside)
    if PHASES & 4:
        words = receive(
            ll_buffer(peer_ll_buffers(peers, RANKS + rank), tag, 0, n, 1, ROWS, SIZE) + w,
            tag,
            inside,
            owner,
            status,
            polls,
        )
        first, second = low(words, DTYPE), high(words, DTYPE)
        if EMULATED:
            words = tl.load(x + at, mask=inside, other=0)
            first, second = RANKS * low(words, DTYPE), RANKS * high(words, DTYPE)
        if RESIDUAL:
            residual_words = tl.load(residual + at, mask=inside, other=0)
            first += low(residual_words, DTYPE)
            second += high(residual_words, DTYPE)
        # Round the sum to the model's dtype before normalizing, and the result before applying the weight.
        words = pack(first, second, DTYPE)
        tl.store(total + at, words, mask=inside)
        first = tl.where(inside, low(words, DTYPE), 0.0)
        second = tl.where(inside, high(words, DTYPE), 0.0)
        scale = tl.rsqrt(tl.sum(first * first + second * second, 0) / H + eps)
        words = pack(first * scale, second * scale, DTYPE)
        norm_weight = tl.load(weight + w, mask=inside, other=0)
        words = pack(low(words, DTYPE) * low(norm_weight, DTYPE), high(words, DTYPE) * high(norm_weight, DTYPE), DTYPE)
        tl.store(y + at, words, mask=inside)
        end_epoch(count, n, tl.num_programs(0))


def all_reduce_norm_rows(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    peers: torch.Tensor,
    count: torch.Tensor,
    status: torch.Tensor,
    *,
    rank: int,
    rows: int,
    spins: int,
    row_words: int = ROW_WORDS,
    emulated: bool = False,
    phases: int = 7,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `kernels.peers.all_reduce_norm.all_reduce_norm`, which documents the other arguments.

    Args:
        x: [N, H], at most `rows` rows and `row_words` words per row.
        peers: [2, W] int64, addresses of the ranks' LL buffers, zeroed before first use: int64 [2, W, rows / W,
            row_words], and those of the sums, [2, rows, row_words]. Buffers and count serve only calls of this
            function.
        rows: a multiple of W.
        emulated: whether peers are absent: sums that arrive are of other rows, so a row is added up W times instead.
    """
    N, H = x.shape
    words = H * x.itemsize // 4
    ranks = peers.shape[1]
    assert words * 4 == H * x.itemsize and max(N, 1) <= rows and rows % ranks == 0
    assert words <= row_words
    assert x.is_contiguous() and weight.is_contiguous() and (residual is None or residual.is_contiguous())
    y, total = torch.empty_like(x), torch.empty_like(x)

    def as_words(t: torch.Tensor) -> torch.Tensor:
        return t.view(torch.int32)

    _all_reduce_norm_rows_kernel[(N,)](
        as_words(x), as_words(x if residual is None else residual), as_words(weight), as_words(y), as_words(total),
        peers, count, status, rank, H, eps, spins,
        WORDS=words, BLOCK=triton.next_power_of_2(words), RANKS=ranks, ROWS=rows, SIZE=row_words,
        DTYPE=DTYPES[x.dtype], RESIDUAL=residual is not None, EMULATED=emulated, PHASES=phases,
        num_warps=8 if words >= MANY_WORDS else 4, **pdl_options(x),
    )  # fmt: skip
    return y, total
