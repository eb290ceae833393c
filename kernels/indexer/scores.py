"""Indexer scores: for each query, one per key of its sequence on this rank.

A program holds the queries of all index heads of several tokens of a sequence, and reads a run of index keys, so tokens
that are verified together read each key once. MMA rows are keys, so that the sum over heads is mostly within a thread.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.attention.split_prefill import tile_of_segment, tiles_of_rows
from kernels.indexer.keys import DIGITS, score_codes
from kernels.indexer.reference import index_scores as reference
from kernels.overlap import pdl_options, sm_count, start_successor, wait_for_predecessor


def score_tile(
    rows: int, heads: int, dtype: torch.dtype, scaled: bool = False, verified: bool = False
) -> dict[str, int]:
    """Returns launch options for up to `rows` tokens of a sequence with this many index heads.

    Args:
        scaled: keys are e4m3.
        verified: each sequence has `rows` tokens, one of few values, so 5 tokens may run as 4 and 1.
    """
    block_h = triton.next_power_of_2(heads)
    columns, block_n, warps, stages = (64, 32, 4, 1) if dtype == torch.float32 else (256, 128, 8, 3)
    max_length, least = max(1, columns // block_h), max(1, 16 // block_h)  # per MMA
    each = max(least, min(triton.next_power_of_2(rows), max_length))
    first = each if rows > each else each // 2
    more = max(least, triton.next_power_of_2(max(rows - first, 1)))
    if verified and first < rows <= first + more and more < first:
        each = first
    else:
        more = 0
    if each * block_h <= 64:
        warps = 4
    elif rows > 16 and each * block_h == 256 and not scaled:
        block_n, warps, stages = 64, 4, 2  # two programs per SM: one multiplies while the other sums over heads
    elif scaled and each * block_h > 128:
        # Wider tiles would spill, as keys are dequantized in registers. Here each warp takes half the columns: a few
        # more columns would be part of a token's heads, and its sum would differ from running it alone.
        block_n, stages, more = 64, 4, 0
    return dict(ROWS=each, MORE=more, BLOCK_H=block_h, BLOCK_N=block_n, num_warps=warps, num_stages=stages)


@triton.jit
def _queries(
    q, weights, begin, end, q_n, weights_n,
    HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Loads the queries [ROWS * BLOCK_H, BLOCK_D] of all heads of tokens from `begin` on, and their weights."""
    column = tl.arange(0, ROWS * BLOCK_H)
    n = begin + column // BLOCK_H
    head = column % BLOCK_H
    inside = (n < end) & (head < HEADS)
    d = tl.arange(0, BLOCK_D)
    queries = tl.load(
        q + (n * q_n + head * D)[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0
    )
    return queries, tl.load(weights + n * weights_n + head, mask=inside, other=0.0)


@triton.jit
def _store_scores(
    scored, scored_n, keys, scales, queries, factors, begin, lengths, key, at_scale, longest,
    ROWS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Stores and returns the scores [BLOCK_N, ROWS] of a tile of keys for tokens from `begin` on."""
    products = tl.dot(keys, tl.trans(queries), input_precision="ieee")  # [BLOCK_N, ROWS * BLOCK_H]
    found = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL) * factors[None, :]
    found = tl.sum(tl.reshape(found, [BLOCK_N, ROWS, BLOCK_H]), 2)
    if scales is not None:
        # a power of two: may be multiplied last
        found *= tl.load(scales + at_scale, mask=key < longest, other=0.0)[:, None]
    to = scored + (begin + tl.arange(0, ROWS))[None, :] * scored_n + key[:, None]
    tl.store(to, found, mask=key[:, None] < lengths[None, :])
    return found


@triton.jit(do_not_specialize=["segments", "EACH"])
def _index_scores_kernel(
    q, weights, cache, scales, tables, hi, cu_q, scored, digit_counts,
    segments, q_n, weights_n, page_stride, tables_b, scored_n, EACH,
    HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, OFFSETS: tl.constexpr,
    ROWS: tl.constexpr, MORE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    b = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0)
    begin = b * EACH
    end = begin + EACH
    if OFFSETS:
        segment, group, start, length = tile_of_segment(cu_q, segments, group, 1, ROWS + MORE)
        b, begin = segment.to(tl.int64), start.to(tl.int64)
        end = begin + length
    begin += group * (ROWS + MORE)
    t = tl.arange(0, ROWS)
    lengths = tl.load(hi + begin + t, mask=begin + t < end, other=0)
    longest = tl.max(lengths, 0)
    if MORE > 0:
        beyond = begin + ROWS
        t_more = tl.arange(0, MORE)
        lengths_more = tl.load(hi + beyond + t_more, mask=beyond + t_more < end, other=0)
        longest = tl.maximum(longest, tl.max(lengths_more, 0))
    tiles = tl.cdiv(longest, BLOCK_N)
    if tl.program_id(2) < tiles:
        queries, factors = _queries(q, weights, begin, end, q_n, weights_n, HEADS, D, ROWS, BLOCK_H, BLOCK_D)
        if MORE > 0:
            queries_more, factors_more = _queries(
                q, weights, beyond, end, q_n, weights_n, HEADS, D, MORE, BLOCK_H, BLOCK_D
            )
        d = tl.arange(0, BLOCK_D)
        pages = tables + b * tables_b
        lane = tl.arange(0, BLOCK_N)
        # One page lookup per tile if pages hold whole tiles, else one per key.
        step = 0 if PAGE % BLOCK_N == 0 else lane
        ahead = tl.program_id(2) * BLOCK_N + step
        # Load one iteration ahead: an index loaded where it is used would prevent pipelining.
        next_page = tl.load(pages + ahead // PAGE, mask=ahead < longest, other=0)
        if digit_counts is not None:
            counts = tl.zeros([256], tl.int32)
            beside = longest * 0
        for tile in range(tl.program_id(2), tiles, tl.num_programs(2)):
            page = next_page.to(tl.int64)
            ahead = (tile + tl.num_programs(2)) * BLOCK_N + step
            next_page = tl.load(pages + ahead // PAGE, mask=ahead < longest, other=0)
            key = tile * BLOCK_N + lane
            at = page * page_stride + (key % PAGE) * D
            # Keys past the longest row may be anything: their scores are not stored.
            keys = tl.load(
                cache + at[:, None] + d[None, :], mask=(key < longest)[:, None] & (d < D)[None, :], other=0.0
            )
            keys = keys.to(queries.dtype)
            at_scale = page * PAGE + key % PAGE
            found = _store_scores(
                scored, scored_n, keys, scales, queries, factors, begin, lengths, key, at_scale, longest,
                ROWS, BLOCK_H, BLOCK_N,
            )  # fmt: skip
            if digit_counts is not None:  # of the only row with a length
                # Count invalid scores as 0 and subtract them. A mask would not do: Triton 3.6's histogram orders
                # reshaped values and their mask differently.
                digits = tl.where(key[:, None] < lengths[None, :], score_codes(found) >> 24, 0)
                counts += tl.histogram(tl.ravel(digits.to(tl.int32)), 256)
                beside += BLOCK_N * ROWS - tl.minimum(longest - tile * BLOCK_N, BLOCK_N)
            if MORE > 0:
                _store_scores(
                    scored, scored_n, keys, scales, queries_more, factors_more, beyond, lengths_more, key, at_scale,
                    longest, MORE, BLOCK_H, BLOCK_N,
                )  # fmt: skip
        if digit_counts is not None:
            counts -= tl.where(tl.arange(0, 256) == 0, beside, 0)
            to = digit_counts + begin * 256 + tl.arange(0, 256)
            tl.atomic_add(to, counts, mask=counts > 0, sem="relaxed")
    # Not earlier: the successor's programs would take the SMs of this launch's programs that have not started yet.
    start_successor(PDL)


def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    tables: torch.Tensor,
    hi: torch.Tensor,
    cu_q: torch.Tensor | None,
    max_q: int,
    scores: torch.Tensor,
    scales: torch.Tensor | None = None,
    digit_counts: torch.Tensor | None = None,
) -> None:
    """Computes scores of this rank's keys for each query: the weighted sum over heads of relu(q.k), in fp32.

    A score depends only on its query and key, not on where the key is.

    Args:
        q: [N, H, D] bf16, fp16 or fp32, heads contiguous.
        weights: [N, H] fp32, last dim contiguous; any sign.
        cache: [pages, page_size, D] in q's dtype, contiguous within a page. With scales: e4m3.
        tables: [n, P] int32, rows contiguous: pages of each sequence.
        hi: [N] int32, contiguous: keys of each query, in local order; 0: none.
        cu_q: [n + 1] int32, cumulative numbers of queries per sequence; None: N / n each.
        max_q: max queries per sequence.
        scores: [N, S] fp32, last dim contiguous; the first `hi` of each row are written.
        scales: for e4m3 keys, [pages, page_size] fp32, contiguous; see `kernels.scaled_keys`.
        digit_counts: only with one query per sequence, see `kernels.indexer.select_topk`: adds the counts of the
            scores' first digits to the first plane.

    Source:
        DeepSeek-V3.2 (arXiv:2512.02556), section 2.1, equation 1.
    """
    if not dispatch.on_gpu(q):
        reference(q, weights, cache, tables, hi, cu_q, max_q, scores, scales, digit_counts)
        return
    N, heads, D = q.shape
    page_size, columns = cache.shape[1], scores.shape[1]
    assert q.stride()[1:] == (D, 1) and cache.stride()[1:] == (D, 1)
    assert cache.dtype == (q.dtype if scales is None else torch.float8_e4m3fn)
    assert scales is None or scales.is_contiguous()
    assert weights.dtype == scores.dtype == torch.float32 and weights.stride(1) == scores.stride(1) == 1
    assert hi.is_contiguous() and tables.stride(1) == 1
    assert digit_counts is None or (
        max_q == 1 and digit_counts[0].shape == (N, DIGITS) and digit_counts[0].is_contiguous()
    )
    if N == 0:
        return
    tile = score_tile(max_q, heads, q.dtype, scales is not None, cu_q is None)
    rows = tile["ROWS"] + tile["MORE"]
    groups, segments = (triton.cdiv(max_q, rows), len(tables)), 0
    if cu_q is not None:
        row_tiles, segments = tiles_of_rows(N, max_q, len(tables), rows)
        groups = row_tiles, 1
    tiles = triton.cdiv(columns, tile["BLOCK_N"])
    least = triton.cdiv(2 * sm_count(q.device), groups[0] * groups[1])  # fills the GPU
    programs = max(1, min(tiles, max(least, triton.cdiv(tiles, 64))))
    _index_scores_kernel[(*groups, programs)](
        q, weights, cache, scales, tables, hi, cu_q, scores, digit_counts,
        segments, q.stride(0), weights.stride(0), cache.stride(0), tables.stride(0), scores.stride(0), max_q,
        HEADS=heads, D=D, PAGE=page_size, OFFSETS=cu_q is not None, BLOCK_D=max(16, triton.next_power_of_2(D)),
        **tile, **pdl_options(q),
    )  # fmt: skip
