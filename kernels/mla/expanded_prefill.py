"""MLA prefill over expanded latents: per-head keys and values, and a rope part that all heads share.

Fewer FLOPs than absorbed attention: for DeepSeek-V3, 192 key and 128 value elements per head instead of 576 and 512. A
few query rows per key pay for the expansion.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.attention.split_prefill import tile_of_segment, tiles_of_rows
from kernels.mla import expanded_prefill_sm90
from kernels.mla.reference import expanded_prefill as reference


def expanded_tile(rows: int, dtype: torch.dtype) -> dict[str, int]:
    """Returns launch options for up to `rows` rows of a sequence.

    Keys and values of a tile are 40 KB in bf16: three stages and the queries fit an SM.
    """
    if dtype == torch.float32:
        return dict(BLOCK_M=min(32, max(16, triton.next_power_of_2(rows))), BLOCK_N=32, num_warps=4, num_stages=1)
    if rows <= 64:
        return dict(BLOCK_M=max(16, triton.next_power_of_2(rows)), BLOCK_N=64, num_warps=4, num_stages=2)
    return dict(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=3)


@triton.jit
def _attend_expanded(
    acc, total, peak, q_nope, q_rope, row_hi, stop, first, last, keys, ropes, key_t, rope_t, scale_log2,
    MASKED: tl.constexpr, NOPE: tl.constexpr, P: tl.constexpr, V: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    p = tl.arange(0, BLOCK_P)
    v = tl.arange(0, BLOCK_V)
    for tile in range(first, last):
        key = tile * BLOCK_N + lane
        at = keys + (key.to(tl.int64) * key_t)[:, None]
        ropes_at = ropes + (key.to(tl.int64) * rope_t)[:, None] + p[None, :]
        if MASKED:
            there = (key < stop)[:, None]
            k = tl.load(at + d[None, :], mask=there & (d < NOPE)[None, :], other=0.0)
            r = tl.load(ropes_at, mask=there & (p < P)[None, :], other=0.0)
            values = tl.load(at + NOPE + v[None, :], mask=there & (v < V)[None, :], other=0.0)
        else:
            k = tl.load(at + d[None, :], mask=(d < NOPE)[None, :], other=0.0)
            r = tl.load(ropes_at, mask=(p < P)[None, :], other=0.0)
            values = tl.load(at + NOPE + v[None, :], mask=(v < V)[None, :], other=0.0)
        scores = tl.dot(q_nope, tl.trans(k), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(r), scores, input_precision="ieee") * scale_log2
        if MASKED:
            scores = tl.where(key[None, :] < row_hi[:, None], scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.math.exp2(scores - highest[:, None])
        shrink = tl.math.exp2(peak - highest)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
        peak = highest
    return acc, total, peak


@triton.jit(do_not_specialize=["segments"])
def _expanded_prefill_kernel(
    q, keys, ropes, cu_q, hi, out, lse,
    segments, q_n, q_h, key_b, key_t, key_h, rope_b, rope_t, out_n, out_h, scale_log2,
    NOPE: tl.constexpr, P: tl.constexpr, V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # Start with the last queries: they read the most keys.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    segment, tile_m, begin, length = tile_of_segment(cu_q, segments, tile, 1, BLOCK_M)
    segment = segment.to(tl.int64)
    head = tl.program_id(1)
    if tile_m * BLOCK_M < length:
        row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        live = row < length
        n = (begin + row).to(tl.int64)
        row_hi = tl.load(hi + n, mask=live, other=0)
        stop = tl.max(row_hi, 0)
        full = tl.min(tl.where(live, row_hi, stop), 0) // BLOCK_N  # tiles that every row reads in full

        d = tl.arange(0, BLOCK_D)
        p = tl.arange(0, BLOCK_P)
        v = tl.arange(0, BLOCK_V)
        rows = q + (n * q_n + head * q_h)[:, None]
        q_nope = tl.load(rows + d[None, :], mask=live[:, None] & (d < NOPE)[None, :], other=0.0)
        q_rope = tl.load(rows + NOPE + p[None, :], mask=live[:, None] & (p < P)[None, :], other=0.0)
        head_keys = keys + segment * key_b + head * key_h
        segment_ropes = ropes + segment * rope_b
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        peak = tl.full([BLOCK_M], -1.0e38, tl.float32)  # finite: -inf minus -inf would be NaN
        acc, total, peak = _attend_expanded(
            acc, total, peak, q_nope, q_rope, row_hi, stop, 0, full, head_keys, segment_ropes, key_t, rope_t,
            scale_log2,
            False, NOPE, P, V, BLOCK_N, BLOCK_D, BLOCK_P, BLOCK_V,
        )  # fmt: skip
        acc, total, peak = _attend_expanded(
            acc, total, peak, q_nope, q_rope, row_hi, stop, full, tl.cdiv(stop, BLOCK_N), head_keys, segment_ropes,
            key_t,
            rope_t, scale_log2, True, NOPE, P, V, BLOCK_N, BLOCK_D, BLOCK_P, BLOCK_V,
        )  # fmt: skip
        empty = total == 0.0
        acc /= tl.where(empty, 1.0, total)[:, None]
        natural = tl.where(empty, float("-inf"), (peak + tl.log2(total)) * 0.6931471805599453)
        tl.store(out + (n * out_n + head * out_h)[:, None] + v[None, :], acc, mask=live[:, None] & (v < V)[None, :])
        tl.store(lse + n * tl.num_programs(1) + head, natural, mask=live)


def expanded_prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    ropes: torch.Tensor,
    cu_q: torch.Tensor,
    max_q: int,
    hi: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends prompt chunks of several sequences to their expanded latents; returns the partial output and its LSE.

    Args:
        q: [N, H, nope + P] bf16, fp16 or fp32, rotated, not absorbed, concatenated chunks; last dim contiguous.
        keys: [n, T, H, nope + V] in q's dtype, non-rope key part and value per head; last dim contiguous. May hold
            anything past the keys that are read.
        ropes: [n, T, P] in q's dtype, the rope part of keys; last dim contiguous.
        cu_q: [m + 1] int32, cumulative segment lengths of q; segments from `n` on read nothing.
        hi: [N] int32, contiguous: number of keys that a query reads, from the first; 0: none.
        scale: factor on scores, above 0.

    Returns:
        Output [N, H, V] normalized over these keys, and natural-log LSE [N, H] fp32; 0 and -inf where a query reads
        no key.

    Source:
        DeepSeek-V2 (arXiv:2405.04434), section 2.1, not absorbed; FlashAttention-2.
    """
    if not dispatch.on_gpu(q):
        return reference(q, keys, ropes, cu_q, max_q, hi, scale)
    N, heads, _ = q.shape
    P = ropes.shape[2]
    nope = q.shape[2] - P
    V = keys.shape[3] - nope
    assert keys.shape[:3] == (*ropes.shape[:2], heads) and keys.dtype == ropes.dtype == q.dtype and scale > 0
    assert q.stride(2) == keys.stride(3) == ropes.stride(2) == 1 and hi.is_contiguous() and cu_q.is_contiguous()
    out = q.new_empty(N, heads, V)
    lse = torch.empty(N, heads, dtype=torch.float32, device=q.device)
    if not heads:  # a rank may have no heads, and TMA does not support empty tensors
        return out, lse
    if q.is_cuda and expanded_prefill_sm90.fits(q, keys, ropes, max_q):
        expanded_prefill_sm90.launch(q, keys, ropes, cu_q, max_q, hi, scale, out, lse)
        return out, lse
    tile = expanded_tile(max_q, q.dtype)
    tiles, segments = tiles_of_rows(N, max_q, len(cu_q) - 1, tile["BLOCK_M"])
    _expanded_prefill_kernel[tiles, heads](
        q, keys, ropes, cu_q, hi, out, lse,
        segments, *q.stride()[:2], *keys.stride()[:3], *ropes.stride()[:2], *out.stride()[:2],
        scale * math.log2(math.e),
        NOPE=nope, P=P, V=V, BLOCK_D=max(16, triton.next_power_of_2(nope)),
        BLOCK_P=max(16, triton.next_power_of_2(P)), BLOCK_V=max(16, triton.next_power_of_2(V)), **tile,
    )  # fmt: skip
    return out, lse
