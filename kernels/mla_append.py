"""Append for MLA: the step's latents are normalised, keys and queries rotated, and each token's slot is written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import routing
from kernels.reference.mla_append import mla_append as reference


@triton.jit
def _mla_append_kernel(
    q, kv, cos, sin, gain, cache, slots, out,
    q_n, q_h, kv_n, page_stride, out_n, out_h, eps,
    HEADS: tl.constexpr, R: tl.constexpr, P: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = P // 2
    d = tl.arange(0, BLOCK)  # over one half of the rotated part
    inside = d < half
    c = tl.load(cos + n * half + d, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + n * half + d, mask=inside, other=0.0).to(tl.float32)
    if tl.program_id(1) == 0:
        slot = tl.load(slots + n)
        if slot >= 0:
            target = cache + (slot // PAGE) * page_stride + (slot % PAGE) * (R + P)
            row = kv + n * kv_n
            r = tl.arange(0, BLOCK_R)
            x = tl.load(row + r, mask=r < R, other=0.0).to(tl.float32)
            scaled = x * tl.rsqrt(tl.sum(x * x, 0) / R + eps)
            # Rounded before the gain is applied, as the models were trained.
            rounded = scaled.to(cache.dtype.element_ty).to(tl.float32)
            weight = tl.load(gain + r, mask=r < R, other=0.0).to(tl.float32)
            tl.store(target + r, rounded * weight, mask=r < R)
            first = tl.load(row + R + d, mask=inside, other=0.0).to(tl.float32)
            second = tl.load(row + R + half + d, mask=inside, other=0.0).to(tl.float32)
            tl.store(target + R + d, first * c - second * s, mask=inside)
            tl.store(target + R + half + d, second * c + first * s, mask=inside)
    else:
        head = (tl.program_id(1) - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        mask = (head < HEADS)[:, None] & inside[None, :]
        source = q + n * q_n + head[:, None] * q_h + d[None, :]
        first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)
        target = out + n * out_n + head[:, None] * out_h + d[None, :]
        tl.store(target, first * c[None, :] - second * s[None, :], mask=mask)
        tl.store(target + half, second * c[None, :] + first * s[None, :], mask=mask)


def mla_append(
    q: torch.Tensor,
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write this rank's latents and rotated keys into their slots of the cache, rotate the queries' rope part.

    Args:
        q: [N, Hq, P], the rope part of the queries before rotation; last dim contiguous.
        kv: [N, R + P], a token's latent and its key's rope part before rotation; last dim contiguous.
        cos: [N, P / 2], contiguous; of the angles by which the halves of a rope part are rotated against each other.
        sin: like `cos`.
        gain: [R], contiguous; weight of the latent's RMSNorm.
        eps: of that norm.
        cache: [pages, page_size, R + P] in kv's dtype, contiguous within a page; pages may be strided.
        slots: [N] int64, contiguous: `page * page_size + offset`, distinct, or -1 for a token that another rank owns.
        out: [N, Hq, P] in q's dtype, written if given; last dim contiguous. `q` itself rotates in place; the last P
            values of an absorbed query [N, Hq, R + P] are where attention wants them.

    Returns:
        The rotated part [N, Hq, P] of the queries: `out`, or a new tensor.

    Source:
        DeepSeek-V2 (arXiv:2405.04434), section 2.1; RoPE in the half-split form of kv_append.
    """
    if not routing.on_gpu(q):
        return reference(q, kv, cos, sin, gain, eps, cache, slots, out=out)
    N, heads, P = q.shape
    R = kv.shape[1] - P
    assert cache.stride()[1:] == (R + P, 1), f"a page must be contiguous, got strides {cache.stride()}"
    assert cache.dtype == kv.dtype == q.dtype and gain.shape == (R,)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    assert q.stride(2) == kv.stride(1) == out.stride(2) == gain.stride(0) == 1
    assert cos.is_contiguous() and sin.is_contiguous() and slots.is_contiguous()
    if N == 0:
        return out
    block_h = min(8, triton.next_power_of_2(heads))
    _mla_append_kernel[N, 1 + triton.cdiv(heads, block_h)](
        q, kv, cos, sin, gain, cache, slots, out,
        *q.stride()[:2], kv.stride(0), cache.stride(0), *out.stride()[:2], eps,
        HEADS=heads, R=R, P=P, PAGE=cache.shape[1],
        BLOCK_R=triton.next_power_of_2(R), BLOCK_H=block_h, BLOCK=triton.next_power_of_2(P // 2), num_warps=1,
    )  # fmt: skip
    return out
