"""Fused step between MLA's projections and its attention: q absorption, RoPE, latent norm and KV append.

Some programs absorb queries with one head's columns of W_UK, prefetched before the predecessor is done; the others
write one token's latent and rope key to the cache, or rotate some heads of its queries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.mla.per_head_linear import MAX_ROWS, head_blocks, head_product, head_weight
from kernels.mla.reference import mla_append as reference
from kernels.mla.reference import per_head_linear
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor
from kernels.scaled_keys import GROUP, reciprocal, scale_at, scale_bits


@triton.jit
def _store_fp8(latent, target, scales, slot, R: tl.constexpr, PAGE: tl.constexpr, BLOCK_R: tl.constexpr):
    width: tl.constexpr = GROUP if BLOCK_R > GROUP else BLOCK_R
    x = tl.reshape(latent.to(tl.float32), [BLOCK_R // width, width])
    group = tl.arange(0, BLOCK_R // width)
    bits = scale_bits(tl.max(tl.abs(x), 1))
    r = group[:, None] * width + tl.arange(0, width)[None, :]
    tl.store(target + r, (x * reciprocal(bits)[:, None]).to(target.dtype.element_ty), mask=r < R)
    groups: tl.constexpr = (R + width - 1) // width
    at = scale_at(scales, slot // PAGE, slot % PAGE, group, PAGE, PAGE, groups * PAGE, PAGE)
    tl.store(at, bits.to(tl.float32, bitcast=True), mask=group * width < R)


@triton.jit(do_not_specialize=["N"])  # changes from chunk to chunk
def _mla_append_kernel(
    q, kv, cos, sin, norm_weight, weight, cache, scales, ropes, slot_mapping, out,
    q_n, q_h, kv_n, w_h, w_a, page_stride, rope_stride, out_n, out_h, N, absorbs, eps,
    HEADS: tl.constexpr, NOPE: tl.constexpr, R: tl.constexpr, P: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Attention may start at once: an SM has room for one of its programs.
    if tl.program_id(0) < absorbs:
        head, b, w = head_weight(weight, w_h, w_a, 1, tl.program_id(0), NOPE, R, BLOCK_A, BLOCK_B)  # constant
        wait_for_predecessor(PDL)
        start_successor(PDL)
        head_product(q, out, w, q_n, q_h, out_n, out_h, head, b, N, NOPE, R, BLOCK_N, BLOCK_A)
    else:
        wait_for_predecessor(PDL)
        start_successor(PDL)
        each: tl.constexpr = 1 + (HEADS + BLOCK_H - 1) // BLOCK_H  # programs per token
        token = ((tl.program_id(0) - absorbs) // each).to(tl.int64)
        part = (tl.program_id(0) - absorbs) % each
        half: tl.constexpr = P // 2
        d = tl.arange(0, BLOCK)  # within one half of the rope part
        inside = d < half
        c = tl.load(cos + token * half + d, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + token * half + d, mask=inside, other=0.0).to(tl.float32)
        if part == 0:
            slot = tl.load(slot_mapping + token)
            if slot >= 0:
                width: tl.constexpr = R + P if scales is None else R
                target = cache + (slot // PAGE) * page_stride + (slot % PAGE) * width
                row = kv + token * kv_n
                r = tl.arange(0, BLOCK_R)
                x = tl.load(row + r, mask=r < R, other=0.0).to(tl.float32)
                scaled = x * tl.rsqrt(tl.sum(x * x, 0) / R + eps)
                # Round before applying the norm weight, as the models were trained.
                rounded = scaled.to(kv.dtype.element_ty).to(tl.float32)
                latent = rounded * tl.load(norm_weight + r, mask=r < R, other=0.0).to(tl.float32)
                if scales is None:
                    tl.store(target + r, latent, mask=r < R)
                    target += R
                else:
                    _store_fp8(latent.to(kv.dtype.element_ty), target, scales, slot, R, PAGE, BLOCK_R)
                    target = ropes + (slot // PAGE) * rope_stride + (slot % PAGE) * P
                first = tl.load(row + R + d, mask=inside, other=0.0).to(tl.float32)
                second = tl.load(row + R + half + d, mask=inside, other=0.0).to(tl.float32)
                tl.store(target + d, first * c - second * s, mask=inside)
                tl.store(target + half + d, second * c + first * s, mask=inside)
        else:
            heads = (part - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
            mask = (heads < HEADS)[:, None] & inside[None, :]
            source = q + token * q_n + NOPE + heads[:, None] * q_h + d[None, :]
            first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
            second = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)
            target = out + token * out_n + R + heads[:, None] * out_h + d[None, :]
            tl.store(target, first * c[None, :] - second * s[None, :], mask=mask)
            tl.store(target + half, second * c[None, :] + first * s[None, :], mask=mask)


def mla_append(
    q: torch.Tensor,
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    w_uk: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: torch.Tensor | None = None,
    ropes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Writes this rank's latents and rope keys to their cache slots; returns queries, absorbed and rotated.

    Args:
        q: [N, Hq, nope + P], queries before absorption and RoPE; last dim contiguous.
        kv: [N, R + P], latent and rope key before RoPE; last dim contiguous.
        cos, sin: [N, P / 2], contiguous.
        norm_weight: [R], contiguous; RMSNorm of the latent.
        w_uk: [Hq, nope, R], up-projection of keys; last dim contiguous.
        cache: [pages, page_size, R + P] in kv's dtype, contiguous within a page; pages may be strided. With scales:
            [pages, page_size, R] e4m3.
        slot_mapping: [N] int64, contiguous: `page * page_size + offset`, distinct, or -1 for a token of another rank.
        scales: for e4m3 latents, [pages, ceil(R / 128), page_size] fp32, contiguous.
        ropes: for e4m3 latents, the rope keys [pages, page_size, P] in kv's dtype, contiguous within a page.

    Returns:
        Absorbed queries [N, Hq, R + P] in q's dtype: W_UK^T times the first `nope` values, then the rotated rest.

    Source:
        DeepSeek-V2 (arXiv:2405.04434), section 2.1; RoPE in the half-split form of kv_append.
    """
    if not dispatch.on_gpu(q):
        return reference(q, kv, cos, sin, norm_weight, eps, w_uk, cache, slot_mapping, scales, ropes)
    N, heads, _ = q.shape
    _, nope, R = w_uk.shape
    P = kv.shape[1] - R
    width, dtype = (R + P, kv.dtype) if scales is None else (R, torch.float8_e4m3fn)
    assert q.shape[2] == nope + P and cache.stride()[1:] == (width, 1), f"a page must be contiguous: {cache.stride()}"
    assert (
        kv.dtype == q.dtype == w_uk.dtype and cache.dtype == dtype and norm_weight.shape == (R,) and len(w_uk) == heads
    )
    assert (scales is None) == (ropes is None) and (scales is None or scales.is_contiguous())
    assert ropes is None or (ropes.dtype == kv.dtype and ropes.stride()[1:] == (P, 1))
    assert q.stride(2) == kv.stride(1) == w_uk.stride(2) == norm_weight.stride(0) == 1
    assert cos.is_contiguous() and sin.is_contiguous() and slot_mapping.is_contiguous()
    out = torch.empty(N, heads, R + P, dtype=q.dtype, device=q.device)
    if N == 0:
        return out
    blocks = head_blocks(nope, 64, q.dtype)
    absorbs = 0
    if N <= MAX_ROWS:
        absorbs = heads * triton.cdiv(R, blocks["BLOCK_B"])
    else:
        per_head_linear(q[..., :nope], w_uk, out[..., :R])
    block_h = min(8, triton.next_power_of_2(max(heads, 1)))
    _mla_append_kernel[(absorbs + N * (1 + triton.cdiv(heads, block_h)),)](
        q, kv, cos, sin, norm_weight, w_uk, cache, scales, ropes, slot_mapping, out,
        *q.stride()[:2], kv.stride(0), *w_uk.stride()[:2], cache.stride(0),
        0 if ropes is None else ropes.stride(0), *out.stride()[:2], N, absorbs, eps,
        HEADS=heads, NOPE=nope, R=R, P=P, PAGE=cache.shape[1], **blocks,
        BLOCK_R=triton.next_power_of_2(R), BLOCK_H=block_h, BLOCK=triton.next_power_of_2(P // 2),
        num_warps=4 if absorbs else 1, **pdl_options(q),
    )  # fmt: skip
    return out
