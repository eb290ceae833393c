"""Helix all-to-all in one kernel: sends partial attention outputs to each head's owner, which merges them."""

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

GROUP_RANK_OFFSET = 1 << 16  # added to a rank of the group in `status`, to tell it from a rank of the world
PIECE_WORDS = 264  # one head's output and LSE: head dim 256 in fp32 plus a word, padded to 64 bytes


@triton.jit
def combine(parts, logs, real, DTYPE: tl.constexpr):
    """Merges words of partial outputs [SOURCES, n] by their LSEs into exact attention [n], over `real` sources."""
    logs = tl.where(real, logs.to(tl.float32, bitcast=True), float("-inf"))
    peak = tl.max(logs, 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp(logs - peak)
    total = tl.sum(weights, 0)
    total = tl.where(total == 0.0, 1.0, total)
    # Ignore the words of an empty source, even NaN. A NaN LSE propagates to the output.
    some = (logs != float("-inf"))[:, None]
    first = tl.sum(tl.where(some, low(parts, DTYPE) * weights[:, None], 0.0), 0) / total
    second = tl.sum(tl.where(some, high(parts, DTYPE) * weights[:, None], 0.0), 0) / total
    return pack(first, second, DTYPE)


@triton.jit
def _exchange_kernel(
    out, lse, result, starts, peers, sent, received, status,
    out_n, out_h, lse_n, lse_h, rank, lanes, spins,
    RANKS: tl.constexpr, BLOCK_RANKS: tl.constexpr, PIECES: tl.constexpr, SIZE: tl.constexpr,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr, PUSH: tl.constexpr, WAIT: tl.constexpr,
    GROUP_RANK_OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    start_successor(PDL)
    piece = tl.program_id(0)  # (token, lane): the lane-th head of each destination
    n = (piece // lanes).to(tl.int64)
    lane = piece % lanes
    to = (rank + 1 + tl.program_id(1)) % RANKS if PUSH else rank  # this rank last
    w = tl.arange(0, BLOCK)
    if PUSH:
        head = tl.load(starts + to) + lane
        live = head < tl.load(starts + to + 1)
        words = tl.load(out + n * out_n + head * out_h + w, mask=live & (w < WORDS), other=0)
        log = tl.load(lse + n * lse_n + head * lse_h, mask=live, other=float("-inf"))
        tag = epoch(sent)
        there = ll_buffer(peer_ll_buffers(peers, to), tag, rank, piece, RANKS, PIECES, SIZE)
        send(there + w, words, tag, w < WORDS)
        send(there + WORDS, log.to(tl.int32, bitcast=True), tag, True)
        end_epoch(sent, piece * RANKS + tl.program_id(1), tl.num_programs(0) * RANKS)
    if WAIT:
        if to == rank:
            expected = epoch(received)
            source = tl.arange(0, BLOCK_RANKS)
            real = source < RANKS
            here = ll_buffer(peer_ll_buffers(peers, rank), expected, source, piece, RANKS, PIECES, SIZE)
            polls = poll_limit(status, spins)
            parts = receive(
                here[:, None] + w[None, :],
                expected,
                real[:, None] & (w < WORDS)[None, :],
                source[:, None] + GROUP_RANK_OFFSET,
                status,
                polls,
            )
            logs = receive(here + WORDS, expected, real, source + GROUP_RANK_OFFSET, status, polls)
            words = combine(parts, logs, real, DTYPE)
            mine = tl.load(starts + rank + 1) - tl.load(starts + rank)
            at = result + (n * mine + lane) * WORDS + w
            tl.store(at, words, mask=(lane < mine) & (w < WORDS))
            end_epoch(received, piece, tl.num_programs(0))


def exchange(
    out: torch.Tensor,
    lse: torch.Tensor,
    result: torch.Tensor,
    starts: torch.Tensor,
    peers: torch.Tensor,
    counts: tuple[torch.Tensor, torch.Tensor],
    status: torch.Tensor,
    *,
    rank: int,
    lanes: int,
    pieces: int,
    spins: int,
    push: bool = True,
    wait: bool = True,
) -> torch.Tensor:
    """Sends each head's partial output to its owner and merges the partials of this rank's heads, in fp32.

    Args:
        out: [N, heads, D], a multiple of 4 bytes per head; last dim contiguous.
        lse: [N, heads] fp32, natural log; -inf where a rank has no keys.
        result: [N, local heads, D], written; contiguous.
        starts: [K + 1] int32, the first head of each rank of the group, and the end.
        peers: [K] int64, addresses of the group's LL buffers: int64 [2, K, pieces, PIECE_WORDS], zeroed before first
            use.
        counts: two zeroed int64 [1], epoch counters of sends and of receives.
        status: [1] int32, set to 1 + GROUP_RANK_OFFSET + the rank in the group whose words do not arrive within `spins`
            polls.
        rank: this rank in the group.
        lanes: max heads per rank.
        pieces: capacity of the LL buffers, at least N * lanes.
        push: send. A call with only `push` must be followed by one with only `wait`.
        wait: receive and merge.

    Source:
        Helix Parallelism (arXiv:2507.07120), section 2.1.2.
    """
    N, _, D = out.shape
    ranks = len(peers)
    words = D * out.itemsize // 4
    assert N * lanes <= pieces and words < PIECE_WORDS and words * 4 == D * out.itemsize
    assert out.stride(2) == 1 and result.is_contiguous() and lse.dtype == torch.float32
    out_words = out.view(torch.int32)
    _exchange_kernel[N * lanes, ranks if push else 1](
        out_words, lse, result.view(torch.int32), starts, peers, *counts, status,
        *out_words.stride()[:2], *lse.stride(), rank, lanes, spins,
        RANKS=ranks, BLOCK_RANKS=triton.next_power_of_2(ranks), PIECES=pieces, SIZE=PIECE_WORDS,
        WORDS=words, BLOCK=triton.next_power_of_2(words), DTYPE=DTYPES[out.dtype], PUSH=push, WAIT=wait,
        GROUP_RANK_OFFSET=GROUP_RANK_OFFSET, num_warps=1, **pdl_options(out),
    )  # fmt: skip
    return result
