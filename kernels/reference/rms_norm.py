"""rms_norm in plain torch."""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalises (RMSNorm) the residual sum; shapes as in `kernels.dense.rms_norm.rms_norm`."""
    total = x if residual is None else x + residual
    wide = total.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype), total
