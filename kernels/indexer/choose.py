"""Exact choice of the best-scored tokens of a sequence, over all ranks that hold parts of it.

A token's key is a number of its score, then of its position, an earlier one above a later one: keys are distinct, so
that ties are decided alike on every grid. Each launch counts one digit of eight bits, of the keys whose digits before
are those of the k-th largest. Ranks gather these counts, and each next launch finds the digit in their sum. Once all
keys with the digits found are chosen, further launches count nothing. Two more launches write the chosen tokens in
local order: one counts those of each part of a row, one writes them.

With the keys of a rank alone, all of this is the same without the gathers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.overlap import overlapped, sm_count, start_successor, wait_for_predecessor
from kernels.reference.choose_tokens import Shard
from kernels.reference.choose_tokens import choose_tokens as reference

TILE = 2048  # scores of a program per iteration
PROGRAMS = 4  # per SM
DIGITS = 256
SCORE_PASSES = 4


@triton.jit
def _keys(
    scored, j, inside, turn,
    CYCLE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Computes the keys of local tokens `j`, int64: 32 bits of the score, BITS of the position."""
    x = tl.load(scored + j, mask=inside, other=0.0)
    x = tl.where(x == 0.0, 0.0, x)  # -0 equals 0
    bits = x.to(tl.int32, bitcast=True)
    code = (bits ^ ((bits >> 31) | -2147483648)).to(tl.int64) & 0xFFFFFFFF
    code = tl.where(x == x, code, 0xFFFFFFFF)
    at = j // BLOCK_TOKENS * CYCLE + turn * BLOCK_TOKENS + j % BLOCK_TOKENS  # in the sequence
    return (code << BITS) + ((1 << BITS) - 1 - at.to(tl.int64))


@triton.jit
def _found(
    positions, gathered, least_keys, lefts, n, N, topk, STAGE: tl.constexpr, PASSES: tl.constexpr, RANKS: tl.constexpr
):
    """Finds the least key of those chosen so far, and how many more are to come of the keys with its digits; 0: none.

    `STAGE` digits are counted.
    """
    if STAGE == 0:
        bound = n * 0
        left = tl.where(tl.load(positions + n) + 1 > topk, topk, 0)
    else:
        bound = tl.load(least_keys + (STAGE - 1) * N + n)
        left = tl.load(lefts + (STAGE - 1) * N + n)
        if left > 0:
            digit = tl.arange(0, 256)
            counts = tl.zeros([256], tl.int32)
            for rank in tl.static_range(RANKS):
                counts += tl.load(gathered + (rank * N + n) * 256 + digit)
            reach = tl.cumsum(counts, 0, reverse=True)
            found = tl.sum((reach >= left).to(tl.int32), 0) - 1
            above = tl.max(tl.where(reach < left, reach, 0), 0)
            equal = tl.min(tl.where(reach >= left, reach, 0x7FFFFFFF), 0) - above
            bound += found.to(tl.int64) << (8 * (PASSES - STAGE))
            left = tl.where(left - above == equal, 0, left - above)
    return bound, left


