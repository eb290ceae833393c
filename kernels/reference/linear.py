"""linear in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.reference.silu_mul import silu_mul


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> torch.Tensor:
    """x W^T + b, or its gate; shapes as in `kernels.linear.linear`."""
    y = F.linear(x, weight, bias)
    return silu_mul(y) if gated else y
