"""What flash_decode and flash_prefill share: the inner loop over paged keys, its tiles, and the learned sink."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROOMY = tl.constexpr(64)  # head dim up to which an SM has room for more programs of attention than are meant for it


def tile_shape(rows: int, most_rows: int, D: int, dtype: torch.dtype) -> dict[str, int]:
    """Launch options of a kernel around `attend_tiles`: no register spills on sm_90 for head dims up to 256.

    Args:
        rows: query rows (tokens x heads of a group) there are for one tile, at most.
        most_rows: the largest tile that the kernel wants.
        D: head dim.
        dtype: of queries and cache; fp32 has no tensor cores at full precision, hence small tiles and more warps.
    """
    block_d = max(16, triton.next_power_of_2(D))  # the least that tl.dot takes
    most_rows = 32 if dtype == torch.float32 else most_rows
    block_m = min(most_rows, max(16, triton.next_power_of_2(rows)))
    # 16 KiB of keys, and of values.
    block_n = max(16, min(128 if block_m == 128 else 64, 16384 // (block_d * dtype.itemsize)))
    wide = dtype == torch.float32 or block_m == 128 or block_m * block_d >= 128 * 128
    return dict(
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        num_warps=8 if wide else 4,
        # As much in flight as lets two programs of four warps fit an SM, and no third: of those that start while others
        # run out, some SMs would take three and others one. 128 rows have an SM to themselves.
        num_stages=2 if dtype == torch.float32 else 4 if block_m in (16, 128) else 3,
    )


@triton.jit
def mean_query(query, counts):
    """[16, BLOCK_D]: rows that add up to the sum of those rows of `query` [BLOCK_M, BLOCK_D] that count, in its dtype.

    Scores are linear in queries: the sum of rows' scores is one row more, however many rows there are. Half of the rows
    hold what the others' rounding leaves, so that a product keeps twice the digits. Rows that do not count are finite.
    """
    row = tl.arange(0, 16)[:, None]
    ones = tl.where(counts[None, :] & (row >= 0), 1.0, 0.0).to(query.dtype)
    mean = tl.dot(ones, query, input_precision="ieee") / 8
    rounded = mean.to(query.dtype)
    return tl.where(row < 8, rounded, (mean - rounded.to(tl.float32)).to(query.dtype))


@triton.jit
def tiles_read_whole(row_lo, row_hi, live, stop, first, last, BLOCK_N: tl.constexpr):
    """Where those of the tiles first..last-1 begin and end that every row of `live` reads whole: they need no mask."""
    shared_lo = tl.max(tl.where(live, row_lo, 0), 0)
    shared_hi = tl.min(tl.where(live, row_hi, stop), 0)
    full = tl.minimum(tl.maximum(tl.cdiv(shared_lo, BLOCK_N), first), last)
    return full, tl.maximum(tl.minimum(shared_hi // BLOCK_N, last), full)


@triton.jit
def attend_tiles(
    acc, total, peak, q, row_lo, row_hi, start, stop, first, last, full, full_stop, k_cache, v_cache, pages,
    page_stride, slot_stride, head_stride, head, scale_log2,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HOLES: tl.constexpr = False,
    mean=None, counts=None, share=0.0, kept=None, kept_pages=None, kept_page=0,
    COLLECT: tl.constexpr = None, SEVERAL: tl.constexpr = False,
):  # fmt: skip
    """Fold the key tiles first..last-1 into a running softmax in base 2; tile j holds keys j*BLOCK_N onwards.

    Only keys of [start, stop) are touched, and no other entry of `pages` is followed. The caller promises that every
    row that matters reads every key of tiles full..full_stop-1. With HOLES, negative entries of `pages` are pages
    without keys. `scale_log2` is the scale times log2(e), above 0. With `kept`, a number for each key goes to page
    `kept_pages[j]` of a plane of scores, for keys of page j: the best of the rows that count (COLLECT is any), or their
    sum, by way of the `mean` query where there is one; times `share`.
    """
    lane = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    # A page that holds whole tiles is looked up once a tile, any other page once a key.
    step = 0 if PAGE % BLOCK_N == 0 else lane
    within = lane[:, None] * slot_stride + d[None, :]
    # Carried one iteration ahead: an index loaded where it is used would stop the pipelining of K and V.
    ahead = tl.maximum(first * BLOCK_N + step, start)
    next_page = tl.load(pages + ahead // PAGE, mask=(first < last) & (ahead < stop), other=0)
    if kept is not None:
        next_kept = tl.load(kept_pages + ahead // PAGE, mask=(first < last) & (ahead < stop), other=0)
    for tile in range(first, last):
        page = next_page.to(tl.int64)
        ahead = (tile + 1) * BLOCK_N + step
        next_page = tl.load(pages + ahead // PAGE, mask=(tile + 1 < last) & (ahead < stop), other=0)
        key = tile * BLOCK_N + lane
        live = (key >= start) & (key < stop)
        if HOLES:
            live = live & (page >= 0)
        mask = live[:, None] & (d < D)[None, :]
        # A whole tile in a page lies at fixed offsets from one address: few instructions, which short runs are made of.
        if PAGE % BLOCK_N == 0:
            base = page * page_stride + tile * BLOCK_N % PAGE * slot_stride
            at = base + head * head_stride + within
        else:
            at = (page * page_stride + (key % PAGE).to(tl.int64) * slot_stride + head * head_stride)[:, None] + d[
                None, :
            ]
        k = tl.load(k_cache + at, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if kept is not None:
            to = kept + next_kept.to(tl.int64) * kept_page + key % PAGE
            next_kept = tl.load(kept_pages + ahead // PAGE, mask=(tile + 1 < last) & (ahead < stop), other=0)
            if COLLECT == "any":
                found = tl.max(tl.where(counts[:, None], scores, float("-inf")), 0) * share
                if SEVERAL:  # tiles of rows, of which none may count in this one
                    found = tl.where(found == float("-inf"), 0.0, found)
            elif mean is None:
                found = tl.sum(tl.where(counts[:, None], scores, 0.0), 0) * share
        # In one loop: a loop for each kind of tile starts its loads anew, and products wait for one another there.
        if HOLES or ((tile < full) | (tile >= full_stop)):
            reads = (key[None, :] >= row_lo[:, None]) & (key[None, :] < row_hi[:, None])
            if HOLES:
                reads = reads & live[None, :]
            scores = tl.where(reads, scores, float("-inf"))
        if mean is not None:
            found = tl.sum(tl.dot(mean, tl.trans(k), input_precision="ieee"), 0) * share
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_peak[:, None])  # scaled and shifted by one instruction
        rescale = tl.exp2(peak - new_peak)
        total = total * rescale + tl.sum(weights, 1)
        # Dead lanes of V are zero: a weight of zero times the NaN of an unused slot would be NaN.
        v = tl.load(v_cache + at, mask=mask, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        peak = new_peak
        if kept is not None:  # behind the product, which runs meanwhile
            tl.store(to, found.to(to.dtype.element_ty), mask=live)
    return acc, total, peak


@triton.jit
def with_sink(log2, sink):
    """One more key, of value zero: its score `sink` in natural units, `log2` the LSE without it in base 2.

    Returns the LSE with it in base 2, and the factor that the output shrinks by.
    """
    sink = sink.to(tl.float32) * 1.4426950408889634
    peak = tl.maximum(log2, sink)
    both = peak + tl.log2(tl.exp2(log2 - peak) + tl.exp2(sink - peak))
    return both, tl.exp2(log2 - both)
