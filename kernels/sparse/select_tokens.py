"""Selection of the keys that sparse drafts attend: top k per sequence, layer and KV head, by scores of verification.

A radix select over 16-bit scores. Each launch reads the scores of all rows (layer, sequence, KV head), each row cut
into equal parts, one per program. The first launch guesses that the k-th largest is near the last call's: it counts
each of the 256 values around it, and all above. The next three skip rows where the guess was right; they count keys by
their highest four bits, then by the next four bits within the k-th largest's digit, then by the low byte. Now the k-th
largest is known, and how many keys of each part reach it: the last launch writes every part's keys at their indices.
Scores are read from HBM once and then, if all rows fit, from L2. Joint selection over several ranks does not guess.

Counting by four bits needs no atomics or votes (`tl.histogram` takes eight votes per key for 256 bins): an int64 holds
sixteen counters of eight keys. A launch is dominated by the wait for a tile's pages and scores, so tiles are large: a
thread loads several cache lines at once.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.overlap import pdl_options, sm_count, start_successor, store_in_place, wait_for_predecessor
from kernels.sparse.reference import FORCED, MAX_REACH, NO_NUMBER, SelectionGroup
from kernels.sparse.reference import select_tokens as reference

TILE = 4096  # keys per program and iteration; half in the launch that writes
PROGRAMS = 8  # min per SM
MIN_PARTS = 8  # min per row: sequences differ in length
MAX_TILES = 7  # per part: each adds up to 32 to an 8-bit counter
STAGES = 4

_FORCED, _NO_NUMBER = tl.constexpr(FORCED), tl.constexpr(NO_NUMBER)
_EVEN = tl.constexpr(0x0F0F0F0F0F0F0F0F)  # every other counter
# Offsets of the counts of the second digit and of low bytes, in a row's and its parts' counts (the first digit is at
# 0), then of the last launch's data from a row's first two digits. A part's low-byte counts become cumulative.
_SECOND, _LOW, _FOUND, _SIZE = tl.constexpr(16), tl.constexpr(32), tl.constexpr(288), tl.constexpr(320)
# Row counts of the guess: per value, keys above, keys that reach them. 0 between calls.
_GUESSED, _ABOVE, _ROW = tl.constexpr(320), tl.constexpr(576), tl.constexpr(640)


@triton.jit
def _ordered(x):
    """Maps fp16 to a 16-bit number of the same order, in int32; NaN is the highest."""
    bits = x.to(tl.int16, bitcast=True).to(tl.int32)
    return tl.where(x == x, bits ^ ((bits >> 31) | 0x8000), _NO_NUMBER)


@triton.jit
def _scores(at, mask, plane_stride, head_stride, PLANES: tl.constexpr, ADDED_HEADS: tl.constexpr):
    if PLANES * ADDED_HEADS == 1:
        return _ordered(tl.load(at, mask=mask, other=0.0))
    else:
        total = tl.zeros(at.shape, tl.float32)
        for i in tl.static_range(PLANES * ADDED_HEADS):
            one = at + i // ADDED_HEADS * plane_stride + i % ADDED_HEADS * head_stride
            total += tl.load(one, mask=mask, other=0.0).to(tl.float32)
        return _ordered(total.to(tl.float16))


@triton.jit
def _read_tile(
    scores, pages, begin, n, sinks, windows, fresh, plane_stride, page_stride, head_stride,
    PLANES: tl.constexpr, ADDED_HEADS: tl.constexpr, PAGE: tl.constexpr, REACH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Loads the scores of local keys from `begin` on, [pages, keys per page]; 0, below any score, from n on."""
    SPAN: tl.constexpr = PAGE if PAGE < TILE else TILE  # keys per page
    s = tl.arange(0, SPAN)
    piece = begin + tl.arange(0, TILE // SPAN) * SPAN
    # Whole pages, for 16-byte loads. Memory after key n exists, but may hold anything.
    live = (piece < n) & (fresh == 0)
    page = tl.load(pages + piece // PAGE, mask=live, other=0).to(tl.int64) * page_stride
    offset = (piece % PAGE)[:, None] + s[None, :]
    mask = live[:, None] & (s >= 0)[None, :]
    x = _scores(scores + page[:, None] + offset, mask, plane_stride, head_stride, PLANES, ADDED_HEADS)
    j = piece[:, None] + s[None, :]
    if REACH > 0:
        # The REACH + 1 keys up to j: the beginning of j's group (x), the end of the group REACH before (y), and all
        # groups between. A group is within a thread, so no scan is needed.
        GROUP: tl.constexpr = REACH if REACH < 8 else 8
        i = tl.arange(0, GROUP)
        x = tl.reshape(x, [TILE // GROUP, GROUP])
        best = x * 0
        for back in tl.static_range(GROUP, REACH + 1, GROUP):
            live = (piece >= back) & (piece - back < n) & (fresh == 0)
            before = tl.load(pages + (piece - back) // PAGE, mask=live, other=0).to(tl.int64) * page_stride
            same = offset >= back
            start = tl.where(same, page[:, None], before[:, None])
            start += tl.where(same, offset - back, ((piece + PAGE - back % PAGE) % PAGE)[:, None] + s[None, :])
            inside = (mask | live[:, None]) & (j >= back)
            y = _scores(scores + start, inside, plane_stride, head_stride, PLANES, ADDED_HEADS)
            y = tl.reshape(tl.where(j >= back, y, 0), [TILE // GROUP, GROUP])
            if back < REACH:
                best = tl.maximum(best, tl.max(y, 1)[:, None])
            else:
                best = tl.maximum(best, y)
                for at in tl.static_range(GROUP):
                    max_x = tl.max(tl.where((i == at)[None, :], x, 0), 1)
                    max_y = tl.max(tl.where((i == at)[None, :], y, 0), 1)
                    best = tl.maximum(best, tl.where((i >= at)[None, :], max_x[:, None], max_y[:, None]))
        x = tl.reshape(best, [TILE // SPAN, SPAN])
    if (begin < sinks) | (begin + TILE > n - windows) | (fresh > 0):  # almost never
        x = tl.where((j < sinks) | (j >= n - windows), _FORCED, tl.where(fresh > 0, 1, x))
        x = tl.where(j < n, x, 0)
    return x


@triton.jit
def _slots(blocks, begin, n, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Looks up cache slots of the local keys from `begin` on: [TILE // 8, 8], in the layout of their scores."""
    key = begin + 8 * tl.arange(0, TILE // 8)[:, None]
    if PAGE >= 8:
        page = tl.load(blocks + key // PAGE, mask=key < n, other=0)
        return page * PAGE + key % PAGE + tl.arange(0, 8)[None, :]
    else:
        key += tl.arange(0, 8)[None, :]
        return tl.load(blocks + key // PAGE, mask=key < n, other=0) * PAGE + key % PAGE


@triton.jit
def _ranks(ones):
    """Inclusive prefix sum of ones [TILE // 8, 8], and their total: first within a thread, then over threads."""
    eights = tl.sum(ones, 1)
    return (tl.cumsum(eights, 0) - eights)[:, None] + tl.cumsum(ones, 1), tl.sum(eights, 0)


@triton.jit
def _find(counts, k):
    """Finds the largest digit that k keys reach; also how many of the k, and of all keys, have it."""
    reach = tl.cumsum(counts, 0, reverse=True)
    found = tl.sum((reach >= k).to(tl.int32), 0) - 1
    above = tl.max(tl.where(reach < k, reach, 0), 0)
    return found, k - above, tl.min(tl.where(reach >= k, reach, 0x7FFFFFFF), 0) - above


@triton.jit
def _eights(x, counted, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """Counts each of sixteen digits in groups of eight keys, where `counted`, in four bits each: [TILE // 8] int64."""
    counter = (x >> (SHIFT - 2)) & 60  # four times the digit
    return tl.sum(tl.reshape(counted.to(tl.int64) << counter.to(tl.int64), [TILE // 8, 8], can_reorder=True), 1)


@triton.jit
def _fours(eights, TILE: tl.constexpr):
    """Sums 8-bit counters [TILE // 8] by fours -> [TILE // 32]."""
    return tl.sum(tl.reshape(eights, [TILE // 32, 4], can_reorder=True), 1)


@triton.jit
def _counts_of(even, odd):
    digit = tl.arange(0, 16)
    both = tl.where((digit % 2 == 0)[None, :], even[:, None], odd[:, None])
    return tl.sum(((both >> (digit // 2 * 8).to(tl.int64)[None, :]) & 0xFF).to(tl.int32), 0)


@triton.jit
def _write_tail(blocks, table, n, columns, tail, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the slots of keys n to n + tail - 1; 0 beyond the block table."""
    for begin in range(0, tail, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        column = (n + i) // PAGE
        page = tl.load(blocks + column, mask=(i < tail) & (column < columns), other=0)
        tl.store(table + i, tl.where(column < columns, page * PAGE + (n + i) % PAGE, 0), mask=i < tail)


@triton.jit
def _select_tokens_kernel(
    key_scores, score_tables, block_tables, num_keys, counts, sink_keys, window_keys, fresh, table,
    row_counts, part_counts, all_counts, equals_before, joint_counts, overflow, layer_stride, plane_stride, page_stride,
    head_stride, score_tables_b, block_tables_b, table_layer, B, columns, width, tail, parts,
    STAGE: tl.constexpr, GUESS: tl.constexpr, PLANES: tl.constexpr, HEADS: tl.constexpr, ADDED_HEADS: tl.constexpr,
    PAGE: tl.constexpr, REACH: tl.constexpr, TILE: tl.constexpr, BLOCK_PARTS: tl.constexpr, JOINT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % parts  # one axis: a large batch has more rows than axis 1 allows
    row = (tl.program_id(0) // parts).to(tl.int64)
    if STAGE % 2 == 1:  # what was read last is still in L2
        row = tl.num_programs(0) // parts - 1 - row
    b = row // HEADS % B
    if STAGE == 0 or GUESS:
        wait_for_predecessor(PDL)
    n, k, room = tl.load(num_keys + b), tl.load(joint_counts + b), tl.load(counts + b)
    sinks, windows, is_fresh = tl.load(sink_keys + b), tl.load(window_keys + b), tl.load(fresh + b).to(tl.int32)
    run = tl.cdiv(tl.cdiv(n, TILE), parts) * TILE
    begin = part * run
    end = tl.minimum(begin + run, n)
    if STAGE > 0 and not GUESS:  # everything above is older than the first launch
        wait_for_predecessor(PDL)
    if (begin >= end) & (part > 0):
        return
    key_scores += row // HEADS // B * layer_stride + row % HEADS * head_stride
    pages = score_tables + b * score_tables_b
    blocks = block_tables + b * block_tables_b
    table += row // HEADS // B * table_layer + row % (HEADS * B) * width
    row_counts += row * _ROW
    all_counts += row * _ROW  # over all ranks of a joint selection
    part_counts += (row * parts + part) * _SIZE
    d = tl.arange(0, 16)
    v = tl.arange(0, 256)

    guessed = tl.minimum(tl.maximum(tl.load(row_counts + _FOUND + 2) - 128, 0), 0xFF00)
    if STAGE < 3 and not GUESS and not JOINT:
        above = tl.load(row_counts + _ABOVE)
        if (above < k) & (k <= tl.load(row_counts + _ABOVE + 1)):  # the guess was right
            if STAGE == 0:
                if part == 0:
                    tl.store(row_counts + _LOW + v, tl.load(row_counts + _GUESSED + v))
                    tl.store(row_counts + _FOUND, guessed)
                    tl.store(row_counts + _FOUND + 1, k - above)
            return
    if STAGE == 0:
        if part == 0:  # counts of the previous call, no longer read
            tl.store(row_counts + _SECOND + d, d * 0)
            tl.store(row_counts + _LOW + v, v * 0)
    if STAGE == 1 or (STAGE == 2 and not GUESS):
        first, left, _ = _find(tl.load(all_counts + d), k)
    if STAGE <= 1:
        even = tl.zeros([TILE // 32], tl.int64)
        odd = tl.zeros([TILE // 32], tl.int64)
    elif STAGE == 2:
        if GUESS:
            base = guessed
        else:
            second, left, _ = _find(tl.load(all_counts + _SECOND + d), left)
            base = (first * 16 + second) * 256
            if part == 0:
                tl.store(row_counts + _FOUND, base)
                tl.store(row_counts + _FOUND + 1, left)
        higher = tl.zeros([TILE // 32], tl.int32)
        tl.store(part_counts + _LOW + v, v * 0)
        tl.debug_barrier()
    else:
        if part == 0:
            tl.store(row_counts + d, d * 0)
            tl.store(row_counts + _GUESSED + v, v * 0)
            tl.store(row_counts + _ABOVE + tl.arange(0, 2), tl.zeros([2], tl.int32))
            _write_tail(blocks, table + room, n, columns, tail, PAGE, 64)
        low, left, equals = _find(tl.load(all_counts + _LOW + v), tl.load(row_counts + _FOUND + 1))
        threshold = tl.load(row_counts + _FOUND) + low
        if part == 0:
            tl.store(row_counts + _FOUND + 2, threshold)
        if JOINT:  # ties go to the first rank
            equals = tl.load(row_counts + _LOW + low)
            left = tl.minimum(tl.maximum(left - tl.load(equals_before + row * 256 + low), 0), equals)
        skipped = equals - left  # ties: skip the earlier keys
        q = tl.arange(0, BLOCK_PARTS)
        reached = part_counts + (q - part) * _SIZE + _LOW + low
        beyond = tl.load(reached + 1, mask=q < part, other=0)
        equal = tl.load(reached, mask=q < part, other=0) - beyond
        local_equal = tl.load(part_counts + _LOW + low) - tl.load(part_counts + _LOW + low + 1)
        both = tl.sum((equal.to(tl.int64) << 32) + beyond, 0)
        equal, beyond = (both >> 32).to(tl.int32), both.to(tl.int32)
        # Earlier parts have `equal` keys at the threshold, and `index` selected keys.
        index = beyond + tl.maximum(equal - skipped, 0)
        bound = threshold - (equal >= skipped).to(tl.int32)  # select keys above
        is_cut = (equal < skipped) & (
            equal + local_equal > skipped
        )  # select only some of this part's ties, the later ones
        if JOINT and part == 0:
            counts_of_parts = part_counts + q * _SIZE + _LOW + low + 1
            local_count = left + tl.sum(tl.load(counts_of_parts, mask=q * run < n, other=0), 0)
            for at in range(0, room, 128):
                i = at + tl.arange(0, 128)
                tl.store(table + i, i * 0 - 1, mask=(i >= local_count) & (i < room))
            tl.atomic_add(overflow, tl.maximum(local_count - room, 0).to(tl.int64), sem="relaxed")

    STEP: tl.constexpr = TILE // 2 if STAGE == 3 else TILE
    for at in range(begin, end, STEP):
        if STAGE == 3:
            slot = _slots(blocks, at, n, PAGE, STEP)
        x = _read_tile(
            key_scores, pages, at, n, sinks, windows, is_fresh, plane_stride, page_stride, head_stride,
            PLANES, ADDED_HEADS, PAGE, REACH, STEP,
        )  # fmt: skip
        if STAGE == 0:
            eights = _eights(x, x == x, 12, TILE)
        elif STAGE == 1:
            eights = _eights(x, x >> 12 == first, 8, TILE)
        elif STAGE == 2:  # usually few keys, and no other program adds here
            code = tl.ravel(x, can_reorder=True) - base
            inside = (code >= 0) & (code < 256)
            tl.atomic_add(part_counts + _LOW + code, code * 0 + 1, mask=inside, sem="relaxed")
            higher += tl.sum(tl.reshape((code > 255).to(tl.int32), [TILE // 32, 32], can_reorder=True), 1)
        else:
            x = tl.reshape(x, [STEP // 8, 8])
            selected = (x > bound).to(tl.int32)
            if is_cut:
                at_it = (x == threshold).to(tl.int32)
                until, count = _ranks(at_it)
                selected |= at_it & (equal + until > skipped).to(tl.int32)
                equal += count
            until, count = _ranks(selected)
            to = index + until - 1
            store_in_place(table + to, slot, (selected > 0) & (to < room), PDL)
            index += count
        if STAGE <= 1:
            even += _fours(eights & _EVEN, TILE)
            odd += _fours((eights >> 4) & _EVEN, TILE)
    start_successor(PDL)

    if STAGE <= 1:
        found = _counts_of(even, odd)
        tl.atomic_add(row_counts + STAGE * _SECOND + d, found, mask=found > 0, sem="relaxed")
    elif STAGE == 2:
        tl.debug_barrier()
        found = tl.load(part_counts + _LOW + v, cache_modifier=".cg")  # all, before any is overwritten
        tl.debug_barrier()
        beyond = tl.sum(higher, 0)
        tl.store(part_counts + _LOW + v, beyond + tl.cumsum(found, 0, reverse=True))
        tl.store(part_counts + _LOW + 256, beyond)
        if GUESS:
            tl.atomic_add(row_counts + _GUESSED + v, found, mask=found > 0, sem="relaxed")
            tl.atomic_add(row_counts + _ABOVE, beyond, sem="relaxed")
            tl.atomic_add(row_counts + _ABOVE + 1, beyond + tl.sum(found, 0), sem="relaxed")
        else:
            tl.atomic_add(row_counts + _LOW + v, found, mask=found > 0, sem="relaxed")


@cache
def _workspace(device: torch.device, rows: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates counts of rows (some 0 between calls, one the last call's k-th score) and of parts; cached."""
    row_counts = torch.zeros(rows, _ROW.value, dtype=torch.int32, device=device)
    return row_counts, torch.empty(rows, parts, _SIZE.value, dtype=torch.int32, device=device)


def select_tokens(
    scores: torch.Tensor,
    score_tables: torch.Tensor,
    block_tables: torch.Tensor,
    num_keys: torch.Tensor,
    counts: torch.Tensor,
    sinks: torch.Tensor,
    windows: torch.Tensor,
    fresh: torch.Tensor,
    table: torch.Tensor,
    tail: int,
    *,
    reach: int = 0,
    selection_group: SelectionGroup | None = None,
) -> None:
    """Writes tables of the cache slots of each sequence's best keys, for all layers and KV heads.

    Exactly `counts` of the first `num_keys` local keys are selected: the first `sinks`, the last `windows`, then those
    with the highest scores, ties to the latest. Scores compare as fp16; NaN is the highest, so that it surfaces, and -0
    is below 0. Slots ascend by local position. The slots of the next `tail` keys, which later steps append, follow; 0
    beyond the block table. No shape depends on device data. Deterministic. Calls on one device with equally many rows
    share a workspace and must not run concurrently.

    Args:
        scores: [L, planes, pages, Hkv, page_size] fp16, last dim contiguous. Local key j of sequence b is in page
            `score_tables[b, j // page_size]`, slot `j % page_size`; its score is the sum of its planes, in fp32, and of
            all heads if `table` has only one. Scores of keys past `num_keys` may be anything.
        score_tables, block_tables: [B, P] int32, rows contiguous: pages of scores and of the KV cache, of equal size. A
            key's slot is `block_tables[b, j // page_size] * page_size + j % page_size`.
        num_keys: [B] int32; contiguous, like all that follow.
        counts: [B] int32, at most `num_keys`.
        sinks, windows: [B] int32, together at most `counts`.
        fresh: [B] bool: ignore scores and select the latest keys.
        table: [L, B, Hkv or 1, width] int32, contiguous in a layer: the first `counts + tail` entries of each row, at
            most the width, are written.
        tail: keys after `num_keys`.
        reach: a key's score is the maximum over itself and the `reach` preceding keys; 0 or a power of two up to 16.
        selection_group: context of a joint selection over several ranks, which makes this a collective.

    Source:
        Vegas (arXiv:2602.07223), section 3.2; radix select.
    """
    layers, planes, _, score_heads, page_size = scores.shape
    B, columns = score_tables.shape
    heads, width = table.shape[2:]
    assert scores.dtype == torch.float16 and scores.stride(4) == 1
    assert block_tables.shape == score_tables.shape and block_tables.stride(1) == score_tables.stride(1) == 1
    assert table[0].is_contiguous() and table.shape[:2] == (layers, B) and fresh.dtype == torch.bool
    assert heads in (1, score_heads)
    per_sequence = (num_keys, counts, sinks, windows)
    assert all(t.is_contiguous() and t.dtype == torch.int32 and t.shape == (B,) for t in per_sequence)
    assert 0 <= reach <= MAX_REACH and reach & (reach - 1) == 0
    if not dispatch.on_gpu(scores):
        reference(
            scores, score_tables, block_tables, *per_sequence, fresh, table, tail, reach=reach,
            selection_group=selection_group
        )  # fmt: skip
        return
    assert page_size & (page_size - 1) == 0 and (page_size == 1 or page_size >= MAX_REACH)
    rows = layers * B * heads
    tiles = triton.cdiv(columns * page_size, TILE)
    parts = max(MIN_PARTS, triton.cdiv(PROGRAMS * sm_count(scores.device), rows))
    parts = max(min(parts, tiles), triton.cdiv(tiles, MAX_TILES))
    row_counts, part_counts = _workspace(scores.device, rows, parts)
    all_counts, equals_before = row_counts, None
    joint_counts, overflow = (
        (counts, None) if selection_group is None else (selection_group.counts, selection_group.overflow)
    )
    if selection_group is not None:
        all_counts = torch.empty_like(row_counts)
        assert joint_counts.is_contiguous() and joint_counts.dtype == torch.int32 and joint_counts.shape == (B,)
    for stage, guess in [(2, True)] * (selection_group is None) + [(stage, False) for stage in range(STAGES)]:
        if stage and selection_group is not None:  # each rank's counts of the previous launch
            begin = (0, _SECOND.value, _LOW.value)[stage - 1]
            digits = slice(begin, begin + (256 if stage == 3 else 16))
            all_digits = selection_group.gather(row_counts[:, digits].contiguous())
            all_counts[:, digits] = all_digits.sum(0)
            equals_before = all_digits[: selection_group.rank].sum(0, dtype=torch.int32) if stage == 3 else None
        _select_tokens_kernel[(parts * rows,)](
            scores, score_tables, block_tables, *per_sequence, fresh, table, row_counts, part_counts,
            all_counts, equals_before, joint_counts, overflow, *scores.stride()[:4], score_tables.stride(0),
            block_tables.stride(0), table.stride(0), B, columns, width, tail, parts,
            STAGE=stage, GUESS=guess, PLANES=planes, HEADS=heads, ADDED_HEADS=score_heads // heads, PAGE=page_size,
            REACH=reach, TILE=TILE, BLOCK_PARTS=triton.next_power_of_2(parts), JOINT=selection_group is not None,
            num_warps=4, **pdl_options(scores),
        )  # fmt: skip
