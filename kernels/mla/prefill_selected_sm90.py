"""Hopper variant of `kernels.mla.prefill` for sparse prefill: each query reads its own tokens, selected by an indexer.

A program processes up to 64 heads of one query after another, with warps as in `kernels.mla.decode_many_rows_sm90`,
except that a producer warpgroup gathers the tokens of a tile in 16-byte copies. It starts the next query while the
others finish the previous one.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from kernels.attention.schedule_sm90 import TILE
from kernels.mla.many_rows_sm90 import SCORES, STORED, allocate_shared, attend_left, attend_right, load_queries
from kernels.overlap import sm_count
from kernels.paged_keys import PagedKeys
from kernels.sm90 import COPIED

MIN_HEADS = 33  # fewer fill half a tile


@gluon.jit
def _range(lo, hi, n):
    start = gl.load(lo + n)
    stop = gl.maximum(gl.load(hi + n), start)
    return start, stop, start // TILE, gl.where(stop > start, (stop + TILE - 1) // TILE, start // TILE)


@gluon.jit
def _gather(
    cache, table, table_n, lo, hi, keys, ready, free, items, R: gl.constexpr, P: gl.constexpr, TILES_M: gl.constexpr
):  # fmt: skip
    """Producer warpgroup: gathers the tokens of each query's tiles, half by half; dead keys are zeros."""
    k_left, k_right, k_rope = keys
    left_ready, right_ready = ready
    left_free, right_free = free
    lane = gl.arange(0, TILE, layout=gl.SliceLayout(1, COPIED))
    c = gl.arange(0, 64, layout=gl.SliceLayout(0, COPIED))
    loaded = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        n = item // TILES_M
        start, stop, first, last = _range(lo, hi, n)
        selected = table + n.to(gl.int64) * table_n
        key = first * TILE + lane
        live = (key >= start) & (key < stop)
        at = gl.load(selected + key, mask=live, other=0)
        for _ in range(first, last):
            rows = cache + (at.to(gl.int64) * (R + P))[:, None] + c[None, :]
            copied = live[:, None] & (c >= 0)[None, :]
            slot = loaded % 2
            phase = loaded // 2 % 2
            mbarrier.wait(left_free.index(slot), phase ^ 1)
            for k in gl.static_range(R // 128):
                to = k_left.index(slot).slice(k * 64, 64, dim=1)
                async_copy.async_copy_global_to_shared(to, rows + k * 64, mask=copied)
            async_copy.async_copy_global_to_shared(k_rope.index(slot), rows + R, mask=copied)
            async_copy.commit_group()
            mbarrier.wait(right_free.index(slot), phase ^ 1)
            for k in gl.static_range(R // 128):
                to = k_right.index(slot).slice(k * 64, 64, dim=1)
                async_copy.async_copy_global_to_shared(to, rows + (R // 2 + k * 64), mask=copied)
            async_copy.commit_group()
            # While the copies are in flight, so that the next tile's slots are ready when it begins.
            key += TILE
            live = key < stop
            at = gl.load(selected + key, mask=live, other=0)
            async_copy.wait_group(1)
            fence_async_shared()
            tl.debug_barrier()
            mbarrier.arrive(left_ready.index(slot))
            async_copy.wait_group(0)
            fence_async_shared()
            tl.debug_barrier()
            mbarrier.arrive(right_ready.index(slot))
            loaded += 1


@gluon.jit
def _store_half(acc, column: gl.constexpr, tile_m, out, out_h, GROUP: gl.constexpr):
    values = gl.convert_layout(acc.to(out.dtype.element_ty), STORED)
    m = tile_m * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, STORED))
    d = column + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, STORED))
    gl.store(out + (m * out_h)[:, None] + d[None, :], values, mask=(m < GROUP)[:, None])


