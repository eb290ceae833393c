"""Which implementation of an op a tensor gets."""

from __future__ import annotations

import torch


def on_gpu(t: torch.Tensor) -> bool:
    """Whether `t` is served by the Triton kernel; ops call it through the module so that tests can redirect them."""
    return t.is_cuda
