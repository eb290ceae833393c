"""MLA decode: a few absorbed queries per sequence over this rank's shard of the paged latents."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.attention.split_kv import PartialAttention, UnmergedAttention, item_at, schedule, store_item, workspace
from kernels.mla import decode_common_sm90, decode_few_rows_sm90, decode_many_rows_sm90
from kernels.mla.latent_tiles import attend_latents, latent_tile
from kernels.mla.reference import mla_decode as reference
from kernels.overlap import pdl_options, sm_count, start_successor, wait_for_predecessor
from kernels.paged_keys import KeyScores, PagedKeys


@triton.jit
def _mla_decode_kernel(
    q, cache, scales, ropes, block_table, lo, hi, out, lse, part, part_lse, key_scores, score_table,
    q_b, q_t, q_h, page_stride, rope_stride, table_b, lo_b, lo_t, hi_b, hi_t, out_b, out_t, out_h, lse_b, lse_t, lse_h,
    score_plane, score_page, score_table_b,
    scale_log2, B, T: tl.constexpr, GROUP: tl.constexpr, R: tl.constexpr, P: tl.constexpr, PAGE: tl.constexpr,
    SCALE_PAGE: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, ROWS: tl.constexpr, COLLECT: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if not EARLY:
        wait_for_predecessor(PDL)
    tiles_m: tl.constexpr = (T * GROUP + BLOCK_M - 1) // BLOCK_M
    starts, stops, tiles, ends, run = schedule(
        lo, hi, lo_b, lo_t, hi_b, hi_t, B, T, tiles_m, tl.num_programs(0), BLOCK_B, BLOCK_N
    )
    begin = tl.program_id(0) * run
    end = tl.minimum(begin + run, tl.max(ends, 0))
    if EARLY:
        wait_for_predecessor(PDL)
    m = tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_R)
    p = tl.arange(0, BLOCK_P)
    at = begin
    while at < end:
        i, tile_m, item_begin, item_end, start, stop = item_at(at, starts, stops, tiles, ends, tiles_m, BLOCK_B)
        b = i.to(tl.int64)

        # One row per query token and head: all heads read the same keys.
        row = tile_m * BLOCK_M + m
        t = row // GROUP
        head = row % GROUP
        if T == 1:
            row_lo, row_hi = tl.where(t < T, start, 0), tl.where(t < T, stop, 0)
        else:
            row_lo = tl.load(lo + b * lo_b + t * lo_t, mask=t < T, other=0)
            row_hi = tl.load(hi + b * hi_b + t * hi_t, mask=t < T, other=0)
        inside = (t < T)[:, None] & (r < R)[None, :]
        rows = q + b * q_b + (t * q_t + head * q_h)[:, None]
        q_latent = tl.load(rows + r[None, :], mask=inside, other=0.0)
        q_rope = tl.load(rows + R + p[None, :], mask=(t < T)[:, None] & (p < P)[None, :], other=0.0)
        first = start // BLOCK_N + at - item_begin
        last = first + tl.minimum(end, item_end) - at
        counts, to, to_pages = None, None, None
        if key_scores is not None:  # queries that read no key, before the first or after the last, do not count
            query = tl.arange(0, triton.next_power_of_2(T))
            los = tl.load(lo + b * lo_b + query * lo_t, mask=query < T, other=0)
            his = tl.load(hi + b * hi_b + query * hi_t, mask=query < T, other=0)
            earliest = tl.min(tl.where(los < his, query, T), 0)
            latest = tl.max(tl.where(los < his, query, -1), 0)
            counts = (t >= earliest) & (t <= latest)
            if COLLECT == "ends":
                counts = counts & ((t == earliest) | (t == latest))
            to = key_scores + tile_m * score_plane
            to_pages = score_table + b * score_table_b
        acc, total, peak = attend_latents(
            tl.zeros([BLOCK_M, BLOCK_R], tl.float32),
            tl.zeros([BLOCK_M], tl.float32),
            tl.full([BLOCK_M], -1.0e38, tl.float32),  # finite: -inf minus -inf would be NaN
            q_latent, q_rope, row_lo, row_hi, start, stop, first, last, cache, scales, ropes,
            block_table + b * table_b, page_stride, rope_stride, scale_log2,
            MASKED=True, PAGE=PAGE, SCALE_PAGE=SCALE_PAGE, R=R, P=P,
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_R=BLOCK_R, BLOCK_P=BLOCK_P,
            counts=counts, share=1.0 / (T * GROUP), key_scores=to, score_pages=to_pages, score_page=score_page,
            COLLECT=COLLECT, SEVERAL=T * GROUP > BLOCK_M,
        )  # fmt: skip
        store_item(
            acc, total, peak, begin, end, item_begin, item_end, run, None,
            out + b * out_b + (t * out_t + head * out_h)[:, None] + r[None, :],
            lse + b * lse_b + t * lse_t + head * lse_h,
            part, part_lse, inside, t < T, D=R, ROWS=ROWS, SINKS=False,
        )  # fmt: skip
        at = tl.minimum(end, item_end)
    # Not earlier: the successor's programs would take the SMs of this launch's programs that have not started yet.
    start_successor(PDL)


def mla_decode(
    q: torch.Tensor,
    keys: PagedKeys,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    sms: int | None = None,
    early: bool = False,
    scores: KeyScores | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends absorbed queries to paged latents; returns the partial output in latent space and its LSE.

    A cache slot holds R latent and P rope values: all R + P are the key of every head, the first R its value.

    Args:
        q: [B, T, Hq, R + P] bf16, fp16 or fp32; last dim contiguous.
        keys: latents in q's dtype, or in e4m3 with scales and rope values in q's dtype.
        out: [B, T, Hq, R] in q's dtype, written if given; last dim contiguous.
        lse: [B, T, Hq] fp32, written if given.
        sms: number of SMs to fill; default all.
        early: the bounds are older than the preceding kernel and may be read while it runs.
        scores: if given, the score of each key is written, too; all heads count.

    Returns:
        Output [B, T, Hq, R] normalized over these keys, and natural-log LSE [B, T, Hq] fp32; 0 and -inf where a
        query reads no key.

    Source:
        DeepSeek-V2 (arXiv:2405.04434), section 2.1, absorbed; FlashDecoding; stream-K (arXiv:2301.03598).
    """
    found = decode_parts(q, keys, out=out, lse=lse, sms=sms, early=early, scores=scores)
    found.merge_states()
    return found.out, found.lse


