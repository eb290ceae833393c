"""Chooses an op's implementation by tensor."""

from __future__ import annotations

import torch


def on_gpu(t: torch.Tensor) -> bool:
    """Returns whether the Triton kernel serves `t`; ops call it through the module so that tests can redirect them."""
    return t.is_cuda
