"""Asynchronous copies between host and device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to a device in stream order; the host does not wait."""
    return x.to(device) if x.is_cuda or device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)


def to_host(x: Tensor) -> Tensor:
    """Copies a tensor to the host in stream order; the host does not wait."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda).copy_(x, non_blocking=x.is_cuda)
