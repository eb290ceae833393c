"""KV append: QK norm, RoPE, and the write of this rank's keys and values to the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.attention.paged_tiles import SMALL_HEAD_DIM
from kernels.attention.reference import kv_append as reference
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor
from kernels.scaled_keys import reciprocal, scale_at, scale_bits, scale_strides

MANY = 1024  # tokens x heads; below, one program each (a GPU starts about one program per ns)
TOKENS = 16  # tokens of a head per program, from MANY on


@dataclass(frozen=True)
class QKVTarget:
    """Outputs of a QKV projection (see `kv_append`): `q` [N, Hq, D], and cache slots for keys and values."""

    cos: torch.Tensor
    sin: torch.Tensor
    slot_mapping: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    q: torch.Tensor

    @classmethod
    def create(
        cls, x: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor,
        k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor,
    ) -> QKVTarget:  # fmt: skip
        """Allocates q for N rows of `x` [N, ...], in its dtype; `heads` counts query, key and value heads."""
        kv_heads, D = k_cache.shape[2:]
        assert k_cache.stride(1) == v_cache.stride(1) and k_cache.stride(3) == v_cache.stride(3) == 1
        assert k_cache.stride(2) == v_cache.stride(2) or k_cache.dtype != v_cache.dtype
        assert cos.is_contiguous() and sin.is_contiguous() and slot_mapping.is_contiguous()
        q = torch.empty(len(x), heads - 2 * kv_heads, D, dtype=x.dtype, device=x.device)
        return cls(cos, sin, slot_mapping, k_cache, v_cache, q)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.cos, self.sin, self.slot_mapping, self.k_cache, self.v_cache, self.q

    @property
    def strides(self) -> tuple[int, int]:
        """Page strides of the key cache and the value cache."""
        return self.k_cache.stride(0), self.v_cache.stride(0)

    @property
    def shape(self) -> dict[str, int]:
        (_, q_heads, D), (_, page_size, kv_heads, _) = self.q.shape, self.k_cache.shape
        slot, head = self.k_cache.stride()[1:3]
        return dict(Q_HEADS=q_heads, KV_HEADS=kv_heads, D=D, PAGE=page_size, SLOT=slot, HEAD=head)


@triton.jit
def store_heads(
    first, second, c, s, n, head, d, slot, live, q, k_cache, v_cache, k_page, v_page,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, SLOT: tl.constexpr,
    HEAD: tl.constexpr,
):  # fmt: skip
    """Stores elements d and d + D / 2 of heads of tokens n: queries and keys rotated, keys and values in their slots.

    Elements are fp32, not rounded yet. All arguments but the cache and its shape broadcast to one shape. SLOT and HEAD
    are the strides between tokens and between heads within a page.
    """
    half: tl.constexpr = D // 2
    dtype: tl.constexpr = q.dtype.element_ty
    first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    rotated = first * c - second * s
    other = second * c + first * s
    is_value = head >= Q_HEADS + KV_HEADS
    first, second = tl.where(is_value, first, rotated).to(dtype), tl.where(is_value, second, other).to(dtype)
    query = live & (head < Q_HEADS)
    target = q + (n * Q_HEADS + head) * D + d
    tl.store(target, first, mask=query)
    tl.store(target + half, second, mask=query)
    is_stored = live & (slot >= 0)
    key = is_stored & (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS)
    within = slot % PAGE * SLOT + (head - Q_HEADS) * HEAD + d
    target = k_cache + slot // PAGE * k_page + within
    tl.store(target, first, mask=key)
    tl.store(target + half, second, mask=key)
    target = v_cache + slot // PAGE * v_page + within - KV_HEADS * HEAD
    tl.store(target, first, mask=is_stored & is_value)
    tl.store(target + half, second, mask=is_stored & is_value)


@triton.jit
def _store_fp8(
    first, second, d, slot, live, cache, scales, head, page_stride, D: tl.constexpr, PAGE: tl.constexpr,
    SLOT: tl.constexpr, HEAD: tl.constexpr, SCALE_NEXT: tl.constexpr, SCALE_HEAD: tl.constexpr,
):  # fmt: skip
    is_stored = live & (slot >= 0)
    max_abs = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))[:, None]
    bits = scale_bits(max_abs)
    factor = reciprocal(bits)
    target = cache + slot // PAGE * page_stride + slot % PAGE * SLOT + head * HEAD + d
    tl.store(target, (first * factor).to(cache.dtype.element_ty), mask=is_stored)
    tl.store(target + D // 2, (second * factor).to(cache.dtype.element_ty), mask=is_stored)
    at = scale_at(scales, slot // PAGE, slot % PAGE, head, PAGE, PAGE, SCALE_NEXT, SCALE_HEAD)
    tl.store(at, bits.to(tl.float32, bitcast=True), mask=slot >= 0)


@triton.jit(do_not_specialize=["N"])
def _kv_append_kernel(
    qkv, cos, sin, slot_mapping, k_cache, v_cache, q, k_scales, v_scales, q_norm, k_norm, means, x_n, x_h, k_page,
    v_page,
    eps, N,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, SLOT: tl.constexpr,
    HEAD: tl.constexpr, V_HEAD: tl.constexpr, SCALE_NEXT: tl.constexpr, SCALE_HEAD: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, NORMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    if D > SMALL_HEAD_DIM:  # not for smaller heads: attention programs would crowd onto the SMs that are already free
        start_successor(PDL)
    n = (tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS))[:, None]
    live = n < N
    head = tl.program_id(1)
    slot = tl.load(slot_mapping + n, mask=live, other=-1)
    half: tl.constexpr = D // 2
    d = tl.arange(0, BLOCK)[None, :]  # within one half of the head dim
    inside = live & (d < half)
    x = qkv + n * x_n + head * x_h
    first = tl.load(x + d, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + half + d, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + n * half + d, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + n * half + d, mask=inside, other=0.0).to(tl.float32)
    if NORMS:
        if head < Q_HEADS + KV_HEADS:
            norm_weight = (q_norm if head < Q_HEADS else k_norm) + d
            if means is not None:
                norm_weight += (head if head < Q_HEADS else head - Q_HEADS) * D
                scale = tl.rsqrt(tl.load(means + 2 * n + (head >= Q_HEADS), mask=live, other=0.0) + eps)
            else:
                sum_squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
                scale = tl.rsqrt(sum_squares / D + eps)[:, None]
            dtype: tl.constexpr = qkv.dtype.element_ty
            # Round before and after applying the weight, as the models were trained.
            first = (first * scale).to(dtype).to(tl.float32) * tl.load(norm_weight, mask=d < half, other=0.0).to(
                tl.float32
            )
            second = (second * scale).to(dtype).to(tl.float32)
            second *= tl.load(norm_weight + half, mask=d < half, other=0.0).to(tl.float32)
    if v_scales is not None:
        rounded: tl.constexpr = q.dtype.element_ty
        first, second = first.to(rounded).to(tl.float32), second.to(rounded).to(tl.float32)
        if head >= Q_HEADS + KV_HEADS:
            kv_head = head - Q_HEADS - KV_HEADS
            _store_fp8(
                first, second, d, slot, inside, v_cache, v_scales, kv_head, v_page, D, PAGE, SLOT, V_HEAD,
                SCALE_NEXT, SCALE_HEAD,
            )  # fmt: skip
        else:
            rotated = (first * c - second * s).to(rounded)
            other = (second * c + first * s).to(rounded)
            if head < Q_HEADS:
                target = q + (n * Q_HEADS + head) * D + d
                tl.store(target, rotated, mask=inside)
                tl.store(target + half, other, mask=inside)
            elif k_scales is not None:
                _store_fp8(
                    rotated.to(tl.float32), other.to(tl.float32), d, slot, inside, k_cache, k_scales, head - Q_HEADS,
                    k_page, D, PAGE, SLOT, HEAD, SCALE_NEXT, SCALE_HEAD,
                )  # fmt: skip
            else:
                target = k_cache + slot // PAGE * k_page + slot % PAGE * SLOT + (head - Q_HEADS) * HEAD + d
                tl.store(target, rotated, mask=inside & (slot >= 0))
                tl.store(target + half, other, mask=inside & (slot >= 0))
    else:
        store_heads(
            first, second, c, s, n, head, d, slot, inside, q, k_cache, v_cache, k_page, v_page,
            Q_HEADS, KV_HEADS, D, PAGE, SLOT, HEAD,
        )  # fmt: skip


def kv_append(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    means: torch.Tensor | None = None,
) -> torch.Tensor:
    """Applies RoPE, writes this rank's keys and values to their cache slots, and returns the queries [N, Hq, D].

    Args:
        qkv: [N, Hq + 2 Hkv, D], query heads, key heads, value heads; last dim contiguous.
        cos, sin: [N, D / 2], contiguous.
        k_cache: [pages, page_size, Hkv, D] in qkv's dtype or e4m3, last dim contiguous.
        v_cache: like `k_cache`, with the same stride between tokens; in its dtype, between heads too.
        slot_mapping: [N] int64, `page * page_size + offset`, distinct, or -1 for a token of another rank.
        norms: QK norm, applied before RoPE: query and key RMSNorm weights [D], and eps.
        scales: for e4m3 caches (None where 16 bits): key scales, value scales [pages, Hkv, page_size] fp32, same
            strides, last dim contiguous (see `kernels.scaled_keys`).
        means: [N, 2] fp32 contiguous, for norms over all heads: mean squares of the query heads and of the key heads;
            weights are then [Hq, D] and [Hkv, D], contiguous.

    Source:
        RoPE (https://arxiv.org/abs/2104.09864), in the half-split form.
    """
    if not dispatch.on_gpu(qkv):
        return reference(qkv, cos, sin, k_cache, v_cache, slot_mapping, norms, scales, means)
    N, heads, D = qkv.shape
    assert qkv.stride(2) == 1
    to = QKVTarget.create(qkv, heads, cos, sin, k_cache, v_cache, slot_mapping)
    assert all((s is None) == (c.dtype == qkv.dtype) for s, c in zip(scales, (k_cache, v_cache), strict=True))
    q_norm, k_norm, eps = norms or (qkv, qkv, 0.0)
    tokens = 1 if N * heads < MANY else TOKENS
    _kv_append_kernel[triton.cdiv(N, tokens), heads](
        qkv, *to.tensors, *scales, q_norm, k_norm, means, qkv.stride(0), qkv.stride(1), *to.strides, eps, N, **to.shape,
        V_HEAD=v_cache.stride(2), TOKENS=tokens, BLOCK=triton.next_power_of_2(D // 2), NORMS=norms is not None,
        num_warps=min(tokens, 4), **scale_strides(*scales), **pdl_options(qkv),
    )  # fmt: skip
    return to.q
