"""Hopper variant of `kernels.mla.decode` for more than 32 query rows (tokens x heads), warp-specialized.

Here matmuls take longer than loads. A program is three groups of warps that synchronize through mbarriers:

* one warp loads tiles of 64 keys, piece by piece; for e4m3 latents, a warpgroup loads and dequantizes;
* one warpgroup scores a tile, computes the softmax, and accumulates the left half of the output;
* one warpgroup accumulates the right half, with the weights that the other stores in shared memory.

Two tiles fit: a piece is refilled as soon as the matmuls that read it as values are done. Row tiles of one run are
neighboring programs, and share keys in L2.
"""

from __future__ import annotations

import math

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.attention.schedule_sm90 import TILE, block_of, item_at, of, schedule_of, slot_of
from kernels.attention.split_kv import UnmergedAttention, workspace
from kernels.mla.decode_common_sm90 import collecting_of, pieces, score_args
from kernels.mla.many_rows_sm90 import SCORES, STORED, allocate_shared, attend_left, attend_right, load_queries
from kernels.mla.unpack_sm90 import load_unpacked
from kernels.paged_keys import KeyScores, PagedKeys
from kernels.sm90 import COPIED


@gluon.jit
def _load(
    latents, scales, page_stride, ropes, block_table, table_b, page_rows, bounds, keys, ready, free,
    R: gl.constexpr, P: gl.constexpr, PAGE: gl.constexpr,
    TILES_M: gl.constexpr, T: gl.constexpr, BLOCK_B: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Producer warp: fills the two stages piece by piece (`load_unpacked` if there are scales)."""
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
            if page >= 0:  # always true; keeps the compiler from moving the wait above the load
                gdc_wait()
        for tile in range(first, last):
            row = page * page_rows + tile * TILE % PAGE
            # One iteration ahead, so that the page index has arrived when its tile is loaded.
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
        gdc_wait()  # also in programs without items


@gluon.jit
def _store_rows(
    acc, column: gl.constexpr, tile_m, begin, end, item_begin, item_end, run, out, out_t, out_h, part,
    T: gl.constexpr, GROUP: gl.constexpr, R: gl.constexpr, ROWS: gl.constexpr, TILES_M: gl.constexpr,
):  # fmt: skip
    """Writes columns from `column` on of the run's share of an item: to `out` if the run covers it, else to a part."""
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
    q, strides, lo, hi, scale_log2, bounds, queries, keys, ready, left_free, handing, out, lse, part, part_lse, scoring,
    T: gl.constexpr, GROUP: gl.constexpr, R: gl.constexpr, ROWS: gl.constexpr, PAGE: gl.constexpr,
    TILES_M: gl.constexpr, BLOCK_B: gl.constexpr, COLLECT: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    q_b, q_t, q_h, out_b, out_t, out_h, lse_b, lse_t, lse_h = strides
    q_left, q_right, q_rope = queries
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
        collecting = None
        if COLLECT is not None:
            collecting = collecting_of(scoring, bounds, b, t, tile_m, scale_log2 / (T * GROUP), T, COLLECT)
        acc, log2, loaded, handed = attend_left(
            queries, keys, ready, left_free, handing, loaded, handed, first, last, start, stop,
            full_from, full_to, row_lo, row_hi, scale_log2, R, True,
            collecting, PAGE, COLLECT,
        )  # fmt: skip
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
        gdc_wait()  # also in programs without items


@gluon.jit
def _right(
    strides, bounds, k_right, right_ready, right_free, handing, out, part,
    T: gl.constexpr, GROUP: gl.constexpr, R: gl.constexpr, ROWS: gl.constexpr,
    TILES_M: gl.constexpr, BLOCK_B: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    _, _, _, out_b, out_t, out_h, _, _, _ = strides
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
        acc, loaded, handed = attend_right(
            k_right, right_ready, right_free, handing, loaded, handed, first, last, start, stop, R, ZERO_DEAD_KEYS=True
        )  # fmt: skip
        _store_rows(
            acc, R // 2, tile_m, begin, end, item_begin, item_end, run,
            out + i.to(gl.int64) * out_b, out_t, out_h, part, T, GROUP, R, ROWS, TILES_M,
        )  # fmt: skip
        at = gl.minimum(end, item_end)
    if EARLY:
        gdc_wait()  # also in programs without items


@gluon.jit
def _mla_decode_sm90_kernel(
    latents, scales, ropes, q, block_table, lo, hi, out, lse, part, part_lse,
    page_stride, q_b, q_t, q_h, table_b, lo_b, lo_t, hi_b, hi_t, out_b, out_t, out_h, lse_b, lse_t, lse_h,
    key_scores, score_table, score_plane, score_page, score_table_b,
    scale_log2, page_rows, B, T: gl.constexpr, GROUP: gl.constexpr, R: gl.constexpr, P: gl.constexpr,
    PAGE: gl.constexpr, BLOCK_B: gl.constexpr, ROWS: gl.constexpr, COLLECT: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    TILES_M: gl.constexpr = (T * GROUP + TILE - 1) // TILE
    queries, keys, ready, free, handing = allocate_shared(q.dtype.element_ty, R, P, 1 if scales is None else 2)
    bounds = (lo, hi, lo_b, lo_t, hi_b, hi_t, B)
    strides = (q_b, q_t, q_h, out_b, out_t, out_h, lse_b, lse_t, lse_h)
    gl.warp_specialize(
        [
            (
                _score_and_left,
                (
                    q, strides, lo, hi, scale_log2, bounds, queries, keys, ready, free[0], handing,
                    out, lse, part, part_lse, (key_scores, score_table, score_plane, score_page, score_table_b),
                    T, GROUP, R, ROWS, PAGE, TILES_M, BLOCK_B, COLLECT, EARLY,
                ),
            ),
            (
                _right,
                (
                    strides, bounds, keys[1], ready[1], free[1], handing, out, part,
                    T, GROUP, R, ROWS, TILES_M, BLOCK_B, EARLY,
                ),
            ),
            (
                _load if scales is None else load_unpacked,
                (
                    latents, scales, page_stride, ropes, block_table, table_b, page_rows, bounds, keys, ready,
                    free, R, P, PAGE, TILES_M, T, BLOCK_B, EARLY,
                ),
            ),
        ],
        [4, 1 if scales is None else 4],
        [240 if scales is None else 168, 24 if scales is None else 112],
    )  # fmt: skip
    # Not earlier: the successor's programs would take the SMs of this launch's programs that have not started yet.
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
    """Runs `kernels.mla.decode.mla_decode` up to the merge; requires `decode_common_sm90.fits`."""
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
        *out.stride()[:3], *lse.stride(), *score_args(scores), keys.scale * math.log2(math.e), page_rows, B,
        T=T, GROUP=Hq, R=latent, P=width - latent, PAGE=keys.page_size,
        BLOCK_B=block_of(B), ROWS=rows, COLLECT=None if scores is None else scores.rows, EARLY=early,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return UnmergedAttention(out, lse, lo, hi, None, part, part_lse, runs, 1, tiles_m * TILE.value, TILE.value)
