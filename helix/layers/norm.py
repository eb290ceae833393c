"""RMSNorm, replicated."""

from __future__ import annotations

from torch import Tensor

from helix.layers.weights import Weights
from kernels.rms_norm import rms_norm


class RMSNorm:
    """y = w * s / rms(s) over the last dimension, of the residual stream s with the newest update added."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float) -> None:
        self.eps = eps
        self.weight = weights.parameter(size)
        weights.read(self.weight, f"{name}.weight", (size,))

    def __call__(self, x: Tensor, update: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x, update [N, H] -> (y, x + update)."""
        if update is None:
            return rms_norm(x, self.weight, self.eps)
        return rms_norm(update, self.weight, self.eps, x)
