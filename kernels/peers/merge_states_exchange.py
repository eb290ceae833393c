"""Fused split-KV merge and Helix all-to-all."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention.split_kv import UnmergedAttention, item_of, load_merged_states, merge_tile, schedule
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor
from kernels.peers.exchange import GROUP_RANK_OFFSET, PIECE_WORDS, combine
from kernels.peers.ll_protocol import (
    DTYPES,
    EPOCH_UNITS,
    end_epoch,
    epoch,
    ll_buffer,
    pack,
    peer_ll_buffers,
    poll_limit,
    receive,
    send,
)


@triton.jit
def _merge_states_exchange_kernel(
    lo, hi, sinks, out, lse, part, part_lse, result, starts, peers, sent, received, status,
    lo_b, lo_t, hi_b, hi_t, out_b, out_t, out_h, lse_b, lse_t, lse_h, B, programs, rank, lanes, spins,
    T: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, SLICE: tl.constexpr, SINKS: tl.constexpr,
    RANKS: tl.constexpr, BLOCK_RANKS: tl.constexpr, PIECES: tl.constexpr, SIZE: tl.constexpr,
    DTYPE: tl.constexpr, PUSH: tl.constexpr, WAIT: tl.constexpr, GROUP_RANK_OFFSET: tl.constexpr,
    START_EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    SLICES: tl.constexpr = (D + SLICE - 1) // SLICE
    VALUES: tl.constexpr = 1 if tl.float32 == DTYPE else 2  # per word
    WORDS: tl.constexpr = D // VALUES
    tiles_m: tl.constexpr = (T * GROUP + BLOCK_M - 1) // BLOCK_M
    piece = tl.program_id(0) // SLICES  # (query, lane): the lane-th head of each destination
    n = piece // lanes
    lane = piece % lanes
    to = (rank + 1 + tl.program_id(1)) % RANKS if PUSH else rank  # this rank last
    # The bounds are older than the predecessor: compute the schedule while it runs.
    _, _, tiles, ends, run = schedule(lo, hi, lo_b, lo_t, hi_b, hi_t, B, T, HEADS * tiles_m, programs, BLOCK_B, BLOCK_N)
    head = tl.load(starts + to) + lane
    live = head < tl.load(starts + to + 1)
    head = tl.minimum(head, HEADS * GROUP - 1)
    i = n // T
    t = n % T
    item_begin, length, row = item_of(i, t, head, tiles, ends, T, HEADS, GROUP, BLOCK_B, BLOCK_M)
    first = item_begin // run
    parts = tl.where(live, (item_begin + length - 1) // run - first + 1, 0)
    ll_buffers = peer_ll_buffers(peers, to)
    local_ll_buffers = peer_ll_buffers(peers, rank)
    if parts >= 0:  # always true; keeps the wait after the schedule
        wait_for_predecessor(PDL)
    # A projection of several rows prefetches its weights. One of a single row waits first, and its programs, more than
    # the GPU holds at once, would delay those that still receive (benchmarks/LOG.md).
    if START_EARLY:
        start_successor(PDL)
    # Before the parts, to overlap the latencies.
    tag = epoch(sent)
    expected = epoch(received)
    polls = poll_limit(status, spins)
    s = tl.program_id(0) % SLICES
    w = s * (SLICE // VALUES) + tl.arange(0, SLICE // VALUES)
    if PUSH:
        d = s * SLICE + tl.arange(0, SLICE)
        b = i.to(tl.int64)
        values, log = load_merged_states(
            out + b * out_b + t * out_t + head * out_h, lse + b * lse_b + t * lse_t + head * lse_h, part, part_lse,
            sinks + head if SINKS else sinks, item_begin, run, first, parts, row, d, live, D, ROWS, PARTS, SLICE, SINKS,
        )  # fmt: skip
        if VALUES == 1:
            words = values.to(tl.int32, bitcast=True)
        else:
            first_of, second_of = tl.split(tl.reshape(values, [SLICE // 2, 2]))
            words = pack(first_of, second_of, DTYPE)
        there = ll_buffer(ll_buffers, tag, rank, piece, RANKS, PIECES, SIZE)
        send(there + w, words, tag, w < WORDS)
        send(there + WORDS, log.to(tl.int32, bitcast=True), tag, s == 0)
        tl.debug_barrier()  # all threads have read the epoch
        end_epoch(sent, tl.program_id(0) * RANKS + tl.program_id(1), tl.num_programs(0) * RANKS)
    if WAIT:
        if to == rank:
            source = tl.arange(0, BLOCK_RANKS)
            real = source < RANKS
            here = ll_buffer(local_ll_buffers, expected, source, piece, RANKS, PIECES, SIZE)
            inside = real[:, None] & (w < WORDS)[None, :]
            theirs = receive(
                here[:, None] + w[None, :], expected, inside, source[:, None] + GROUP_RANK_OFFSET, status, polls
            )
            logs = receive(here + WORDS, expected, real, source + GROUP_RANK_OFFSET, status, polls)
            words = combine(theirs, logs, real, DTYPE)
            mine = tl.load(starts + rank + 1) - tl.load(starts + rank)
            at = result + (n.to(tl.int64) * mine + lane) * WORDS + w
            tl.store(at, words, mask=(lane < mine) & (w < WORDS))
            tl.debug_barrier()
            end_epoch(received, tl.program_id(0), tl.num_programs(0))


def merge_states_exchange(
    parts: UnmergedAttention,
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
    """Merges `parts` and exchanges the result, like `kernels.peers.exchange.exchange` but for the order of sums.

    Args:
        parts: attention of queries [B, T], in the exchange's order.
        result: [B * T, local heads, D], written; contiguous.
        starts, peers, counts, status, rank, lanes, pieces, spins, push, wait: see `exchange`, which may share them.
    """
    B, T, Hq, D = parts.out.shape
    ranks, N = len(peers), B * T
    assert N * lanes <= pieces and D * parts.out.itemsize // 4 < PIECE_WORDS and D * parts.out.itemsize % 4 == 0
    assert result.is_contiguous()
    part = parts.part
    at_once, width, warps = merge_tile(N * lanes * ranks, D, part.itemsize, parts.items, parts.programs)
    grid = N * lanes * triton.cdiv(D, width)
    assert grid * ranks < EPOCH_UNITS.value
    _merge_states_exchange_kernel[grid, ranks if push else 1](
        parts.lo, parts.hi, parts.sinks, parts.out, parts.lse, part, parts.part_lse, result.view(torch.int32),
        starts, peers, *counts, status,
        *parts.lo.stride(), *parts.hi.stride(), *parts.out.stride()[:3], *parts.lse.stride(),
        B, parts.programs, rank, lanes, spins,
        T=T, HEADS=parts.heads, GROUP=Hq // parts.heads, D=D, BLOCK_B=triton.next_power_of_2(B),
        BLOCK_M=parts.block_m, BLOCK_N=parts.block_n, ROWS=part.shape[1], PARTS=at_once, SLICE=width,
        SINKS=parts.sinks is not None, RANKS=ranks, BLOCK_RANKS=triton.next_power_of_2(ranks), PIECES=pieces,
        SIZE=PIECE_WORDS, DTYPE=DTYPES[result.dtype], PUSH=push, WAIT=wait, GROUP_RANK_OFFSET=GROUP_RANK_OFFSET,
        START_EARLY=N > 1, num_warps=warps, **pdl_options(result),
    )  # fmt: skip
    return result
