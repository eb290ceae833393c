"""Vocabulary-parallel embedding lookup."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.dense.reference import embedding as reference


@triton.jit
def _embedding_kernel(tokens, weight, out, first, V, H: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(tokens + n) - first
    mine = (row >= 0) & (row < V)
    values = tl.load(weight + row * H + h, mask=mine & (h < H), other=0.0)
    tl.store(out + n * H + h, values, mask=h < H)


def embedding(tokens: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
    """Looks up rows [N, H] of weight [V, H] for tokens [N] int64; row 0 is token `first`; zeros for tokens outside."""
    if not dispatch.on_gpu(tokens) or len(tokens) == 0:
        return reference(tokens, weight, first)
    assert weight.is_contiguous() and tokens.is_contiguous()
    N, (V, H) = len(tokens), weight.shape
    out = torch.empty(N, H, dtype=weight.dtype, device=weight.device)
    block = min(1024, triton.next_power_of_2(H))
    _embedding_kernel[N, triton.cdiv(H, block)](tokens, weight, out, first, V, H=H, BLOCK=block)
    return out
