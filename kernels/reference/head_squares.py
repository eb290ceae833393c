"""head_squares in plain torch."""

from __future__ import annotations

import torch


def head_squares(qkv: torch.Tensor, kv_heads: int, shares: tuple[float, float]) -> torch.Tensor:
    """Sums squares; arguments and shapes as in `kernels.attention.head_squares.head_squares`."""
    parts = qkv.float().split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)[:2]
    return torch.stack([part.square().sum((1, 2)) * share for part, share in zip(parts, shares, strict=True)], 1)
