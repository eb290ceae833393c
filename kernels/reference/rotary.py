"""angles in plain torch."""

from __future__ import annotations

import torch


def angles(
    positions: torch.Tensor, inv_freq: torch.Tensor, factor: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes cos and sin; shapes as in `kernels.dense.rotary.angles`."""
    angle = positions.float()[:, None] * inv_freq
    return (angle.cos() * torch.where(inv_freq == 0, 1.0, factor)).to(dtype), (angle.sin() * factor).to(dtype)
