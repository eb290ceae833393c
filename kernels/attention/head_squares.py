"""Mean squares of all of a token's query heads, and of all its key heads, for norms over all of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.attention.reference import head_squares as reference
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor

BLOCK = 1024  # numbers of a row at a time


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
    """Computes sums of squares of query heads and of key heads, times `shares`, in fp32.

    Args:
        qkv: [N, Hq + 2 Hkv, D]: the query heads, then the key heads, then the value heads; a token's are contiguous.
        kv_heads: Hkv; may be 0.
        shares: factor on the sum over query heads, and on that over key heads.

    Returns:
        [N, 2] fp32.
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
