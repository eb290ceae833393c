"""Hopper variant of `kernels.attention.flash_prefill` for long chunks: warp-specialized TMA and WGMMA.

A program attends 128 rows (query tokens x heads of a KV head):

* one warp loads pairs of tiles: the keys of a tile with the values of the previous one, which are needed together;
* two warpgroups attend 64 rows each, at their own pace.

A warpgroup issues both matmuls of a pair at once, and computes the softmax of the new scores while the previous tile's
values are still being accumulated; tensor cores it leaves idle serve the other warpgroup.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention.paged_tiles import with_sink
from kernels.attention.split_prefill import attend_split, locate_tile, tiles_of_rows, tiles_of_split
from kernels.paged_keys import PagedKeys
from kernels.sm90 import COPIED, SHARED, add, next_stage, pair_barriers, zero_dead_keys

ROWS = gl.constexpr(64)  # per warpgroup
PIECE = gl.constexpr(64)  # keys per load, within one page
SHAPES = {128: {"KEYS": 128, "STAGES": 3}, 256: {"KEYS": 64, "STAGES": 2}}  # by head dim: keys per tile, pairs held
# Min rows (queries x heads) and keys, or keys alone. Smaller sizes are faster with one warpgroup per program, several
# programs per SM: one starts while another ends.
MIN_ROWS, MIN_KEYS_MANY_ROWS = 24 << 10, 1536
MIN_KEYS = 16 << 10


@gluon.jit
def _page(pages, tile, piece: gl.constexpr, start, stop, last, KEYS: gl.constexpr, PAGE: gl.constexpr):
    """Loads the page index of a piece of a tile; outside [start, stop), that of the nearest key inside."""
    key = gl.minimum(gl.maximum(tile * KEYS + piece * PIECE, start), stop - 1)
    return gl.load(pages + key // PAGE, mask=tile < last, other=0)


@gluon.jit
def _copy(cache, to, ready, tile, page_0, page_1, head, KEYS: gl.constexpr, PAGE: gl.constexpr):
    page_rows, head_row, column = head
    row_0 = page_0 * page_rows + head_row + tile * KEYS % PAGE
    tma.async_copy_global_to_shared(cache, [row_0, column], ready, to.slice(0, PIECE))
    if KEYS > PIECE:
        row_1 = page_1 * page_rows + head_row + (tile * KEYS + PIECE) % PAGE
        tma.async_copy_global_to_shared(cache, [row_1, column], ready, to.slice(PIECE, PIECE))


@gluon.jit
def _load(
    keys, values, pages, head, tiles, pairs,
    KEYS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Producer warp: pair i is the keys of tile i and the values of tile i - 1.

    `head` holds the rows per page, and the head's first row and column in them.
    """
    start, stop, _, _, first, last = tiles
    k_parts, v_shared, ready, free = pairs
    k_shared = k_parts[0]
    BYTES: gl.constexpr = KEYS * D * 2
    if first < last:
        page_0 = _page(pages, first, 0, start, stop, last, KEYS, PAGE)
        page_1 = _page(pages, first, 1, start, stop, last, KEYS, PAGE)
        mbarrier.expect(ready.index(0), BYTES)
        _copy(keys, k_shared.index(0), ready.index(0), first, page_0, page_1, head, KEYS, PAGE)
        next_0 = _page(pages, first + 1, 0, start, stop, last, KEYS, PAGE)
        next_1 = _page(pages, first + 1, 1, start, stop, last, KEYS, PAGE)
        stage = 1
        phase = 1
        for tile in range(first + 1, last):
            # One iteration ahead, so that page indices have arrived when their tile is loaded.
            ahead_0 = _page(pages, tile + 1, 0, start, stop, last, KEYS, PAGE)
            ahead_1 = _page(pages, tile + 1, 1, start, stop, last, KEYS, PAGE)
            here = ready.index(stage)
            mbarrier.wait(free.index(stage), phase)
            mbarrier.expect(here, 2 * BYTES)
            _copy(keys, k_shared.index(stage), here, tile, next_0, next_1, head, KEYS, PAGE)
            _copy(values, v_shared.index(stage), here, tile - 1, page_0, page_1, head, KEYS, PAGE)
            page_0 = next_0
            page_1 = next_1
            next_0 = ahead_0
            next_1 = ahead_1
            stage, phase = next_stage(stage, phase, STAGES)
        mbarrier.wait(free.index(stage), phase)
        mbarrier.expect(ready.index(stage), BYTES)
        _copy(values, v_shared.index(stage), ready.index(stage), last - 1, page_0, page_1, head, KEYS, PAGE)


