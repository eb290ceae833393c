"""Projections of a few rows: as fast as the weights can be read, with bias and gate in the same pass.

A library's matrix product reaches a third of the read rate on the small matrices that a rank holds. Here every program
streams some rows of the weight through registers, past all rows of x: with so few of these the multiplications are
free, and tensor cores, fed through shared memory, are slower (benchmarks/LOG.md). While the kernel before still runs,
the programs already fetch their weights into the L2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels import routing
from kernels.launching import overlapped, start_successor, wait_for_predecessor
from kernels.reference.linear import linear as reference
from kernels.silu_mul import silu_mul

PREFETCHED = 4 << 20  # bytes of a weight: the most that a kernel asks for before it may begin
MAX_ROWS = 4  # of x; beyond, a library's kernels are as fast


@triton.jit
def _prefetch(weight, rows, K, columns, LINES: tl.constexpr):
    """Asks the L2 for the first columns of rows of the weight, a line of 128 bytes at a time."""
    line: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
    for begin in range(0, columns, LINES * line):
        k = begin + tl.arange(0, LINES) * line
        at = weight + rows[:, None].to(tl.int64) * K + tl.where(k < columns, k, 0)[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _linear_kernel(
    x, weight, bias, out, x_n, N, R, K, ahead,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    STAGES: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    row = tl.minimum(r, R - 1)  # beyond the last row: read it again, store nothing
    if PREFETCH:
        _prefetch(weight, row, K, ahead, 8)
        if GATED:
            _prefetch(weight, row + R, K, ahead, 8)
    wait_for_predecessor(PDL)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_R, BLOCK_K], tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_R, BLOCK_K], tl.float32)
    x_at = x + (n * x_n)[:, None] + k[None, :]
    w_at = weight + row[:, None].to(tl.int64) * K + k[None, :]
    up_at = weight + (row + R)[:, None].to(tl.int64) * K + k[None, :]
    for begin in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = k + begin < K
        xs = tl.load(x_at + begin, mask=(n < N)[:, None] & inside[None, :], other=0.0).to(tl.float32)[:, None, :]
        acc += xs * tl.load(w_at + begin, mask=inside[None, :], other=0.0).to(tl.float32)[None, :, :]
        if GATED:
            ups += xs * tl.load(up_at + begin, mask=inside[None, :], other=0.0).to(tl.float32)[None, :, :]
    start_successor(PDL)
    y = tl.sum(acc, 2)
    if BIAS:
        y += tl.load(bias + row).to(tl.float32)[None, :]
    if GATED:
        up = tl.sum(ups, 2)
        if BIAS:
            up += tl.load(bias + R + row).to(tl.float32)[None, :]
        # Rounded as the two projections' outputs would be.
        y = y.to(out.dtype.element_ty).to(tl.float32)
        y = y / (1.0 + tl.exp(-y)) * up.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + (n * R)[:, None] + r[None, :], y, mask=(n < N)[:, None] & (r < R)[None, :])


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False
) -> torch.Tensor:
    """y = x W^T + b, or silu(y_1) * y_2 of the two halves of its columns; sums in fp32.

    Args:
        x: [N, K], last dim contiguous.
        weight: [R, K] in x's dtype, contiguous; gated: [2 R, K], the gate's rows before the others.
        bias: one value for each row of the weight, or None.
        gated: the result is the gate's.

    Returns:
        [N, R] in x's dtype.
    """
    N, K = x.shape
    R = len(weight) // 2 if gated else len(weight)
    if not routing.on_gpu(x):
        return reference(x, weight, bias, gated)
    if not 0 < N <= MAX_ROWS or R == 0 or K == 0:
        y = F.linear(x, weight, bias)
        return silu_mul(y) if gated else y
    assert x.stride(1) == 1 and weight.is_contiguous() and weight.dtype == x.dtype
    out = torch.empty(N, R, dtype=x.dtype, device=x.device)
    tile = _tile(N, R, K, gated)
    _linear_kernel[(triton.cdiv(R, tile["BLOCK_R"]),)](
        x, weight, bias, out, x.stride(0), N, R, K, min(K, PREFETCHED // (len(weight) * weight.itemsize)),
        BIAS=bias is not None, GATED=gated, PREFETCH=x.is_cuda, **tile, **overlapped(x),
    )  # fmt: skip
    return out


def _tile(N: int, R: int, K: int, gated: bool) -> dict[str, int]:
    """Launch options, as measured on an H200: 16 weights a thread, fewer where more rows of x share the registers."""
    if K <= 1024:
        rows, block_k, stages, warps = 8, 512, 2, 4
    elif R <= 2048 and not gated:
        rows, block_k, stages, warps = 2, 1024, 1, 4
    elif gated:
        rows, block_k, stages, warps = 4, 256, 4, 2
    else:
        rows, block_k, stages, warps = 8, 256, 4, 4
    rows = max(1, rows // 2) if N > 1 else rows
    return dict(
        BLOCK_N=triton.next_power_of_2(N), BLOCK_R=rows, BLOCK_K=block_k, STAGES=stages, num_warps=warps
    )  # fmt: skip
