"""Decode attention: a few queries per sequence over this rank's shard of the paged KV cache."""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl

from kernels import routing
from kernels.lse_combine import lse_combine
from kernels.paged import attend_tiles, tile_shape
from kernels.reference.flash_decode import flash_decode as reference

MAX_SPLITS = 256  # What lse_combine takes.
MIN_SPLIT_KEYS = 256  # Below this, merging a split costs more than it saves.
BLOCKS_PER_SM = 2


@triton.jit
def _flash_decode_kernel(
    q, k_cache, v_cache, block_table, lo, hi, out, lse,
    q_b, q_t, q_h, k_page, k_slot, k_head, v_page, v_slot, v_head, table_b, lo_b, lo_t, hi_b, hi_t,
    out_s, out_b, out_t, out_h, lse_s, lse_b, lse_t, lse_h,
    scale_log2, T, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(T * GROUP, BLOCK_M)
    tile_m = tl.program_id(0) % tiles_m
    head = tl.program_id(0) // tiles_m % HEADS
    b = (tl.program_id(0) // (tiles_m * HEADS)).to(tl.int64)
    split = tl.program_id(1).to(tl.int64)

    # One row per query token and head of the group: the group's heads read the same keys.
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    t = row // GROUP
    q_head = head * GROUP + row % GROUP
    row_lo = tl.load(lo + b * lo_b + t * lo_t, mask=t < T, other=0)
    row_hi = tl.load(hi + b * hi_b + t * hi_t, mask=t < T, other=0)
    reads = row_lo < row_hi
    stop = tl.max(tl.where(reads, row_hi, 0), 0)
    start = tl.min(tl.where(reads, row_lo, stop), 0)

    # The grid is fixed, so that a captured graph serves every length; the keys are cut up here, from device bounds.
    first = start // BLOCK_N
    share = tl.cdiv(tl.cdiv(stop, BLOCK_N) - first, tl.num_programs(1))
    first += tl.program_id(1) * share
    last = tl.minimum(first + share, tl.cdiv(stop, BLOCK_N))

    d = tl.arange(0, BLOCK_D)
    inside = (t < T)[:, None] & (d < D)[None, :]
    query = tl.load(q + b * q_b + (t * q_t + q_head * q_h)[:, None] + d[None, :], mask=inside, other=0.0)
    acc, total, peak = attend_tiles(
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.full([BLOCK_M], -1.0e38, tl.float32),  # A finite floor: -inf minus -inf would be NaN.
        query, row_lo, row_hi, start, stop, first, last, k_cache, v_cache, block_table + b * table_b,
        k_page, k_slot, k_head, v_page, v_slot, v_head, head, scale_log2,
        MASKED=True, PAGE=PAGE, D=D, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D,
    )  # fmt: skip
    empty = total == 0.0
    acc /= tl.where(empty, 1.0, total)[:, None]
    natural = tl.where(empty, float("-inf"), (peak + tl.log2(total)) * 0.6931471805599453)
    tl.store(out + split * out_s + b * out_b + (t * out_t + q_head * out_h)[:, None] + d[None, :], acc, mask=inside)
    tl.store(lse + split * lse_s + b * lse_b + t * lse_t + q_head * lse_h, natural, mask=t < T)


@cache
def _sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def num_splits(tiles: int, capacity: int, sms: int) -> int:
    """Splits of the keys: the fewest within 5% of the best wave efficiency, from static shapes alone.

    Args:
        tiles: programs of one split.
        capacity: keys that a sequence's block table can hold.
        sms: streaming multiprocessors of the device.

    Source:
        The heuristic of FlashAttention-3, with a narrower margin: benchmarks/LOG.md.
    """
    efficiency = []
    for splits in range(1, max(1, min(MAX_SPLITS, capacity // MIN_SPLIT_KEYS)) + 1):
        waves = tiles * splits / (BLOCKS_PER_SM * sms)
        efficiency.append(waves / math.ceil(waves))
    return next(i for i, e in enumerate(efficiency, 1) if e >= 0.95 * max(efficiency))


def flash_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    lo: torch.Tensor,
    hi: torch.Tensor,
    scale: float,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a few queries per sequence over paged keys: a partial output and its LSE.

    Query head h reads KV head `h // (Hq // Hkv)`. Local key i of a sequence lies in page
    `block_table[b, i // page_size]`, slot `i % page_size`. Causal, window and verify bounds are all `[lo, hi)`; the
    ranges of one sequence's queries together leave no gap. Keys and table entries outside them are never used, so
    they may hold anything. No size depends on device data: one captured graph serves every length. Deterministic.

    Args:
        q: [B, T, Hq, D] bf16, fp16 or fp32; last dim contiguous.
        k_cache: [pages, page_size, Hkv, D] in q's dtype; last dim contiguous.
        v_cache: like `k_cache`.
        block_table: [B, max_pages] int32, rows contiguous.
        lo: [B, T] int32, first local key of each query, at least 0.
        hi: [B, T] int32, one past the last; `lo >= hi` reads nothing.
        scale: factor on the scores.
        out: [B, T, Hq, D] in q's dtype, written if given; B and T must merge into one dim without a copy.
        lse: [B, T, Hq] fp32, written if given; B and T likewise.
        splits: programs that share a sequence's keys; chosen from the shapes if None.

    Returns:
        Output [B, T, Hq, D] normalised over these keys, and natural-log LSE [B, T, Hq] fp32; 0 and -inf where a
        query reads no key.

    Source:
        FlashDecoding; Helix Parallelism (arXiv:2507.07120), section 2.1.
    """
    if not routing.on_gpu(q):
        return reference(q, k_cache, v_cache, block_table, lo, hi, scale, out=out, lse=lse)
    B, T, Hq, D = q.shape
    page_size, Hkv = k_cache.shape[1:3]
    group = Hq // Hkv
    assert Hq == group * Hkv and k_cache.dtype == v_cache.dtype == q.dtype
    assert q.stride(3) == k_cache.stride(3) == v_cache.stride(3) == block_table.stride(1) == 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if lse is None else lse

    tile = tile_shape(T * group, 64, D, q.dtype)
    tiles = B * Hkv * triton.cdiv(T * group, tile["BLOCK_M"])
    if splits is None:
        splits = num_splits(tiles, block_table.shape[1] * page_size, _sm_count(q.device))
    part, part_lse = out[None], lse[None]
    if splits > 1:
        part = torch.empty(splits, B, T, Hq, D, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(splits, B, T, Hq, dtype=torch.float32, device=q.device)
    _flash_decode_kernel[tiles, splits](
        q, k_cache, v_cache, block_table, lo, hi, part, part_lse,
        *q.stride()[:3], *k_cache.stride()[:3], *v_cache.stride()[:3], block_table.stride(0),
        *lo.stride(), *hi.stride(), *part.stride()[:4], *part_lse.stride(),
        scale * math.log2(math.e), T, HEADS=Hkv, GROUP=group, D=D, PAGE=page_size, **tile,
    )  # fmt: skip
    if splits > 1:
        lse_combine(
            part.view(splits, B * T, Hq, D),
            part_lse.view(splits, B * T, Hq),
            out=out.view(B * T, Hq, D),
            out_lse=lse.view(B * T, Hq),
            return_lse=True,
        )
    return out, lse
