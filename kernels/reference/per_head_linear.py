"""per_head_linear in plain torch."""

from __future__ import annotations

import torch


def per_head_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Multiplies each head's rows by its matrix; shapes as in `kernels.mla.per_head_linear.per_head_linear`."""
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
    return out
