"""Hopper variant of `kernels.attention.flash_decode` for 65 to 128 query rows per KV head: drafts and shared prefixes.

One tile that loads, scores and accumulates 128 rows in sequence takes twice as long as loading its keys. This kernel is
warp-specialized like `kernels.attention.flash_prefill_sm90`, over the key runs of decode:

* one warp loads pairs of tiles: the keys of a tile with the values of the previous one, which are needed together;
* two warpgroups attend 64 rows each, over the same keys in shared memory, at their own pace.

The first warpgroup passes its key scores through shared memory to the second, which stores the scores over all rows.
"""

from __future__ import annotations

import math

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.attention.flash_prefill_sm90 import slots_of, slots_suit
from kernels.attention.paged_tiles import with_sink
from kernels.attention.schedule_sm90 import TILE, block_of, item_at, of, schedule_of, slot_of
from kernels.attention.split_kv import UnmergedAttention, workspace
from kernels.overlap import sm_count
from kernels.paged_keys import KeyScores, PagedKeys
from kernels.sm90 import COPIED, SHARED, next_stage, zero_dead_keys

D = gl.constexpr(128)
SIDE = gl.constexpr(64)  # rows per warpgroup
MAX_QUERIES = 32  # each costs a round of loads before the first tile
STAGES = gl.constexpr(5)  # pairs of tiles in shared memory
SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=SUMS.value, k_width=2))
ROW_LAYOUT, KEY_LAYOUT = (gl.constexpr(gl.SliceLayout(axis, SCORES.value)) for axis in (1, 0))
FOUND = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
EACH = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # one key, or one query, per thread


