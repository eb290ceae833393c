"""Variant of `kernels.mla.decode` for many query rows on Hopper, with explicit asynchronous instructions.

From 33 rows on (query tokens x heads), the products take longer than the loads, and the tensor cores must be kept
busy explicitly. A program is three groups of warps that hand work to each other through barriers in shared memory:

* one warp loads tiles of 64 keys, piece by piece; latents in e4m3 are loaded and unpacked by four;
* four warps score a tile, compute softmax weights, and accumulate the left half of the output;
* four warps accumulate the right half, with the weights that the others store in shared memory.

Two tiles fit: a piece is refilled as soon as the products that read it as values are done. Row tiles of one run are
neighbouring programs, and share keys in the L2.
"""

from __future__ import annotations

import math

import torch
import triton
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

from kernels.attention.schedule_sm90 import TILE, item_at, of, schedule_of, slot_of
from kernels.attention.split_kv import UnmergedAttention, workspace
from kernels.mla.decode_common_sm90 import pieces
from kernels.mla.unpack_sm90 import load_unpacked
from kernels.paged_keys import PagedKeys
from kernels.sm90 import COPIED, SHARED, silence

# Layouts of scores (TILE query rows x TILE keys) and values (rows x half of the latents).
SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
VALUES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16]))
# VALUES as stored, in whole sectors of 32 bytes. (Eight neighbours per thread instead of four would go through shared
# memory, which is full.)
STORED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64], [0, 128]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], [64, 256],
    )
)  # fmt: skip


@gluon.jit
def _load(
    latents, scales, page_stride, ropes, block_table, table_b, page_rows, bounds, keys, ready, free,
    R: gl.constexpr, P: gl.constexpr, PAGE: gl.constexpr,
    TILES_M: gl.constexpr, T: gl.constexpr, BLOCK_B: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Fills the two slots piece by piece, in a warp of its own; `load_unpacked` does so with scales."""
    k_left, k_right, k_rope = keys
    left_ready, right_ready = ready
    left_free, right_free = free
    schedule = schedule_of(bounds, TILES_M, T, BLOCK_B, EARLY)
    begin, end = schedule[7], schedule[8]
    loaded = 0
    at = begin
    while at < end:
        i, _, _, _, _, item_end, first, last = item_at(at, schedule)
        pages = block_table + i.to(gl.int64) * table_b
        page = gl.load(pages + first * TILE // PAGE, mask=first < last, other=0)
        if EARLY:
            if page >= 0:  # Always true: without it the compiler moves the wait to before the load.
                gdc_wait()
        for tile in range(first, last):
            row = page * page_rows + tile * TILE % PAGE
            # One iteration ahead, so that the next page's number has arrived when its tile is loaded.
            page = gl.load(pages + (tile + 1) * TILE // PAGE, mask=tile + 1 < last, other=0)
            slot = loaded % 2
            phase = loaded // 2 % 2
            mbarrier.wait(left_free.index(slot), phase ^ 1)
            mbarrier.expect(left_ready.index(slot), TILE * (R // 2 + P) * 2)
            tma.async_copy_global_to_shared(ropes, [row, R], left_ready.index(slot), k_rope.index(slot))
            tma.async_copy_global_to_shared(latents, [row, 0], left_ready.index(slot), k_left.index(slot))
            mbarrier.wait(right_free.index(slot), phase ^ 1)
            mbarrier.expect(right_ready.index(slot), TILE * (R // 2) * 2)
            tma.async_copy_global_to_shared(latents, [row, R // 2], right_ready.index(slot), k_right.index(slot))
            loaded += 1
        at = gl.minimum(end, item_end)
    if EARLY:
        gdc_wait()  # those without items, too


@gluon.jit
def load_queries(q_left, q_right, q_rope, rows, live, R: gl.constexpr):
    """Copies a tile of query rows from pointers `rows` [TILE]; zeros where not `live`."""
    c = gl.arange(0, 64, layout=gl.SliceLayout(0, COPIED))
    for k in gl.static_range(R // 128):
        left = gl.load(rows[:, None] + (k * 64 + c)[None, :], mask=live[:, None], other=0.0)
        q_left.slice(k * 64, 64, dim=1).store(left)
        right = gl.load(rows[:, None] + (R // 2 + k * 64 + c)[None, :], mask=live[:, None], other=0.0)
        q_right.slice(k * 64, 64, dim=1).store(right)
    q_rope.store(gl.load(rows[:, None] + (R + c)[None, :], mask=live[:, None], other=0.0))
    fence_async_shared()
    tl.debug_barrier()


@gluon.jit
def score(queries, keys, ready, loaded, scores):
    """Issues the products of the queries with the tile that was loaded as number `loaded`, counted from 0."""
    q_left, q_right, q_rope = queries
    k_left, k_right, k_rope = keys
    left_ready, right_ready = ready
    slot = loaded % 2
    phase = loaded // 2 % 2
    mbarrier.wait(left_ready.index(slot), phase)
    scores = warpgroup_mma(q_rope, k_rope.index(slot).permute((1, 0)), scores, use_acc=False, is_async=True)
    scores = warpgroup_mma(q_left, k_left.index(slot).permute((1, 0)), scores, is_async=True)
    mbarrier.wait(right_ready.index(slot), phase)
    return warpgroup_mma(q_right, k_right.index(slot).permute((1, 0)), scores, is_async=True)


@gluon.jit
def weigh(scores, total, peak, scale_log2, key, full_from, full_to, row_lo, row_hi):
    """Computes a tile's softmax weights, the rescale factor of earlier tiles, and the running sum and peak."""
    scores = scores * scale_log2
    if (key < full_from) | (key + TILE > full_to):
        n = key + gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORES))
        reads = (n[None, :] >= row_lo[:, None]) & (n[None, :] < row_hi[:, None])
        scores = gl.where(reads, scores, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(scores, 1))
    rescale = gl.exp2(peak - new_peak)
    weights = gl.exp2(scores - new_peak[:, None])
    return weights, rescale, total * rescale + gl.sum(weights, 1), new_peak