@gluon.jit
def _score_and_left(
    q, strides, lo, hi, scale_log2, queries, keys, ready, left_free, handing, out, lse, items,
    GROUP: gl.constexpr, R: gl.constexpr, TILES_M: gl.constexpr,
):  # fmt: skip
    q_n, q_h, out_n, out_h, lse_n, lse_h = strides
    q_left, q_right, q_rope = queries
    loaded = 0
    handed = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        n = item // TILES_M
        tile_m = item % TILES_M
        start, stop, first, last = _range(lo, hi, n)
        at = n.to(gl.int64)
        m = tile_m * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, COPIED))
        load_queries(q_left, q_right, q_rope, q + at * q_n + m * q_h, m < GROUP, R)

        row = tile_m * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, SCORES))
        row_lo = start + row * 0
        row_hi = stop + row * 0
        acc, log2, loaded, handed = attend_left(
            queries, keys, ready, left_free, handing, loaded, handed, first, last, start, stop,
            start, stop, row_lo, row_hi, scale_log2, R, ZERO_DEAD_KEYS=False,
        )  # fmt: skip
        _store_half(acc, 0, tile_m, out + at * out_n, out_h, GROUP)
        gl.store(lse + at * lse_n + row * lse_h, log2 * 0.6931471805599453, mask=row < GROUP)


@gluon.jit
def _right(
    out_n, out_h, lo, hi, k_right, right_ready, right_free, handing, out, items,
    GROUP: gl.constexpr, R: gl.constexpr, TILES_M: gl.constexpr,
):  # fmt: skip
    loaded = 0
    handed = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        n = item // TILES_M
        start, stop, first, last = _range(lo, hi, n)
        acc, loaded, handed = attend_right(
            k_right, right_ready, right_free, handing, loaded, handed, first, last, start, stop, R, ZERO_DEAD_KEYS=False
        )  # fmt: skip
        _store_half(acc, R // 2, item % TILES_M, out + n.to(gl.int64) * out_n, out_h, GROUP)


@gluon.jit(do_not_specialize=["items"])  # changes from chunk to chunk
def _mla_prefill_selected_kernel(
    q, cache, table, lo, hi, out, lse, q_n, q_h, table_n, out_n, out_h, lse_n, lse_h, items, scale_log2,
    GROUP: gl.constexpr, R: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    TILES_M: gl.constexpr = (GROUP + TILE - 1) // TILE
    queries, keys, ready, free, handing = allocate_shared(q.dtype.element_ty, R, P, 1)
    strides = (q_n, q_h, out_n, out_h, lse_n, lse_h)
    gl.warp_specialize(
        [
            (
                _score_and_left,
                (
                    q, strides, lo, hi, scale_log2, queries, keys, ready, free[0], handing, out, lse, items,
                    GROUP, R, TILES_M,
                ),
            ),
            (_right, (out_n, out_h, lo, hi, keys[1], ready[1], free[1], handing, out, items, GROUP, R, TILES_M)),
            (_gather, (cache, table, table_n, lo, hi, keys, ready, free, items, R, P, TILES_M)),
        ],
        [4, 4],
        [168, 112],
    )  # fmt: skip


def fits(q: torch.Tensor, keys: PagedKeys, segments: int) -> bool:
    """Returns whether `launch` supports these arguments of `kernels.mla.prefill` and is faster."""
    N, Hq, width = q.shape
    return (
        keys.page_size == 1
        and segments == N  # one query each
        and N * triton.cdiv(Hq, TILE.value) >= sm_count(q.device) // 2
        and Hq >= MIN_HEADS
        and keys.rope is None
        and (keys.v.shape[-1], width) == (512, 576)
        and q.dtype in (torch.bfloat16, torch.float16)
        and keys.k.stride(0) == width
        and keys.k.data_ptr() % 16 == 0
        and torch.cuda.get_device_capability(q.device)[0] == 9
    )


def launch(q: torch.Tensor, keys: PagedKeys, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Runs `kernels.mla.prefill.mla_prefill`; requires `fits`.

    Source:
        DeepSeek-V3.2 (arXiv:2512.02556), section 2.1.
    """
    N, Hq, width = q.shape
    items = N * triton.cdiv(Hq, TILE.value)
    _mla_prefill_selected_kernel[(min(items, sm_count(q.device)),)](
        q, keys.k, keys.table, keys.lo, keys.hi, out, lse,
        *q.stride()[:2], keys.table.stride(0), *out.stride()[:2], *lse.stride(), items,
        keys.scale * math.log2(math.e), GROUP=Hq, R=keys.v.shape[-1], P=width - keys.v.shape[-1], num_warps=4,
    )  # fmt: skip
