"""Exact top-k token selection per query, over all ranks that hold parts of the sequence: a distributed radix select.

Keys are defined in `kernels.indexer.keys`. Each launch counts one 8-bit digit of the keys that share the preceding
digits with the k-th largest; `index_scores` may have counted the first. Ranks all-gather the counts, and the next
launch finds the digit in their sum. Once the digits found decide all keys, further launches count nothing.

Two digits leave few undecided keys, some hundred of a million. The next launch lists them, ranks all-gather the lists,
and each program of the last launch finds the bound among them and writes the selected tokens in local order; the launch
that lists has counted those of each part of a row.

Many rows would send too much; `kernels.indexer.select_topk_many_rows` selects for them, with one program per row. On a
single rank, all of this is the same without the gathers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.indexer.keys import (
    DIGITS,
    SCORE_PASSES,
    at_least,
    begin_alike,
    digit_of,
    find_bound,
    keys_of,
    score_codes,
)
from kernels.indexer.reference import Shard
from kernels.indexer.reference import index_topk as reference
from kernels.indexer.select_topk_many_rows import index_topk_many_rows
from kernels.overlap import pdl_options, sm_count, start_successor, wait_for_predecessor

TILE = 1024  # scores per program and iteration
PROGRAMS = 4  # per SM
COUNTED = tl.constexpr(2)  # digits counted before undecided keys are listed
UNCOUNTED = tl.constexpr((1 << 8 * (SCORE_PASSES - COUNTED.value)) - 1)  # the other digits of a score
FEW_ROWS = 32  # with several programs each
PLANES = COUNTED.value + 1  # of counters per row that launches add to: counts of its digits, and a ticket
LISTED = 1024  # listed keys of all ranks that a program keeps in registers


@triton.jit
def _part(hi, first_ranks, n, part, parts, kvp_rank, RANKS: tl.constexpr, TILE: tl.constexpr):
    """Returns a row's tokens on this rank, the range of a part of them, and the rank's cycle index."""
    length = tl.load(hi + n)
    run = tl.cdiv(tl.cdiv(length, TILE), parts) * TILE
    begin = part * run
    cycle_index = (kvp_rank - tl.load(first_ranks + n) + RANKS).to(tl.int32) % RANKS
    return length, begin, tl.minimum(begin + run, length), cycle_index


@triton.jit
def _tile(scored, begin, end, TILE: tl.constexpr):
    """Loads the scores of a tile; before the wait, if a launch older than the predecessor wrote them."""
    j = begin + tl.arange(0, TILE)
    return tl.load(scored + j, mask=j < end, other=0.0)


@triton.jit(do_not_specialize=["N", "parts", "listed_n", "kvp_rank"])  # change from chunk to chunk
def _count_digits_kernel(
    scored, positions, first_ranks, hi, gathered, counts, min_keys, lefts, listed,
    scored_n, N, topk, parts, listed_n, kvp_rank,
    STAGE: tl.constexpr, PASSES: tl.constexpr, BITS: tl.constexpr, RANKS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr, SEVERAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % parts
    n = (tl.program_id(0) // parts).to(tl.int64)
    scored += n * scored_n
    _, begin, end, cycle_index = _part(hi, first_ranks, n, part, parts, kvp_rank, RANKS, TILE)
    if STAGE == 0 or RANKS == 1:
        wait_for_predecessor(PDL)  # which may have written the scores
    x = _tile(scored, begin, end, TILE)
    wait_for_predecessor(PDL)
    bound, left = find_bound(positions, gathered, min_keys, lefts, n, N, topk, STAGE, PASSES, RANKS)
    if STAGE > 0 and part == 0:
        tl.store(min_keys + STAGE * N + n, bound)
        tl.store(lefts + STAGE * N + n, left.to(tl.int32))
        tl.store(listed + n * listed_n, tl.zeros([], tl.int64))
    if (left > 0) & (begin < end):
        shift: tl.constexpr = 8 * (PASSES - 1 - STAGE)
        found = tl.zeros([256], tl.int32)
        for at in range(begin, end, TILE):
            j = at + tl.arange(0, TILE)
            inside = j < end
            if SEVERAL:
                x = _tile(scored, at, end, TILE)
            keys = keys_of(x, j, cycle_index, RANKS * BLOCK_TOKENS, BLOCK_TOKENS, BITS)
            counted = inside & begin_alike(keys, bound, shift + 8)
            # From the third digit on, hardly any tile has keys that count.
            if tl.max(counted.to(tl.int32), 0) > 0:
                found += tl.histogram(((keys >> shift) & 255).to(tl.int32), 256, mask=counted)
        tl.atomic_add(counts + n * 256 + tl.arange(0, 256), found, mask=found > 0, sem="relaxed")
    start_successor(PDL)


@triton.jit
def _differ(scored, length, bound, SHIFT: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr):
    """Returns whether a row has different scores with the digits of `bound`."""
    least = tl.full([TILE], UNCOUNTED, tl.int32)
    most = tl.zeros([TILE], tl.int32)
    for at in range(0, length, TILE):
        j = at + tl.arange(0, TILE)
        code = score_codes(tl.load(scored + j, mask=j < length, other=0.0))
        among = (j < length) & (code >> (SHIFT - BITS) == (bound >> SHIFT) & 0xFFFF)  # keys may have 64 bits
        rest = (code & UNCOUNTED).to(tl.int32)
        least = tl.minimum(least, tl.where(among, rest, UNCOUNTED))
        most = tl.maximum(most, tl.where(among, rest, 0))
    return tl.min(least, 0) != tl.max(most, 0)


@triton.jit
def _list_topk(
    scored, listed, length, bound, cycle_index, cap,
    SHIFT: tl.constexpr, CYCLE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Lists the `cap` largest of more keys with the digits of `bound`; one program reads the row.

    Only equal scores are that many, mostly all of them: then these are the first in order, and no digit is sought.
    """
    low = bound
    want = cap
    digit = tl.arange(0, 256)
    if _differ(scored, length, bound, SHIFT, BITS, TILE):
        for write_at in range(SHIFT // 8):
            at_bit = SHIFT - 8 - 8 * write_at
            counts = tl.zeros([256], tl.int32)
            for at in range(0, length, TILE):
                j = at + tl.arange(0, TILE)
                inside = j < length
                x = tl.load(scored + j, mask=inside, other=0.0)
                keys = keys_of(x, j, cycle_index, CYCLE, BLOCK_TOKENS, BITS)
                counted = inside & (keys >> (at_bit + 8) == low >> (at_bit + 8))
                counts += tl.histogram(((keys >> at_bit) & 255).to(tl.int32), 256, mask=counted)
            reach = tl.cumsum(counts, 0, reverse=True)
            found = tl.sum((reach >= want).to(tl.int32), 0) - 1
            want -= tl.max(tl.where(digit == found + 1, reach, 0), 0)
            low += found.to(tl.int64) << at_bit
    done = cap * 0
    at = done
    while (at < length) & (done < cap):
        j = at + tl.arange(0, TILE)
        inside = j < length
        x = tl.load(scored + j, mask=inside, other=0.0)
        keys = keys_of(x, j, cycle_index, CYCLE, BLOCK_TOKENS, BITS)
        counts_out = (inside & at_least(keys, low) & (keys >> SHIFT == bound >> SHIFT)).to(tl.int32)
        to = done + tl.cumsum(counts_out, 0)  # after their number
        tl.store(listed + to, keys, mask=(counts_out > 0) & (to <= cap))
        done += tl.sum(counts_out, 0)
        at += TILE
    tl.store(listed, tl.minimum(done, cap).to(tl.int64))


@triton.jit(do_not_specialize=["N", "parts", "cap", "kvp_rank"])
def _list_between_kernel(
    scored, positions, first_ranks, hi, gathered, min_keys, lefts, part_counts, listed, tickets,
    scored_n, N, topk, parts, cap, kvp_rank,
    PASSES: tl.constexpr, BITS: tl.constexpr, RANKS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr, SEVERAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % parts
    n = (tl.program_id(0) // parts).to(tl.int64)
    scored += n * scored_n
    length, begin, end, cycle_index = _part(hi, first_ranks, n, part, parts, kvp_rank, RANKS, TILE)
    x = _tile(scored, begin, end, TILE)
    wait_for_predecessor(PDL)
    bound, left = find_bound(positions, gathered, min_keys, lefts, n, N, topk, COUNTED, PASSES, RANKS)
    if part == 0:
        tl.store(min_keys + COUNTED * N + n, bound)
        tl.store(lefts + COUNTED * N + n, left.to(tl.int32))
    shift: tl.constexpr = 8 * (PASSES - COUNTED)
    listed += n * (1 + cap)
    # Keys from `selected_from` on are selected; those in between are listed.
    selected_from = bound + (tl.where(left > 0, 1, 0).to(tl.int64) << shift)
    count = part * 0
    for at in range(begin, end, TILE):
        j = at + tl.arange(0, TILE)
        inside = j < end
        if SEVERAL:
            x = _tile(scored, at, end, TILE)
        keys = keys_of(x, j, cycle_index, RANKS * BLOCK_TOKENS, BLOCK_TOKENS, BITS)
        selected = at_least(keys, selected_from)
        count += tl.sum((inside & selected).to(tl.int32), 0)
        between = (inside & at_least(keys, bound) & (selected == 0)).to(tl.int32)
        some = tl.sum(between, 0)
        if some > 0:
            first = tl.atomic_add(listed, some.to(tl.int64), sem="relaxed")  # in any order: keys are distinct
            to = first + tl.cumsum(between, 0)
            tl.store(listed + to, keys, mask=(between > 0) & (to <= cap))
    tl.store(part_counts + n * parts + part, count)
    tl.debug_barrier()  # after the stores of all threads
    if tl.atomic_add(tickets + n * 256, 1) == parts - 1:  # the row's last program
        if tl.load(listed, volatile=True) > cap:
            _list_topk(
                scored, listed, length, bound, cycle_index, cap,
                shift, RANKS * BLOCK_TOKENS, BLOCK_TOKENS, BITS, TILE,
            )  # fmt: skip
    start_successor(PDL)


@triton.jit
def _listed_keys(rank_lists, list_lengths, begin, EACH: tl.constexpr):
    """Loads EACH listed keys of each rank from `begin` on, in any order; -1 past the last."""
    i = begin + tl.arange(0, EACH)
    keys = tl.load(rank_lists[:, None] + 1 + i[None, :], mask=i[None, :] < list_lengths[:, None], other=-1)
    return tl.ravel(keys, can_reorder=True)


@triton.jit
def _count_hex_digit(keys, bound, shift):
    """Counts the values of the four bits from `shift` on, over keys that match `bound` above them."""
    counted = keys >> (shift + 4) == bound >> (shift + 4)
    return tl.histogram(((keys >> shift) & 15).to(tl.int32), 16, mask=counted)


@triton.jit
def _search(rank_lists, list_lengths, cap, bound, left, SHIFT: tl.constexpr, EACH: tl.constexpr):
    """Finds the last SHIFT bits of a bound that `left` listed keys of all ranks reach.

    Four bits at a time until the bound is decided, mostly two or three steps. A full list may lack keys of the same
    digits: there the bound is the lowest key, to the last bit.
    """
    max_length = tl.max(list_lengths, 0)
    first = _listed_keys(rank_lists, list_lengths, 0, EACH)
    shift = tl.full([], SHIFT, tl.int32)
    while shift > 0:
        shift -= 4
        counts = _count_hex_digit(first, bound, shift)
        for at in range(EACH, max_length, EACH):
            counts += _count_hex_digit(_listed_keys(rank_lists, list_lengths, at, EACH), bound, shift)
        found, left, all_selected = digit_of(counts, left, 16)
        bound += found << shift
        shift = tl.where(all_selected & (max_length < cap), 0, shift)
    return bound


@triton.jit(do_not_specialize=["N", "parts", "EACH", "width", "kvp_rank"])
def _write_topk_kernel(
    scored, first_ranks, hi, all_listed, min_keys, lefts, part_counts, block_tables, query_rows,
    selected_slots, selected_counts, scored_n, tables_b, width, N, parts, EACH, kvp_rank,
    PASSES: tl.constexpr, BITS: tl.constexpr, RANKS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, SEVERAL: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_RANKS: tl.constexpr,
    LISTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % parts
    n = (tl.program_id(0) // parts).to(tl.int64)
    scored += n * scored_n
    _, begin, end, cycle_index = _part(hi, first_ranks, n, part, parts, kvp_rank, RANKS, TILE)
    row = n // EACH
    if query_rows is not None:
        row = tl.load(query_rows + n)
    x = _tile(scored, begin, end, TILE)
    wait_for_predecessor(PDL)
    bound = tl.load(min_keys + COUNTED * N + n)
    left = tl.load(lefts + COUNTED * N + n)
    q = tl.arange(0, BLOCK_PARTS)
    counts_of_parts = tl.load(part_counts + n * parts + q, mask=q < parts, other=0)
    write_at = tl.sum(tl.where(q < part, counts_of_parts, 0), 0)
    total = tl.sum(counts_of_parts, 0)
    if left > 0:
        stride = 1 + width.to(tl.int64)
        rank = tl.arange(0, BLOCK_RANKS)
        rank_lists = all_listed + (rank * N + n) * stride
        list_lengths = tl.load(rank_lists, mask=rank < RANKS, other=0).to(tl.int32)
        bound = _search(rank_lists, list_lengths, width, bound, left, 8 * (PASSES - COUNTED), LISTED)
        listed = all_listed + (kvp_rank * N + n) * stride
        local_count = tl.load(listed).to(tl.int32)
        for at in range(0, local_count, LISTED):
            i = at + tl.arange(0, LISTED)
            keys = tl.load(listed + 1 + i, mask=i < local_count, other=-1)
            at_token = (1 << BITS) - 1 - (keys & ((1 << BITS) - 1))
            local = at_token // (RANKS * BLOCK_TOKENS) * BLOCK_TOKENS + at_token % BLOCK_TOKENS
            counts_out = (i < local_count) & at_least(keys, bound)
            total += tl.sum(counts_out.to(tl.int32), 0)
            write_at += tl.sum((counts_out & (local < begin)).to(tl.int32), 0)
    if part == 0:
        # Never more, except with emulated ranks, whose counts are not those of their tokens.
        tl.store(selected_counts + n, tl.minimum(total, width))
    pages = block_tables + row * tables_b
    for at in range(begin, end, TILE):
        j = at + tl.arange(0, TILE)
        inside = j < end
        if SEVERAL:
            x = _tile(scored, at, end, TILE)
        keys = keys_of(x, j, cycle_index, RANKS * BLOCK_TOKENS, BLOCK_TOKENS, BITS)
        selected = (inside & at_least(keys, bound)).to(tl.int32)
        page = tl.load(pages + j // PAGE, mask=selected > 0, other=0)
        to = write_at + tl.cumsum(selected, 0) - 1
        tl.store(selected_slots + n * width + to, page * PAGE + j % PAGE, mask=(selected > 0) & (to < width))
        write_at += tl.sum(selected, 0)
    start_successor(PDL)


def index_topk(
    scores: torch.Tensor,
    positions: torch.Tensor,
    starts: torch.Tensor,
    hi: torch.Tensor,
    tables: torch.Tensor,
    rows: torch.Tensor | None,
    topk: int,
    max_length: int,
    shard: Shard,
    digit_counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Selects the `topk` best-scored tokens of a sequence for each query, or all of fewer; ties to the lower position.

    NaN is the highest score, so that it surfaces.

    Args:
        scores: [N, S] fp32, last dim contiguous: this rank's tokens in local order, the first `hi` of a row.
        positions: [N] int64, contiguous: of the queries, which read all tokens up to their own.
        starts: [N] int64, contiguous: kvp ranks of the sequences' first blocks.
        hi: [N] int32, contiguous: tokens of a row on this rank.
        tables: [n, P] int32, rows contiguous: pages of each sequence.
        rows: [N] int64, contiguous: each query's row in `tables`; None: N / n queries each.
        topk: tokens per query, over all ranks.
        max_length: upper bound of positions.
        shard: this rank's part of the tokens; with other ranks, this is a collective.
        digit_counts: [PLANES, N, 256] int32, rows contiguous, overwritten: zeros, but for the first digit's counts,
            which `index_scores` added to the first plane; None if it did not. Ignored for more than FEW_ROWS rows.

    Returns:
        Cache slots [N, min(topk, S)] int32 of the tokens selected on this rank, in local order, and their number [N]
        int32; entries past it are undefined.

    Source:
        DeepSeek-V3.2 (arXiv:2512.02556), section 2.1; radix select.
    """
    if not dispatch.on_gpu(scores):
        return reference(scores, positions, starts, hi, tables, rows, topk, max_length, shard)
    N, S = scores.shape
    assert scores.dtype == torch.float32 and scores.stride(1) == tables.stride(1) == 1 and shard.kvp * max_length > 0
    assert positions.is_contiguous() and starts.is_contiguous() and hi.is_contiguous()
    assert (shard.gather is None) == (shard.kvp == 1) and topk < 1 << 22  # which `digit_of` packs
    device, passes = scores.device, SCORE_PASSES + triton.cdiv(max(max_length, 2).bit_length(), 8)
    width = min(topk, S)
    slots = torch.empty(N, width, dtype=torch.int32, device=device)
    counts_out = torch.empty(N, dtype=torch.int32, device=device)
    if N == 0:
        return slots, counts_out
    if N > FEW_ROWS:
        index_topk_many_rows(scores, positions, starts, hi, tables, rows, topk, passes, shard, slots, counts_out)
        return slots, counts_out
    tiles = triton.cdiv(S, TILE)
    parts = max(1, min(tiles, triton.cdiv(PROGRAMS * sm_count(device), N)))
    counted = 0 if digit_counts is None else 1
    counts = torch.zeros(PLANES, N, DIGITS, dtype=torch.int32, device=device) if digit_counts is None else digit_counts
    assert counts.shape == (PLANES, N, DIGITS) and counts.stride()[1:] == (DIGITS, 1)
    min_keys = torch.empty(passes, N, dtype=torch.int64, device=device)
    lefts = torch.empty(passes, N, dtype=torch.int32, device=device)
    part_counts = torch.empty(N, parts, dtype=torch.int32, device=device)
    listed = torch.empty(N, 1 + width, dtype=torch.int64, device=device)
    common = dict(PASSES=passes, RANKS=shard.kvp, TILE=TILE, num_warps=4, **pdl_options(scores))
    options = dict(BITS=8 * (passes - SCORE_PASSES), BLOCK_TOKENS=shard.append_block, SEVERAL=tiles > parts, **common)
    gathered = counts
    for stage in range(COUNTED.value):
        if stage >= counted:
            _count_digits_kernel[(parts * N,)](
                scores, positions, starts, hi, gathered, counts[stage], min_keys, lefts, listed,
                scores.stride(0), N, topk, parts, 1 + width, shard.kvp_rank, STAGE=stage, **options,
            )  # fmt: skip
        gathered = counts[stage] if shard.gather is None else shard.gather(counts[stage])
    _list_between_kernel[(parts * N,)](
        scores, positions, starts, hi, gathered, min_keys, lefts, part_counts, listed, counts[-1],
        scores.stride(0), N, topk, parts, width, shard.kvp_rank, **options,
    )  # fmt: skip
    ranks = triton.next_power_of_2(shard.kvp)
    _write_topk_kernel[(parts * N,)](
        scores, starts, hi, listed if shard.gather is None else shard.gather(listed), min_keys, lefts, part_counts,
        tables, rows, slots, counts_out,
        scores.stride(0), tables.stride(0), width, N, parts, max(1, N // len(tables)), shard.kvp_rank,
        PAGE=shard.page_size, BLOCK_PARTS=triton.next_power_of_2(parts), BLOCK_RANKS=ranks,
        LISTED=max(16, LISTED // ranks), **options,
    )  # fmt: skip
    return slots, counts_out
