"""Rows of weights of a few bits (`kernels.scaled.ScaledMatrix`) in the products of Triton kernels.

A scale multiplies the fp32 sum over its group's columns, so that nothing is rounded but the sum. Only those of e2m1,
powers of two, may go into a bf16 weight before: that is exact, and spares a sum for every 32 columns.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.scaled import ScaledMatrix


@triton.jit
def _e2m1(n, dtype: tl.constexpr):
    """Converts the lower four bits: as exponent and mantissa of a tiny number, times a power of two."""
    if dtype == tl.bfloat16:
        n = n.to(tl.int16)
        tiny = (((n & 8) << 12) | ((n & 7) << 6)).to(tl.bfloat16, bitcast=True)
        return tiny * tl.full([], 2.0**126, tl.bfloat16)
    else:
        n = n.to(tl.int32)
        return (((n & 8) << 28) | ((n & 7) << 22)).to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def numbers(w, dtype: tl.constexpr):
    """Converts stored weights [R, C] to bf16 or fp32: exact but for fp32 to bf16; bytes hold pairs -> [R, 2 C]."""
    if w.dtype == tl.uint8:
        return tl.reshape(tl.join(_e2m1(w, dtype), _e2m1(w >> 4, dtype)), [w.shape[0], 2 * w.shape[1]])
    else:
        return w.to(dtype)


@triton.jit
def load_scales(at, mask):
    """Loads scales as fp32; 2^-127 becomes zero."""
    scale = tl.load(at, mask=mask, other=0.0)
    if scale.dtype == tl.uint8:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def inside(column, K: tl.constexpr, BEGIN: tl.constexpr):
    """Tells which columns a matrix has, counted from -BEGIN on."""
    if BEGIN > 0:
        return (column >= 0) & (column < K)
    else:
        return column < K


@triton.jit
def add_product(acc, w, xs, scales_at, group, ROWS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Adds the product of stored weights [R, K] and xs [K, N] to fp32 sums.

    The columns begin with a group, or are a part of one; `scales_at` [R] points to scales of the first group, the next
    group's are ROWS further. A single group of e4m3 is left to `finish`.
    """
    if GROUPS == 0:
        return tl.dot(w, xs, acc, input_precision="ieee")
    w = numbers(w, xs.dtype)
    if scales_at.dtype.element_ty == tl.uint8:
        count: tl.constexpr = w.shape[1] // GROUP
        groups = group + tl.arange(0, count)
        scale = load_scales(scales_at[:, None] + (groups * ROWS)[None, :], (groups < GROUPS)[None, :]).to(xs.dtype)
        w = tl.reshape(tl.reshape(w, [w.shape[0], count, GROUP]) * scale[:, :, None], w.shape)
        return tl.dot(w, xs, acc, input_precision="ieee")
    elif GROUPS == 1:
        return tl.dot(w, xs, acc, input_precision="ieee")
    else:
        scale = tl.load(scales_at + group * ROWS)
        return acc + scale[:, None] * tl.dot(w, xs, input_precision="ieee")


@triton.jit
def finish(acc, scales_at, GROUPS: tl.constexpr):
    """Multiplies finished sums by the scales of a single group of e4m3."""
    if GROUPS == 1:
        if scales_at.dtype.element_ty != tl.uint8:
            acc *= tl.load(scales_at)[:, None]
    return acc


def stored(weight: torch.Tensor | ScaledMatrix) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, Any]]:
    """Returns what kernels read of a weight: its numbers, their scales or None, and the shape of the groups."""
    if isinstance(weight, torch.Tensor):
        return weight, None, dict(GROUP=1, GROUPS=0, BEGIN=0)
    return weight.data, weight.scales, dict(GROUP=weight.group, GROUPS=weight.scales.shape[-2], BEGIN=weight.begin)


def run_of(weight: torch.Tensor | ScaledMatrix, run: int) -> int:
    """Computes how many neighbouring weights of one group a thread loads at once: 16 bytes, `run` of bf16, or fewer."""
    if isinstance(weight, torch.Tensor):
        return run
    return math.gcd(4 * run if weight.packed else 2 * run, weight.begin)
