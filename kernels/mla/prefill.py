"""MLA prefill: chunks of several prompts over this rank's shard of the paged latents."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.attention.dequantized_prefill import attend_dequantized
from kernels.attention.paged_tiles import tiles_read_whole
from kernels.attention.split_prefill import attend_split, tile_of_segment, tiles_of_rows, tiles_of_split
from kernels.mla import prefill_selected_sm90
from kernels.mla.latent_tiles import attend_latents, latent_tile
from kernels.mla.reference import mla_prefill as reference
from kernels.paged_keys import PagedKeys


@triton.jit(do_not_specialize=["segments", "lse_s", "splits"])  # change from chunk to chunk
def _mla_prefill_kernel(
    q, cache, scales, ropes, block_table, cu_q, lo, hi, out, lse,
    segments, q_n, q_h, page_stride, rope_stride, table_i, out_s, out_n, out_h, lse_s, lse_n, lse_h,
    splits, scale_log2, GROUP: tl.constexpr, R: tl.constexpr, P: tl.constexpr, PAGE: tl.constexpr,
    SCALE_PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    # Start with the last queries: they read the most keys.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    segment, tile_m, begin, length = tile_of_segment(cu_q, segments, tile, GROUP, BLOCK_M)
    split = tl.program_id(1)
    if tile_m * BLOCK_M < length * GROUP:
        # One row per query token and head: all heads read the same keys.
        row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        live = row // GROUP < length
        n = (begin + row // GROUP).to(tl.int64)
        head = row % GROUP
        row_lo = tl.load(lo + n, mask=live, other=0)
        row_hi = tl.load(hi + n, mask=live, other=0)
        reads = row_lo < row_hi
        stop = tl.max(tl.where(reads, row_hi, 0), 0)
        start = tl.min(tl.where(reads, row_lo, stop), 0)

        # Every row reads tiles [full, full_stop) in full: no mask. The rest is left and right of them.
        first, last = tiles_of_split(start // BLOCK_N, tl.cdiv(stop, BLOCK_N), split, splits)
        full, full_stop = tiles_read_whole(row_lo, row_hi, live, stop, first, last, BLOCK_N)

        r = tl.arange(0, BLOCK_R)
        p = tl.arange(0, BLOCK_P)
        inside = live[:, None] & (r < R)[None, :]
        rows = q + (n * q_n + head * q_h)[:, None]
        q_latent = tl.load(rows + r[None, :], mask=inside, other=0.0)
        q_rope = tl.load(rows + R + p[None, :], mask=live[:, None] & (p < P)[None, :], other=0.0)
        pages = block_table + segment.to(tl.int64) * table_i
        acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        peak = tl.full([BLOCK_M], -1.0e38, tl.float32)  # finite: -inf minus -inf would be NaN
        # Selected tokens (page size 1) are few: the next loop would start with its first tiles not prefetched.
        whole: tl.constexpr = PAGE > 1
        if whole:
            acc, total, peak = attend_latents(
                acc, total, peak, q_latent, q_rope, row_lo, row_hi, start, stop, first, full, cache, scales, ropes,
                pages, page_stride, rope_stride, scale_log2,
                MASKED=True, PAGE=PAGE, SCALE_PAGE=SCALE_PAGE, R=R, P=P,
                BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_R=BLOCK_R, BLOCK_P=BLOCK_P,
            )  # fmt: skip
            acc, total, peak = attend_latents(
                acc, total, peak, q_latent, q_rope, row_lo, row_hi, start, stop, full, full_stop, cache, scales, ropes,
                pages, page_stride, rope_stride, scale_log2,
                MASKED=False, PAGE=PAGE, SCALE_PAGE=SCALE_PAGE, R=R, P=P,
                BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_R=BLOCK_R, BLOCK_P=BLOCK_P,
            )  # fmt: skip
        acc, total, peak = attend_latents(
            acc, total, peak, q_latent, q_rope, row_lo, row_hi, start, stop, full_stop if whole else first, last, cache,
            scales, ropes, pages, page_stride, rope_stride, scale_log2,
            MASKED=True, PAGE=PAGE, SCALE_PAGE=SCALE_PAGE, R=R, P=P,
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_R=BLOCK_R, BLOCK_P=BLOCK_P,
        )  # fmt: skip
        empty = total == 0.0
        acc /= tl.where(empty, 1.0, total)[:, None]
        natural = tl.where(empty, float("-inf"), (peak + tl.log2(total)) * 0.6931471805599453)
        out += split.to(tl.int64) * out_s
        lse += split.to(tl.int64) * lse_s
        tl.store(out + (n * out_n + head * out_h)[:, None] + r[None, :], acc, mask=inside)
        tl.store(lse + n * lse_n + head * lse_h, natural, mask=live)


def mla_prefill(
    q: torch.Tensor,
    keys: PagedKeys,
    cu_q: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends prompt chunks of several sequences to their paged latents; returns the partial output and its LSE.

    Cache slots as in `kernels.mla.decode.mla_decode`, bounds as in `kernels.attention.flash_prefill`.

    Args:
        q: [N, Hq, R + P] bf16, fp16 or fp32, absorbed, concatenated chunks; last dim contiguous.
        keys: latents in q's dtype, or in e4m3 with scales and rope values in q's dtype; row i of the table belongs to
            segment i.
        cu_q, max_q, max_k, lse: as in `kernels.attention.flash_prefill`.
        out: [N, Hq, R] in q's dtype, written if given; last dim contiguous.

    Returns:
        Output [N, Hq, R] normalized over these keys, and natural-log LSE [N, Hq] fp32; 0 and -inf where a query
        reads no key.

    Source:
        DeepSeek-V2 (arXiv:2405.04434), section 2.1, absorbed; FlashAttention-2.
    """
    if not dispatch.on_gpu(q):
        return reference(q, keys, cu_q, max_q, max_k, out=out, lse=lse)
    N, Hq, width = q.shape
    cache, table, lo, hi, latent = keys.k, keys.table, keys.lo, keys.hi, keys.v.shape[-1]
    P = width - latent
    keys.check_latents(q.dtype, width)
    assert q.stride(2) == table.stride(1) == 1
    assert cu_q.is_contiguous() and lo.is_contiguous() and hi.is_contiguous()
    out = torch.empty(N, Hq, latent, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(N, Hq, dtype=torch.float32, device=q.device) if lse is None else lse
    assert out.stride(2) == 1

    few = keys.rope is not None
    if few and keys.page_size == keys.latent_scale_page:
        attend_dequantized(q, keys, cu_q, max_q, max_k, out, lse, mla_prefill)
        return out, lse
    if q.is_cuda and prefill_selected_sm90.fits(q, keys, len(cu_q) - 1):
        prefill_selected_sm90.launch(q, keys, out, lse)
        return out, lse
    tile = latent_tile(max_q * Hq, latent, P, q.dtype, few)
    tiles, segments = tiles_of_rows(N * Hq, max_q * Hq, len(cu_q) - 1, tile["BLOCK_M"])

    def attend(part: torch.Tensor, part_lse: torch.Tensor, splits: int) -> None:
        _mla_prefill_kernel[tiles, splits](
            q, cache, keys.k_scale, keys.rope, table, cu_q, lo, hi, part, part_lse,
            segments, *q.stride()[:2], *keys.page_strides, table.stride(0), *part.stride()[:3], *part_lse.stride(),
            splits, keys.scale * math.log2(math.e), GROUP=Hq, R=latent, P=P, PAGE=cache.shape[1],
            SCALE_PAGE=keys.latent_scale_page, **tile,
        )  # fmt: skip

    attend_split(out, lse, tile, 1, len(cu_q) - 1, max_k, attend)
    return out, lse