@triton.jit(do_not_specialize=["N", "parts"])  # they change from chunk to chunk
def _count_digits_kernel(
    scored, positions, first_ranks, hi, gathered, counts, least_keys, lefts, scores_n, N, topk, parts,
    STAGE: tl.constexpr, PASSES: tl.constexpr, BITS: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % parts
    n = (tl.program_id(0) // parts).to(tl.int64)
    wait_for_predecessor(PDL)
    bound, left = _found(positions, gathered, least_keys, lefts, n, N, topk, STAGE, PASSES, RANKS)
    if part == 0:
        tl.store(least_keys + STAGE * N + n, bound)
        tl.store(lefts + STAGE * N + n, left.to(tl.int32))
    length = tl.load(hi + n)
    run = tl.cdiv(tl.cdiv(length, TILE), parts) * TILE
    begin = part * run
    end = tl.minimum(begin + run, length)
    if (left > 0) & (begin < end):
        shift: tl.constexpr = 8 * (PASSES - 1 - STAGE)
        turn = (RANK - tl.load(first_ranks + n) + RANKS).to(tl.int32) % RANKS
        found = tl.zeros([256], tl.int32)
        for at in range(begin, end, TILE):
            j = at + tl.arange(0, TILE)
            inside = j < end
            keys = _keys(scored + n * scores_n, j, inside, turn, RANKS * BLOCK_TOKENS, BLOCK_TOKENS, BITS)
            counted = inside & (keys >> (shift + 8) == bound >> (shift + 8))
            found += tl.histogram(((keys >> shift) & 255).to(tl.int32), 256, mask=counted)
        tl.atomic_add(counts + n * 256 + tl.arange(0, 256), found, mask=found > 0, sem="relaxed")
    start_successor(PDL)


@triton.jit(do_not_specialize=["N", "parts", "EACH"])
def _write_chosen_kernel(
    scored, positions, first_ranks, hi, gathered, least_keys, lefts, part_counts, block_tables, owners,
    chosen_slots, chosen_counts, scores_n, tables_b, width, N, topk, parts, EACH,
    WRITES: tl.constexpr, PASSES: tl.constexpr, BITS: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, BLOCK_PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % parts
    n = (tl.program_id(0) // parts).to(tl.int64)
    wait_for_predecessor(PDL)
    length = tl.load(hi + n)
    run = tl.cdiv(tl.cdiv(length, TILE), parts) * TILE
    begin = part * run
    end = tl.minimum(begin + run, length)
    turn = (RANK - tl.load(first_ranks + n) + RANKS).to(tl.int32) % RANKS
    if WRITES:
        bound = tl.load(least_keys + PASSES * N + n)
        q = tl.arange(0, BLOCK_PARTS)
        of_parts = tl.load(part_counts + n * parts + q, mask=q < parts, other=0)
        place = tl.sum(tl.where(q < part, of_parts, 0), 0)
        if part == 0:
            # Never more, unless ranks are emulated, whose counts are not those of their tokens.
            tl.store(chosen_counts + n, tl.minimum(tl.sum(of_parts, 0), width))
        row = n // EACH
        if owners is not None:
            row = tl.load(owners + n)
        pages = block_tables + row * tables_b
    else:
        bound, _ = _found(positions, gathered, least_keys, lefts, n, N, topk, PASSES, PASSES, RANKS)
        if part == 0:
            tl.store(least_keys + PASSES * N + n, bound)
        place = part * 0
    for at in range(begin, end, TILE):
        j = at + tl.arange(0, TILE)
        inside = j < end
        keys = _keys(scored + n * scores_n, j, inside, turn, RANKS * BLOCK_TOKENS, BLOCK_TOKENS, BITS)
        chosen = (inside & (keys >= bound)).to(tl.int32)
        if WRITES:
            page = tl.load(pages + j // PAGE, mask=chosen > 0, other=0)
            to = place + tl.cumsum(chosen, 0) - 1
            tl.store(chosen_slots + n * width + to, page * PAGE + j % PAGE, mask=(chosen > 0) & (to < width))
        place += tl.sum(chosen, 0)
    start_successor(PDL)
    if not WRITES:
        tl.store(part_counts + n * parts + part, place)


def choose_tokens(
    scores: torch.Tensor,
    positions: torch.Tensor,
    starts: torch.Tensor,
    hi: torch.Tensor,
    tables: torch.Tensor,
    rows: torch.Tensor | None,
    topk: int,
    most: int,
    shard: Shard,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses the `topk` best-scored tokens of a sequence for each query, or all of fewer; ties to the lower position.

    NaN is the highest score, so that it surfaces.

    Args:
        scores: [N, S] fp32, last dim contiguous: of this rank's tokens in local order, the first `hi` of a row.
        positions, starts: [N] int64, contiguous: positions of the queries, which read all tokens up to their own, and
            the kvp ranks of their sequences' first blocks.
        hi: [N] int32, contiguous: tokens of a row on this rank.
        tables: [n, P] int32, rows contiguous: pages of each sequence.
        rows: [N] int64, contiguous: the row of each query's sequence in `tables`; None: N / n queries of each.
        topk: tokens of a query, over all ranks.
        most: an upper bound of positions.
        shard: this rank's part of the tokens; with other ranks, this is a collective.

    Returns:
        Cache slots [N, min(topk, S)] int32 of the tokens chosen here, in local order, and how many they are [N] int32;
        the entries behind them may be anything.

    Source:
        DeepSeek-V3.2 (arXiv:2512.02556), section 2.1; radix select.
    """
    if not dispatch.on_gpu(scores):
        return reference(scores, positions, starts, hi, tables, rows, topk, most, shard)
    N, S = scores.shape
    assert scores.dtype == torch.float32 and scores.stride(1) == tables.stride(1) == 1 and shard.kvp * most > 0
    assert positions.is_contiguous() and starts.is_contiguous() and hi.is_contiguous()
    assert (shard.gather is None) == (shard.kvp == 1)
    device, passes = scores.device, SCORE_PASSES + triton.cdiv(max(most, 2).bit_length(), 8)
    width = min(topk, S)
    slots = torch.empty(N, width, dtype=torch.int32, device=device)
    taken = torch.empty(N, dtype=torch.int32, device=device)
    if N == 0:
        return slots, taken
    tiles = triton.cdiv(S, TILE)
    parts = max(1, min(tiles, triton.cdiv(PROGRAMS * sm_count(device), N)))
    counts = torch.zeros(passes, N, DIGITS, dtype=torch.int32, device=device)
    bounds = torch.empty(passes + 1, N, dtype=torch.int64, device=device)
    lefts = torch.empty(passes, N, dtype=torch.int32, device=device)
    part_counts = torch.empty(N, parts, dtype=torch.int32, device=device)
    options = dict(
        PASSES=passes, BITS=8 * (passes - SCORE_PASSES), RANKS=shard.kvp, RANK=shard.kvp_rank,
        BLOCK_TOKENS=shard.append_block, TILE=TILE, num_warps=4, **overlapped(scores),
    )  # fmt: skip
    gathered = counts
    for stage in range(passes):
        _count_digits_kernel[(parts * N,)](
            scores, positions, starts, hi, gathered, counts[stage], bounds, lefts, scores.stride(0), N, topk, parts,
            STAGE=stage, **options,
        )  # fmt: skip
        gathered = counts[stage] if shard.gather is None else shard.gather(counts[stage])
    for writes in (False, True):
        _write_chosen_kernel[(parts * N,)](
            scores, positions, starts, hi, gathered, bounds, lefts, part_counts, tables, rows, slots, taken,
            scores.stride(0), tables.stride(0), width, N, topk, parts, max(1, N // len(tables)),
            WRITES=writes, PAGE=shard.page_size, BLOCK_PARTS=triton.next_power_of_2(parts), **options,
        )  # fmt: skip
    return slots, taken