@gluon.jit
def _load(
    keys, values, page_rows, head_rows, head_columns, block_table, table_b, bounds, pairs,
    T: gl.constexpr, HEADS: gl.constexpr, PAGE: gl.constexpr, BLOCK_B: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Producer warp. The first pair of an item has no values, the last has no keys."""
    k_shared, v_shared, ready, free = pairs
    BYTES: gl.constexpr = TILE * D * 2
    schedule = schedule_of(bounds, 1, T, BLOCK_B, EARLY, HEADS)
    begin, end = schedule[7], schedule[8]
    stage = 0
    phase = 1
    at = begin
    while at < end:
        i, head, _, _, _, item_end, first, last = item_at(at, schedule, HEADS)
        pages = block_table + i.to(gl.int64) * table_b
        column = head * head_columns
        page = gl.load(pages + first * TILE // PAGE, mask=first < last, other=0)
        if EARLY:
            if page >= 0:  # always true; keeps the compiler from moving the wait above the load
                gdc_wait()
        before = 0
        for tile in range(first, last):
            row = page * page_rows + head * head_rows + tile * TILE % PAGE
            # One iteration ahead, so that the page index has arrived when its tile is loaded.
            page = gl.load(pages + (tile + 1) * TILE // PAGE, mask=tile + 1 < last, other=0)
            here = ready.index(stage)
            mbarrier.wait(free.index(stage), phase)
            if tile == first:
                mbarrier.expect(here, BYTES)
            else:
                mbarrier.expect(here, 2 * BYTES)
                tma.async_copy_global_to_shared(values, [before, column], here, v_shared.index(stage))
            tma.async_copy_global_to_shared(keys, [row, column], here, k_shared.index(stage))
            before = row
            stage, phase = next_stage(stage, phase, STAGES)
        if first < last:
            mbarrier.wait(free.index(stage), phase)
            mbarrier.expect(ready.index(stage), BYTES)
            tma.async_copy_global_to_shared(values, [before, column], ready.index(stage), v_shared.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)
        at = gl.minimum(end, item_end)
    if EARLY:
        gdc_wait()  # also in programs without items


@gluon.jit
def _load_queries(q_shared, side: gl.constexpr, q, q_t, q_h, earliest, latest, GROUP: gl.constexpr):
    """Copies a warpgroup's rows. Queries outside earliest..latest repeat the nearest one, which changes no maximum."""
    m = side * SIDE + gl.arange(0, SIDE, layout=gl.SliceLayout(1, COPIED))
    t = gl.minimum(gl.maximum(m // GROUP, earliest), latest)
    rows = q + t * q_t + (m % GROUP) * q_h
    wanted = (t >= earliest)[:, None]
    c = gl.arange(0, 64, layout=gl.SliceLayout(0, COPIED))
    tl.debug_barrier()  # all warps are done with the previous item
    for k in gl.static_range(D // 64):
        x = gl.load(rows[:, None] + (k * 64 + c)[None, :], mask=wanted, other=0.0)
        q_shared.slice(k * 64, 64, dim=1).store(x)
    fence_async_shared()
    tl.debug_barrier()


@gluon.jit
def _mask(scores, key, full_from, full_to, row_lo, row_hi):
    if (key < full_from) | (key + TILE > full_to):
        n = key + gl.arange(0, TILE, layout=KEY_LAYOUT)
        reads = (n[None, :] >= row_lo[:, None]) & (n[None, :] < row_hi[:, None])
        scores = gl.where(reads, scores, float("-inf"))
    return scores


@gluon.jit
def _found(scores, is_end, COLLECT: gl.constexpr):
    """Reduces scores to one per key over a warpgroup's rows: maximum, or sum of the ends; 0 if not collected."""
    if COLLECT == "any":
        return gl.max(scores, 0)
    elif COLLECT == "ends":
        return gl.sum(gl.where(is_end[:, None], scores, 0.0), 0)
    else:
        return 0.0


@gluon.jit
def _keep(
    found, side: gl.constexpr, handed, scored, phase, key, start, stop, key_scores, page, score_page, share,
    PAGE: gl.constexpr, COLLECT: gl.constexpr,
):  # fmt: skip
    """Sends a tile's key scores to the second warpgroup, which stores the scores over all rows."""
    if COLLECT != "":
        if side == 0:
            handed.store(found)
            tl.debug_barrier()
            mbarrier.arrive(scored)
        else:
            found = gl.convert_layout(found, EACH)
            mbarrier.wait(scored, phase)
            others = handed.load(EACH)
            found = gl.maximum(found, others) if COLLECT == "any" else found + others
            n = key + gl.arange(0, TILE, layout=EACH)
            to = key_scores + page.to(gl.int64) * score_page + n % PAGE
            gl.store(to, (found * share).to(key_scores.dtype.element_ty), mask=(n >= start) & (n < stop))


@gluon.jit
def _attend(
    side: gl.constexpr, q, strides, bounds, sinks, scale_log2, q_shared, pairs, handing, collecting,
    out, lse, part, part_lse,
    T: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, BLOCK_B: gl.constexpr,
    ROWS: gl.constexpr, SINKS: gl.constexpr, COLLECT: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup: attends 64 rows over the run's tiles; writes results of whole items, else partial states."""
    q_b, q_t, q_h, out_b, out_t, out_h, lse_b, lse_t, lse_h = strides
    k_shared, v_shared, ready, free = pairs
    handed, scored = handing
    key_scores, score_table, score_page, score_table_b = collecting
    lo, hi, lo_b, lo_t, hi_b, hi_t, _ = bounds
    dtype: gl.constexpr = q.dtype.element_ty
    schedule = schedule_of(bounds, 1, T, BLOCK_B, EARLY, HEADS, ALL=False)
    seq, _, _, fulls_from, fulls_to, _, _, begin, end, run = schedule
    # One row per query token and head of the group: heads of a group read the same keys.
    row = side * SIDE + gl.arange(0, SIDE, layout=ROW_LAYOUT)
    t = row // GROUP
    share = scale_log2 / (T * GROUP)
    stage = 0
    phase = 0
    at = begin
    while at < end:
        i, head, start, stop, item_begin, item_end, first, last = item_at(at, schedule, HEADS)
        full_from, full_to = of(fulls_from, seq, i), of(fulls_to, seq, i)
        if EARLY:
            gdc_wait()
        b = i.to(gl.int64)
        row_lo = gl.load(lo + b * lo_b + t * lo_t, mask=t < T, other=0)
        row_hi = gl.load(hi + b * hi_b + t * hi_t, mask=t < T, other=0)
        earliest = 0
        latest = T - 1
        score_pages = score_table
        score_head = key_scores
        page = 0
        if COLLECT != "":
            # Queries that read no key may be NaN: those before a rank's first key, and unused drafts after the last.
            query = gl.arange(0, 128, layout=EACH)
            los = gl.load(lo + b * lo_b + query * lo_t, mask=query < T, other=0)
            his = gl.load(hi + b * hi_b + query * hi_t, mask=query < T, other=0)
            earliest = gl.min(gl.where(los < his, query, T), 0)
            latest = gl.max(gl.where(los < his, query, -1), 0)
            score_pages = score_table + b * score_table_b
            score_head = key_scores + head * PAGE
        is_end = (t == earliest) | (t == latest)
        q_head = head * GROUP
        _load_queries(q_shared, side, q + b * q_b + q_head * q_h, q_t, q_h, earliest, latest, GROUP)
        acc = gl.zeros([SIDE, D], gl.float32, layout=SUMS)
        total = gl.zeros([SIDE], gl.float32, layout=ROW_LAYOUT)
        # Finite: -inf minus -inf would be NaN.
        peak = gl.full([SIDE], -1.0e38, gl.float32, layout=ROW_LAYOUT)
        if first < last:
            if COLLECT != "":
                page = gl.load(score_pages + first * TILE // PAGE)
            mbarrier.wait(ready.index(stage), phase)
            scores = gl.zeros([SIDE, TILE], gl.float32, layout=SCORES)
            scores = warpgroup_mma(
                q_shared, k_shared.index(stage).permute((1, 0)), scores, use_acc=False, is_async=True
            )
            scores = warpgroup_mma_wait(num_outstanding=0, deps=[scores])
            _keep(
                _found(scores, is_end, COLLECT), side, handed.index(stage), scored.index(stage), phase, first * TILE,
                start, stop, score_head, page, score_page, share, PAGE, COLLECT,
            )  # fmt: skip
            tl.debug_barrier()
            mbarrier.arrive(free.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)
            scores = _mask(scores, first * TILE, full_from, full_to, row_lo, row_hi)
            # Scale after the maximum, fused into the subtraction: one instruction per score.
            peak = gl.maximum(peak, gl.max(scores, 1) * scale_log2)
            weights = gl.exp2(scores * scale_log2 - peak[:, None])
            total = gl.sum(weights, 1)
            p = gl.convert_layout(weights.to(dtype), WEIGHTS)
            mbarrier.wait(ready.index(stage), phase)
            for tile in range(first + 1, last):
                if COLLECT != "":
                    page = gl.load(score_pages + tile * TILE // PAGE)
                if (tile - 1) * TILE < start:
                    zero_dead_keys(v_shared.index(stage), (tile - 1) * TILE, start, stop)
                keys = k_shared.index(stage).permute((1, 0))
                scores = warpgroup_mma(q_shared, keys, scores, use_acc=False, is_async=True)
                acc = warpgroup_mma(p, v_shared.index(stage), acc, is_async=True)
                scores = warpgroup_mma_wait(num_outstanding=1, deps=[scores])
                found = _found(scores, is_end, COLLECT)
                scores = _mask(scores, tile * TILE, full_from, full_to, row_lo, row_hi)
                new_peak = gl.maximum(peak, gl.max(scores, 1) * scale_log2)
                rescale = gl.exp2(peak - new_peak)
                weights = gl.exp2(scores * scale_log2 - new_peak[:, None])
                total = total * rescale + gl.sum(weights, 1)
                peak = new_peak
                next_p = gl.convert_layout(weights.to(dtype), WEIGHTS)
                _keep(
                    found, side, handed.index(stage), scored.index(stage), phase, tile * TILE, start, stop, score_head,
                    page, score_page, share, PAGE, COLLECT,
                )  # fmt: skip
                used = stage
                stage, phase = next_stage(stage, phase, STAGES)
                # Wait for the next pair here, so that ptxas does not move the wait for the accumulators above the
                # softmax (see `kernels.attention.flash_prefill_sm90`).
                mbarrier.wait(ready.index(stage), phase)
                # p too: the MMA reads its registers until it is done.
                acc, p = warpgroup_mma_wait(num_outstanding=0, deps=[acc, p])
                tl.debug_barrier()
                mbarrier.arrive(free.index(used))
                acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None]
                p = next_p
            if ((last - 1) * TILE < start) | (last * TILE > stop):
                zero_dead_keys(v_shared.index(stage), (last - 1) * TILE, start, stop)
            acc = warpgroup_mma(p, v_shared.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
            tl.debug_barrier()
            if COLLECT != "":
                if side == 0:  # this pair has no scores, but every stage uses both barriers once
                    mbarrier.arrive(scored.index(stage))
            mbarrier.arrive(free.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)

        # Drop what rows that read no key, which may be NaN, accumulated from unmasked tiles.
        reads = row_lo < row_hi
        total = gl.where(reads, total, 0.0)
        acc = gl.where(gl.convert_layout(reads, gl.SliceLayout(1, SUMS))[:, None], acc, 0.0)
        empty = total == 0.0
        log2 = gl.where(empty, float("-inf"), peak + gl.log2(total))
        factor = 1.0 / gl.where(empty, 1.0, total)
        m = side * SIDE + gl.arange(0, SIDE, layout=gl.SliceLayout(1, SUMS))
        d = gl.arange(0, D, layout=gl.SliceLayout(0, SUMS))
        if (item_begin >= begin) & (item_end <= end):
            if SINKS:
                log2, shrink = with_sink(log2, gl.load(sinks + q_head + row % GROUP, mask=t < T, other=0.0))
                factor = factor * shrink
            acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, SUMS))[:, None]
            rows = out + b * out_b + (m // GROUP) * out_t + (q_head + m % GROUP) * out_h
            gl.store(rows[:, None] + d[None, :], acc.to(dtype), mask=(m < T * GROUP)[:, None])
            to = lse + b * lse_b + t * lse_t + (q_head + row % GROUP) * lse_h
            gl.store(to, log2 * 0.6931471805599453, mask=t < T)
        else:
            acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, SUMS))[:, None]
            here = slot_of(begin, item_begin, run, 1) * ROWS
            gl.store(part + (here + m)[:, None] * D + d[None, :], acc.to(part.dtype.element_ty))
            gl.store(part_lse + here + row, log2)
        at = gl.minimum(end, item_end)
    if EARLY:
        gdc_wait()  # also in programs without items


@gluon.jit
def _flash_decode_many_sm90_kernel(
    keys, values, q, block_table, lo, hi, sinks, out, lse, part, part_lse, key_scores, score_table,
    page_rows, head_rows, head_columns, q_b, q_t, q_h, table_b, lo_b, lo_t, hi_b, hi_t,
    out_b, out_t, out_h, lse_b, lse_t, lse_h, score_page, score_table_b, scale_log2, B,
    T: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, BLOCK_B: gl.constexpr,
    ROWS: gl.constexpr, SINKS: gl.constexpr, COLLECT: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q.dtype.element_ty
    q_shared = gl.allocate_shared_memory(dtype, [2, SIDE, D], SHARED)
    k_shared = gl.allocate_shared_memory(dtype, [STAGES, TILE, D], SHARED)
    v_shared = gl.allocate_shared_memory(dtype, [STAGES, TILE, D], SHARED)
    handed = gl.allocate_shared_memory(gl.float32, [STAGES, TILE], FOUND)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    scored = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=2)
        mbarrier.init(scored.index(s), count=1)
    fence_async_shared()
    tl.debug_barrier()
    bounds = (lo, hi, lo_b, lo_t, hi_b, hi_t, B)
    strides = (q_b, q_t, q_h, out_b, out_t, out_h, lse_b, lse_t, lse_h)
    pairs = (k_shared, v_shared, ready, free)
    handing = (handed, scored)
    collecting = (key_scores, score_table, score_page, score_table_b)
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    0, q, strides, bounds, sinks, scale_log2, q_shared.index(0), pairs, handing, collecting,
                    out, lse, part, part_lse, T, HEADS, GROUP, PAGE, BLOCK_B, ROWS, SINKS, COLLECT, EARLY,
                ),
            ),
            (
                _attend,
                (
                    1, q, strides, bounds, sinks, scale_log2, q_shared.index(1), pairs, handing, collecting,
                    out, lse, part, part_lse, T, HEADS, GROUP, PAGE, BLOCK_B, ROWS, SINKS, COLLECT, EARLY,
                ),
            ),
            (
                _load,
                (
                    keys, values, page_rows, head_rows, head_columns, block_table, table_b, bounds, pairs,
                    T, HEADS, PAGE, BLOCK_B, EARLY,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
    # Not earlier: the successor's programs would take the SMs of this launch's programs that have not started yet.
    gdc_launch_dependents()


def fits(q: torch.Tensor, keys: PagedKeys) -> bool:
    """Returns whether `launch` supports these arguments of `kernels.attention.flash_decode.flash_decode`."""
    T, Hq = q.shape[1:3]
    return (
        keys.v_scale is None
        and keys.table.dim() == 2
        and SIDE.value < T * (Hq // keys.k.shape[2]) <= 2 * SIDE.value
        and T <= MAX_QUERIES
        and q.dtype in (torch.bfloat16, torch.float16)
        and keys.k.shape[-1] == D.value
        and slots_suit(keys)
    )


def launch(
    q: torch.Tensor,
    keys: PagedKeys,
    out: torch.Tensor,
    lse: torch.Tensor,
    sms: int | None,
    early: bool,
    scores: KeyScores | None,
    lane: int,
) -> UnmergedAttention:
    """Runs `kernels.attention.flash_decode.flash_decode` up to the merge; requires `fits`.

    Source:
        FlashAttention-3 (arXiv:2407.08608) over stream-K runs (arXiv:2301.03598).
    """
    B, T, Hq, dim = q.shape
    k, table, lo, hi, heads = keys.k, keys.table, keys.lo, keys.hi, keys.k.shape[2]
    rows = 2 * SIDE.value
    programs = sms or sm_count(q.device)
    part, part_lse = workspace(q.device, q.dtype, programs, rows, dim, lane)
    key_scores, score_table, score_strides, collect = None, None, (0, 0), ""
    if scores is not None:
        key_scores, score_table, collect = scores.planes, scores.table, scores.rows
        score_strides = key_scores.stride(1), score_table.stride(0)
    _flash_decode_many_sm90_kernel[(programs,)](
        slots_of(k), slots_of(keys.v), q, table, lo, hi, keys.sinks, out, lse, part, part_lse, key_scores, score_table,
        k.stride(0) // k.stride(1), *divmod(k.stride(2), k.stride(1)), *q.stride()[:3], table.stride(0),
        *lo.stride(), *hi.stride(), *out.stride()[:3], *lse.stride(), *score_strides, keys.scale * math.log2(math.e), B,
        T=T, HEADS=heads, GROUP=Hq // heads, PAGE=keys.page_size,
        BLOCK_B=block_of(B), ROWS=rows, SINKS=keys.sinks is not None, COLLECT=collect,
        EARLY=early, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return UnmergedAttention(out, lse, lo, hi, keys.sinks, part, part_lse, programs, heads, rows, TILE.value)
