"""Decode attention: a few queries per sequence over this rank's shard of the paged KV cache.

Stream-K split-KV with a fixed grid, so one captured graph serves every length. All programs compute the same schedule
from the bounds on the device: the key tiles of all (sequence, KV head, query tile) items form one line, cut into equal
runs, one per program. A run that covers a whole item writes the result; otherwise it writes a partial state to a
workspace slot, and a second kernel, already launched and waiting, merges them with one program per row and slice of the
head dim. (Merging in the program that finishes last was slower: benchmarks/LOG.md.)
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.attention import flash_decode_fp8_sm90, flash_decode_many_rows_sm90
from kernels.attention.paged_tiles import SMALL_HEAD_DIM, attend_tiles, mean_query, tile_shape, tiles_read_whole
from kernels.attention.reference import flash_decode as reference
from kernels.attention.split_kv import PartialAttention, UnmergedAttention, item_at, schedule, store_item, workspace
from kernels.overlap import pdl_options, prefetch, sm_count, start_successor, wait_for_predecessor
from kernels.paged_keys import KeyScores, PagedKeys


@triton.jit
def _prefetch_tile(
    tile, k_cache, v_cache, pages, page_stride, slot_stride, head_stride, head,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Prefetches a tile of keys and values into L2; safe while the preceding kernel still writes some of them."""
    LINE: tl.constexpr = 128 // (k_cache.dtype.element_ty.primitive_bitwidth // 8)
    page = tl.load(pages + tile * BLOCK_N // PAGE).to(tl.int64)
    slot = tile * BLOCK_N % PAGE + tl.arange(0, BLOCK_N)
    column = tl.minimum(tl.arange(0, triton.next_power_of_2((D + LINE - 1) // LINE)) * LINE, D - 1)
    at = page * page_stride + head * head_stride + slot[:, None] * slot_stride + column[None, :]
    prefetch(k_cache + at)
    prefetch(v_cache + at)


@triton.jit
def _flash_decode_kernel(
    q, k_cache, v_cache, k_scales, v_scales, block_table, lo, hi, sinks, out, lse, part, part_lse, key_scores,
    score_table,
    q_b, q_t, q_h, page_stride, slot_stride, head_stride, table_b, table_h, lo_b, lo_t, hi_b, hi_t,
    out_b, out_t, out_h, lse_b, lse_t, lse_h, score_plane, score_page, score_table_b,
    scale_log2, B, T: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, SINKS: tl.constexpr, HOLES: tl.constexpr, COLLECT: tl.constexpr, V_APART: tl.constexpr,
    SCALE_PAGE: tl.constexpr, SCALE_NEXT: tl.constexpr, SCALE_HEAD: tl.constexpr,
    EARLY: tl.constexpr, READY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if not EARLY:
        wait_for_predecessor(PDL)
    M: tl.constexpr = T * GROUP
    tiles_m: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    starts, stops, tiles, ends, run = schedule(
        lo, hi, lo_b, lo_t, hi_b, hi_t, B, T, HEADS * tiles_m, tl.num_programs(0), BLOCK_B, BLOCK_N
    )
    begin = tl.program_id(0) * run
    all_tiles = tl.max(ends, 0)
    end = tl.minimum(begin + run, all_tiles)
    at = begin
    # A program without tiles gets the last item, and skips the loop below.
    i, item, item_begin, item_end, start, stop = item_at(
        tl.minimum(at, all_tiles - 1), starts, stops, tiles, ends, HEADS * tiles_m, BLOCK_B
    )
    if EARLY:
        # The bounds are ready early, a table of selected pages is not.
        if PDL and PAGE % BLOCK_N == 0 and not HOLES and V_APART == 1:
            if (begin < end) & (start < stop):
                # A single tile: more would slow the preceding kernel down (benchmarks/LOG.md).
                _prefetch_tile(
                    start // BLOCK_N + begin - item_begin, k_cache, v_cache, block_table + i.to(tl.int64) * table_b,
                    page_stride, slot_stride, head_stride, item // tiles_m, PAGE, D, BLOCK_N,
                )  # fmt: skip
        if not READY:
            if item >= 0:  # always true; keeps the compiler from moving the wait above the loads of the bounds
                wait_for_predecessor(PDL)
    # Not at the end: all programs are resident at once, the merge is small enough to share the SMs with them, and
    # programs of another attention can start as these end.
    start_successor(PDL)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    while at < end:
        tile_m = item % tiles_m
        head = item // tiles_m
        b = i.to(tl.int64)

        # One row per query token and head of the group: heads of a group read the same keys.
        row = tile_m * BLOCK_M + m
        t = row // GROUP
        q_head = head * GROUP + row % GROUP
        if T == 1:
            los, his = tl.zeros([1], tl.int32) + start, tl.zeros([1], tl.int32) + stop
            row_lo, row_hi = tl.where(t < T, start, 0), tl.where(t < T, stop, 0)
        else:
            query = tl.arange(0, triton.next_power_of_2(T))
            los = tl.load(lo + b * lo_b + query * lo_t, mask=query < T, other=0)
            his = tl.load(hi + b * hi_b + query * hi_t, mask=query < T, other=0)
            row_lo = tl.load(lo + b * lo_b + t * lo_t, mask=t < T, other=0)
            row_hi = tl.load(hi + b * hi_b + t * hi_t, mask=t < T, other=0)
        inside = (t < T)[:, None] & (d < D)[None, :]
        wanted = inside
        if key_scores is not None:
            # Queries that read no key may be NaN: those before a rank's first key, and unused drafts after the last.
            # Two scalars: per-row bounds, used here and after the loop, would occupy registers.
            if T == 1:
                earliest, latest = 0, tl.where(start < stop, 0, -1)
            else:
                earliest = tl.min(tl.where(los < his, query, T), 0)
                latest = tl.max(tl.where(los < his, query, -1), 0)
            counts = (t >= earliest) & (t <= latest)
            wanted = counts[:, None] & (d < D)[None, :]
        rows = tl.load(q + b * q_b + (t * q_t + q_head * q_h)[:, None] + d[None, :], mask=wanted, other=0.0)
        first = start // BLOCK_N + at - item_begin
        last = first + tl.minimum(end, item_end) - at
        full, full_stop = tiles_read_whole(los, his, los < his, stop, first, last, BLOCK_N)
        pages = block_table + b * table_b + head * table_h
        if key_scores is not None:
            if COLLECT == "ends":
                counts = counts & ((t == earliest) | (t == latest))
            # For few rows of long heads, summing their scores takes fewer registers than another matmul.
            PRODUCT: tl.constexpr = COLLECT == "ends" and (BLOCK_M > 64 or D <= SMALL_HEAD_DIM)
            mean = mean_query(rows, counts) if PRODUCT else None
            to = key_scores + head * PAGE + tile_m * score_plane
            to_pages = score_table + b * score_table_b
        else:
            counts, mean, to, to_pages = None, None, None, None
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        peak = tl.full([BLOCK_M], -1.0e38, tl.float32)  # finite: -inf minus -inf would be NaN
        acc, total, peak = attend_tiles(
            acc, total, peak, rows, row_lo, row_hi, start, stop, first, last, full, full_stop, k_cache, v_cache,
            pages, page_stride, slot_stride, head_stride, head, scale_log2,
            PAGE=PAGE, D=D, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D, HOLES=HOLES, mean=mean, counts=counts,
            share=scale_log2 / M, key_scores=to, score_pages=to_pages, score_page=score_page,
            COLLECT=COLLECT, SEVERAL=T * GROUP > BLOCK_M,
            k_scales=k_scales, v_scales=v_scales, V_APART=V_APART,
            SCALE_PAGE=SCALE_PAGE, SCALE_NEXT=SCALE_NEXT, SCALE_HEAD=SCALE_HEAD,
        )  # fmt: skip
        # Drop what rows that read no key accumulated from unmasked tiles.
        reads = row_lo < row_hi
        acc, total = tl.where(reads[:, None], acc, 0.0), tl.where(reads, total, 0.0)
        store_item(
            acc, total, peak, begin, end, item_begin, item_end, run, sinks + q_head if SINKS else sinks,
            out + b * out_b + (t * out_t + q_head * out_h)[:, None] + d[None, :],
            lse + b * lse_b + t * lse_t + q_head * lse_h,
            part, part_lse, inside, t < T, D=D, ROWS=ROWS, SINKS=SINKS,
        )  # fmt: skip
        at = tl.minimum(end, item_end)
        if at < end:
            i, item, item_begin, item_end, start, stop = item_at(
                at, starts, stops, tiles, ends, HEADS * tiles_m, BLOCK_B
            )


def decode_tile(rows: int, D: int, dtype: torch.dtype, more: int = 0) -> dict[str, int]:
    """Returns the `tile_shape` that fits the most of `rows` query rows per KV head: every tile reads all keys."""
    return tile_shape(rows, 128 if D <= 128 else 64, D, dtype, more)


def flash_decode(
    q: torch.Tensor,
    keys: PagedKeys,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    sms: int | None = None,
    early: bool = False,
    scores: KeyScores | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends a few queries per sequence to paged keys; returns the partial output and its LSE.

    No shape depends on device data, so one captured graph serves every length. Deterministic. Launches on one device
    share a workspace and must not run concurrently.

    Args:
        q: [B, T, Hq, D] bf16, fp16 or fp32; last dim contiguous.
        keys: in q's dtype; keys and values, or only values, may be e4m3 with scales.
        out: [B, T, Hq, D] in q's dtype, written if given; last dim contiguous.
        lse: [B, T, Hq] fp32, written if given.
        sms: number of SMs to fill, two programs each; default all. The other SMs stay free only while the preceding
            kernel occupies them; otherwise programs go to the emptiest SM.
        early: the bounds are older than the preceding kernel and may be read while it runs.
        scores: buffers for the scores of all keys that some query reads, written if given.

    Returns:
        Output [B, T, Hq, D] normalized over these keys, and natural-log LSE [B, T, Hq] fp32; 0 and -inf (with sinks:
        the sink) where a query reads no key.

    Source:
        FlashDecoding; stream-K (arXiv:2301.03598); Helix Parallelism (arXiv:2507.07120), section 2.1.
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
    ready: bool = False,
) -> PartialAttention:
    """Runs `flash_decode`, with the same arguments, up to the merge.

    Args:
        lane: workspace that holds the partial states until they are merged.
        ready: `early`, and everything this launch reads or writes is older than the preceding kernel (attention over
            other rows in another lane, or a pause), so it does not wait.
    """
    if not dispatch.on_gpu(q):
        return PartialAttention(*reference(q, keys, out=out, lse=lse, scores=scores))
    B, T, Hq, D = q.shape
    k, v, table, lo, hi, sinks = keys.k, keys.v, keys.table, keys.lo, keys.hi, keys.sinks
    Hkv = k.shape[2]
    group = Hq // Hkv
    assert keys.scale > 0 and Hq % Hkv == 0
    keys.check_cache(q.dtype)
    assert q.stride(3) == table.stride(-1) == 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if lse is None else lse
    assert out.stride(3) == 1 and (sinks is None or (sinks.dtype == torch.float32 and sinks.shape == (Hq,)))
    if q.numel() == 0:
        return PartialAttention(out, lse)
    if q.is_cuda and scores is None and flash_decode_fp8_sm90.fits(q, keys):
        return flash_decode_fp8_sm90.launch(q, keys, out, lse, sms, early, lane, ready)
    if q.is_cuda and flash_decode_many_rows_sm90.fits(q, keys):
        return flash_decode_many_rows_sm90.launch(q, keys, out, lse, sms, early, scores, lane)
    tile = decode_tile(T * group, D, q.dtype, (keys.k_scale is not None) + (keys.v_scale is not None))
    rows = min(tile["BLOCK_M"], triton.next_power_of_2(T * group))
    key_scores, score_table, score_strides, collect = None, None, (0, 0, 0), ""
    if scores is not None:
        key_scores, score_table, collect = scores.planes, scores.table, scores.rows
        assert key_scores.shape[2:] == (Hkv, keys.page_size) and key_scores.stride()[2:] == (keys.page_size, 1)
        assert len(key_scores) >= triton.cdiv(T * group, tile["BLOCK_M"]), "key scores need one plane per tile of rows"
        score_strides = key_scores.stride(0), key_scores.stride(1), score_table.stride(0)
    programs = 8 // tile["num_warps"] * (sms or sm_count(q.device))  # eight warps fill an SM's registers
    part, part_lse = workspace(q.device, q.dtype, programs, rows, D, lane)
    _flash_decode_kernel[(programs,)](
        q, k, v, keys.k_scale, keys.v_scale, table, lo, hi, sinks, out, lse, part, part_lse, key_scores, score_table,
        *q.stride()[:3], *k.stride()[:3], table.stride(0), table.stride(1) if table.dim() == 3 else 0,
        *lo.stride(), *hi.stride(), *out.stride()[:3], *lse.stride(), *score_strides,
        keys.scale * math.log2(math.e), B, T=T, HEADS=Hkv, GROUP=group, D=D, PAGE=keys.page_size,
        BLOCK_B=triton.next_power_of_2(B), ROWS=rows, SINKS=sinks is not None,
        HOLES=table.dim() == 3, COLLECT=collect, EARLY=early, READY=ready,
        **keys.shape, **pdl_options(q), **tile,
    )  # fmt: skip
    return UnmergedAttention(out, lse, lo, hi, sinks, part, part_lse, programs, Hkv, tile["BLOCK_M"], tile["BLOCK_N"])
