"""Shared by flash_decode and flash_prefill: the inner loop over paged keys, tile shapes, and sinks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.scaled_keys import scale_at

SMALL_HEAD_DIM = tl.constexpr(64)  # up to here an SM has room for more attention programs than intended


def tile_shape(rows: int, max_rows: int, D: int, dtype: torch.dtype, more: int = 0) -> dict[str, int]:
    """Returns launch options for a kernel around `attend_tiles`, without register spills on sm_90 up to head dim 256.

    Args:
        rows: upper bound of query rows (tokens x heads of a group) per tile.
        max_rows: largest tile that suits the kernel.
        dtype: of queries and cache; fp32 has no full-precision tensor cores, hence small tiles and more warps.
        more: extra stages, for e4m3 keys or values.
    """
    block_d = max(16, triton.next_power_of_2(D))  # minimum of tl.dot
    max_rows = 32 if dtype == torch.float32 else max_rows
    block_m = min(max_rows, max(16, triton.next_power_of_2(rows)))
    # 16 KiB of keys, and of values; e4m3 keys of short heads would spill at 128 keys.
    block_n = max(16, min(128 if block_m == 128 and more < 2 else 64, 16384 // (block_d * dtype.itemsize)))
    if block_m == 64 and more == 1:  # keys are 16-bit: one more stage would leave room for a single program
        more = 0
    wide = dtype == torch.float32 or block_m == 128 or block_m * block_d >= 128 * 128
    return dict(
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        num_warps=8 if wide else 4,
        # Stages are sized so that exactly two programs of four warps fit an SM: with room for a third, some SMs would
        # run three and others one while programs start and end. A tile of 128 rows has an SM to itself. e4m3 takes more
        # stages to keep the same number of bytes in flight.
        num_stages=2 if dtype == torch.float32 else (4 if block_m in (16, 128) else 3) + more,
    )


@triton.jit
def mean_query(query, counts):
    """Computes rows [16, BLOCK_D] that add up to the sum of the rows of `query` [BLOCK_M, BLOCK_D] where `counts`.

    Scores are linear in queries, so the sum of all rows' scores costs one more row. Half of the rows hold the rounding
    error of the others, which doubles the precision of the product. Rows that do not count must be finite.
    """
    row = tl.arange(0, 16)[:, None]
    ones = tl.where(counts[None, :] & (row >= 0), 1.0, 0.0).to(query.dtype)
    mean = tl.dot(ones, query, input_precision="ieee") / 8
    rounded = mean.to(query.dtype)
    return tl.where(row < 8, rounded, (mean - rounded.to(tl.float32)).to(query.dtype))


@triton.jit
def tiles_read_whole(row_lo, row_hi, live, stop, first, last, BLOCK_N: tl.constexpr):
    """Returns the sub-range of tiles first..last-1 that every `live` row reads in full: they need no mask."""
    shared_lo = tl.max(tl.where(live, row_lo, 0), 0)
    shared_hi = tl.min(tl.where(live, row_hi, stop), 0)
    full = tl.minimum(tl.maximum(tl.cdiv(shared_lo, BLOCK_N), first), last)
    return full, tl.maximum(tl.minimum(shared_hi // BLOCK_N, last), full)


@triton.constexpr_function
def lift(dtype):
    """Returns a factor for softmax weights times e4m3 value scales that keeps small ones in fp16's range."""
    return 2.0**7 if dtype == tl.float16 else 1.0


