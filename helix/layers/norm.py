"""RMSNorm, replicated."""

from __future__ import annotations

import torch
from torch import Tensor

from helix.layers.weights import Weights


class RMSNorm:
    """y = w * x / rms(x) over the last dimension, the statistics in fp32."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float) -> None:
        self.eps = eps
        self.weight = weights.parameter(size)
        weights.read(self.weight, f"{name}.weight", (size,))

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        # Rounded before the weight is applied, as the models were trained and as transformers does it.
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)
