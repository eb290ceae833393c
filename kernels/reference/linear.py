"""linear in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.reference.silu_mul import silu_mul
from kernels.scaled import Matrix, as_tensor


def linear(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None, gated: bool, dtype: torch.dtype) -> torch.Tensor:
    """Computes x W^T + b, or its gate, in `dtype`; shapes as in `kernels.dense.linear.linear`."""
    y = F.linear(x.to(dtype), as_tensor(weight, dtype).to(dtype), bias)
    return silu_mul(y) if gated else y
