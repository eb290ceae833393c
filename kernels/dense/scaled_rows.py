"""Rows of quantized weights (`kernels.scaled.ScaledMatrix`) in Triton matmuls.

A scale multiplies the fp32 sum over its group's columns, so that only the sum is rounded. Scales of groups shorter than
a step multiply the weight instead, which is rounded to x's dtype: exactly for e2m1, and as a dequantized matrix is
otherwise. For many rows of x all do: a second accumulator would halve the tile.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.scaled import ScaledMatrix


@triton.jit
def numbers(w, dtype: tl.constexpr, E2M1: tl.constexpr = False):
    """Converts stored weights [R, C] to `dtype`, exactly; words (see `kernels.scaled.pack`) give [R, 8 C], int4 less 8.

    The three bits of e2m1 become exponent and mantissa of a tiny number, which is multiplied by a power of two.
    """
    if w.dtype == tl.int32:
        w = w.to(tl.uint32, bitcast=True)
        if E2M1:
            rotated = (w << 6) | (w >> 26)
            w3 = (rotated & 0x001B001B) * 0x4108
            # Two bf16 each, also upper halves of fp32.
            pairs = tl.join(tl.join(w, rotated), tl.join(w << 3, w3)) & 0x81C081C0
            low = (pairs << 16).to(tl.float32, bitcast=True)
            high = (pairs & 0xFFFF0000).to(tl.float32, bitcast=True)
            pairs = tl.join(low, high) * tl.full([], 2.0**126, tl.float32)
        else:
            pairs = tl.join(tl.join(w, w >> 8), tl.join(w >> 4, w >> 12)) & 0x000F000F
            pairs = tl.join(pairs & 0xF, pairs >> 16).to(tl.float32) - 8
        # [R, 32 columns, word, p, h]; tl.join appends the index that it adds: p = 2 (inner) + outer
        pairs = tl.reshape(pairs, [w.shape[0], w.shape[1] // 4, 4, 4, 2])
        return tl.reshape(tl.permute(pairs, [0, 1, 3, 2, 4]), [w.shape[0], 8 * w.shape[1]]).to(dtype)
    elif w.dtype == dtype:
        return w
    else:
        return w.to(tl.float32).to(dtype)  # via fp32: fp16 to bf16 is a slow instruction


@triton.jit
def load_scales(at, mask, UE5M3: tl.constexpr = False):
    """Loads scales as fp32; 2^-127 becomes zero."""
    scale = tl.load(at, mask=mask, other=0.0)
    if scale.dtype == tl.uint8:
        if UE5M3:
            scale = ((scale.to(tl.int32) + (118 << 3)) << 20).to(tl.float32, bitcast=True)
        else:
            scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return scale.to(tl.float32)


@triton.jit
def inside(offset, at, K: tl.constexpr, BEGIN: tl.constexpr):
    """Returns which columns from `at` on (negative only if BEGIN is not zero) are inside the matrix."""
    if BEGIN > 0:
        return (offset < K - at) & (offset >= -at)
    else:
        return offset < K - at


@triton.constexpr_function
def _groups_of_weights(columns, GROUP, GROUPS, E2M1, ROUNDS):
    """Returns how many groups of a step have scales that multiply its weights; 0: one scale, of the sum."""
    if GROUPS == 1 and not E2M1:
        return 0
    return max(1, columns // GROUP) if E2M1 or ROUNDS or columns > GROUP else 0


@triton.jit
def add_product(
    acc, w, xs, scales_at, zeros_at, group, ROWS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """Adds the product of stored weights [R, K] and xs [K, N] to fp32 sums; ROUNDS: weights rounded to xs' dtype.

    The columns begin with a group, or are part of one; `scales_at` and `zeros_at` [R] point to scales and zero points
    of the first group, the next group's are ROWS further. A single group's scales are left to `finish`.
    """
    if GROUPS == 0:
        acc = tl.dot(w, xs, acc, input_precision="ieee")
    else:
        E2M1: tl.constexpr = scales_at.dtype.element_ty == tl.uint8
        count: tl.constexpr = _groups_of_weights(xs.shape[0], GROUP, GROUPS, E2M1, ROUNDS)
        several: tl.constexpr = max(1, count)
        groups = group + tl.arange(0, several)
        at, valid = (groups * ROWS)[None, :], (groups < GROUPS)[None, :]
        w = numbers(w, xs.dtype, E2M1)
        if zeros_at is not None:
            zeros = (tl.load(zeros_at[:, None] + at, mask=valid, other=0.0).to(tl.float32) - 8).to(xs.dtype)
            w = tl.reshape(tl.reshape(w, [w.shape[0], several, w.shape[1] // several]) - zeros[:, :, None], w.shape)
        if count > 0:
            scale = load_scales(scales_at[:, None] + at, valid, GROUP == 16)
            scaled = tl.reshape(w.to(tl.float32), [w.shape[0], several, w.shape[1] // several]) * scale[:, :, None]
            w = tl.reshape(scaled.to(xs.dtype), w.shape)
        if count > 0 or GROUPS == 1:
            acc = tl.dot(w, xs, acc, input_precision="ieee")
        else:
            scale = tl.load(scales_at + group * ROWS).to(tl.float32)
            acc += scale[:, None] * tl.dot(w, xs, input_precision="ieee")
    return acc


@triton.jit
def finish(acc, scales_at, row_scales_at, GROUPS: tl.constexpr):
    """Multiplies finished sums by the scales of a single group, and of rows."""
    if GROUPS == 1:
        if scales_at.dtype.element_ty != tl.uint8:
            acc *= tl.load(scales_at).to(tl.float32)[:, None]
    if row_scales_at is not None:
        acc *= tl.load(row_scales_at)[:, None]
    return acc


@triton.jit
def product(
    rows_at, scales_at, zeros_at, row_scales_at, x_at, valid, K: tl.constexpr, ROWS: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, BEGIN: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Multiplies weight rows with rows of x, given pointers to both -> [BLOCK_R, BLOCK_N] fp32."""
    PACK: tl.constexpr = 8 if rows_at.dtype.element_ty == tl.int32 else 1
    k = tl.arange(0, BLOCK_K)
    c = tl.arange(0, BLOCK_K // PACK)
    acc = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    for begin in tl.range(-BEGIN, K, BLOCK_K, num_stages=STAGES):
        w_mask = inside(c, begin // PACK, K // PACK, BEGIN)[None, :]
        w = tl.load(rows_at[:, None] + (begin // PACK + c)[None, :], mask=w_mask, other=0.0)
        x_mask = inside(k, begin, K, BEGIN)[:, None] & valid[None, :]
        xs = tl.load(x_at[None, :] + (begin + k)[:, None], mask=x_mask, other=0.0)
        acc = add_product(acc, w, xs, scales_at, zeros_at, (BEGIN + begin) // GROUP, ROWS, GROUP, GROUPS, ROUNDS)
    return finish(acc, scales_at, row_scales_at, GROUPS)


def stored(
    weight: torch.Tensor | ScaledMatrix,
) -> tuple[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None], dict[str, Any]]:
    """Returns a weight's kernel arguments: its data, scales, zeros and row scales (or None), and the groups' shape."""
    if isinstance(weight, torch.Tensor):
        return (weight, None, None, None), dict(GROUP=1, GROUPS=0, BEGIN=0)
    tensors = weight.data, weight.scales, weight.zeros, weight.row_scales
    return tensors, dict(GROUP=weight.group, GROUPS=weight.scales.shape[-2], BEGIN=weight.begin)


def run_of(weight: torch.Tensor | ScaledMatrix, run: int) -> int:
    """Returns how many consecutive weights of one group a thread loads at once: 16 bytes, `run` of bf16, or fewer."""
    if isinstance(weight, torch.Tensor):
        return run
    return math.gcd(2 * run, weight.begin, weight.group)