@gluon.jit
def _mask(scores, tile, full, full_stop, row_lo, row_hi):
    KEYS: gl.constexpr = scores.shape[1]
    if (tile < full) | (tile >= full_stop):
        key = tile * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, scores.type.layout))
        reads = (key[None, :] >= row_lo[:, None]) & (key[None, :] < row_hi[:, None])
        scores = gl.where(reads, scores, float("-inf"))
    return scores


@gluon.jit
def _products(q_parts, k_parts, stage, scores):
    for i in gl.static_range(len(q_parts)):
        keys = k_parts[i].index(stage).permute((1, 0))
        scores = warpgroup_mma(q_parts[i], keys, scores, use_acc=i > 0, is_async=True)
    return scores


@gluon.jit
def attend_rows(
    side: gl.constexpr, lo, hi, sinks, out, lse, strides, scale_log2, q_parts, pairs, chunk, tiles,
    KEYS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """Attends 64 rows over all tiles and stores output [.., D] and LSE; without `lo`, keys start at 0."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=PRODUCT, k_width=2)
    # A thread has the same rows in both layouts, so conversion moves no data.
    SCORE_LAYOUT: gl.constexpr = gl.SliceLayout(1, SCORES)
    PRODUCT_LAYOUT: gl.constexpr = gl.SliceLayout(1, PRODUCT)
    out_n, out_h, lse_n, lse_h = strides
    k_parts, v_shared, ready, free = pairs
    begin, length, row_0, head, split = chunk
    start, stop, full, full_stop, first, last = tiles
    dtype: gl.constexpr = out.dtype.element_ty
    row = row_0 + side * ROWS + gl.arange(0, ROWS, layout=SCORE_LAYOUT)
    live = row // GROUP < length
    n = (begin + row // GROUP).to(gl.int64)
    q_head = head * GROUP + row % GROUP
    row_hi = gl.load(hi + n, mask=live, other=0)
    row_lo = gl.zeros_like(row_hi)
    if lo is not None:
        row_lo = gl.load(lo + n, mask=live, other=0)
    acc = gl.zeros([ROWS, D], gl.float32, layout=PRODUCT)
    total = gl.zeros([ROWS], gl.float32, layout=SCORE_LAYOUT)
    # Finite: -inf minus -inf would be NaN.
    peak = gl.full([ROWS], -1.0e38, gl.float32, layout=SCORE_LAYOUT)
    if first < last:
        mbarrier.wait(ready.index(0), 0)
        scores = gl.zeros([ROWS, KEYS], gl.float32, layout=SCORES)
        scores = _products(q_parts, k_parts, 0, scores)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=[scores])
        tl.debug_barrier()
        mbarrier.arrive(free.index(0))
        scores = _mask(scores, first, full, full_stop, row_lo, row_hi)
        # Scale after the maximum, fused into the subtraction: one instruction per score.
        peak = gl.maximum(peak, gl.max(scores, 1) * scale_log2)
        weights = gl.exp2(scores * scale_log2 - peak[:, None])
        total = gl.sum(weights, 1)
        p = gl.convert_layout(weights.to(dtype), WEIGHTS)
        stage = 1
        phase = 0
        mbarrier.wait(ready.index(stage), phase)
        for tile in range(first + 1, last):
            if (tile - 1) * KEYS < start:
                zero_dead_keys(v_shared.index(stage), (tile - 1) * KEYS, start, stop)
            scores = _products(q_parts, k_parts, stage, scores)
            acc = warpgroup_mma(p, v_shared.index(stage), acc, is_async=True)
            scores = warpgroup_mma_wait(num_outstanding=1, deps=[scores])
            scores = _mask(scores, tile, full, full_stop, row_lo, row_hi)
            new_peak = gl.maximum(peak, gl.max(scores, 1) * scale_log2)
            rescale = gl.exp2(peak - new_peak)
            weights = gl.exp2(scores * scale_log2 - new_peak[:, None])
            total = total * rescale + gl.sum(weights, 1)
            peak = new_peak
            next_p = gl.convert_layout(weights.to(dtype), WEIGHTS)
            used = stage
            stage, phase = next_stage(stage, phase, STAGES)
            # Wait for the next pair here although only the next iteration needs it: ptxas hoists the wait for the
            # accumulators to the start of its basic block, above the softmax, and nothing would overlap. This wait is a
            # loop, which ends the block.
            mbarrier.wait(ready.index(stage), phase)
            # p too: the MMA reads its registers until it is done.
            acc, p = warpgroup_mma_wait(num_outstanding=0, deps=[acc, p])
            tl.debug_barrier()
            mbarrier.arrive(free.index(used))
            acc = acc * gl.convert_layout(rescale, PRODUCT_LAYOUT)[:, None]
            p = next_p
        if ((last - 1) * KEYS < start) | (last * KEYS > stop):
            zero_dead_keys(v_shared.index(stage), (last - 1) * KEYS, start, stop)
        acc = warpgroup_mma(p, v_shared.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])

    empty = total == 0.0
    log2 = gl.where(empty, float("-inf"), peak + gl.log2(total))
    factor = 1.0 / gl.where(empty, 1.0, total)
    if SINKS:
        if split == 0:  # a sink counts once
            log2, shrink = with_sink(log2, gl.load(sinks + q_head))
            factor = factor * shrink
    gl.store(lse + n * lse_n + q_head * lse_h, log2 * 0.6931471805599453, mask=live)
    d = gl.arange(0, D, layout=gl.SliceLayout(0, PRODUCT))
    rows = gl.convert_layout(out + n * out_n + q_head * out_h, PRODUCT_LAYOUT)
    live, factor = gl.convert_layout(live, PRODUCT_LAYOUT), gl.convert_layout(factor, PRODUCT_LAYOUT)
    gl.store(rows[:, None] + d[None, :], (acc * factor[:, None]).to(dtype), mask=live[:, None])


@gluon.jit
def tile_of_segment(cu_q, segments, tile, GROUP: gl.constexpr):
    """Finds the segment of a tile of 128 rows, like `kernels.attention.split_prefill.tile_of_segment`."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    segment = tile * 0
    before = tile * 0
    counted = tile * 0
    for at in range(0, segments, 128):
        s = at + gl.arange(0, 128, layout=LANES)
        begin = gl.load(cu_q + s, mask=s < segments, other=0)
        end = gl.load(cu_q + s + 1, mask=s < segments, other=0)
        ends = counted + gl.associative_scan(((end - begin) * GROUP + 2 * ROWS - 1) // (2 * ROWS), 0, add)
        segment += gl.sum((ends <= tile).to(gl.int32), 0)
        before = gl.maximum(before, gl.max(gl.where(ends <= tile, ends, 0), 0))
        counted = gl.max(ends, 0)
    return locate_tile(cu_q, segments, tile, segment, before)


@gluon.jit(do_not_specialize=["segments", "lse_s", "splits"])  # they change from chunk to chunk
def _flash_prefill_sm90_kernel(
    keys, values, q, block_table, cu_q, lo, hi, sinks, out, lse,
    segments, q_n, q_h, page_rows, head_rows, head_columns, table_i, out_s, out_n, out_h, lse_s, lse_n, lse_h,
    splits, scale_log2,
    KEYS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr,
    SINKS: gl.constexpr,
):  # fmt: skip
    # Start with the last queries: they read the most keys.
    tile = gl.num_programs(0) - 1 - gl.program_id(0)
    segment, tile_m, begin, length = tile_of_segment(cu_q, segments, tile, GROUP)
    row_0 = tile_m * 2 * ROWS
    head = gl.program_id(1)
    split = gl.program_id(2)
    if row_0 < length * GROUP:
        dtype: gl.constexpr = q.dtype.element_ty
        q_shared = gl.allocate_shared_memory(dtype, [2, ROWS, D], SHARED)
        k_shared = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], SHARED)
        v_shared = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], SHARED)
        ready, free = pair_barriers(STAGES)
        # Overlap the loads of bounds and queries.
        row = row_0 + gl.arange(0, 2 * ROWS, layout=gl.BlockedLayout([1], [32], [4], [0]))
        live = row // GROUP < length
        row_lo = gl.load(lo + begin + row // GROUP, mask=live, other=0)
        row_hi = gl.load(hi + begin + row // GROUP, mask=live, other=0)
        # One row per query token and head of the group: heads of a group read the same keys.
        c = gl.arange(0, 64, layout=gl.SliceLayout(0, COPIED))
        for side in gl.static_range(2):
            m = row_0 + side * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPIED))
            rows = q + (begin + m // GROUP).to(gl.int64) * q_n + (head * GROUP + m % GROUP) * q_h
            inside = (m // GROUP < length)[:, None]
            for k in gl.static_range(D // 64):
                x = gl.load(rows[:, None] + (k * 64 + c)[None, :], mask=inside, other=0.0)
                q_shared.index(side).slice(k * 64, 64, dim=1).store(x)
        fence_async_shared()
        reads = row_lo < row_hi
        stop = gl.max(gl.where(reads, row_hi, 0), 0)
        start = gl.min(gl.where(reads, row_lo, stop), 0)
        first, last = tiles_of_split(start // KEYS, (stop + KEYS - 1) // KEYS, split, splits)
        # Every row reads all keys of tiles [full, full_stop): no mask.
        full = (gl.max(gl.where(live, row_lo, 0), 0) + KEYS - 1) // KEYS
        full_stop = gl.min(gl.where(live, row_hi, stop), 0) // KEYS
        tl.debug_barrier()
        pairs = ((k_shared,), v_shared, ready, free)
        strides = (out_n, out_h, lse_n, lse_h)
        chunk = (begin, length, row_0, head, split)
        out += split.to(gl.int64) * out_s
        lse += split.to(gl.int64) * lse_s
        tiles = (start, stop, full, full_stop, first, last)
        rows_of_head = (page_rows, head * head_rows, head * head_columns)
        gl.warp_specialize(
            [
                (
                    attend_rows,
                    (
                        0, lo, hi, sinks, out, lse, strides, scale_log2, (q_shared.index(0),), pairs, chunk, tiles,
                        KEYS, D, STAGES, GROUP, SINKS,
                    ),
                ),
                (
                    attend_rows,
                    (
                        1, lo, hi, sinks, out, lse, strides, scale_log2, (q_shared.index(1),), pairs, chunk, tiles,
                        KEYS, D, STAGES, GROUP, SINKS,
                    ),
                ),
                (
                    _load,
                    (
                        keys, values, block_table + segment.to(gl.int64) * table_i, rows_of_head, tiles, pairs,
                        KEYS, D, STAGES, PAGE,
                    ),
                ),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


def fits(q: torch.Tensor, keys: PagedKeys, max_q: int, max_k: int) -> bool:
    """Returns whether `launch` supports these arguments of `kernels.attention.flash_prefill` and is faster."""
    rows = max_q * q.shape[1]
    return (
        # a one-warpgroup program reads the keys of its rows only once, too
        (
            (rows >= MIN_ROWS and max_k >= MIN_KEYS_MANY_ROWS)
            or (max_k >= MIN_KEYS and rows > ROWS.value * keys.k.shape[2])
        )
        and q.dtype in (torch.bfloat16, torch.float16)
        and keys.k.shape[-1] in SHAPES
        and slots_suit(keys)
    )


def slots_suit(keys: PagedKeys) -> bool:
    """Returns whether TMA through `slots_of` can load pieces of 64 keys and 16-bit values from this cache."""
    k = keys.k
    page_size, heads, dim = k.shape[1:]
    return (
        page_size % PIECE.value == 0
        # heads next to each other, or each in its own rows
        and (k.stride()[1:] == (heads * dim, dim, 1) or (k.stride(1) == dim and k.stride(2) % dim == 0))
        and k.stride(0) % k.stride(1) == 0
        and k.data_ptr() % 16 == keys.v.data_ptr() % 16 == 0
        and keys.scale > 0  # the maximum is taken before scaling
        and torch.cuda.get_device_capability(k.device)[0] == 9
    )


def slots_of(cache: torch.Tensor) -> TensorDescriptor:
    """Returns a TMA descriptor of the cache as one matrix of slots, including the gaps between pages."""
    width = cache.stride(1)
    rows = 1 + sum((n - 1) * (stride // width) for n, stride in zip(cache.shape[:3], cache.stride(), strict=False))
    slots = cache.as_strided((rows, width), (width, 1))
    return TensorDescriptor(slots, [rows, width], [width, 1], [PIECE.value, cache.shape[-1]], SHARED.value)


def launch(
    q: torch.Tensor,
    keys: PagedKeys,
    cu_q: torch.Tensor,
    max_q: int,
    max_k: int,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Runs `kernels.attention.flash_prefill.flash_prefill`; requires `fits`.

    Source:
        FlashAttention-3 (arXiv:2407.08608), without ping-pong scheduling.
    """
    k = keys.k
    heads, dim = k.shape[2:]
    group, shape = q.shape[1] // heads, SHAPES[dim]
    slots = slots_of(k), slots_of(keys.v)
    tiles, segments = tiles_of_rows(len(q) * group, max_q * group, len(cu_q) - 1, 2 * ROWS.value)

    def attend(part: torch.Tensor, part_lse: torch.Tensor, splits: int) -> None:
        _flash_prefill_sm90_kernel[tiles, heads, splits](
            *slots, q, keys.table, cu_q, keys.lo, keys.hi, keys.sinks, part, part_lse,
            segments, *q.stride()[:2], k.stride(0) // k.stride(1), *divmod(k.stride(2), k.stride(1)),
            keys.table.stride(0), *part.stride()[:3], *part_lse.stride(), splits,
            keys.scale * math.log2(math.e), D=dim, GROUP=group, PAGE=keys.page_size, SINKS=keys.sinks is not None,
            **shape, num_warps=4,
        )  # fmt: skip

    tile = {"BLOCK_M": 2 * ROWS.value, "BLOCK_N": shape["KEYS"], "num_warps": 8}  # plus the producer warp
    attend_split(out, lse, tile, heads, len(cu_q) - 1, max_k, attend)
