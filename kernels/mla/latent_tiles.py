"""Shared by mla_decode and mla_prefill: the inner loop over paged latents, and its tile shapes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.scaled_keys import GROUP


def latent_tile(rows: int, R: int, P: int, dtype: torch.dtype, scaled: bool = False) -> dict[str, int]:
    """Returns launch options for a kernel around `attend_latents`, one program per SM.

    Args:
        rows: upper bound of query rows (tokens x heads) per tile.
        R, P: latent and rope values per slot.
        dtype: of queries and cache.
        scaled: latents are e4m3 with scales instead.
    """
    if dtype == torch.float32:  # no full-precision tensor cores: for comparisons, not for speed
        # With dequantization, loading the next tile ahead would spill.
        block_m, block_n, warps, stages = 16, 16, 8, 1 if scaled else 2
    elif rows > 32 or scaled:
        # Three tiles of 36 KiB fit next to 64 rows of queries (72 KiB). With fewer rows, tiles to dequantize would not
        # be loaded ahead: the compiler does that only for wgmma.
        block_m, block_n, warps, stages = 64, 32, 8, 3
    else:
        # Two tiles of 72 KiB: compute one while loading the other. At 16 rows 4 warps are 3 to 4% faster than 8, though
        # a few addresses spill; 32 rows of accumulators need 8.
        block_m = max(16, triton.next_power_of_2(rows))
        block_n, warps, stages = 64, 4 if block_m == 16 else 8, 3
    return dict(
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_R=max(16, triton.next_power_of_2(R)),  # minimum of tl.dot
        BLOCK_P=max(16, triton.next_power_of_2(P)),
        num_warps=warps,
        num_stages=stages,
    )


@triton.jit
def _weigh(scores, total, peak, dtype: tl.constexpr):
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    rescale = tl.exp2(peak - new_peak)
    weights = tl.exp2(scores - new_peak[:, None])
    return weights.to(dtype), rescale, total * rescale + tl.sum(weights, 1), new_peak


@triton.jit
def _dequantize(
    latent, scales, page, key, live,
    MASKED: tl.constexpr, PAGE: tl.constexpr, SCALE_PAGE: tl.constexpr, R: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Dequantizes a tile of e4m3 latents [keys, BLOCK_R]: exact in `dtype`."""
    width: tl.constexpr = GROUP if latent.shape[1] > GROUP else latent.shape[1]
    groups: tl.constexpr = (R + width - 1) // width
    group = tl.arange(0, latent.shape[1] // width)
    mask = live[:, None] & (group < groups)[None, :] if MASKED else (group < groups)[None, :]
    slot = key % PAGE
    if PAGE != SCALE_PAGE:
        token = page * PAGE + slot
        page, slot = token // SCALE_PAGE, token % SCALE_PAGE
    at = (page * (groups * SCALE_PAGE) + slot)[:, None] + (group * SCALE_PAGE)[None, :]
    scale = tl.load(scales + at, mask=mask, other=0.0)
    parts = tl.reshape(latent.to(tl.float32), [latent.shape[0], latent.shape[1] // width, width])
    return tl.reshape(parts * scale[:, :, None], latent.shape).to(dtype)


@triton.jit
def _slots(plane, page, stride, tile, key, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the address of a tile of slots with WIDTH elements, and its keys' offsets [BLOCK_N, 1]."""
    if PAGE % BLOCK_N == 0:
        lane = tl.arange(0, BLOCK_N)
        return plane + page * stride + tile * BLOCK_N % PAGE * WIDTH, (lane * WIDTH)[:, None]
    else:
        return plane, (page * stride + (key % PAGE).to(tl.int64) * WIDTH)[:, None]


@triton.jit
def attend_latents(
    acc, total, peak, q_latent, q_rope, row_lo, row_hi, start, stop, first, last, cache, scales, ropes, pages,
    page_stride, rope_stride, scale_log2,
    MASKED: tl.constexpr, PAGE: tl.constexpr, SCALE_PAGE: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    counts=None, share=0.0, key_scores=None, score_pages=None, score_page=0,
    COLLECT: tl.constexpr = None, SEVERAL: tl.constexpr = False,
):  # fmt: skip
    """Folds tiles of latents into a running softmax, like `kernels.attention.paged_tiles.attend_tiles`, as one KV head.

    `key_scores` and what belongs to it are as there; rows that do not count may be NaN.

    Keys have R + P values, and the first R are the value: each tile is loaded once. The slot stride R + P is a
    compile-time constant, as with a run-time stride every address of a tile would take a register. With scales, the R
    values are e4m3, and the P values are in `ropes`.
    """
    width: tl.constexpr = R + P if scales is None else R
    lane = tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_R)
    p = tl.arange(0, BLOCK_P)
    # One page lookup per tile if pages hold whole tiles, else one per key.
    step = 0 if PAGE % BLOCK_N == 0 else lane
    # Load one iteration ahead: an index loaded where it is used would prevent pipelining.
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
        # Zero dead lanes: as values, the NaN of an unused slot would survive a weight of zero.
        mask_r = live[:, None] & (r < R)[None, :] if MASKED else (r < R)[None, :]
        mask_p = live[:, None] & (p < P)[None, :] if MASKED else (p < P)[None, :]
        base, within = _slots(cache, page, page_stride, tile, key, width, PAGE, BLOCK_N)
        latent = tl.load(base + (within + r[None, :]), mask=mask_r, other=0.0)
        if scales is None:
            rope = tl.load(base + (within + (R + p)[None, :]), mask=mask_p, other=0.0)
        else:
            latent = _dequantize(latent, scales, page, key, live, MASKED, PAGE, SCALE_PAGE, R, q_latent.dtype)
            base, within = _slots(ropes, page, rope_stride, tile, key, P, PAGE, BLOCK_N)
            rope = tl.load(base + (within + p[None, :]), mask=mask_p, other=0.0)
        scores = tl.dot(q_rope, tl.trans(rope), input_precision="ieee")
        scores = tl.dot(q_latent, tl.trans(latent), scores, input_precision="ieee") * scale_log2
        if key_scores is not None:
            to = key_scores + next_score_page.to(tl.int64) * score_page + key % PAGE
            next_score_page = tl.load(score_pages + ahead // PAGE, mask=(tile + 1 < last) & (ahead < stop), other=0)
            if COLLECT == "any":
                found = tl.max(tl.where(counts[:, None], scores, float("-inf")), 0) * share
                if SEVERAL:  # several tiles of rows: maybe none of this one counts
                    found = tl.where(found == float("-inf"), 0.0, found)
            else:
                found = tl.sum(tl.where(counts[:, None], scores, 0.0), 0) * share
            tl.store(to, found.to(to.dtype.element_ty), mask=live)
        if MASKED:
            reads = (key[None, :] >= row_lo[:, None]) & (key[None, :] < row_hi[:, None])
            scores = tl.where(reads, scores, float("-inf"))
        if BLOCK_M >= 64:
            # Always true. Without the branch, the compiler sees chained matmuls, keeps whole score rows in each warp,
            # and has both groups of 4 warps compute the same 64 rows.
            weights = tl.zeros(scores.shape, latent.dtype)
            rescale = tl.full(peak.shape, 1.0, tl.float32)
            if tile * BLOCK_N < stop:
                weights, rescale, total, peak = _weigh(scores, total, peak, latent.dtype)
        else:
            weights, rescale, total, peak = _weigh(scores, total, peak, latent.dtype)
        acc = tl.dot(weights, latent, acc * rescale[:, None], input_precision="ieee")
    return acc, total, peak
