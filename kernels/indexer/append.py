"""Fused step between an indexer's projections and its scores: key LayerNorm, RoPE, key append."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.indexer.reference import index_append as reference
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor
from kernels.scaled_keys import reciprocal, scale_bits


@triton.jit
def _index_append_kernel(
    q, raw, cos, sin, norm_weight, bias, cache, scales, slot_mapping, digit_counts, q_n, raw_n, page_stride, eps,
    HEADS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, PLANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    half: tl.constexpr = ROPE // 2
    r = tl.arange(0, BLOCK)  # within one half of the rotated part
    rotated = r < half
    d = tl.arange(0, BLOCK_D)
    wait_for_predecessor(PDL)
    start_successor(PDL)
    c = tl.load(cos + token * half + r, mask=rotated, other=0.0).to(tl.float32)
    s = tl.load(sin + token * half + r, mask=rotated, other=0.0).to(tl.float32)
    if part == 0:
        if digit_counts is not None:
            for plane in tl.static_range(PLANES):
                zeroed = digit_counts + (plane * tl.num_programs(0) + token) * 256
                tl.store(zeroed + tl.arange(0, 256), tl.zeros([256], tl.int32))
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            row = raw + token * raw_n
            x = tl.load(row + d, mask=d < D, other=0.0).to(tl.float32)
            mean = tl.sum(x, 0) / D
            apart = tl.where(d < D, x - mean, 0.0)
            factor = tl.rsqrt(tl.sum(apart * apart, 0) / D + eps)
            target = cache + (slot // PAGE) * page_stride + (slot % PAGE) * D
            weight = tl.load(norm_weight + d, mask=d < D, other=0.0).to(tl.float32)
            bias_values = tl.load(bias + d, mask=d < D, other=0.0).to(tl.float32)
            plain = (d >= ROPE) & (d < D)
            rest = apart * factor * weight + bias_values
            first = (tl.load(row + r, mask=rotated, other=0.0).to(tl.float32) - mean) * factor
            first = first * tl.load(norm_weight + r, mask=rotated, other=0.0).to(tl.float32)
            first += tl.load(bias + r, mask=rotated, other=0.0).to(tl.float32)
            second = (tl.load(row + half + r, mask=rotated, other=0.0).to(tl.float32) - mean) * factor
            second = second * tl.load(norm_weight + half + r, mask=rotated, other=0.0).to(tl.float32)
            second += tl.load(bias + half + r, mask=rotated, other=0.0).to(tl.float32)
            first, second = first * c - second * s, second * c + first * s
            if scales is not None:
                max_length = tl.max(tl.where(plain, tl.abs(rest), 0.0), 0)
                max_length = tl.maximum(
                    max_length, tl.max(tl.where(rotated, tl.maximum(tl.abs(first), tl.abs(second)), 0.0), 0)
                )
                bits = scale_bits(max_length)
                tl.store(scales + slot, bits.to(tl.float32, bitcast=True))
                rest, first, second = rest * reciprocal(bits), first * reciprocal(bits), second * reciprocal(bits)
            stored: tl.constexpr = target.dtype.element_ty
            tl.store(target + d, rest.to(stored), mask=plain)
            tl.store(target + r, first.to(stored), mask=rotated)
            tl.store(target + half + r, second.to(stored), mask=rotated)
    else:
        heads = (part - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        mask = (heads < HEADS)[:, None] & rotated[None, :]
        at = q + token * q_n + heads[:, None] * D + r[None, :]
        first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, first * c[None, :] - second * s[None, :], mask=mask)
        tl.store(at + half, second * c[None, :] + first * s[None, :], mask=mask)


def index_append(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm_weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: torch.Tensor | None = None,
    digit_counts: torch.Tensor | None = None,
) -> None:
    """Writes this rank's index keys, normalized and rotated, to their cache slots; rotates index queries in place.

    RoPE applies to the first P elements of queries and keys.

    Args:
        q: [N, H, D], index queries, overwritten; heads contiguous. H may be 0.
        k: [N, D] fp32 or q's dtype, index keys before the norm; last dim contiguous.
        cos, sin: [N, P / 2], contiguous.
        norm_weight, bias: [D], contiguous; the keys' LayerNorm.
        cache: [pages, page_size, D], contiguous within a page; pages may be strided. With scales: e4m3.
        slot_mapping: [N] int64, contiguous: `page * page_size + offset`, distinct, or -1 for a token of another rank.
        scales: for e4m3 keys, [pages, page_size] fp32, contiguous; see `kernels.scaled_keys`.
        digit_counts: [P, N, 256] int32, contiguous, zeroed here for later launches to add to.

    Source:
        DeepSeek-V3.2 (arXiv:2512.02556), section 2.1, with the RoPE and the norm of its inference code.
    """
    if not dispatch.on_gpu(q):
        reference(q, k, cos, sin, norm_weight, bias, eps, cache, slot_mapping, scales, digit_counts)
        return
    N, heads, D = q.shape
    rope = 2 * cos.shape[1]
    assert q.stride()[1:] == (D, 1) and k.stride(1) == 1 and cache.stride()[1:] == (D, 1) and rope <= D
    assert (
        cos.is_contiguous()
        and sin.is_contiguous()
        and slot_mapping.is_contiguous()
        and norm_weight.shape == bias.shape == (D,)
    )
    assert (scales is None) == (cache.dtype != torch.float8_e4m3fn) and (scales is None or scales.is_contiguous())
    assert digit_counts is None or (digit_counts.is_contiguous() and digit_counts.shape[1:] == (N, 256))
    if N == 0:
        return
    block_h = min(16, triton.next_power_of_2(max(heads, 1)))
    _index_append_kernel[N, 1 + triton.cdiv(heads, block_h)](
        q, k, cos, sin, norm_weight, bias, cache, scales, slot_mapping, digit_counts, q.stride(0), k.stride(0),
        cache.stride(0), eps,
        HEADS=heads, D=D, ROPE=rope, PAGE=cache.shape[1], BLOCK_H=block_h, BLOCK_D=triton.next_power_of_2(D),
        BLOCK=triton.next_power_of_2(rope // 2), PLANES=0 if digit_counts is None else len(digit_counts), num_warps=1,
        **pdl_options(q),
    )  # fmt: skip