@triton.jit
def attend_tiles(
    acc, total, peak, q, row_lo, row_hi, start, stop, first, last, full, full_stop, k_cache, v_cache, pages,
    page_stride, slot_stride, head_stride, head, scale_log2,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HOLES: tl.constexpr = False,
    mean=None, counts=None, share=0.0, key_scores=None, score_pages=None, score_page=0,
    COLLECT: tl.constexpr = None, SEVERAL: tl.constexpr = False,
    k_scales=None, v_scales=None, V_APART: tl.constexpr = 1,
    SCALE_PAGE: tl.constexpr = 1, SCALE_NEXT: tl.constexpr = 0, SCALE_HEAD: tl.constexpr = 0,
):  # fmt: skip
    """Folds key tiles first..last-1 into a running base-2 softmax; tile j starts at key j * BLOCK_N.

    Only keys of [start, stop) and their entries of `pages` are read. Every live row must read all keys of tiles
    full..full_stop-1. `scale_log2` is the scale times log2(e), above 0. HOLES: negative entries of `pages` mean no
    page. `key_scores`: stores a score for each key of page j in page `score_pages[j]` of a score plane: the maximum
    over the rows that count (COLLECT is any), or their sum, computed from the `mean` query if given; times `share`.
    Scales: keys and values are e4m3 (see `kernels.scaled_keys`). V_APART: page and head strides of values, in those of
    keys.
    """
    LIFT: tl.constexpr = lift(q.dtype) if v_scales is not None else 1.0
    if LIFT != 1.0:
        acc *= LIFT
    lane = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    # One page lookup per tile if pages hold whole tiles, else one per key.
    step = 0 if PAGE % BLOCK_N == 0 else lane
    within = lane[:, None] * slot_stride + d[None, :]
    # Load one iteration ahead: an index loaded where it is used would prevent pipelining of K and V.
    ahead = tl.maximum(first * BLOCK_N + step, start)
    next_page = tl.load(pages + ahead // PAGE, mask=(first < last) & (ahead < stop), other=0)
    if key_scores is not None:
        next_score_page = tl.load(score_pages + ahead // PAGE, mask=(first < last) & (ahead < stop), other=0)
    for tile in range(first, last):
        page = next_page.to(tl.int64)
        ahead = (tile + 1) * BLOCK_N + step
        next_page = tl.load(pages + ahead // PAGE, mask=(tile + 1 < last) & (ahead < stop), other=0)
        key = tile * BLOCK_N + lane
        live = (key >= start) & (key < stop)
        if HOLES:
            live = live & (page >= 0)
        mask = live[:, None] & (d < D)[None, :]
        # A tile within one page has one base address: fewer instructions, which dominate short runs.
        if PAGE % BLOCK_N == 0:
            base = page * page_stride + tile * BLOCK_N % PAGE * slot_stride
            at = base + head * head_stride + within
        else:
            at = (page * page_stride + (key % PAGE).to(tl.int64) * slot_stride + head * head_stride)[:, None] + d[
                None, :
            ]
        k = tl.load(k_cache + at, mask=mask, other=0.0)
        if k_scales is not None:
            slot = (key % PAGE).to(tl.int64)
            k_scales_at = scale_at(k_scales, page, slot, head, PAGE, SCALE_PAGE, SCALE_NEXT, SCALE_HEAD)
            k_scale = tl.load(k_scales_at, mask=live, other=0.0)
            k = k.to(tl.float32).to(q.dtype)  # direct conversion to bf16 would go through fp16, which is slow
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if k_scales is not None:
            scores *= k_scale[None, :]
        if key_scores is not None:
            to = key_scores + next_score_page.to(tl.int64) * score_page + key % PAGE
            next_score_page = tl.load(score_pages + ahead // PAGE, mask=(tile + 1 < last) & (ahead < stop), other=0)
            if COLLECT == "any":
                found = tl.max(tl.where(counts[:, None], scores, float("-inf")), 0) * share
                if SEVERAL:  # several tiles of rows: maybe none of this one counts
                    found = tl.where(found == float("-inf"), 0.0, found)
            elif mean is None:
                found = tl.sum(tl.where(counts[:, None], scores, 0.0), 0) * share
        # One loop: separate masked and unmasked loops would restart the pipeline.
        if HOLES or ((tile < full) | (tile >= full_stop)):
            reads = (key[None, :] >= row_lo[:, None]) & (key[None, :] < row_hi[:, None])
            if HOLES:
                reads = reads & live[None, :]
            scores = tl.where(reads, scores, float("-inf"))
        if mean is not None:
            found = tl.sum(tl.dot(mean, tl.trans(k), input_precision="ieee"), 0) * share
            if k_scales is not None:
                found *= k_scale
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_peak[:, None])  # scale and shift in one instruction
        rescale = tl.exp2(peak - new_peak)
        total = total * rescale + tl.sum(weights, 1)
        # Zero dead lanes of V: a weight of zero times the NaN of an unused slot would be NaN.
        if V_APART > 1:
            farther = (page * page_stride + head * head_stride) * (V_APART - 1)
            at += farther if PAGE % BLOCK_N == 0 else farther[:, None]
        v = tl.load(v_cache + at, mask=mask, other=0.0)
        if v_scales is not None:
            slot = (key % PAGE).to(tl.int64)
            v_scales_at = scale_at(v_scales, page, slot, head, PAGE, SCALE_PAGE, SCALE_NEXT, SCALE_HEAD)
            weights *= (tl.load(v_scales_at, mask=live, other=0.0) * LIFT)[None, :]
            v = v.to(tl.float32).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * rescale[:, None], input_precision="ieee")
        peak = new_peak
        if key_scores is not None:  # overlaps with the matmul
            tl.store(to, found.to(to.dtype.element_ty), mask=live)
    if LIFT != 1.0:
        acc *= 1.0 / LIFT
    return acc, total, peak


@triton.jit
def with_sink(log2, sink):
    """Adds a sink (score `sink` in natural units, value zero) to a softmax with base-2 LSE `log2`.

    Returns the new base-2 LSE, and the factor for the output.
    """
    sink = sink.to(tl.float32) * 1.4426950408889634
    peak = tl.maximum(log2, sink)
    both = peak + tl.log2(tl.exp2(log2 - peak) + tl.exp2(sink - peak))
    return both, tl.exp2(log2 - both)