def decode_parts(
    q: torch.Tensor,
    keys: PagedKeys,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    sms: int | None = None,
    early: bool = False,
    scores: KeyScores | None = None,
    lane: int = 0,
) -> PartialAttention:
    """Runs `mla_decode`, with the same arguments, up to the merge.

    Args:
        lane: workspace that holds the partial states until they are merged.
    """
    if not dispatch.on_gpu(q):
        return PartialAttention(*reference(q, keys, out=out, lse=lse, scores=scores))
    B, T, Hq, width = q.shape
    cache, table, lo, hi, latent = keys.k, keys.table, keys.lo, keys.hi, keys.v.shape[-1]
    P = width - latent
    keys.check_latents(q.dtype, width)
    assert q.stride(3) == table.stride(1) == 1
    out = torch.empty(B, T, Hq, latent, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(B, T, Hq, dtype=torch.float32, device=q.device) if lse is None else lse
    assert out.stride(3) == 1
    if q.numel() == 0:
        return PartialAttention(out, lse)

    if scores is not None:
        assert scores.planes.shape[2:] == (1, keys.page_size) and scores.planes.stride(3) == 1
    if q.is_cuda and decode_common_sm90.fits(q, keys):
        on_hopper = decode_few_rows_sm90 if T * Hq <= decode_few_rows_sm90.MAX_ROWS else decode_many_rows_sm90
        return on_hopper.launch(q, keys, out, lse, sms or sm_count(q.device), early, scores, lane)
    tile = latent_tile(T * Hq, latent, P, q.dtype, keys.k_scale is not None)
    rows = min(tile["BLOCK_M"], triton.next_power_of_2(T * Hq))
    key_scores, score_table, score_strides, collect = None, None, (0, 0, 0), ""
    if scores is not None:
        key_scores, score_table, collect = scores.planes, scores.table, scores.rows
        assert len(key_scores) >= triton.cdiv(T * Hq, tile["BLOCK_M"]), "key scores need one plane per tile of rows"
        score_strides = key_scores.stride(0), key_scores.stride(1), score_table.stride(0)
    programs = sms or sm_count(q.device)
    part, part_lse = workspace(q.device, q.dtype, programs, rows, latent, lane)
    _mla_decode_kernel[(programs,)](
        q, cache, keys.k_scale, keys.rope, table, lo, hi, out, lse, part, part_lse, key_scores, score_table,
        *q.stride()[:3], *keys.page_strides, table.stride(0),
        *lo.stride(), *hi.stride(), *out.stride()[:3], *lse.stride(), *score_strides,
        keys.scale * math.log2(math.e), B, T=T, GROUP=Hq, R=latent, P=P, PAGE=cache.shape[1],
        SCALE_PAGE=keys.latent_scale_page, BLOCK_B=triton.next_power_of_2(B), ROWS=rows, COLLECT=collect, EARLY=early,
        **pdl_options(q), **tile,
    )  # fmt: skip
    return UnmergedAttention(out, lse, lo, hi, None, part, part_lse, programs, 1, tile["BLOCK_M"], tile["BLOCK_N"])
