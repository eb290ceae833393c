"""Projections of any number of rows with quantized weights, converted in registers for the tensor cores.

A program owns some rows of the weight and of x, and loops over the weight's groups of columns; of two programs on an
SM, one converts while the other multiplies. Past 64 rows, weights are rounded to x's dtype. From MANY rows on,
converting again for each tile of x takes longer than the matmul: the matrix is dequantized once, into a buffer that all
matrices share, for cuBLAS.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.dense.scaled_rows import load_scales, numbers, product, stored
from kernels.dense.silu_mul import rounded_swiglu, silu_mul
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor
from kernels.scaled import ScaledMatrix

MANY = 129  # rows of x, by H200 timings
TILE = dict(BLOCK_R=16, BLOCK_K=256, num_warps=4)  # of a program that dequantizes
GROUP_TILES = 8  # tiles of x rows that neighboring programs take per weight tile, for L2 reuse


@triton.jit(do_not_specialize=["N"])
def _scaled_linear_kernel(
    x, weight, scales, zeros, row_scales, bias, out, x_n, N, R: tl.constexpr, K: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, BEGIN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, STAGES: tl.constexpr, ROUNDS: tl.constexpr,
    GROUP_TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = 2 * R if GATED else R
    tiles_r: tl.constexpr = (ROWS + BLOCK_R - 1) // BLOCK_R
    tiles_n = tl.cdiv(N, BLOCK_N)
    band = tl.program_id(0) // (tiles_r * GROUP_TILES) * GROUP_TILES
    wide = tl.minimum(tiles_n - band, GROUP_TILES)
    rest = tl.program_id(0) % (tiles_r * GROUP_TILES)
    tile_n = (band + rest % wide).to(tl.int64)
    tile_r = rest // wide
    r = tile_r * BLOCK_R + tl.arange(0, BLOCK_R)
    if GATED:  # rows of gate and up alternate, so that one tile holds both of a column
        row = tl.minimum(r // 2, R - 1) + r % 2 * R
    else:
        row = tl.minimum(r, R - 1)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = n < N
    wait_for_predecessor(PDL)
    start_successor(PDL)
    PACK: tl.constexpr = 8 if weight.dtype.element_ty == tl.int32 else 1
    y = product(
        weight + row.to(tl.int64) * (K // PACK), scales + row, None if zeros is None else zeros + row,
        None if row_scales is None else row_scales + row, x + n * x_n, valid, K, ROWS, GROUP, GROUPS, BEGIN,
        BLOCK_R, BLOCK_N, BLOCK_K, STAGES, ROUNDS,
    )  # fmt: skip
    if BIAS:
        y += tl.load(bias + row).to(tl.float32)[:, None]
    if GATED:
        y, up = tl.split(tl.permute(tl.reshape(y, [BLOCK_R // 2, 2, BLOCK_N]), [0, 2, 1]))
        y = rounded_swiglu(y, up, out.dtype.element_ty)
        r = tile_r * (BLOCK_R // 2) + tl.arange(0, BLOCK_R // 2)
    tl.store(out + (n * R)[None, :] + r[:, None], y, mask=(r < R)[:, None] & valid[None, :])


@triton.jit
def _dequantize_kernel(
    weight, scales, zeros, row_scales, out, R, K, GROUP: tl.constexpr, BEGIN: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    PACK: tl.constexpr = 8 if weight.dtype.element_ty == tl.int32 else 1
    SHARE: tl.constexpr = min(GROUP, 32) if PACK == 8 else 1  # columns that are known to have one scale
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * (BLOCK_K // PACK) + tl.arange(0, BLOCK_K // PACK)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    s = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K // SHARE) * SHARE
    at = r[:, None].to(tl.int64) * (K // PACK) + c[None, :]
    stored = tl.load(weight + at, mask=(r < R)[:, None] & (c < K // PACK)[None, :], other=0.0)
    inside = (r < R)[:, None] & (s < K)[None, :]
    at = ((BEGIN + s) // GROUP * R)[None, :] + r[:, None]
    scale = load_scales(scales + at, inside, GROUP == 16)
    E2M1: tl.constexpr = scales.dtype.element_ty == tl.uint8
    w = tl.reshape(numbers(stored, tl.float32, E2M1), [BLOCK_R, BLOCK_K // SHARE, SHARE])
    if zeros is not None:
        w -= tl.load(zeros + at, mask=inside, other=0.0).to(tl.float32)[:, :, None] - 8
    w = tl.reshape(w * scale[:, :, None], [BLOCK_R, BLOCK_K])
    if row_scales is not None:
        w *= tl.load(row_scales + r, mask=r < R, other=0.0)[:, None]
    tl.store(out + r[:, None].to(tl.int64) * K + k[None, :], w, mask=(r < R)[:, None] & (k < K)[None, :])


@cache
def _memory(device: torch.device, stream: int) -> list[torch.Tensor]:
    """Returns a stream's buffer for dequantized matrices: a list of one tensor that grows with the largest matrix."""
    return [torch.empty(0, dtype=torch.uint8, device=device)]


