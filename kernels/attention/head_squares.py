"""Mean squares over all query heads, and over all key heads, of a token: for QK norms that span the heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.attention.reference import head_squares as reference
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor

BLOCK = 1024  # elements of a row per iteration


@triton.jit
def _sum_of_squares(row, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, LENGTH, BLOCK):
        x = tl.load(row + begin + at, mask=begin + at < LENGTH, other=0.0).to(tl.float32)
        total += x * x
    return tl.sum(total, 0)


@triton.jit
def _head_squares_kernel(
    qkv, means, x_n, q_share, k_share, Q: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    wait_for_predecessor(PDL)
    start_successor(PDL)
    n = tl.program_id(0).to(tl.int64)
    row = qkv + n * x_n
    tl.store(means + 2 * n, _sum_of_squares(row, Q, BLOCK) * q_share)
    tl.store(means + 2 * n + 1, _sum_of_squares(row + Q, K, BLOCK) * k_share)


def head_squares(qkv: torch.Tensor, kv_heads: int, shares: tuple[float, float]) -> torch.Tensor:
    """Computes sums of squares over the query heads and over the key heads, times `shares` -> [N, 2] fp32.

    Args:
        qkv: [N, Hq + 2 Hkv, D], query heads, key heads, value heads; contiguous per token.
        kv_heads: Hkv; may be 0.
        shares: factors of the sum over query heads and of the sum over key heads.
    """
    if not dispatch.on_gpu(qkv):
        return reference(qkv, kv_heads, shares)
    N, heads, D = qkv.shape
    assert qkv.stride(2) == 1 and qkv.stride(1) == D
    out = torch.empty(N, 2, dtype=torch.float32, device=qkv.device)
    if N:
        _head_squares_kernel[(N,)](
            qkv, out, qkv.stride(0), *shares, Q=(heads - 2 * kv_heads) * D, K=kv_heads * D, BLOCK=BLOCK, num_warps=4,
            **pdl_options(qkv),
        )  # fmt: skip
    return out
