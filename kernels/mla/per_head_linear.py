"""Batched matmul of a few rows with a small matrix per head: MLA's value up-projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.mla.reference import per_head_linear as reference
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor

MAX_ROWS = 16  # minimum tile of tensor cores; more rows go to cuBLAS


@triton.jit
def head_weight(
    weight, w_h, w_a, w_b, program, A: tl.constexpr, B: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr
):  # fmt: skip
    """Returns a program's head, its columns [BLOCK_B] of the head's matrix [A, B], and their weights."""
    tiles: tl.constexpr = (B + BLOCK_B - 1) // BLOCK_B
    head = (program // tiles).to(tl.int64)
    b = program % tiles * BLOCK_B + tl.arange(0, BLOCK_B)
    a = tl.arange(0, BLOCK_A)
    at = weight + head * w_h + (a * w_a)[:, None] + (b * w_b)[None, :]
    return head, b, tl.load(at, mask=(a < A)[:, None] & (b < B)[None, :], other=0.0)


@triton.jit
def head_product(
    x, out, w, x_n, x_h, out_n, out_h, head, b, N,
    A: tl.constexpr, B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_A: tl.constexpr,
):  # fmt: skip
    """Multiplies a head's x [N, A] by columns b of its matrix, into columns b of its rows in `out`."""
    n = tl.arange(0, BLOCK_N)
    a = tl.arange(0, BLOCK_A)
    rows = x + head * x_h + (n * x_n)[:, None] + a[None, :]
    xs = tl.load(rows, mask=(n < N)[:, None] & (a < A)[None, :], other=0.0)
    y = tl.dot(xs, w, input_precision="ieee")
    tl.store(out + head * out_h + (n * out_n)[:, None] + b[None, :], y, mask=(n < N)[:, None] & (b < B)[None, :])


@triton.jit
def _each_head_kernel(
    x, weight, out, x_n, x_h, w_h, w_a, w_b, out_n, out_h, N,
    A: tl.constexpr, B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    head, b, w = head_weight(weight, w_h, w_a, w_b, tl.program_id(0), A, B, BLOCK_A, BLOCK_B)  # constant
    wait_for_predecessor(PDL)
    start_successor(PDL)
    head_product(x, out, w, x_n, x_h, out_n, out_h, head, b, N, A, B, BLOCK_N, BLOCK_A)


def head_blocks(A: int, max_columns: int, dtype: torch.dtype) -> dict[str, int]:
    """Chooses the tile of a kernel around `head_product`: all of A, and at most `max_columns` columns.

    fp32, which has no full-precision tensor cores, gets few columns.
    """
    block_a = max(16, triton.next_power_of_2(A))
    widest = max(16, (8192 if dtype == torch.float32 else 16384) // block_a)
    return dict(BLOCK_N=MAX_ROWS, BLOCK_A=block_a, BLOCK_B=min(max_columns, widest))


def per_head_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Computes y[n, h] = x[n, h] W[h] for every head h; sums in fp32.

    Args:
        x: [N, Hq, A], last dim contiguous.
        weight: [Hq, A, B] in x's dtype; any strides.
        out: [N, Hq, B] in x's dtype, written if given; last dim contiguous.
    """
    N, heads, A = x.shape
    B = weight.shape[2]
    out = torch.empty(N, heads, B, dtype=x.dtype, device=x.device) if out is None else out
    if not dispatch.on_gpu(x) or not 0 < N <= MAX_ROWS or 0 in (heads, A, B):
        return reference(x, weight, out)
    assert x.stride(2) == out.stride(2) == 1 and weight.dtype == x.dtype == out.dtype
    blocks = head_blocks(A, 16, x.dtype)
    _each_head_kernel[(heads * triton.cdiv(B, blocks["BLOCK_B"]),)](
        x, weight, out, *x.stride()[:2], *weight.stride(), *out.stride()[:2], N,
        A=A, B=B, **blocks, num_warps=4, **pdl_options(x),
    )  # fmt: skip
    return out