def dequantize(weight: ScaledMatrix, dtype: torch.dtype) -> torch.Tensor:
    """Dequantizes a matrix into a buffer that the next call overwrites -> [R, K], rounded to `dtype`."""
    (R, K), stream = weight.shape, torch.cuda.current_stream(weight.device) if weight.data.is_cuda else None
    memory = _memory(weight.device, stream.cuda_stream if stream else 0)
    size = R * K * dtype.itemsize
    if memory[0].numel() < size:
        memory[0] = torch.empty(size, dtype=torch.uint8, device=weight.device)
    out = memory[0][:size].view(dtype).view(R, K)
    tensors, groups = stored(weight)
    _dequantize_kernel[triton.cdiv(R, TILE["BLOCK_R"]), triton.cdiv(K, TILE["BLOCK_K"])](
        *tensors, out, R, K, GROUP=groups["GROUP"], BEGIN=groups["BEGIN"], **TILE
    )  # fmt: skip
    return out


def scaled_linear(
    x: torch.Tensor, weight: ScaledMatrix, bias: torch.Tensor | None, gated: bool, dtype: torch.dtype
) -> torch.Tensor:
    """Runs `kernels.dense.linear.linear` for a quantized matrix; returns `dtype`."""
    N, K = x.shape
    if N >= MANY and x.dtype == dtype:
        y = F.linear(x, dequantize(weight, x.dtype), bias)
        return silu_mul(y) if gated else y
    R = len(weight) // 2 if gated else len(weight)
    out = torch.empty(N, R, dtype=dtype, device=x.device)
    if 0 in out.shape:
        return out
    assert x.stride(1) == 1
    tensors, groups = stored(weight)
    if x.dtype == torch.float32:
        tile = dict(BLOCK_R=32, BLOCK_N=16, BLOCK_K=32, STAGES=2, num_warps=4)
    elif N <= 64:
        tile = dict(BLOCK_R=64, BLOCK_N=max(16, triton.next_power_of_2(N)), BLOCK_K=128, STAGES=5, num_warps=4)
    else:
        tile = dict(BLOCK_R=128, BLOCK_N=64 if N <= 128 else 128, BLOCK_K=64, STAGES=4, num_warps=4 if N <= 128 else 8)
    programs = triton.cdiv(len(weight), tile["BLOCK_R"]) * triton.cdiv(N, tile["BLOCK_N"])
    _scaled_linear_kernel[(programs,)](
        x, *tensors, bias, out, x.stride(0), N, R=R, K=K, BIAS=bias is not None, GATED=gated,
        GROUP_TILES=GROUP_TILES,
        ROUNDS=N > 64 and x.dtype == dtype,
        **groups, **tile, **pdl_options(x),
    )  # fmt: skip
    return out