@gluon.jit
def hand_over(weights, factors, handed, weights_shared, factors_shared, weighed, taken):
    """Stores the tile's weights, and each row's rescale factor, for the group of the right half."""
    mbarrier.wait(taken, handed % 2 ^ 1)
    weights_shared.store(weights.to(weights_shared.dtype))
    factors_shared.store(factors)
    fence_async_shared()
    tl.debug_barrier()
    mbarrier.arrive(weighed)


@gluon.jit
def _store_rows(
    acc, column: gl.constexpr, tile_m, begin, end, item_begin, item_end, run, out, out_t, out_h, part,
    T: gl.constexpr, GROUP: gl.constexpr, R: gl.constexpr, ROWS: gl.constexpr, TILES_M: gl.constexpr,
):  # fmt: skip
    """Writes columns from `column` on of the run's part of an item: to `out` if the run covers it, else to a part."""
    values = gl.convert_layout(acc.to(out.dtype.element_ty), STORED)
    m = tile_m * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, STORED))
    d = column + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, STORED))
    if (item_begin >= begin) & (item_end <= end):
        rows = out + (m // GROUP) * out_t + (m % GROUP) * out_h
        gl.store(rows[:, None] + d[None, :], values, mask=(m < T * GROUP)[:, None])
    else:
        here = slot_of(begin, item_begin, run, TILES_M) * ROWS + m
        gl.store(part + here[:, None] * R + d[None, :], values, mask=(m < ROWS)[:, None])


@gluon.jit
def _score_and_left(
    q, strides, lo, hi, scale_log2, bounds, queries, keys, ready, left_free, handing, out, lse, part, part_lse,
    T: gl.constexpr, GROUP: gl.constexpr, R: gl.constexpr, ROWS: gl.constexpr,
    TILES_M: gl.constexpr, BLOCK_B: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Scores, computes weights, accumulates the left half and writes the LSE, in a group of four warps."""
    q_b, q_t, q_h, out_b, out_t, out_h, lse_b, lse_t, lse_h = strides
    q_left, q_right, q_rope = queries
    k_left, _, _ = keys
    weights_shared, factors_shared, weighed, taken = handing
    schedule = schedule_of(bounds, TILES_M, T, BLOCK_B, EARLY)
    seq, _, _, fulls_from, fulls_to, _, _, begin, end, run = schedule
    _, _, lo_b, lo_t, hi_b, hi_t, _ = bounds
    tile_m = gl.program_id(0) % TILES_M
    loaded = 0
    handed = 0
    at = begin
    while at < end:
        i, _, start, stop, item_begin, item_end, first, last = item_at(at, schedule)
        if EARLY:
            gdc_wait()
        full_from, full_to = of(fulls_from, seq, i), of(fulls_to, seq, i)
        b = i.to(gl.int64)
        m = tile_m * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, COPIED))
        rows = q + b * q_b + (m // GROUP) * q_t + (m % GROUP) * q_h
        load_queries(q_left, q_right, q_rope, rows, m < T * GROUP, R)

        # One row per query token and head: all heads read the same keys.
        row = tile_m * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, SCORES))
        t = row // GROUP
        row_lo = gl.load(lo + b * lo_b + t * lo_t, mask=t < T, other=0)
        row_hi = gl.load(hi + b * hi_b + t * hi_t, mask=t < T, other=0)
        acc = gl.zeros([TILE, R // 2], gl.float32, layout=VALUES)
        scores = gl.zeros([TILE, TILE], gl.float32, layout=SCORES)
        total = gl.zeros([TILE], gl.float32, layout=gl.SliceLayout(1, SCORES))
        # A finite floor: -inf minus -inf would be NaN.
        peak = gl.full([TILE], -1.0e38, gl.float32, layout=gl.SliceLayout(1, SCORES))
        if first < last:
            scores = score(queries, keys, ready, loaded, scores)
            scores = warpgroup_mma_wait(num_outstanding=0, deps=[scores])
        # The last tile is peeled: products in flight across an iteration's end would be waited for there.
        for tile in range(first, last - 1):
            key = tile * TILE
            slot = loaded % 2
            weights, rescale, total, peak = weigh(
                scores, total, peak, scale_log2, key, full_from, full_to, row_lo, row_hi
            )
            if key < start:
                silence(k_left.index(slot), key, start, stop)
            hand_over(weights, rescale, handed, weights_shared, factors_shared, weighed, taken)
            acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, VALUES))[:, None]
            acc = warpgroup_mma(weights_shared, k_left.index(slot), acc, is_async=True)
            handed += 1
            loaded += 1
            scores = score(queries, keys, ready, loaded, scores)
            acc = warpgroup_mma_wait(num_outstanding=3, deps=[acc])
            tl.debug_barrier()
            mbarrier.arrive(left_free.index(slot))
            scores = warpgroup_mma_wait(num_outstanding=0, deps=[scores])
        if first < last:
            key = (last - 1) * TILE
            slot = loaded % 2
            weights, rescale, total, peak = weigh(
                scores, total, peak, scale_log2, key, full_from, full_to, row_lo, row_hi
            )
            if (key < start) | (key + TILE > stop):
                silence(k_left.index(slot), key, start, stop)
            hand_over(weights, rescale, handed, weights_shared, factors_shared, weighed, taken)
            acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, VALUES))[:, None]
            acc = warpgroup_mma(weights_shared, k_left.index(slot), acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
            tl.debug_barrier()
            mbarrier.arrive(left_free.index(slot))
            handed += 1
            loaded += 1

        empty = total == 0.0
        log2 = gl.where(empty, float("-inf"), peak + gl.log2(total))
        factor = 1.0 / gl.where(empty, 1.0, total)
        mbarrier.wait(taken, handed % 2 ^ 1)
        factors_shared.store(factor)
        tl.debug_barrier()
        mbarrier.arrive(weighed)
        handed += 1
        acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, VALUES))[:, None]
        _store_rows(
            acc, 0, tile_m, begin, end, item_begin, item_end, run, out + b * out_b, out_t, out_h, part,
            T, GROUP, R, ROWS, TILES_M,
        )  # fmt: skip
        if (item_begin >= begin) & (item_end <= end):
            gl.store(lse + b * lse_b + t * lse_t + (row % GROUP) * lse_h, log2 * 0.6931471805599453, mask=t < T)
        else:
            gl.store(part_lse + slot_of(begin, item_begin, run, TILES_M) * ROWS + row, log2, mask=row < ROWS)
        at = gl.minimum(end, item_end)
    if EARLY:
        gdc_wait()  # those without items, too


@gluon.jit
def _right(
    strides, bounds, k_right, right_ready, right_free, handing, out, part,
    T: gl.constexpr, GROUP: gl.constexpr, R: gl.constexpr, ROWS: gl.constexpr,
    TILES_M: gl.constexpr, BLOCK_B: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Accumulates the right half, in a group of four warps."""
    _, _, _, out_b, out_t, out_h, _, _, _ = strides
    weights_shared, factors_shared, weighed, taken = handing
    schedule = schedule_of(bounds, TILES_M, T, BLOCK_B, EARLY)
    begin, end, run = schedule[7], schedule[8], schedule[9]
    tile_m = gl.program_id(0) % TILES_M
    loaded = 0
    handed = 0
    at = begin
    while at < end:
        i, _, start, stop, item_begin, item_end, first, last = item_at(at, schedule)
        if EARLY:
            gdc_wait()
        acc = gl.zeros([TILE, R // 2], gl.float32, layout=VALUES)
        for tile in range(first, last):
            slot = loaded % 2
            mbarrier.wait(right_ready.index(slot), loaded // 2 % 2)
            mbarrier.wait(weighed, handed % 2)
            rescale = factors_shared.load(gl.SliceLayout(1, VALUES))
            if (tile * TILE < start) | (tile * TILE + TILE > stop):
                silence(k_right.index(slot), tile * TILE, start, stop)
            acc = warpgroup_mma(weights_shared, k_right.index(slot), acc * rescale[:, None], is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
            tl.debug_barrier()
            mbarrier.arrive(taken)
            mbarrier.arrive(right_free.index(slot))
            loaded += 1
            handed += 1
        mbarrier.wait(weighed, handed % 2)
        factor = factors_shared.load(gl.SliceLayout(1, VALUES))
        tl.debug_barrier()
        mbarrier.arrive(taken)
        handed += 1
        _store_rows(
            acc * factor[:, None], R // 2, tile_m, begin, end, item_begin, item_end, run,
            out + i.to(gl.int64) * out_b, out_t, out_h, part, T, GROUP, R, ROWS, TILES_M,
        )  # fmt: skip
        at = gl.minimum(end, item_end)
    if EARLY:
        gdc_wait()  # those without items, too


@gluon.jit
def _mla_decode_sm90_kernel(
    latents, scales, ropes, q, block_table, lo, hi, out, lse, part, part_lse,
    page_stride, q_b, q_t, q_h, table_b, lo_b, lo_t, hi_b, hi_t, out_b, out_t, out_h, lse_b, lse_t, lse_h,
    scale_log2, page_rows, B, T: gl.constexpr, GROUP: gl.constexpr, R: gl.constexpr, P: gl.constexpr,
    PAGE: gl.constexpr, BLOCK_B: gl.constexpr, ROWS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    TILES_M: gl.constexpr = (T * GROUP + TILE - 1) // TILE
    H: gl.constexpr = R // 2
    dtype: gl.constexpr = q.dtype.element_ty
    queries = (
        gl.allocate_shared_memory(dtype, [TILE, H], SHARED),
        gl.allocate_shared_memory(dtype, [TILE, H], SHARED),
        gl.allocate_shared_memory(dtype, [TILE, P], SHARED),
    )
    keys = (
        gl.allocate_shared_memory(dtype, [2, TILE, H], SHARED),
        gl.allocate_shared_memory(dtype, [2, TILE, H], SHARED),
        gl.allocate_shared_memory(dtype, [2, TILE, P], SHARED),
    )
    weights = gl.allocate_shared_memory(dtype, [TILE, TILE], SHARED)
    factors = gl.allocate_shared_memory(gl.float32, [TILE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    left_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    right_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    left_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    right_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    weighed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(2):
        mbarrier.init(left_ready.index(s), count=1 if scales is None else 2)
        mbarrier.init(right_ready.index(s), count=1)
        mbarrier.init(left_free.index(s), count=1)
        mbarrier.init(right_free.index(s), count=1)
    mbarrier.init(weighed, count=1)
    mbarrier.init(taken, count=1)
    fence_async_shared()
    tl.debug_barrier()
    bounds = (lo, hi, lo_b, lo_t, hi_b, hi_t, B)
    strides = (q_b, q_t, q_h, out_b, out_t, out_h, lse_b, lse_t, lse_h)
    ready = (left_ready, right_ready)
    handing = (weights, factors, weighed, taken)
    gl.warp_specialize(
        [
            (
                _score_and_left,
                (
                    q, strides, lo, hi, scale_log2, bounds, queries, keys, ready, left_free, handing,
                    out, lse, part, part_lse, T, GROUP, R, ROWS, TILES_M, BLOCK_B, EARLY,
                ),
            ),
            (
                _right,
                (
                    strides, bounds, keys[1], right_ready, right_free, handing, out, part,
                    T, GROUP, R, ROWS, TILES_M, BLOCK_B, EARLY,
                ),
            ),
            (
                _load if scales is None else load_unpacked,
                (
                    latents, scales, page_stride, ropes, block_table, table_b, page_rows, bounds, keys, ready,
                    (left_free, right_free), R, P, PAGE, TILES_M, T, BLOCK_B, EARLY,
                ),
            ),
        ],
        [4, 1 if scales is None else 4],
        [240 if scales is None else 168, 24 if scales is None else 112],
    )  # fmt: skip
    # Not earlier: the successor's programs would take the room of this launch's that have not started yet.
    gdc_launch_dependents()


def launch(
    q: torch.Tensor,
    keys: PagedKeys,
    out: torch.Tensor,
    lse: torch.Tensor,
    programs: int,
    early: bool,
    lane: int,
) -> UnmergedAttention:
    """Runs `kernels.mla.decode.mla_decode` up to the merge, for tensors that fit."""
    B, T, Hq, width = q.shape
    table, lo, hi, latent = keys.table, keys.lo, keys.hi, keys.v.shape[-1]
    page_rows, latents, ropes = pieces(keys)
    tiles_m = triton.cdiv(T * Hq, TILE.value)
    runs = max(1, programs // tiles_m)
    rows = min(tiles_m * TILE.value, triton.next_power_of_2(T * Hq))
    part, part_lse = workspace(q.device, q.dtype, runs, rows, latent, lane)
    _mla_decode_sm90_kernel[(runs * tiles_m,)](
        latents, keys.k_scale, ropes, q, table, lo, hi, out, lse, part, part_lse,
        0 if keys.rope is None else latents.stride(0), *q.stride()[:3], table.stride(0), *lo.stride(), *hi.stride(),
        *out.stride()[:3], *lse.stride(), keys.scale * math.log2(math.e), page_rows, B,
        T=T, GROUP=Hq, R=latent, P=width - latent, PAGE=keys.page_size,
        # At least a warp of sequences: the compiler then knows that a sum over a warp is equal in all its threads.
        BLOCK_B=max(32, triton.next_power_of_2(B)), ROWS=rows, EARLY=early, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return UnmergedAttention(out, lse, lo, hi, None, part, part_lse, runs, 1, tiles_m * TILE.value, TILE.value)
