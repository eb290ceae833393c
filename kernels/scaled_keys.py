"""FP8 (e4m3) keys and values with a power-of-two scale per token and head.

Powers of two avoid double rounding: dividing is exact, a score or a probability can be scaled instead of each element,
and dequantized elements are exact in bf16. Every kernel and rank that writes a token writes the same bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

GROUP = tl.constexpr(128)  # latent elements that share a scale


@triton.jit
def scale_bits(max_abs):
    """Returns the bits of the smallest power of two that scales `max_abs` (fp32) to at most 448; 1 for zero."""
    bits = max_abs.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)  # 448 is 1.75 times 2^8
    return tl.where(max_abs == 0.0, 127, tl.maximum(exponent, 1)) << 23


@triton.jit
def reciprocal(bits):
    """Returns the reciprocal of a power of two up to 2^120, given its bits."""
    return ((254 << 23) - bits).to(tl.float32, bitcast=True)


@triton.jit
def scale_at(
    scales, page, slot, head,
    PAGE: tl.constexpr, SCALE_PAGE: tl.constexpr, SCALE_NEXT: tl.constexpr, SCALE_HEAD: tl.constexpr,
):  # fmt: skip
    """Returns the offsets (int64) of the scales of page slots, in pages of SCALE_PAGE slots or more.

    SCALE_NEXT is the stride between these pages and SCALE_HEAD between their heads, which divides it; 0: all heads
    share a scale.
    """
    if PAGE != SCALE_PAGE:
        token = page * PAGE + slot
        page, slot = token // SCALE_PAGE, token % SCALE_PAGE
    if SCALE_HEAD == 0:
        return scales + page * SCALE_NEXT + slot
    else:  # takes fewer registers than two products
        return scales + (page * (SCALE_NEXT // SCALE_HEAD) + head) * SCALE_HEAD + slot


def scale_strides(key_scales: torch.Tensor | None, value_scales: torch.Tensor | None) -> dict[str, int]:
    """Returns the strides that `scale_at` takes, shared by scales [pages, Hkv, page_size] of keys and of values."""
    if value_scales is None:
        assert key_scales is None
        return dict(SCALE_NEXT=0, SCALE_HEAD=0)
    page, head, slot = value_scales.stride()
    assert slot == 1 and (head == 0 or page % head == 0)
    assert key_scales is None or key_scales.stride() == value_scales.stride()
    return dict(SCALE_NEXT=page, SCALE_HEAD=head)


def scales_of(x: torch.Tensor) -> torch.Tensor:
    """Returns the scales [...] fp32 of x [..., D], like `scale_bits`."""
    max_abs = x.float().abs().amax(-1)
    bits = max_abs.view(torch.int32)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).int()
    return torch.where(max_abs == 0, 127, exponent.clamp(min=1)).int().bitwise_left_shift(23).view(torch.float32)


def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds x [..., D] to e4m3 with scales [...] fp32."""
    scales = scales_of(x)
    return (x.float() / scales[..., None]).to(torch.float8_e4m3fn), scales


def quantize_latents(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds latents [..., R] to e4m3 with a scale per 128 elements, [..., ceil(R / 128)] fp32."""
    parts = [quantize_fp8(part) for part in x.split(GROUP.value, -1)]
    return torch.cat([part for part, _ in parts], -1), torch.stack([scale for _, scale in parts], -1)


def dequantize_latents(latents: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantizes latents [pages, page_size, R] e4m3 with scales [pages, groups, page_size] to fp32."""
    return latents.float() * scales.mT.repeat_interleave(GROUP.value, -1)[..., : latents.shape[-1]]


def store(x: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes x [n, Hkv, D] into cache [pages, page_size, Hkv, D] e4m3 and scales [pages, Hkv, page_size]."""
    page, slot = slots // cache.shape[1], slots % cache.shape[1]
    cache[page, slot], scales[page, :, slot] = quantize_fp8(x)
