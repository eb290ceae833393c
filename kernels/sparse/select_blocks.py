"""Page selection per query: scores candidate pages, takes the top k, and writes attention's page table.

One launch of a fixed grid. As in split-KV attention, the candidate pages of all (sequence, KV head) items form one line
of tiles, cut into equal runs, one per program, so work follows the live length. A program stores the score of each page
and the best of each tile; the last program to finish an item selects among its pages. With several queries per item,
which select separately, a second launch has one program per query.

If an item has too many pages to compare at once, tiles are selected first by their best page, at least topk of them: no
page outside these tiles can be among the top k. Or, for an approximate top k, each stretch of pages that can be
compared at once contributes its share, so that programs select in parallel.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.attention.split_kv import item_at, schedule
from kernels.overlap import pdl_options, prefetch, sm_count, start_successor, wait_for_predecessor
from kernels.sparse.reference import TILE
from kernels.sparse.reference import select_blocks as reference

LANES = 1024  # min pages among which a program selects at once
MAX_SELECTED = 128  # pages
MAX_PAGES = TILE << 14  # per sequence
PROGRAMS = 2  # per SM
STAGES = 3  # tiles of bounds in flight, plus one

_NONE = tl.constexpr(-(2**31))
_HIGHEST = tl.constexpr(2**31 - 1)


@triton.jit
def _ordered(x):
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), _HIGHEST)


@triton.jit
def _largest(keys, count, k, low):
    """Finds the k largest of the `count` keys above _NONE; ties go to the first.

    `low` is a key that at least k of them reach, or _NONE. Returns whether each key is one of the k, its index among
    them, and a key that exactly k reach, or the k-th largest. The search splits the range from `low` to the largest
    into quarters.
    """
    biased = keys.to(tl.uint32, bitcast=True) ^ 0x80000000  # unsigned; _NONE is 0
    high = tl.max(biased, 0)
    min_key = tl.min(tl.where(biased > 0, biased, high), 0)
    mark = tl.where(count > k, tl.maximum(min_key, low.to(tl.uint32, bitcast=True) ^ 0x80000000), 0)
    searching = count > k
    while searching:  # at least k reach `mark`, and fewer than k exceed `high`
        width = high - mark
        step = (width >> 2) + 1
        one = mark + tl.minimum(step, width)
        two = mark + tl.minimum(2 * step, width)
        three = mark + tl.minimum(3 * step, width)
        reach = (biased >= mark).to(tl.int64) + ((biased >= one).to(tl.int64) << 16)
        reach += ((biased >= two).to(tl.int64) << 32) + ((biased >= three).to(tl.int64) << 48)
        reach = tl.sum(reach, 0)
        reach_one, reach_two, reach_three = (reach >> 16) & 0xFFFF, (reach >> 32) & 0xFFFF, reach >> 48
        reached = tl.where(
            reach_three >= k,
            reach_three,
            tl.where(reach_two >= k, reach_two, tl.where(reach_one >= k, reach_one, reach & 0xFFFF)),
        )
        high = tl.where(reach_three >= k, high, tl.where(reach_two >= k, three, tl.where(reach_one >= k, two, one)) - 1)
        mark = tl.where(reach_three >= k, three, tl.where(reach_two >= k, two, tl.where(reach_one >= k, one, mark)))
        searching = (reached > k) & (mark < high)
    above = biased > mark
    equal = (biased == mark) & (biased > 0)
    # One scan counts both: keys above the mark in the low bits, keys at it in the high ones.
    ones = above.to(tl.int32)
    until = tl.cumsum(ones + (equal.to(tl.int32) << 16), 0)
    free = k - tl.sum(ones, 0)
    equals = until >> 16
    index = (until & 0xFFFF) + tl.minimum(equals, free) - 1
    return above | (equal & (equals <= free)), index, (mark ^ 0x80000000).to(tl.int32, bitcast=True)


@triton.jit
def _entry(pages, i, inside, PARTS: tl.constexpr):
    """Returns entries i of a row of pages, or of their subblocks, which are numbered page by page."""
    if PARTS == 1:
        entry = tl.load(pages + i, mask=inside, other=0)
    else:
        entry = tl.load(pages + i // PARTS, mask=inside, other=0) * PARTS + i % PARTS
    return entry


@triton.jit
def _write_fixed_pages(pages, to, begin, end, num_pages, k, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    count = begin + num_pages - end
    lane = tl.arange(0, BLOCK)
    for at in range(0, count, BLOCK):
        i = at + lane
        behind = i >= begin
        page = _entry(pages, i + tl.where(behind, end - begin, 0), i < count, PARTS)
        tl.store(to + i + tl.where(behind, tl.minimum(k, end - begin), 0), page, mask=i < count)


@triton.jit
def _select_pages(
    scores, best, list_, pages, to, report, begin, end, k,
    LANES: tl.constexpr, BLOCK_G: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, REPORT: tl.constexpr,
):  # fmt: skip
    SEATS: tl.constexpr = LANES // TILE
    lane = tl.arange(0, LANES)
    page = begin + lane
    low = tl.full([], _NONE, tl.int32)
    if end - begin > LANES:
        tiles = tl.cdiv(end, TILE) - begin // TILE
        g = tl.arange(0, BLOCK_G)
        keys = tl.load(best + begin // TILE + g, mask=g < tiles, other=_NONE, cache_modifier=".cg")
        is_selected, index, low = _largest(keys, tiles, SEATS, low)
        tl.store(list_ + index, begin // TILE + g, mask=is_selected)
        tl.debug_barrier()
        page = tl.load(list_ + lane // TILE) * TILE + lane % TILE
    inside = (page >= begin) & (page < end)
    keys = tl.load(scores + page, mask=inside, other=_NONE, cache_modifier=".cg")
    entries = _entry(pages, page, inside, PARTS)
    is_selected, index, low = _largest(keys, end - begin, k, low)
    tl.store(to + begin + index, entries, mask=is_selected)
    if REPORT:
        i = tl.arange(0, LANES)
        tl.store(report + 2 * i, i * 0 + _NONE, mask=(i >= end - begin) & (i < k))
        tl.store(report + 2 * index, keys, mask=is_selected)
        tl.store(report + 2 * index + 1, page, mask=is_selected)


@triton.jit
def _stretch(tile, first, last, k, LANES: tl.constexpr, TILE: tl.constexpr):
    """Finds the stretch of pages first..last-1 that contains a tile (tiles count from the first page's).

    Stretches are equal, except the last, and have at most LANES pages. Returns the stretch's index, its end in tiles,
    its pages (begin, end), how many of the k come from earlier stretches, and how many from this one: shares
    proportional to pages, which add up to k.
    """
    tiles = tl.maximum(tl.cdiv(last, TILE) - first // TILE, 1)
    each = tl.cdiv(tiles, tl.cdiv(tiles, LANES // TILE))
    number = tile // each
    until = tl.minimum((number + 1) * each, tiles)
    begin = tl.maximum((first // TILE + number * each) * TILE, first)
    end = tl.minimum((first // TILE + until) * TILE, last)
    pages = tl.maximum(last - first, 1)
    k = tl.minimum(k, last - first)
    before = (begin - first) * k // pages
    return number, until, begin, end, before, (end - first) * k // pages - before


@triton.jit
def _score_tiles(
    positive_query, negative_query, block_bounds, pages, firsts, lasts, scores, best, first, last, start, stop,
    page_stride, part_stride, kind_stride, score_row, best_row,
    T: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Scores the pages of tiles first..last-1 for an item's queries; stores them and the best of each tile."""
    lane = tl.arange(0, TILE)
    d = tl.arange(0, positive_query.shape[1])
    t = tl.arange(0, positive_query.shape[0]) // GROUP
    # Load one iteration ahead, like attention's tables.
    ahead = first * TILE + lane
    next_page = tl.load(pages + ahead // PARTS, mask=(first < last) & (ahead >= start) & (ahead < stop), other=0)
    for tile in range(first, last):
        page = next_page.to(tl.int64)
        ahead = (tile + 1) * TILE + lane
        next_page = tl.load(pages + ahead // PARTS, mask=(tile + 1 < last) & (ahead < stop), other=0)
        j = tile * TILE + lane
        live = (j >= start) & (j < stop)
        where = (page * page_stride + j % PARTS * part_stride)[:, None] + d[None, :]
        mask = live[:, None] & (d < D)[None, :]
        one = tl.load(block_bounds + where, mask=mask, other=0.0)
        found = tl.dot(positive_query, tl.trans(one), input_precision="ieee")
        two = tl.load(block_bounds + where + kind_stride, mask=mask, other=0.0)
        found = tl.dot(negative_query, tl.trans(two), found, input_precision="ieee")
        keys = _ordered(found)  # [BLOCK_M, TILE]
        for query_t in tl.static_range(T):
            top = tl.max(tl.where((t == query_t)[:, None], keys, _NONE), 0)
            if T == 1:
                in_range = live
            else:
                in_range = (j >= tl.load(firsts + query_t)) & (j < tl.load(lasts + query_t))
            top = tl.where(in_range, top, _NONE)
            tl.store(scores + query_t * score_row + j, top, mask=in_range)
            tl.store(best + query_t * best_row + tile, tl.max(top, 0))


@triton.jit
def _prefetch_tile(block_bounds, pages, first, start, stop, page_stride, D: tl.constexpr, TILE: tl.constexpr):
    """Prefetches the bounds of a tile of pages into L2; safe while the predecessor still writes some of them."""
    LINE: tl.constexpr = 128 // (block_bounds.dtype.element_ty.primitive_bitwidth // 8)
    j = first * TILE + tl.arange(0, TILE)
    page = tl.load(pages + tl.minimum(tl.maximum(j, start), stop - 1)).to(tl.int64)
    column = tl.minimum(tl.arange(0, triton.next_power_of_2((2 * D + LINE - 1) // LINE)) * LINE, 2 * D - 1)
    prefetch(block_bounds + (page * page_stride)[:, None] + column[None, :])


@triton.jit
def _select_blocks_kernel(
    q, block_bounds, block_table, firsts, lasts, num_pages, scores, tile_best, lists, arrived, table, report,
    page_counts,
    q_n, q_h, page_stride, head_stride, part_stride, kind_stride, table_b, table_h, score_row, best_row, B, topk, width,
    T: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr,
    TILE: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr, PARTS: tl.constexpr, STRETCHES: tl.constexpr, REPORT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    starts, stops, tiles, ends, run = schedule(
        firsts, lasts, T, 1, T, 1, B, T, HEADS, tl.num_programs(0), BLOCK_B, TILE
    )  # fmt: skip
    begin = tl.program_id(0) * run
    all_tiles = tl.max(ends, 0)
    end = tl.minimum(begin + run, all_tiles)
    at = begin
    i, head, item_begin, item_end, start, stop = item_at(
        tl.minimum(at, all_tiles - 1), starts, stops, tiles, ends, HEADS, BLOCK_B
    )
    if PDL and PARTS == 1:  # a table of candidates comes from the predecessor
        if (begin < end) & (start < stop):
            pages = block_table + i.to(tl.int64) * table_b
            from_tile = start // TILE + begin - item_begin
            # A tile's entries fill a cache line: the loop, which loads one tile ahead, would wait for each.
            ahead = from_tile + tl.minimum(tl.arange(0, 64), end - begin - 1)
            prefetch(pages + tl.minimum(ahead * TILE, stop - 1))
            _prefetch_tile(block_bounds + head * head_stride, pages, from_tile, start, stop, page_stride, D, TILE)
    if head >= 0:  # always true; keeps the wait after the schedule
        wait_for_predecessor(PDL)
    start_successor(PDL)
    d = tl.arange(0, BLOCK_D)
    m = tl.arange(0, BLOCK_M)
    while at < end:
        b = i.to(tl.int64)
        row = (b * HEADS + head) * T  # of scores; an item's queries are consecutive
        t = m // GROUP
        inside = (t < T)[:, None] & (d < D)[None, :]
        at_q = (b * T + t)[:, None] * q_n + (head * GROUP + m % GROUP)[:, None] * q_h + d[None, :]
        query = tl.load(q + at_q, mask=inside, other=0.0)
        positive_query = tl.maximum(query, 0.0).to(query.dtype)
        negative_query = tl.minimum(query, 0.0).to(query.dtype)
        pages = block_table + b * table_b + head * table_h
        stretch_end = item_end
        if STRETCHES > 1 and T == 1:
            number, until, stretch_start, stretch_stop, before_it, share = _stretch(
                at - item_begin, start, stop, topk, LANES, TILE
            )  # fmt: skip
            stretch_end = item_begin + until
        done = tl.minimum(end, stretch_end) - at
        from_tile = start // TILE + at - item_begin
        if LANES > 0:
            _score_tiles(
                positive_query, negative_query, block_bounds + head * head_stride, pages, firsts + b * T, lasts + b * T,
                scores + row * score_row, tile_best + row * best_row, from_tile, from_tile + done, start, stop,
                page_stride, part_stride, kind_stride, score_row, best_row, T, GROUP, D, TILE, PARTS,
            )  # fmt: skip
        if at == item_begin:
            for query_t in range(T):
                n = b * T + query_t
                first, last, whole = tl.load(firsts + n), tl.load(lasts + n), tl.load(num_pages + n)
                _write_fixed_pages(pages, table + (n * HEADS + head) * width, first, last, whole, topk, PARTS, 128)
                reads = whole - tl.maximum(last - first - topk, 0)
                tl.atomic_add(page_counts, reads.to(tl.int64), sem="relaxed")
                tl.atomic_add(page_counts + 1, reads.to(tl.int64) * 0 + 1, sem="relaxed")
        if LANES > 0 and T == 1:
            tl.debug_barrier()  # the whole program has written its scores
            if STRETCHES > 1:
                counter = arrived + (b * HEADS + head) * STRETCHES + number
                before = tl.atomic_add(counter, done, sem="acq_rel")
                if before + done == until - (stretch_start // TILE - start // TILE):
                    tl.store(counter, 0)
                    _select_pages(
                        scores + row * score_row, tile_best, lists, pages,
                        table + row * width + start + before_it - stretch_start, report, stretch_start, stretch_stop,
                        share, LANES, BLOCK_G, TILE, PARTS, REPORT,
                    )  # fmt: skip
            else:
                before = tl.atomic_add(arrived + b * HEADS + head, done, sem="acq_rel")
                if before + done == item_end - item_begin:
                    tl.store(arrived + b * HEADS + head, 0)
                    _select_pages(
                        scores + row * score_row, tile_best + row * best_row, lists + row * (LANES // TILE), pages,
                        table + row * width, report + row * topk * 2, start, stop, topk, LANES, BLOCK_G, TILE, PARTS,
                        REPORT,
                    )  # fmt: skip
        at = tl.minimum(end, stretch_end)
        if (at < end) & (at == item_end):
            i, head, item_begin, item_end, start, stop = item_at(at, starts, stops, tiles, ends, HEADS, BLOCK_B)


@triton.jit
def _select_pages_kernel(
    scores, tile_best, lists, block_table, firsts, lasts, table, report, table_b, score_row, best_row, topk, width,
    T: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr, BLOCK_G: tl.constexpr, TILE: tl.constexpr,
    STRETCHES: tl.constexpr, REPORT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b = n // T
    row = (b * HEADS + head) * T + n % T
    begin, end = tl.load(firsts + n), tl.load(lasts + n)
    wait_for_predecessor(PDL)
    start_successor(PDL)
    to = table + (n * HEADS + head) * width
    if STRETCHES > 1:
        tiles = tl.maximum(tl.cdiv(end, TILE) - begin // TILE, 1)
        each = tl.cdiv(tiles, tl.cdiv(tiles, LANES // TILE))
        _, until, first, last, before, share = _stretch(tl.program_id(2) * each, begin, end, topk, LANES, TILE)
        if tl.program_id(2) * each < until:
            _select_pages(
                scores + row * score_row, tile_best, lists, block_table + b * table_b, to + begin + before - first,
                report, first, last, share, LANES, BLOCK_G, TILE, 1, REPORT,
            )  # fmt: skip
    else:
        _select_pages(
            scores + row * score_row, tile_best + row * best_row, lists + row * (LANES // TILE),
            block_table + b * table_b, to, report + (n * HEADS + head) * topk * 2, begin, end, topk,
            LANES, BLOCK_G, TILE, 1, REPORT,
        )  # fmt: skip


@cache
def _arrivals(device: torch.device, lane: int, items: int) -> torch.Tensor:
    """Allocates counters of scored tiles per item, 0 between launches."""
    return torch.zeros(items, dtype=torch.int32, device=device)


@cache
def _workspace(
    device: torch.device, lane: int, rows: int, pages: int, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocates scores, best per tile, and lists of tiles; cached, shared by all launches of a lane."""
    scores, best, lists = (
        torch.empty(rows, n, dtype=torch.int32, device=device) for n in (pages, triton.cdiv(pages, TILE), k)
    )
    return scores, best, lists


def select_blocks(
    q: torch.Tensor,
    bounds: torch.Tensor,
    block_table: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    pages: torch.Tensor,
    topk: int,
    width: int,
    page_counts: torch.Tensor,
    *,
    candidates: torch.Tensor | None = None,
    max_pages: int | None = None,
    stretches: bool = False,
    sms: int | None = None,
    lane: int = 0,
) -> torch.Tensor:
    """Selects the pages that queries read per KV head: all outside `[first, last)`, and the best `topk` inside.

    A page's score is the maximum over a KV head's query heads. Ties go to the earlier page; NaN is the highest score,
    so that it surfaces. Pages ascend. No shape depends on device data. Deterministic. Launches of one lane share a
    workspace and must not run concurrently.

    Args:
        q: [N, Hq, D] bf16, fp16 or fp32, N / B queries per sequence; last dim contiguous.
        bounds: [pages, Hkv, 2, D] in q's dtype, from `kernels.sparse.block_bounds`; last dim contiguous. With
            subblocks, [pages, Hkv, parts, 2, D], "page" means subblock everywhere here: subblock j of a row is subblock
            `j % parts` of the page in column `j // parts`, and `page * parts + j % parts` in the result.
        block_table: [B, max_pages] int32, rows contiguous. With subblocks [N, Hkv, max_pages]: pages per query and KV
            head, which may be younger than `first`, `last` and `pages`.
        first, last, pages: int32 [N], contiguous: of `pages` pages, those before `first` and from `last` on are always
            read.
        topk: at most MAX_SELECTED, with `stretches` LANES.
        width: columns of the result, at least the pages that any query reads.
        page_counts: [2] int64, incremented by the pages in all tables and by the number of tables.
        candidates: [N, Hkv, topk, 2] int32, contiguous, written if given, not with subblocks: score (as an integer of
            the same order) and block table column of each selected page; unused entries have the lowest int32 as score.
        max_pages: max pages between `first` and `last`; None: a whole row.
        stretches: cut more than LANES pages into equal stretches, and take a share of `topk` from each (approximate).
        sms: number of SMs to fill; default all.
        lane: distinct for launches that may run concurrently on one device.

    Returns:
        [N, Hkv, width] int32: block table entries; columns past a query's pages are undefined.

    Source:
        Gather-decode (BRL-2026-07), sections 3.2 and 8.1; Quest (arXiv:2406.10774).
    """
    if not dispatch.on_gpu(q):
        return reference(
            q, bounds, block_table, first, last, pages, topk, width, page_counts, candidates=candidates,
            stretch=LANES if stretches else None,
        )  # fmt: skip
    N, Hq, D = q.shape
    parts = bounds.shape[2] if bounds.dim() == 5 else 1
    page_stride, head_stride, *part_stride, kind_stride, last_stride = bounds.stride()
    heads, B = bounds.shape[1], len(block_table)
    columns = block_table.shape[-1] * parts
    max_pages = min(max_pages or columns, columns)
    T, group = N // B, Hq // heads
    assert bounds.dtype == q.dtype and q.stride(2) == last_stride == block_table.stride(-1) == 1
    assert parts == 1 or (T == 1 and candidates is None and block_table.dim() == 3)
    assert topk <= (LANES if stretches else MAX_SELECTED) and max_pages <= MAX_PAGES
    assert not stretches or candidates is None
    assert all(t.is_contiguous() and t.dtype == torch.int32 for t in (first, last, pages))
    table = torch.empty(N, heads, width, dtype=torch.int32, device=q.device)
    lanes = max(LANES, triton.next_power_of_2(topk) * TILE) if topk else 0
    lanes = LANES if stretches else min(lanes, max(LANES, triton.next_power_of_2(max_pages)))
    scores, best, lists = _workspace(q.device, lane, N * heads, columns, lanes // TILE)
    several = triton.cdiv(columns, lanes // 2) if stretches else 1  # all but the last have at least half as many pages
    arrived = _arrivals(q.device, lane, B * heads * several)
    report = table if candidates is None else candidates
    item = dict(
        T=T, HEADS=heads, LANES=lanes, TILE=TILE, BLOCK_G=triton.next_power_of_2(best.shape[1]), STRETCHES=several,
        REPORT=candidates is not None, num_warps=4, **pdl_options(q),
    )  # fmt: skip
    table_strides = block_table.stride(0), block_table.stride(1) if parts > 1 else 0
    _select_blocks_kernel[(PROGRAMS * (sms or sm_count(q.device)),)](
        q, bounds, block_table, first, last, pages, scores, best, lists, arrived, table, report, page_counts,
        *q.stride()[:2], page_stride, head_stride, *(part_stride or [0]), kind_stride, *table_strides, scores.stride(0),
        best.stride(0), B, topk, width, PARTS=parts, GROUP=group, D=D, BLOCK_B=triton.next_power_of_2(B),
        BLOCK_M=max(16, triton.next_power_of_2(T * group)), BLOCK_D=max(16, triton.next_power_of_2(D)),
        num_stages=STAGES, **item,
    )  # fmt: skip
    if topk and T > 1:
        _select_pages_kernel[(N, heads, several)](
            scores, best, lists, block_table, first, last, table, report, block_table.stride(0), scores.stride(0),
            best.stride(0), topk, width, **item,
        )  # fmt: skip
    return table
