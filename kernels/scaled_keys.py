"""Keys and values in e4m3: a power of two for each token and head, by which its numbers are divided before rounding.

With powers of two nothing is rounded twice: dividing is exact, a score or a probability may be multiplied instead of
each number, and unpacked numbers are exact in bf16. Every kernel and rank that writes a token writes the same bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

GROUP = tl.constexpr(128)  # numbers of a latent that share a scale


@triton.jit
def scale_bits(max_abs):
    """Computes the bits of the least power of two by which `max_abs`, fp32, is at most 448, e4m3's largest; 1 for
    zero.
    """
    bits = max_abs.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)  # 448 is 1.75 times 2^8
    return tl.where(max_abs == 0.0, 127, tl.maximum(exponent, 1)) << 23


@triton.jit
def reciprocal(bits):
    """Computes the reciprocal of a power of two of up to 2^120 from its bits."""
    return ((254 << 23) - bits).to(tl.float32, bitcast=True)


@triton.jit
def scale_at(
    scales, page, slot, head,
    PAGE: tl.constexpr, SCALE_PAGE: tl.constexpr, SCALE_NEXT: tl.constexpr, SCALE_HEAD: tl.constexpr,
):  # fmt: skip
    """Locates the scales of slots of pages, int64, in pages of SCALE_PAGE slots, as many or more.

    SCALE_NEXT is the stride of these pages and SCALE_HEAD that of their heads, by which it is divisible; 0: all heads
    share one.
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
    """Computes the scales [...] fp32 of x [..., D], like `scale_bits`."""
    max_abs = x.float().abs().amax(-1)
    bits = max_abs.view(torch.int32)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).int()
    return torch.where(max_abs == 0, 127, exponent.clamp(min=1)).int().bitwise_left_shift(23).view(torch.float32)


def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds x [..., D] to e4m3 with scales [...] fp32."""
    scales = scales_of(x)
    return (x.float() / scales[..., None]).to(torch.float8_e4m3fn), scales


def quantize_latents(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds latents [..., R] to e4m3 with a scale for each 128 numbers, [..., R / 128 rounded up] fp32."""
    parts = [quantize_fp8(part) for part in x.split(GROUP.value, -1)]
    return torch.cat([part for part, _ in parts], -1), torch.stack([scale for _, scale in parts], -1)


def dequantize_latents(latents: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns latents [pages, page_size, R] e4m3 with scales [pages, groups, page_size] as numbers in fp32."""
    return latents.float() * scales.mT.repeat_interleave(GROUP.value, -1)[..., : latents.shape[-1]]


def store(x: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes x [n, Hkv, D] into cache [pages, page_size, Hkv, D] e4m3 and scales [pages, Hkv, page_size]."""
    page, slot = slots // cache.shape[1], slots % cache.shape[1]
    cache[page, slot], scales[page, :, slot] = quantize_fp8(x)
