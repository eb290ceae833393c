"""Hopper variant of `kernels.attention.flash_decode` for keys and values, or only values, in e4m3.

FP8 halves the bytes, so the kernel is bound by instructions. Each warp therefore runs its own softmax over its own keys
and waits for other warps only when copies into shared memory land; the four states are merged at the end of an item.
Loads from shared memory fill the MMA operand registers directly, 16 bytes at a time: a dot product may sum its terms in
any order, and output columns may be permuted, so neighboring bytes become terms, or columns, of one thread.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.attention.paged_tiles import lift, with_sink
from kernels.attention.schedule_sm90 import block_of, of, schedule_of
from kernels.attention.split_kv import UnmergedAttention, first_slot, workspace
from kernels.overlap import sm_count
from kernels.paged_keys import PagedKeys
from kernels.scaled_keys import scale_at

WARPS = gl.constexpr(4)
MAX_ROWS = 32
# Keys per warp and tile, by rows: more rows take accumulator registers, and leave fewer for scores.
KEYS_PER_WARP = {16: 32, MAX_ROWS: 16}
STAGED = 384  # e4m3 keys in flight (two thirds of it for bf16): two programs fit an SM
EACH = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # one key per thread
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8]))
LEFT, RIGHT = (gl.constexpr(gl.DotOperandLayout(i, PRODUCT.value, 2)) for i in range(2))
ROW_LAYOUT, KEY_LAYOUT = (gl.constexpr(gl.SliceLayout(axis, PRODUCT.value)) for axis in (2, 1))
SCALES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
SUMS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
ROWS_OF_Q = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
MERGED = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))


@gluon.constexpr_function
def _bits(size):
    return size.bit_length() - 1


@gluon.constexpr_function
def keys_layout(D, keys_per_warp):
    """Returns the layout of keys [tile, D] that matches the right MMA operand of the scores.

    A thread holds D / 4 consecutive elements of every eighth key of its warp.
    """
    registers = [[0, 1 << bit] for bit in range(_bits(D) - 2)] + [
        [1 << bit, 0] for bit in range(3, _bits(keys_per_warp))
    ]
    lanes = [[0, D // 4], [0, D // 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[keys_per_warp, 0], [2 * keys_per_warp, 0]], [], [4 * keys_per_warp, D]
    )


@gluon.constexpr_function
def values_layout(D, keys_per_warp):
    """Returns the layout of values [tile, D] that matches the right MMA operand of the output.

    A thread holds D / 8 consecutive elements of a quarter of its warp's keys.
    """
    registers = [[0, 1 << bit] for bit in range(_bits(D) - 3)] + [[1, 0]]
    registers += [[1 << bit, 0] for bit in range(3, _bits(keys_per_warp))]
    lanes = [[2, 0], [4, 0], [0, D // 8], [0, D // 4], [0, D // 2]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[keys_per_warp, 0], [2 * keys_per_warp, 0]], [], [4 * keys_per_warp, D]
    )


@gluon.constexpr_function
def copied_layout(D, bytes):
    """Returns the layout that copies [tile, D] elements, 16 bytes per thread."""
    across = min(32, D * bytes // 16)
    return gl.BlockedLayout([1, 16 // bytes], [32 // across, across], [4, 1], [1, 0])


@gluon.constexpr_function
def swizzled(D, bytes):
    """Returns a shared layout that puts 16-byte vectors of consecutive rows into different banks."""
    chunks = min(8, D * bytes // 16)
    return gl.SwizzledSharedLayout(16 // bytes, 8 // chunks, chunks, [1, 0])


@gluon.jit
def _place(tile, pages, start, stop, TILE: gl.constexpr, LAYOUT: gl.constexpr, PAGE: gl.constexpr, HOLES: gl.constexpr):
    """Finds the pages and slots (int64) of a tile's keys, and which keys are live."""
    key = tile * TILE + gl.arange(0, TILE, layout=LAYOUT)
    live = (key >= start) & (key < stop)
    page = gl.load(pages + key // PAGE, mask=live, other=0).to(gl.int64)
    if HOLES:
        live = live & (page >= 0)
    return page, (key % PAGE).to(gl.int64), live


@gluon.jit
def _copy_rows(
    tile, to, cache, pages, start, stop, head, page_stride, slot_stride, head_stride,
    PAGE: gl.constexpr, HOLES: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    TILE: gl.constexpr = to.shape[0]
    D: gl.constexpr = to.shape[1]
    L: gl.constexpr = copied_layout(D, cache.dtype.element_ty.primitive_bitwidth // 8)
    page, slot, live = _place(tile, pages, start, stop, TILE, gl.SliceLayout(1, L), PAGE, HOLES)
    at = (page * page_stride + head * head_stride) * APART + slot * slot_stride
    d = gl.arange(0, D, layout=gl.SliceLayout(0, L))
    async_copy.async_copy_global_to_shared(to, cache + (at[:, None] + d[None, :]), mask=live[:, None])


@gluon.jit
def _copy(
    tile, slot, k_shared, v_shared, k_scales_shared, v_scales_shared,
    k_cache, v_cache, k_scales, v_scales, pages, start, stop, head, page_stride, slot_stride, head_stride,
    V_FIRST: gl.constexpr, PAGE: gl.constexpr, HOLES: gl.constexpr, V_APART: gl.constexpr,
    SCALE_PAGE: gl.constexpr, SCALE_NEXT: gl.constexpr, SCALE_HEAD: gl.constexpr,
):  # fmt: skip
    strides = (page_stride, slot_stride, head_stride)
    _copy_rows(tile, k_shared.index(slot), k_cache, pages, start, stop, head, *strides, PAGE, HOLES, 1)
    _copy_rows(tile, v_shared.index(V_FIRST + slot), v_cache, pages, start, stop, head, *strides, PAGE, HOLES, V_APART)
    TILE: gl.constexpr = k_shared.shape[1]
    page, within, live = _place(tile, pages, start, stop, TILE, EACH, PAGE, HOLES)
    at = scale_at(v_scales, page, within, head, PAGE, SCALE_PAGE, SCALE_NEXT, SCALE_HEAD)
    async_copy.async_copy_global_to_shared(v_scales_shared.index(slot), at, mask=live)
    if k_scales is not None:
        at = scale_at(k_scales, page, within, head, PAGE, SCALE_PAGE, SCALE_NEXT, SCALE_HEAD)
        async_copy.async_copy_global_to_shared(k_scales_shared.index(slot), at, mask=live)


@gluon.jit
def _numbers(x, dtype: gl.constexpr):
    """Converts e4m3 to 16 bits; direct conversion to bf16 would go through fp16 and is slow."""
    return x if x.dtype == dtype else x.to(gl.float32).to(dtype)


@gluon.jit
def _flash_decode_fp8_sm90_kernel(
    q, k_cache, v_cache, k_scales, v_scales, block_table, lo, hi, sinks, out, lse, part, part_lse,
    q_b, q_t, q_h, page_stride, slot_stride, head_stride, table_b, table_h, lo_b, lo_t, hi_b, hi_t,
    out_b, out_t, out_h, lse_b, lse_t, lse_h,
    scale_log2, B, T: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
    BLOCK_B: gl.constexpr, ROWS: gl.constexpr, SINKS: gl.constexpr, HOLES: gl.constexpr, V_APART: gl.constexpr,
    SCALE_PAGE: gl.constexpr, SCALE_NEXT: gl.constexpr, SCALE_HEAD: gl.constexpr, STAGES: gl.constexpr,
    QUERIES: gl.constexpr, KEYS_PER_WARP: gl.constexpr, EARLY: gl.constexpr, READY: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q.dtype.element_ty
    K_BYTES: gl.constexpr = k_cache.dtype.element_ty.primitive_bitwidth // 8
    TILE: gl.constexpr = WARPS * KEYS_PER_WARP
    KEYS: gl.constexpr = keys_layout(D, KEYS_PER_WARP)
    VALUES: gl.constexpr = values_layout(D, KEYS_PER_WARP)
    LIFT: gl.constexpr = lift(dtype)
    # Keys and values of one dtype share a buffer, large enough for the accumulators of an item.
    V_FIRST: gl.constexpr = STAGES if K_BYTES == 1 else 0
    k_shared = gl.allocate_shared_memory(k_cache.dtype.element_ty, [STAGES + V_FIRST, TILE, D], swizzled(D, K_BYTES))
    v_shared = k_shared
    if K_BYTES > 1:
        v_shared = gl.allocate_shared_memory(v_cache.dtype.element_ty, [STAGES, TILE, D], swizzled(D, 1))
    v_scales_shared = gl.allocate_shared_memory(gl.float32, [STAGES, TILE], SCALES)
    k_scales_shared = v_scales_shared
    if k_scales is not None:
        k_scales_shared = gl.allocate_shared_memory(gl.float32, [STAGES, TILE], SCALES)
    q_shared = gl.allocate_shared_memory(dtype, [QUERIES, D], swizzled(D, 2))
    shared = (k_shared, v_shared, k_scales_shared, v_scales_shared)
    caches = (k_cache, v_cache, k_scales, v_scales)
    bounds = (lo, hi, lo_b, lo_t, hi_b, hi_t, B)
    schedule = schedule_of(bounds, 1, T, BLOCK_B, EARLY, HEADS, TILE)
    seq, starts, stops, fulls_from, fulls_to, tiles, ends, begin, end, run = schedule
    if gl.max(ends, 0) >= 0:  # always true; keeps the compiler from moving the wait above the loads of the bounds
        if EARLY and not READY:
            gdc_wait()
    # Not at the end: all programs are resident at once, the merge is small enough to share the SMs with them, and
    # programs of another attention can start as these end.
    gdc_launch_dependents()

    r = gl.arange(0, QUERIES, layout=gl.SliceLayout(0, ROW_LAYOUT))  # rows of the running softmax
    each_warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LEFT)))
    at = begin
    while at < end:
        i = gl.sum((ends <= at).to(gl.int32), 0)
        length, start, stop = of(tiles, seq, i), of(starts, seq, i), of(stops, seq, i)
        full_from, full_to = of(fulls_from, seq, i), of(fulls_to, seq, i)
        offset = at - (of(ends, seq, i) - length * HEADS)
        head = (offset // length).to(gl.int64)
        item_begin = at - offset % length
        item_end = item_begin + length
        first = start // TILE + at - item_begin
        last = first + gl.minimum(end, item_end) - at
        b = i.to(gl.int64)
        pages = block_table + b * table_b + head * table_h

        # One row per query token and head of the group: heads of a group read the same keys. Every warp has all rows.
        m = gl.arange(0, QUERIES, layout=gl.SliceLayout(1, ROWS_OF_Q))
        c = gl.arange(0, D, layout=gl.SliceLayout(0, ROWS_OF_Q))
        # Same order of terms as `keys_layout`.
        d = c % 8 // 2 * (D // 4) + c // 16 * 4 + c % 16 // 8 * 2 + c % 2
        rows = b * q_b + (m // GROUP) * q_t + (head * GROUP + m % GROUP) * q_h
        query = gl.load(q + (rows[:, None] + d[None, :]), mask=(m < T * GROUP)[:, None], other=0.0)
        tl.debug_barrier()  # all warps are done with the previous item
        q_shared.store(query)
        t = r // GROUP
        row_lo = gl.load(lo + b * lo_b + t * lo_t, mask=t < T, other=0)
        row_hi = gl.load(hi + b * hi_b + t * hi_t, mask=t < T, other=0)

        acc = gl.zeros([WARPS, QUERIES, D], gl.float32, layout=PRODUCT)
        total = gl.zeros([WARPS, QUERIES], gl.float32, layout=ROW_LAYOUT)
        # Finite: -inf minus -inf would be NaN.
        peak = gl.full([WARPS, QUERIES], -1.0e38, gl.float32, layout=ROW_LAYOUT)
        tl.debug_barrier()  # the buffer held the accumulators of the previous item
        for s in gl.static_range(STAGES - 1):
            if first + s < last:
                _copy(
                    first + s, s, *shared, *caches, pages, start, stop, head, page_stride, slot_stride, head_stride,
                    V_FIRST, PAGE, HOLES, V_APART, SCALE_PAGE, SCALE_NEXT, SCALE_HEAD,
                )  # fmt: skip
            async_copy.commit_group()
        for tile in range(first, last):
            slot = (tile - first) % STAGES
            async_copy.wait_group(STAGES - 2)
            tl.debug_barrier()  # all copies of the tile have landed, and all warps are done with the previous tile
            ahead = tile + STAGES - 1
            if ahead < last:
                _copy(
                    ahead, (ahead - first) % STAGES, *shared, *caches, pages, start, stop, head,
                    page_stride, slot_stride, head_stride,
                    V_FIRST, PAGE, HOLES, V_APART, SCALE_PAGE, SCALE_NEXT, SCALE_HEAD,
                )  # fmt: skip
            async_copy.commit_group()

            k = _numbers(k_shared.index(slot).load(KEYS), dtype)
            k = gl.permute(gl.reshape(k, [WARPS, KEYS_PER_WARP, 4, D // 16, 2, 2]), (0, 3, 4, 2, 5, 1))
            k = gl.convert_layout(gl.reshape(k, [WARPS, D, KEYS_PER_WARP]), RIGHT, assert_trivial=True)
            # Reload for each tile: registers are scarce.
            rows_of_q, _ = gl.broadcast(q_shared.load(gl.SliceLayout(0, LEFT))[None, :, :], each_warp[:, None, None])
            scores = mma_v2(rows_of_q, k, gl.zeros([WARPS, QUERIES, KEYS_PER_WARP], gl.float32, layout=PRODUCT))
            if k_scales is not None:
                k_scale = k_scales_shared.index(slot).reshape([WARPS, KEYS_PER_WARP]).load(KEY_LAYOUT)
                scores = scores * k_scale[:, None, :]
            scores = scores * scale_log2
            key = tile * TILE
            if HOLES or ((key < full_from) | (key + TILE > full_to)):
                keys_per_warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, KEY_LAYOUT)) * KEYS_PER_WARP
                n = (
                    key
                    + keys_per_warp[:, None]
                    + gl.arange(0, KEYS_PER_WARP, layout=gl.SliceLayout(0, KEY_LAYOUT))[None, :]
                )
                if HOLES:
                    page = gl.load(pages + n // PAGE, mask=(n >= start) & (n < stop), other=-1)
                    n = gl.where(page >= 0, n, -1)
                n = n[:, None, :]
                reads = (n >= row_lo[None, :, None]) & (n < row_hi[None, :, None])
                scores = gl.where(reads, scores, float("-inf"))
            new_peak = gl.maximum(peak, gl.max(scores, 2))
            rescale = gl.exp2(peak - new_peak)
            weights = gl.exp2(scores - new_peak[:, :, None])
            total = total * rescale + gl.sum(weights, 2)
            peak = new_peak
            v_scale = v_scales_shared.index(slot).reshape([WARPS, KEYS_PER_WARP]).load(KEY_LAYOUT)
            weights = gl.convert_layout((weights * (v_scale * LIFT)[:, None, :]).to(dtype), LEFT)
            v = _numbers(v_shared.index(V_FIRST + slot).load(VALUES), dtype)
            v = gl.permute(gl.reshape(v, [WARPS, KEYS_PER_WARP, 8, D // 8]), (0, 1, 3, 2))
            v = gl.convert_layout(gl.reshape(v, [WARPS, KEYS_PER_WARP, D]), RIGHT, assert_trivial=True)
            acc = mma_v2(weights, v, acc * rescale[:, :, None])

        # Merge the warps' states through the tile buffers, so that one warp reads each row.
        best = gl.max(peak, 0)
        factor = gl.exp2(peak - best[None, :])
        total = gl.sum(total * factor, 0)
        acc = acc * factor[:, :, None]
        acc = gl.permute(gl.reshape(acc, [WARPS, QUERIES, D // 8, 8]), (0, 1, 3, 2))  # columns in the order of values
        async_copy.wait_group(0)
        tl.debug_barrier()  # all warps are done with the last tile
        sums = k_shared._reinterpret(gl.float32, [WARPS * QUERIES, D], SUMS)
        sums.store(gl.reshape(acc, [WARPS * QUERIES, D]))
        tl.debug_barrier()
        acc = sums.slice(0, QUERIES).load(MERGED)
        for other in gl.static_range(1, WARPS):
            acc += sums.slice(other * QUERIES, QUERIES).load(MERGED)
        MERGED_LAYOUT: gl.constexpr = gl.SliceLayout(1, MERGED)
        total = gl.convert_layout(total, MERGED_LAYOUT)
        best = gl.convert_layout(best, MERGED_LAYOUT)
        m = gl.arange(0, QUERIES, layout=MERGED_LAYOUT)
        column = gl.arange(0, D, layout=gl.SliceLayout(0, MERGED))
        t = m // GROUP
        q_head = head * GROUP + m % GROUP
        # Drop what rows that read no key accumulated from unmasked tiles.
        reads = gl.load(lo + b * lo_b + t * lo_t, mask=t < T, other=0) < gl.load(
            hi + b * hi_b + t * hi_t, mask=t < T, other=0
        )
        total = gl.where(reads, total, 0.0)
        empty = total == 0.0
        acc = gl.where(reads[:, None], acc, 0.0) * (1.0 / gl.where(empty, 1.0, total * LIFT))[:, None]
        log2 = gl.where(empty, float("-inf"), best + gl.log2(total))
        if (item_begin >= begin) & (item_end <= end):
            if SINKS:
                log2, share = with_sink(log2, gl.load(sinks + q_head, mask=t < T, other=0.0))
                acc *= share[:, None]
            to = out + b * out_b + (t * out_t + q_head * out_h)[:, None] + column[None, :]
            gl.store(to, acc.to(dtype), mask=(t < T)[:, None])
            gl.store(lse + b * lse_b + t * lse_t + q_head * lse_h, log2 * 0.6931471805599453, mask=t < T)
        else:
            part_slot = gl.where(item_begin >= begin, first_slot(item_begin, run), 2 * gl.program_id(0))
            here = part_slot.to(gl.int64) * ROWS + m
            parts = part + here[:, None] * D + column[None, :]
            gl.store(parts, acc.to(part.dtype.element_ty), mask=(m < ROWS)[:, None])
            gl.store(part_lse + here, log2, mask=m < ROWS)
        at = gl.minimum(end, item_end)


def fits(q: torch.Tensor, keys: PagedKeys) -> bool:
    """Returns whether `launch` supports these arguments of `kernels.attention.flash_decode.flash_decode`."""
    T, Hq, D = q.shape[1:]
    return (
        keys.v_scale is not None
        and D in (64, 128)
        and T * (Hq // keys.k.shape[2]) <= MAX_ROWS
        and q.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(q.device)[0] == 9
        # 16-byte copies
        and all(stride * cache.itemsize % 16 == 0 for cache in (keys.k, keys.v) for stride in cache.stride()[:3])
        and keys.k.data_ptr() % 16 == keys.v.data_ptr() % 16 == 0
    )


def launch(
    q: torch.Tensor,
    keys: PagedKeys,
    out: torch.Tensor,
    lse: torch.Tensor,
    sms: int | None,
    early: bool,
    lane: int,
    ready: bool,
) -> UnmergedAttention:
    """Runs `kernels.attention.flash_decode.flash_decode` up to the merge; requires `fits`."""
    B, T, Hq, D = q.shape
    table, lo, hi, heads = keys.table, keys.lo, keys.hi, keys.k.shape[2]
    group = Hq // heads
    queries = 16 if T * group <= 16 else MAX_ROWS
    tile = WARPS.value * KEYS_PER_WARP[queries]
    rows = min(queries, triton.next_power_of_2(T * group))
    programs = 2 * (sms or sm_count(q.device))
    part, part_lse = workspace(q.device, q.dtype, programs, rows, D, lane)
    _flash_decode_fp8_sm90_kernel[(programs,)](
        q, keys.k, keys.v, keys.k_scale, keys.v_scale, table, lo, hi, keys.sinks, out, lse, part, part_lse,
        *q.stride()[:3], *keys.k.stride()[:3], table.stride(0), table.stride(1) if table.dim() == 3 else 0,
        *lo.stride(), *hi.stride(), *out.stride()[:3], *lse.stride(),
        keys.scale * math.log2(math.e), B, T=T, HEADS=heads, GROUP=group, D=D, PAGE=keys.page_size,
        BLOCK_B=block_of(B), ROWS=rows, SINKS=keys.sinks is not None,
        HOLES=table.dim() == 3, QUERIES=queries, KEYS_PER_WARP=KEYS_PER_WARP[queries],
        STAGES=STAGED // tile if keys.k.itemsize == 1 else STAGED * 2 // 3 // tile, EARLY=early, READY=ready,
        **keys.shape, num_warps=WARPS.value, launch_pdl=True,
    )  # fmt: skip
    return UnmergedAttention(out, lse, lo, hi, keys.sinks, part, part_lse, programs, heads, queries, tile)
