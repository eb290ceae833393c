"""Prefill attention: chunks of several prompts over this rank's shard of the paged KV cache."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.attention import flash_prefill_sm90
from kernels.attention.dequantized_prefill import attend_dequantized
from kernels.attention.paged_tiles import attend_tiles, tile_shape, tiles_read_whole, with_sink
from kernels.attention.reference import flash_prefill as reference
from kernels.attention.split_prefill import attend_split, tile_of_segment, tiles_of_rows, tiles_of_split
from kernels.paged_keys import PagedKeys


@triton.jit(do_not_specialize=["segments", "lse_s", "splits"])  # they change from chunk to chunk
def _flash_prefill_kernel(
    q, k_cache, v_cache, block_table, cu_q, lo, hi, sinks, out, lse,
    segments, q_n, q_h, page_stride, slot_stride, head_stride, table_i, out_s, out_n, out_h, lse_s, lse_n, lse_h,
    splits, scale_log2, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    # Start with the last queries: they read the most keys.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    segment, tile_m, begin, length = tile_of_segment(cu_q, segments, tile, GROUP, BLOCK_M)
    head = tl.program_id(1)
    split = tl.program_id(2)
    if tile_m * BLOCK_M < length * GROUP:
        # One row per query token and head of the group: heads of a group read the same keys.
        row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        live = row // GROUP < length
        n = (begin + row // GROUP).to(tl.int64)
        q_head = head * GROUP + row % GROUP
        row_lo = tl.load(lo + n, mask=live, other=0)
        row_hi = tl.load(hi + n, mask=live, other=0)
        reads = row_lo < row_hi
        stop = tl.max(tl.where(reads, row_hi, 0), 0)
        start = tl.min(tl.where(reads, row_lo, stop), 0)

        first, last = tiles_of_split(start // BLOCK_N, tl.cdiv(stop, BLOCK_N), split, splits)
        full, full_stop = tiles_read_whole(row_lo, row_hi, live, stop, first, last, BLOCK_N)

        d = tl.arange(0, BLOCK_D)
        inside = live[:, None] & (d < D)[None, :]
        query = tl.load(q + (n * q_n + q_head * q_h)[:, None] + d[None, :], mask=inside, other=0.0)
        pages = block_table + segment.to(tl.int64) * table_i
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        peak = tl.full([BLOCK_M], -1.0e38, tl.float32)  # finite: -inf minus -inf would be NaN
        acc, total, peak = attend_tiles(
            acc, total, peak, query, row_lo, row_hi, start, stop, first, last, full, full_stop, k_cache, v_cache, pages,
            page_stride, slot_stride, head_stride, head, scale_log2,
            PAGE=PAGE, D=D, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D,
        )  # fmt: skip
        empty = total == 0.0
        acc /= tl.where(empty, 1.0, total)[:, None]
        log2 = tl.where(empty, float("-inf"), peak + tl.log2(total))
        if SINKS:
            if split == 0:  # a sink counts once
                log2, factor = with_sink(log2, tl.load(sinks + q_head))
                acc *= factor[:, None]
        out += split.to(tl.int64) * out_s
        lse += split.to(tl.int64) * lse_s
        tl.store(out + (n * out_n + q_head * out_h)[:, None] + d[None, :], acc, mask=inside)
        tl.store(lse + n * lse_n + q_head * lse_h, log2 * 0.6931471805599453, mask=live)


def flash_prefill(
    q: torch.Tensor,
    keys: PagedKeys,
    cu_q: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends prompt chunks of several sequences to their paged keys; returns the partial output and its LSE.

    Args:
        q: [N, Hq, D] bf16, fp16 or fp32, concatenated chunks; last dim contiguous.
        keys: in q's dtype; keys and values, or only values, may be e4m3 with scales. Row i of the table belongs to
            segment i. Bounds [N], contiguous, do not decrease within a segment.
        cu_q: [n + 1] int32, cumulative segment lengths of q.
        max_k: upper bound of keys per segment; for keys in q's dtype an estimate is enough (it only affects speed).
        out: [N, Hq, D] in q's dtype, written if given; last dim contiguous.
        lse: [N, Hq] fp32, written if given.

    Returns:
        Output [N, Hq, D] normalized over these keys, and natural-log LSE [N, Hq] fp32; 0 and -inf (with sinks:
        the sink) where a query reads no key.

    Source:
        FlashAttention-2, with the queries of a KV head's group packed into one tile.
    """
    if not dispatch.on_gpu(q):
        return reference(q, keys, cu_q, max_q, max_k, out=out, lse=lse)
    k, v, table, lo, hi, sinks = keys.k, keys.v, keys.table, keys.lo, keys.hi, keys.sinks
    Hq, D = q.shape[1:]
    Hkv = k.shape[2]
    group = Hq // Hkv
    assert Hq == group * Hkv and table.dim() == 2 and keys.scale_page in (1, keys.page_size)
    keys.check_cache(q.dtype)
    assert q.stride(2) == table.stride(1) == 1
    assert keys.scale > 0 and cu_q.is_contiguous() and lo.is_contiguous() and hi.is_contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if lse is None else lse
    assert out.stride(2) == 1 and (sinks is None or (sinks.dtype == torch.float32 and sinks.shape == (Hq,)))

    if keys.v_scale is not None:
        attend_dequantized(q, keys, cu_q, max_q, max_k, out, lse, flash_prefill)
        return out, lse
    assert k.stride() == v.stride()
    if q.is_cuda and flash_prefill_sm90.fits(q, keys, max_q, max_k):
        flash_prefill_sm90.launch(q, keys, cu_q, max_q, max_k, out, lse)
        return out, lse
    tile = tile_shape(max_q * group, 64, D, q.dtype)
    tiles, segments = tiles_of_rows(len(q) * group, max_q * group, len(cu_q) - 1, tile["BLOCK_M"])

    def attend(part: torch.Tensor, part_lse: torch.Tensor, splits: int) -> None:
        _flash_prefill_kernel[tiles, Hkv, splits](
            q, k, v, table, cu_q, lo, hi, sinks, part, part_lse,
            segments, *q.stride()[:2], *k.stride()[:3], table.stride(0), *part.stride()[:3], *part_lse.stride(), splits,
            keys.scale * math.log2(math.e), GROUP=group, D=D, PAGE=keys.page_size, SINKS=sinks is not None,
            **tile,
        )  # fmt: skip

    attend_split(out, lse, tile, Hkv, len(cu_q) - 1, max_k, attend)
    return out, lse
