"""Rows of quantized weights (`kernels.scaled.ScaledMatrix`) in Triton matmuls.

A scale multiplies the fp32 sum over its group's columns, so that only the sum is rounded. e2m1 scales, powers of two,
are instead applied to the bf16 weight: exact, and it saves a sum per 32 columns. For many rows of x, e4m3 scales are
too, and the weight is rounded: a second accumulator would halve the tile.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.scaled import ScaledMatrix


@triton.jit
def numbers(w, dtype: tl.constexpr):
    """Converts stored weights [R, C] to bf16 or fp32, exactly if quantized; packed bytes give [R, 2 C].

    The three bits of e2m1 become exponent and mantissa of a tiny number, which is multiplied by a power of two.
    """
    if w.dtype == tl.uint8:
        w = w.to(tl.uint32)
        w = ((w * 0x40040) & 0x01C001C0) | ((w * 0x1001000) & 0x80008000)  # two bf16, also upper halves of fp32
        if dtype == tl.bfloat16:
            low = w.to(tl.uint16).to(tl.bfloat16, bitcast=True)
            high = (w >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        else:
            low = (w << 16).to(tl.float32, bitcast=True)
            high = (w & 0xFFFF0000).to(tl.float32, bitcast=True)
        pairs = tl.join(low, high) * tl.full([], 2.0**126, dtype)
        return tl.reshape(pairs, [w.shape[0], 2 * w.shape[1]])
    elif w.dtype == dtype:
        return w
    else:
        return w.to(tl.float32).to(dtype)  # via fp32: fp16 to bf16 is a slow instruction


@triton.jit
def load_scales(at, mask):
    """Loads scales as fp32; 2^-127 becomes zero."""
    scale = tl.load(at, mask=mask, other=0.0)
    if scale.dtype == tl.uint8:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def inside(offset, at, K: tl.constexpr, BEGIN: tl.constexpr):
    """Returns which columns from `at` on (negative only if BEGIN is not zero) are inside the matrix."""
    if BEGIN > 0:
        return (offset < K - at) & (offset >= -at)
    else:
        return offset < K - at


@triton.jit
def add_product(
    acc, w, xs, scales_at, group, ROWS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROUNDS: tl.constexpr
):
    """Adds the product of stored weights [R, K] and xs [K, N] to fp32 sums; ROUNDS: weights rounded to xs' dtype.

    The columns begin with a group, or are part of one; `scales_at` [R] points to scales of the first group, the next
    group's are ROWS further. A single group of e4m3 is left to `finish`.
    """
    if GROUPS == 0:
        acc = tl.dot(w, xs, acc, input_precision="ieee")
    elif scales_at.dtype.element_ty == tl.uint8:
        w = numbers(w, xs.dtype)
        count: tl.constexpr = w.shape[1] // GROUP
        groups = group + tl.arange(0, count)
        scale = load_scales(scales_at[:, None] + (groups * ROWS)[None, :], (groups < GROUPS)[None, :]).to(xs.dtype)
        w = tl.reshape(tl.reshape(w, [w.shape[0], count, GROUP]) * scale[:, :, None], w.shape)
        acc = tl.dot(w, xs, acc, input_precision="ieee")
    elif GROUPS == 1:
        acc = tl.dot(numbers(w, xs.dtype), xs, acc, input_precision="ieee")
    elif ROUNDS:  # no separate sums per group
        w = w.to(tl.float32) * tl.load(scales_at + group * ROWS)[:, None]
        acc = tl.dot(w.to(xs.dtype), xs, acc, input_precision="ieee")
    else:
        scale = tl.load(scales_at + group * ROWS)
        acc += scale[:, None] * tl.dot(numbers(w, xs.dtype), xs, input_precision="ieee")
    return acc


@triton.jit
def finish(acc, scales_at, GROUPS: tl.constexpr):
    """Multiplies finished sums by the scales of a single group of e4m3."""
    if GROUPS == 1:
        if scales_at.dtype.element_ty != tl.uint8:
            acc *= tl.load(scales_at)[:, None]
    return acc


@triton.jit
def product(
    rows_at, scales_at, x_at, valid, K: tl.constexpr, ROWS: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, BEGIN: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Multiplies weight rows with rows of x, given pointers to both -> [BLOCK_R, BLOCK_N] fp32."""
    PACK: tl.constexpr = 2 if rows_at.dtype.element_ty == tl.uint8 else 1
    k = tl.arange(0, BLOCK_K)
    c = tl.arange(0, BLOCK_K // PACK)
    acc = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    for begin in tl.range(-BEGIN, K, BLOCK_K, num_stages=STAGES):
        w_mask = inside(c, begin // PACK, K // PACK, BEGIN)[None, :]
        w = tl.load(rows_at[:, None] + (begin // PACK + c)[None, :], mask=w_mask, other=0.0)
        x_mask = inside(k, begin, K, BEGIN)[:, None] & valid[None, :]
        xs = tl.load(x_at[None, :] + (begin + k)[:, None], mask=x_mask, other=0.0)
        acc = add_product(acc, w, xs, scales_at, (BEGIN + begin) // GROUP, ROWS, GROUP, GROUPS, ROUNDS)
    return finish(acc, scales_at, GROUPS)


def stored(weight: torch.Tensor | ScaledMatrix) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, Any]]:
    """Returns a weight's kernel arguments: its data, its scales or None, and the shape of the groups."""
    if isinstance(weight, torch.Tensor):
        return weight, None, dict(GROUP=1, GROUPS=0, BEGIN=0)
    return weight.data, weight.scales, dict(GROUP=weight.group, GROUPS=weight.scales.shape[-2], BEGIN=weight.begin)


def run_of(weight: torch.Tensor | ScaledMatrix, run: int) -> int:
    """Returns how many consecutive weights of one group a thread loads at once: 16 bytes, `run` of bf16, or fewer."""
    if isinstance(weight, torch.Tensor):
        return run
    return math.gcd(4 * run if weight.packed else 2 * run, weight.begin)
