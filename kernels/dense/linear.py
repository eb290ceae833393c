"""GEMV-like projections of a few rows at the read rate of the weights, with fused bias and gate.

cuBLAS reaches a third of the read rate on a rank's small matrices. Here every program streams some weight rows through
registers and multiplies them with all rows of x. On Hopper that serves one row of bf16; more rows use
`kernels.dense.linear_sm90`, e4m3 weights `kernels.dense.linear_fp8_sm90`, packed ones
`kernels.dense.linear_packed_sm90`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels import dispatch
from kernels.attention.kv_append import QKVTarget
from kernels.dense import linear_e4m3, linear_fp8_sm90, linear_packed_sm90, linear_sm90
from kernels.dense.linear_scaled import scaled_linear
from kernels.dense.reference import linear as reference
from kernels.dense.scaled_rows import run_of, stored
from kernels.dense.silu_mul import rounded_swiglu, silu_mul
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor
from kernels.peers.ll_protocol import DTYPES, SumTarget, epoch, send_sum, sum_ll_buffers, sum_words
from kernels.scaled import Matrix, ScaledMatrix

MAX_ROWS = 4  # of x; more rows go to the Hopper kernels or cuBLAS
# Rows of x that a launch over a quantized matrix takes. Up to how many rows, and from how many elements on, two of them
# are faster than a dequantized matrix, by H200 timings.
SPLIT_ROWS, SPLIT_UP_TO, SPLIT_ELEMENTS = 128, 192, 1 << 25
RUN = 8  # consecutive weights that a thread loads at once (16 bytes of bf16) and reduces itself


@triton.jit
def _scaled(sums, scales_at, begin, R, K, RUN: tl.constexpr, GROUP: tl.constexpr, BEGIN: tl.constexpr):
    """Multiplies sums over runs of columns [BLOCK_N, BLOCK_R, runs], the first from `begin` on, by their scales."""
    column = begin + tl.arange(0, sums.shape[2]) * RUN
    at = scales_at[:, None] + ((BEGIN + column) // GROUP * R)[None, :]
    return sums * tl.load(at, mask=(column < K)[None, :], other=0.0)[None, :, :]


@triton.jit
def stream(
    x, weight, scales, row, up, x_n, N, R, K,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, BEGIN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, RUN: tl.constexpr, PAIRED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Multiplies all rows of x with weight rows `row` [BLOCK_R], of R in total, and, if PAIRED, with rows `up`.

    Returns both products, [BLOCK_N, BLOCK_R, BLOCK_K / RUN] fp32, to be summed over the last dim.
    """
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    BLOCK_R: tl.constexpr = row.shape[0]
    runs: tl.constexpr = BLOCK_K // RUN
    acc = tl.zeros([BLOCK_N, BLOCK_R, runs], tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_R, runs], tl.float32)
    x_at = x + (n * x_n)[:, None] + k[None, :]
    w_at = weight + row[:, None].to(tl.int64) * K + k[None, :]
    up_at = weight + up[:, None].to(tl.int64) * K + k[None, :]
    for begin in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = k + begin < K
        ws = tl.load(w_at + begin, mask=inside[None, :], other=0.0)
        if PAIRED:
            us = tl.load(up_at + begin, mask=inside[None, :], other=0.0)
        xs = tl.load(x_at + begin, mask=(n < N)[:, None] & inside[None, :], other=0.0)
        xs = tl.reshape(xs.to(tl.float32), [BLOCK_N, 1, runs, RUN])
        sums = tl.sum(xs * tl.reshape(ws.to(tl.float32), [1, BLOCK_R, runs, RUN]), 3)
        acc += _scaled(sums, scales + row, begin, R, K, RUN, GROUP, BEGIN) if GROUPS > 1 else sums
        if PAIRED:
            sums = tl.sum(xs * tl.reshape(us.to(tl.float32), [1, BLOCK_R, runs, RUN]), 3)
            ups += _scaled(sums, scales + up, begin, R, K, RUN, GROUP, BEGIN) if GROUPS > 1 else sums
    if GROUPS == 1:
        acc *= tl.load(scales + row)[None, :, None]
        if PAIRED:
            ups *= tl.load(scales + up)[None, :, None]
    return acc, ups


