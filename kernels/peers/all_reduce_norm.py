"""Fused all-reduce, residual add and RMSNorm over the LL protocol, as between two projections of a decode step.

A row is cut into slices of 256 words, one program each. One-shot: a program sends its slice to every rank and sums the
slices it receives. Two-shot, for more bytes: it sends its slice to one owner, which sums and broadcasts. The programs
of a row exchange their sums of squares through local LL buffers.
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

SLICE_WORDS = 256


@triton.jit
def _all_reduce_norm_kernel(
    x, residual, weight, y, total, peers, squares, count, status,
    rank, H, eps, spins,
    ROW_WORDS: tl.constexpr, SLICES: tl.constexpr, BLOCK_SLICES: tl.constexpr,
    RANKS: tl.constexpr, BLOCK_RANKS: tl.constexpr, PIECES: tl.constexpr, SIZE: tl.constexpr, DTYPE: tl.constexpr,
    RESIDUAL: tl.constexpr, TWO_SHOT: tl.constexpr, PHASES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    EARLY: tl.constexpr = PHASES & 1 == 0  # the predecessor sends, and nothing else here reads its output
    if not EARLY:
        wait_for_predecessor(PDL)
    # A projection follows, and reads only weights before its own wait. With two shots its programs would delay those
    # that still multiply (benchmarks/LOG.md).
    LATE: tl.constexpr = EARLY and TWO_SHOT
    if not LATE:
        start_successor(PDL)
    piece = tl.program_id(0)
    n = (piece // SLICES).to(tl.int64)
    w = tl.arange(0, SIZE)
    column = piece % SLICES * SIZE + w
    inside = column < ROW_WORDS
    at = n * ROW_WORDS + column
    tag = epoch(count)
    polls = poll_limit(status, spins)
    source = tl.arange(0, BLOCK_RANKS)
    owner = piece % RANKS
    # Load what does not depend on a peer.
    norm_weight = tl.load(weight + column, mask=inside, other=0)
    residual_words = tl.load(residual + at, mask=inside, other=0) if RESIDUAL else norm_weight

    if PHASES & 1:
        words = tl.load(x + at, mask=inside, other=0)
        if TWO_SHOT:
            send(
                ll_buffer(peer_ll_buffers(peers, owner), tag, rank, piece, RANKS, PIECES, SIZE) + w, words, tag, inside
            )
        else:
            for step in tl.static_range(RANKS):
                to = (rank + 1 + step) % RANKS
                send(
                    ll_buffer(peer_ll_buffers(peers, to), tag, rank, piece, RANKS, PIECES, SIZE) + w, words, tag, inside
                )
    all_inside = (source < RANKS)[:, None] & inside[None, :]
    here = ll_buffer(peer_ll_buffers(peers, rank), tag, source, piece, RANKS, PIECES, SIZE)[:, None] + w[None, :]
    if TWO_SHOT:
        if PHASES & 2:
            if owner == rank:
                words = receive(here, tag, all_inside, source[:, None], status, polls)
                words = pack(tl.sum(low(words, DTYPE), 0), tl.sum(high(words, DTYPE), 0), DTYPE)
                for step in tl.static_range(RANKS):
                    to = (rank + 1 + step) % RANKS
                    send(
                        ll_buffer(peer_ll_buffers(peers, RANKS + to), tag, 0, piece, 1, PIECES, SIZE) + w,
                        words,
                        tag,
                        inside,
                    )
    if PHASES & 4:
        if TWO_SHOT:
            sum_at = ll_buffer(peer_ll_buffers(peers, RANKS + rank), tag, 0, piece, 1, PIECES, SIZE) + w
            words = receive(sum_at, tag, inside, owner, status, polls)
            first, second = low(words, DTYPE), high(words, DTYPE)
        else:
            words = receive(here, tag, all_inside, source[:, None], status, polls)
            words = tl.where(all_inside, words, 0)
            first, second = tl.sum(low(words, DTYPE), 0), tl.sum(high(words, DTYPE), 0)
        if RESIDUAL:
            first += low(residual_words, DTYPE)
            second += high(residual_words, DTYPE)
        # Round the sum to the model's dtype before normalizing.
        words = pack(first, second, DTYPE)
        if EARLY:
            # Results may reuse the memory of the predecessor's operands. Always true: keeps the wait after the sums.
            if tl.sum(words & 1, 0) >= 0:
                wait_for_predecessor(PDL)
            if LATE:
                start_successor(PDL)
        tl.store(total + at, words, mask=inside)
        first = tl.where(inside, low(words, DTYPE), 0.0)
        second = tl.where(inside, high(words, DTYPE), 0.0)
        square = tl.sum(first * first + second * second, 0)
        if SLICES > 1:
            mine = squares + piece - piece % SLICES  # the previous launch has ended, so its squares have been read
            send(mine + piece % SLICES, square.to(tl.int32, bitcast=True), tag, True)
            s = tl.arange(0, BLOCK_SLICES)
            bits = receive(mine + s, tag, s < SLICES, rank + 0 * s, status, polls)
            square = tl.sum(tl.where(s < SLICES, bits.to(tl.float32, bitcast=True), 0.0), 0)
        scale = tl.rsqrt(square / H + eps)
        # Round before applying the weight, as the models were trained.
        words = pack(first * scale, second * scale, DTYPE)
        words = pack(low(words, DTYPE) * low(norm_weight, DTYPE), high(words, DTYPE) * high(norm_weight, DTYPE), DTYPE)
        tl.store(y + at, words, mask=inside)
        end_epoch(count, piece, tl.num_programs(0))


def all_reduce_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    peers: torch.Tensor,
    squares: torch.Tensor,
    count: torch.Tensor,
    status: torch.Tensor,
    *,
    rank: int,
    pieces: int,
    spins: int,
    two_shot: bool,
    slice_words: int = SLICE_WORDS,
    phases: int = 7,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes s = residual + sum of x over ranks and y = weight * s / rms(s), in fp32 and rank order.

    Equal on all ranks.

    Args:
        x: [N, H], a multiple of 4 bytes per row; contiguous. Without phase 1 only its shape and dtype matter.
        residual: [N, H] in x's dtype, contiguous, the same on all ranks; None adds nothing.
        weight: [H].
        peers: [1 or 2, W] int64, addresses of the ranks' LL buffers, zeroed before first use: int64 [2, W, pieces,
            slice_words], and for two-shot those of the sums, [2, pieces, slice_words].
        squares: int64 [pieces], zeroed, local.
        count: int64 [1], zeroed: epoch counter. Do not share LL buffers, squares and count between one-shot and
            two-shot.
        status: [1] int32, set if a rank's words do not arrive within `spins` polls.
        pieces: capacity of the LL buffers, at least N times the slices per row.
        slice_words: words per program; the same in all calls that share LL buffers.
        phases: bit mask. 1 sends (or a projection did: `kernels.dense.linear.linear_send`), 2 sums at the owner
            (two-shot), 4 finishes; each rank has to run all of them.

    Returns:
        y [N, H] and s [N, H] in x's dtype.
    """
    N, H = x.shape
    words = H * x.itemsize // 4
    slices = triton.cdiv(words, slice_words)
    ranks = peers.shape[1]
    assert words * 4 == H * x.itemsize and N * slices <= pieces and len(peers) >= 1 + two_shot
    assert x.is_contiguous() and weight.is_contiguous() and (residual is None or residual.is_contiguous())
    y, total = torch.empty_like(x), torch.empty_like(x)

    def as_words(t: torch.Tensor) -> torch.Tensor:
        return t.view(torch.int32)

    _all_reduce_norm_kernel[(N * slices,)](
        as_words(x), as_words(x if residual is None else residual), as_words(weight), as_words(y), as_words(total),
        peers, squares, count, status, rank, H, eps, spins,
        ROW_WORDS=words, SLICES=slices, BLOCK_SLICES=triton.next_power_of_2(slices),
        RANKS=ranks, BLOCK_RANKS=triton.next_power_of_2(ranks), PIECES=pieces, SIZE=slice_words,
        DTYPE=DTYPES[x.dtype], RESIDUAL=residual is not None, TWO_SHOT=two_shot, PHASES=phases,
        num_warps=4, **pdl_options(x),
    )  # fmt: skip
    return y, total
