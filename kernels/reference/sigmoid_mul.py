"""sigmoid_mul in plain torch."""

from __future__ import annotations

import torch


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Computes x * sigmoid(gate); shapes as in `kernels.dense.sigmoid_mul.sigmoid_mul`."""
    return (x.float() * gate.float().sigmoid()).to(x.dtype)
