"""Hopper variant of `kernels.mla.decode` for up to 32 query rows: keys are wgmma rows, queries columns.

Bound by reading keys. Two tiles of keys fit: one warpgroup computes with one while the other loads, and issues the next
load as soon as it is done. A second warpgroup loads and dequantizes e4m3 latents.
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

from kernels.attention.schedule_sm90 import TILE, block_of, item_at, of, schedule_of, slot_of
from kernels.attention.split_kv import UnmergedAttention, workspace
from kernels.mla.decode_common_sm90 import (
    collecting_of,
    key_scores_of,
    pieces,
    score_args,
    score_page_of,
    store_scores,
)
from kernels.mla.unpack_sm90 import load_unpacked
from kernels.paged_keys import KeyScores, PagedKeys
from kernels.sm90 import COPIED, SHARED, zero_dead_keys

MAX_ROWS = 32
# Layout of stored accumulators: eight elements of a row per thread, two threads per 32-byte sector.
_LANES, _WARPS = [[8, 0], [0, 1], [0, 2], [0, 4], [0, 8]], [[16, 0], [32, 0]]
_EACH = [[1, 0], [2, 0], [4, 0], [64, 0], [128, 0]]
STORED_16 = gl.constexpr(gl.DistributedLinearLayout(_EACH, _LANES, _WARPS, [], [256, 16]))
STORED_32 = gl.constexpr(gl.DistributedLinearLayout([*_EACH, [0, 16]], _LANES, _WARPS, [], [256, 32]))


@gluon.jit
def _seek(at, schedule, block_table, table_b):
    """Finds the item of tile `at`: pages, tile range end, key tile minus line tile, whether it has keys."""
    i, _, start, stop, _, item_end, first, _ = item_at(at, schedule)
    return block_table + i.to(gl.int64) * table_b, item_end, first - at, stop > start


@gluon.jit
def _page_of(at, end, item, PAGE: gl.constexpr):
    pages, _, ahead, live = item
    return gl.load(pages + (at + ahead) * TILE // PAGE, mask=(at < end) & live, other=-1)


@gluon.jit
def _ask(
    at, item, page, schedule, block_table, table_b, page_rows, latents, ropes, keys, ready,
    R: gl.constexpr, P: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Starts the load of tile `at`, which is in `page`; returns the item and page of the next tile."""
    k_left, k_right, k_rope = keys
    left_ready, right_ready = ready
    begin, end = schedule[7], schedule[8]
    _, item_end, ahead, _ = item
    # A tile without keys loads from before the first slot: out of bounds, hence zeros.
    row = gl.where(page >= 0, page * page_rows + (at + ahead) * TILE % PAGE, -TILE)
    if (at + 1 >= item_end) & (at + 1 < end):
        item = _seek(at + 1, schedule, block_table, table_b)
    # After the page's last use: if both were live, the compiler would copy one, which waits for the load.
    page = _page_of(at + 1, end, item, PAGE)
    slot = (at - begin) % 2
    inside = at < end
    mbarrier.expect(left_ready.index(slot), TILE * (R // 2 + P) * 2, pred=inside)
    tma.async_copy_global_to_shared(ropes, [row, R], left_ready.index(slot), k_rope.index(slot), pred=inside)
    tma.async_copy_global_to_shared(latents, [row, 0], left_ready.index(slot), k_left.index(slot), pred=inside)
    mbarrier.expect(right_ready.index(slot), TILE * (R // 2) * 2, pred=inside)
    tma.async_copy_global_to_shared(latents, [row, R // 2], right_ready.index(slot), k_right.index(slot), pred=inside)
    return item, page


@gluon.jit
def _load_queries(q_left, q_right, q_rope, q, q_t, q_h, T: gl.constexpr, GROUP: gl.constexpr):
    """Copies a sequence's query rows, padded with zeros; issues all loads before the first store."""
    H: gl.constexpr = q_left.shape[1]
    r = gl.arange(0, q_left.shape[0], layout=gl.SliceLayout(1, COPIED))
    c = gl.arange(0, H, layout=gl.SliceLayout(0, COPIED))
    p = gl.arange(0, q_rope.shape[1], layout=gl.SliceLayout(0, COPIED))
    rows = (q + (r // GROUP) * q_t + (r % GROUP) * q_h)[:, None]
    live = (r < T * GROUP)[:, None]
    left = gl.load(rows + c[None, :], mask=live, other=0.0)
    right = gl.load(rows + (H + c)[None, :], mask=live, other=0.0)
    rope = gl.load(rows + (2 * H + p)[None, :], mask=live, other=0.0)
    q_left.store(left)
    q_right.store(right)
    q_rope.store(rope)
    fence_async_shared()
    tl.debug_barrier()


@gluon.jit
def _store_half(
    acc, column: gl.constexpr, begin, end, item_begin, item_end, run, out, out_t, out_h, part,
    T: gl.constexpr, GROUP: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """Writes latents from `column` on of the run's share of an item: to `out` if the run covers it, else to a part."""
    L: gl.constexpr = STORED_32 if acc.shape[1] == 32 else STORED_16
    values = gl.convert_layout(acc.to(out.dtype.element_ty), L)
    d = column + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, L))
    r = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, L))
    if (item_begin >= begin) & (item_end <= end):
        rows = out + (r // GROUP) * out_t + (r % GROUP) * out_h
        gl.store(rows[None, :] + d[:, None], values, mask=(r < T * GROUP)[None, :])
    else:
        here = slot_of(begin, item_begin, run, 1) * acc.shape[1] + r
        gl.store(part + here[None, :] * R + d[:, None], values)


@gluon.jit
def _attend(
    latents, scales, ropes, q, block_table, table_b, page_rows, scale_log2, bounds, strides, queries, keys,
    weights_shared, ready, free, out, lse, part, part_lse, scoring,
    T: gl.constexpr, GROUP: gl.constexpr, R: gl.constexpr, P: gl.constexpr, PAGE: gl.constexpr,
    BLOCK_B: gl.constexpr, ROWS: gl.constexpr, COLLECT: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup, which also requests tiles; with scales, `load_unpacked` loads those that have keys."""
    H: gl.constexpr = R // 2
    dtype: gl.constexpr = q.dtype.element_ty
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    lo, hi, lo_b, lo_t, hi_b, hi_t, _ = bounds
    q_b, q_t, q_h, out_b, out_t, out_h, lse_b, lse_t, lse_h = strides
    q_left, q_right, q_rope = queries
    k_left, k_right, k_rope = keys
    left_ready, right_ready = ready
    schedule = schedule_of(bounds, 1, T, BLOCK_B, EARLY)
    begin, end, run = schedule[7], schedule[8], schedule[9]
    if scales is None:
        asked_item = _seek(begin, schedule, block_table, table_b)
        page = _page_of(begin, end, asked_item, PAGE)
        if EARLY:
            if page >= -1:  # always true; keeps the compiler from moving the wait above the loads
                gdc_wait()
        for n in gl.static_range(2):
            asked_item, page = _ask(
                begin + n, asked_item, page, schedule, block_table, table_b, page_rows, latents, ropes, keys, ready,
                R, P, PAGE,
            )  # fmt: skip
    elif EARLY:
        gdc_wait()
    passed = begin  # tiles without keys are not loaded with scales, and count as passed
    at = begin
    while at < end:
        i, _, start, stop, item_begin, item_end, first, last = item_at(at, schedule)
        full_from, full_to = of(schedule[3], schedule[0], i), of(schedule[4], schedule[0], i)
        b = i.to(gl.int64)

        # One row per query token and head: all heads read the same keys.
        r = gl.arange(0, ROWS, layout=gl.SliceLayout(0, PRODUCT))
        t = r // GROUP
        row_lo = gl.load(lo + b * lo_b + t * lo_t, mask=t < T, other=0)
        row_hi = gl.load(hi + b * hi_b + t * hi_t, mask=t < T, other=0)
        _load_queries(q_left, q_right, q_rope, q + b * q_b, q_t, q_h, T, GROUP)
        left = gl.zeros([H, ROWS], gl.float32, layout=PRODUCT)
        right = gl.zeros([H, ROWS], gl.float32, layout=PRODUCT)
        scores = gl.zeros([TILE, ROWS], gl.float32, layout=PRODUCT)
        totals = gl.zeros([TILE, ROWS], gl.float32, layout=PRODUCT)  # per key modulo 64, summed at the end
        # Finite: -inf minus -inf would be NaN.
        peak = gl.full([ROWS], -1.0e38, gl.float32, layout=gl.SliceLayout(0, PRODUCT))
        collecting = None
        if COLLECT is not None:
            collecting = collecting_of(scoring, bounds, b, t, 0, 1.0 / (T * GROUP), T, COLLECT)
        ahead = first - at
        item_stop = gl.minimum(end, item_end)
        until = item_stop if scales is None else at + last - first
        for now in range(at, until):
            key = (now + ahead) * TILE
            slot = (now - passed) % 2
            phase = (now - passed) // 2 % 2
            score_page = score_page_of(now + ahead, collecting, PAGE, COLLECT)
            mbarrier.wait(left_ready.index(slot), phase)
            scores = warpgroup_mma(k_rope.index(slot), q_rope.permute((1, 0)), scores, use_acc=False, is_async=True)
            scores = warpgroup_mma(k_left.index(slot), q_left.permute((1, 0)), scores, is_async=True)
            mbarrier.wait(right_ready.index(slot), phase)
            scores = warpgroup_mma(k_right.index(slot), q_right.permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma_wait(num_outstanding=0, deps=[scores]) * scale_log2
            found = 0.0
            if COLLECT is not None:
                found = key_scores_of(scores, collecting, 1, COLLECT)
            if (key < full_from) | (key + TILE > full_to):
                k = key + gl.arange(0, TILE, layout=gl.SliceLayout(1, PRODUCT))
                reads = (k[:, None] >= row_lo[None, :]) & (k[:, None] < row_hi[None, :])
                scores = gl.where(reads, scores, float("-inf"))
                zero_dead_keys(k_left.index(slot), key, start, stop)
                zero_dead_keys(k_right.index(slot), key, start, stop)
            new_peak = gl.maximum(peak, gl.max(scores, 0))
            rescale = gl.exp2(peak - new_peak)[None, :]
            weights = gl.exp2(scores - new_peak[None, :])
            totals = totals * rescale + weights
            peak = new_peak
            weights_shared.permute((1, 0)).store(weights.to(dtype))
            fence_async_shared()
            tl.debug_barrier()
            weights_ready = weights_shared.permute((1, 0))
            left = warpgroup_mma(k_left.index(slot).permute((1, 0)), weights_ready, left * rescale, is_async=True)
            right = warpgroup_mma(k_right.index(slot).permute((1, 0)), weights_ready, right * rescale, is_async=True)
            if COLLECT is not None:  # overlaps with the matmuls
                store_scores(found, key, start, stop, score_page, collecting, PAGE)
            left, right = warpgroup_mma_wait(num_outstanding=0, deps=[left, right])
            tl.debug_barrier()
            if scales is None:
                asked_item, page = _ask(
                    now + 2, asked_item, page, schedule, block_table, table_b, page_rows, latents, ropes, keys, ready,
                    R, P, PAGE,
                )  # fmt: skip
            else:
                mbarrier.arrive(free.index(slot))
        passed += item_stop - until

        total = gl.sum(totals, 0)
        empty = total == 0.0
        log2 = gl.where(empty, float("-inf"), peak + gl.log2(total))
        factor = (1.0 / gl.where(empty, 1.0, total))[None, :]
        _store_half(
            left * factor, 0, begin, end, item_begin, item_end, run, out + b * out_b, out_t, out_h, part, T, GROUP, R
        )
        _store_half(
            right * factor, H, begin, end, item_begin, item_end, run, out + b * out_b, out_t, out_h, part, T, GROUP, R
        )
        if (item_begin >= begin) & (item_end <= end):
            gl.store(lse + b * lse_b + t * lse_t + (r % GROUP) * lse_h, log2 * 0.6931471805599453, mask=t < T)
        else:
            gl.store(part_lse + slot_of(begin, item_begin, run, 1) * ROWS + r, log2)
        at = item_stop


@gluon.jit
def _mla_decode_few_sm90_kernel(
    latents, scales, ropes, q, block_table, lo, hi, out, lse, part, part_lse,
    page_stride, q_b, q_t, q_h, table_b, lo_b, lo_t, hi_b, hi_t, out_b, out_t, out_h, lse_b, lse_t, lse_h,
    key_scores, score_table, score_plane, score_page, score_table_b,
    scale_log2, page_rows, B, T: gl.constexpr, GROUP: gl.constexpr, R: gl.constexpr, P: gl.constexpr,
    PAGE: gl.constexpr, BLOCK_B: gl.constexpr, ROWS: gl.constexpr, COLLECT: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    H: gl.constexpr = R // 2
    dtype: gl.constexpr = q.dtype.element_ty
    q_left = gl.allocate_shared_memory(dtype, [ROWS, H], SHARED)
    q_right = gl.allocate_shared_memory(dtype, [ROWS, H], SHARED)
    q_rope = gl.allocate_shared_memory(dtype, [ROWS, P], SHARED)
    k_left = gl.allocate_shared_memory(dtype, [2, TILE, H], SHARED)
    k_right = gl.allocate_shared_memory(dtype, [2, TILE, H], SHARED)
    k_rope = gl.allocate_shared_memory(dtype, [2, TILE, P], SHARED)
    weights_shared = gl.allocate_shared_memory(dtype, [ROWS, TILE], SHARED)
    left_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    right_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(2):
        mbarrier.init(left_ready.index(s), count=1 if scales is None else 2)
        mbarrier.init(right_ready.index(s), count=1)
        if scales is not None:
            mbarrier.init(free.index(s), count=1)
    fence_async_shared()
    tl.debug_barrier()
    queries = (q_left, q_right, q_rope)
    keys = (k_left, k_right, k_rope)
    ready = (left_ready, right_ready)
    bounds = (lo, hi, lo_b, lo_t, hi_b, hi_t, B)
    strides = (q_b, q_t, q_h, out_b, out_t, out_h, lse_b, lse_t, lse_h)
    scoring = (key_scores, score_table, score_plane, score_page, score_table_b)
    if scales is None:
        _attend(
            latents, scales, ropes, q, block_table, table_b, page_rows, scale_log2, bounds, strides, queries, keys,
            weights_shared, ready, free, out, lse, part, part_lse, scoring, T, GROUP, R, P, PAGE, BLOCK_B, ROWS,
            COLLECT, EARLY,
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _attend,
                    (
                        latents, scales, ropes, q, block_table, table_b, page_rows, scale_log2, bounds, strides,
                        queries, keys, weights_shared, ready, free, out, lse, part, part_lse, scoring,
                        T, GROUP, R, P, PAGE, BLOCK_B, ROWS, COLLECT, EARLY,
                    ),
                ),
                (
                    load_unpacked,
                    (
                        latents, scales, page_stride, ropes, block_table, table_b, page_rows, bounds, keys, ready,
                        (free, free), R, P, PAGE, 1, T, BLOCK_B, EARLY,
                    ),
                ),
            ],
            [4],
            [208],
        )  # fmt: skip
    # At the end: starting the merge early, like flash_decode, gained nothing here (benchmarks/LOG.md).
    gdc_launch_dependents()


def launch(
    q: torch.Tensor,
    keys: PagedKeys,
    out: torch.Tensor,
    lse: torch.Tensor,
    programs: int,
    early: bool,
    scores: KeyScores | None,
    lane: int,
) -> UnmergedAttention:
    """Runs `kernels.mla.decode.mla_decode` up to the merge; requires `decode_common_sm90.fits`, MAX_ROWS rows."""
    B, T, Hq, width = q.shape
    table, lo, hi, latent = keys.table, keys.lo, keys.hi, keys.v.shape[-1]
    page_rows, latents, ropes = pieces(keys)
    rows = max(16, triton.next_power_of_2(T * Hq))  # the fewest that give all threads 16-byte accesses
    part, part_lse = workspace(q.device, q.dtype, programs, rows, latent, lane)
    _mla_decode_few_sm90_kernel[(programs,)](
        latents, keys.k_scale, ropes, q, table, lo, hi, out, lse, part, part_lse,
        0 if keys.rope is None else latents.stride(0), *q.stride()[:3], table.stride(0), *lo.stride(), *hi.stride(),
        *out.stride()[:3], *lse.stride(), *score_args(scores), keys.scale * math.log2(math.e), page_rows, B,
        T=T, GROUP=Hq, R=latent, P=width - latent, PAGE=keys.page_size,
        BLOCK_B=block_of(B), ROWS=rows, COLLECT=None if scores is None else scores.rows, EARLY=early,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return UnmergedAttention(out, lse, lo, hi, None, part, part_lse, programs, 1, rows, TILE.value)