@triton.jit
def _linear_kernel(
    x, weight, scales, bias, out, peers, count, x_n, N, R, K, rank,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, BEGIN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, RUN: tl.constexpr,
    BIAS: tl.constexpr, GATED: tl.constexpr, STAGES: tl.constexpr,
    RANKS: tl.constexpr, PIECES: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    if RANKS > 0:  # overlaps with the loads of weights
        dtype: tl.constexpr = x.dtype.element_ty
        VALUES: tl.constexpr = 1 if tl.float32 == dtype else 2  # per word
        w = tl.program_id(0) * (BLOCK_R // VALUES) + tl.arange(0, BLOCK_R // VALUES)
        tag = epoch(count)
        ll_buffers = sum_ll_buffers(peers, w // SIZE, RANKS, False)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    row = tl.minimum(r, R - 1)  # past the last row: read it again, store nothing
    n = tl.arange(0, BLOCK_N)
    acc, ups = stream(
        x, weight, scales, row, row + R, x_n, N, 2 * R if GATED else R, K, GROUP, GROUPS, BEGIN,
        BLOCK_N, BLOCK_K, RUN, GATED, STAGES,
    )  # fmt: skip
    start_successor(PDL)
    y = tl.sum(acc, 2)
    if BIAS:
        y += tl.load(bias + row).to(tl.float32)[None, :]
    if GATED:
        up = tl.sum(ups, 2)
        if BIAS:
            up += tl.load(bias + R + row).to(tl.float32)[None, :]
        y = rounded_swiglu(y, up, out.dtype.element_ty)
    if RANKS == 0:
        tl.store(out + (n * R)[:, None] + r[None, :], y, mask=(n < N)[:, None] & (r < R)[None, :])
    else:
        words = sum_words(tl.reshape(y, [BLOCK_R]), dtype)
        send_sum(ll_buffers, words, w // SIZE, w % SIZE, tag, rank, w < R // VALUES, RANKS, PIECES, SIZE)


def linear(
    x: torch.Tensor,
    weight: Matrix,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    exact: bool = False,
) -> torch.Tensor:
    """Computes y [N, R] = x W^T + b, or silu(y_1) * y_2 of the two halves of its columns; sums in fp32.

    Args:
        x: [N, K], last dim contiguous.
        weight: [R, K] in x's dtype or quantized, contiguous; gated: [2 R, K], gate rows first.
        bias: one value per weight row, or None.
        gated: apply the gate, silu(y_1) * y_2.
        exact: return fp32 instead of x's dtype; not with bias or gate.
    """
    N, K = x.shape
    R = len(weight) // 2 if gated else len(weight)
    dtype = torch.promote_types(x.dtype, torch.float32) if exact else x.dtype
    assert not exact or (not gated and bias is None)
    if not dispatch.on_gpu(x):
        return reference(x, weight, bias, gated, dtype)
    splits = isinstance(weight, ScaledMatrix) and SPLIT_ROWS < N <= SPLIT_UP_TO and len(weight) * K >= SPLIT_ELEMENTS
    parts = x.split(SPLIT_ROWS) if splits else (x,)
    if x.is_cuda and all(fits_sm90(part, weight, R if gated else None) for part in parts):
        out = torch.empty(N, R, dtype=dtype, device=x.device)
        for part, to in zip(parts, out.split(SPLIT_ROWS) if splits else (out,), strict=True):
            launch_sm90(part, weight, bias, to, gated)
        return out
    if isinstance(weight, ScaledMatrix):
        if x.is_cuda and not exact and linear_e4m3.fits(x, weight):
            return linear_e4m3.linear(x, weight, bias, gated)
        if not 0 < N <= MAX_ROWS or weight.packed:
            return scaled_linear(x, weight, bias, gated, dtype)
    elif not 0 < N <= MAX_ROWS or R == 0 or K == 0:
        if dtype != x.dtype and x.is_cuda:
            return torch.mm(x, weight.mT, out_dtype=dtype)
        y = F.linear(x.to(dtype), weight.to(dtype), bias)
        return silu_mul(y) if gated else y
    assert x.stride(1) == 1 and (isinstance(weight, ScaledMatrix) or _is_plain(x, weight))
    out = torch.empty(N, R, dtype=dtype, device=x.device)
    (data, scales, _, _), groups = stored(weight)
    tile = _tile(N, R, K, gated, run_of(weight, RUN))
    _linear_kernel[(triton.cdiv(R, tile["BLOCK_R"]),)](
        x, data, scales, bias, out, None, None, x.stride(0), N, R, K, 0,
        BIAS=bias is not None, GATED=gated, RANKS=0, PIECES=0, SIZE=0, **groups, **tile, **pdl_options(x),
    )  # fmt: skip
    return out


def can_send(x: torch.Tensor, weight: Matrix, two_shot: bool) -> bool:
    """Returns whether `linear_send` supports these tensors."""
    if not dispatch.on_gpu(x) or 0 in weight.shape or len(weight) * x.itemsize % 4:
        return False
    if x.is_cuda and fits_sm90(x, weight):
        return True
    if weight.packed if isinstance(weight, ScaledMatrix) else not _is_plain(x, weight):
        return False
    return x.stride(1) == 1 and x.dtype in DTYPES and len(x) == 1 and not two_shot


def linear_send(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None, sums: SumTarget) -> None:
    """Projects x and sends the result to the ranks that sum it: phase 1 of `kernels.peers.all_reduce_norm`.

    Args:
        x: [N, K], last dim contiguous.
        weight: [H, K] in x's dtype or quantized, contiguous.
        bias: [H] or None.
        sums: the reducing ranks' LL buffers, with as many slices per row as `H` elements fill.
    """
    if x.is_cuda and fits_sm90(x, weight):
        launch_sm90(x, weight, bias, sums, False)
        return
    R, K = weight.shape
    assert len(x) == 1 and not sums.two_shot and x.stride(1) == 1
    assert isinstance(weight, ScaledMatrix) or _is_plain(x, weight)
    (data, scales, _, _), groups = stored(weight)
    tile = _tile(1, R, K, False, run_of(weight, RUN))
    _linear_kernel[(triton.cdiv(R, tile["BLOCK_R"]),)](
        x, data, scales, bias, None, sums.peers, sums.count, x.stride(0), 1, R, K, sums.rank,
        BIAS=bias is not None, GATED=False, RANKS=sums.peers.numel(), PIECES=sums.pieces, SIZE=sums.slice_words,
        **groups, **tile, **pdl_options(x),
    )  # fmt: skip


def fits_sm90(x: torch.Tensor, weight: Matrix, half: int | None = None) -> bool:
    """Returns whether `launch_sm90` supports these tensors, and row pairs `half` apart."""
    if isinstance(weight, ScaledMatrix):
        return (linear_packed_sm90 if weight.packed else linear_fp8_sm90).fits(x, weight, half)
    return linear_sm90.fits(x, weight)


def launch_sm90(
    x: torch.Tensor,
    weight: Matrix,
    bias: torch.Tensor | None,
    out: torch.Tensor | SumTarget | QKVTarget,
    gated: bool,
) -> None:
    """Runs `linear` on Hopper into `out`: a contiguous [N, R], an all-reduce's LL buffers, or attention's heads."""
    if isinstance(weight, ScaledMatrix):
        (linear_packed_sm90 if weight.packed else linear_fp8_sm90).launch(x, weight, bias, out, gated)
    else:
        linear_sm90.launch(x, weight, bias, out, gated)


def _is_plain(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return weight.is_contiguous() and weight.dtype == x.dtype


def _tile(N: int, R: int, K: int, gated: bool, run: int) -> dict[str, int]:
    """Chooses launch options, by H200 timings: few weights per thread, or more for a matrix with many rows.

    A thread loads `run` consecutive weights at once; fewer if its row is too short for all threads.
    """
    short = R <= 2048
    if N == 1 and not gated and K <= 512:  # more warps would have nothing to read
        rows, warps, stages = 8, 2, 1
    elif N > 2:  # more rows of x need the registers: stage weights in shared memory
        rows, warps, stages = (4, 1, 3) if gated else (4, 4, 3) if short else (8, 1, 3)
    elif gated:
        rows, warps, stages = 2, 4 if short else 2, 1
    elif short:
        rows, warps, stages = 2, 8, 1
    else:
        rows, warps, stages = (8, 2, 1) if N == 2 and K <= 1024 else (4, 4, 1)
    # Lay out the warps along K, so that x and the weights are split into the same runs per thread.
    run = min(run, max(RUN, triton.next_power_of_2(K) // (warps * 32))) if run > RUN else run
    return dict(
        BLOCK_N=triton.next_power_of_2(N), BLOCK_R=rows, BLOCK_K=warps * 32 * run, RUN=run, STAGES=stages,
        num_warps=warps,
    )  # fmt: skip
