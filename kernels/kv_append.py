"""Append: a step's heads are normalised and rotated, and this rank's new keys and values go into its paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import routing
from kernels.launching import overlapped, wait_for_predecessor
from kernels.reference.kv_append import kv_append as reference


@triton.jit
def _kv_append_kernel(
    qkv, cos, sin, q_norm, k_norm, k_cache, v_cache, slots, q,
    x_n, x_h, k_page, v_page, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, NORMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # No early start of the successor: attention has to find the whole GPU empty, or its programs crowd on some SMs.
    wait_for_predecessor(PDL)
    n = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + n)
    half: tl.constexpr = D // 2
    d = tl.arange(0, BLOCK)  # over one half of the head dim
    inside = d < half
    x = qkv + n * x_n + head * x_h
    first = tl.load(x + d, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + half + d, mask=inside, other=0.0).to(tl.float32)
    is_value = head >= Q_HEADS + KV_HEADS
    if not is_value:
        if NORMS:
            gain = q_norm if head < Q_HEADS else k_norm
            scale = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / D + eps)
            dtype: tl.constexpr = qkv.dtype.element_ty
            # Rounded before and after the weight is applied, as the models were trained.
            first = (first * scale).to(dtype).to(tl.float32) * tl.load(gain + d, mask=inside, other=0.0).to(tl.float32)
            second = (second * scale).to(dtype).to(tl.float32) * tl.load(gain + half + d, mask=inside, other=0.0).to(
                tl.float32
            )
            first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        c = tl.load(cos + n * half + d, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + n * half + d, mask=inside, other=0.0).to(tl.float32)
        first, second = first * c - second * s, second * c + first * s
    if head < Q_HEADS:
        target = q + (n * Q_HEADS + head) * D
        tl.store(target + d, first, mask=inside)
        tl.store(target + half + d, second, mask=inside)
    elif slot >= 0:
        local = (slot % PAGE) * (KV_HEADS * D)
        if is_value:
            target = v_cache + (slot // PAGE) * v_page + local + (head - Q_HEADS - KV_HEADS) * D
            tl.store(target + d, first, mask=inside)
            tl.store(target + half + d, second, mask=inside)
        else:
            target = k_cache + (slot // PAGE) * k_page + local + (head - Q_HEADS) * D
            tl.store(target + d, first, mask=inside)
            tl.store(target + half + d, second, mask=inside)


def kv_append(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> torch.Tensor:
    """Rotate queries and keys, write this rank's keys and values into their slots of the cache, return the queries.

    Args:
        qkv: [N, Hq + 2 Hkv, D]: the query heads, then the key heads, then the value heads; last dim contiguous.
        cos: [N, D / 2], contiguous; of the angles by which the halves of a head are rotated against each other.
        sin: like `cos`.
        k_cache: [pages, page_size, Hkv, D] in qkv's dtype, contiguous within a page; pages may be strided.
        v_cache: like `k_cache`.
        slots: [N] int64, `page * page_size + offset`, distinct, or -1 for a token that another rank owns.
        norms: RMSNorm of each head before the rotation: weights of queries and of keys [D], and eps.

    Returns:
        Queries [N, Hq, D] in qkv's dtype.

    Source:
        RoPE in the half-split form of https://arxiv.org/abs/2104.09864's implementations.
    """
    if not routing.on_gpu(qkv):
        return reference(qkv, cos, sin, k_cache, v_cache, slots, norms)
    N, heads, D = qkv.shape
    page_size, kv_heads = k_cache.shape[1:3]
    q_heads = heads - 2 * kv_heads
    for cache in (k_cache, v_cache):
        assert cache.stride()[1:] == (kv_heads * D, D, 1), f"a page must be contiguous, got strides {cache.stride()}"
        assert cache.dtype == qkv.dtype
    assert qkv.stride(2) == 1 and cos.is_contiguous() and sin.is_contiguous() and slots.is_contiguous()
    q = torch.empty(N, q_heads, D, dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm, eps = norms or (qkv, qkv, 0.0)
    _kv_append_kernel[N, heads](
        qkv, cos, sin, q_norm, k_norm, k_cache, v_cache, slots, q,
        qkv.stride(0), qkv.stride(1), k_cache.stride(0), v_cache.stride(0), eps,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, D=D, PAGE=page_size,
        BLOCK=triton.next_power_of_2(D // 2), NORMS=norms is not None, num_warps=1, **overlapped(qkv),
    )  # fmt: skip
    return q
