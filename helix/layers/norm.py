"""RMSNorm, replicated."""

from __future__ import annotations

from torch import Tensor

from comm.base import Communicator
from comm.pending import PendingSum
from helix.layers.weights import Weights
from kernels.dense.rms_norm import rms_norm


class AllReduceNorm:
    """Norm w * s / rms(s) over the last dimension, of the residual stream s plus the all-reduced parts of the ranks."""

    def __init__(
        self, weights: Weights, comm: Communicator, name: str, size: int, eps: float, zero_centered: bool
    ) -> None:
        self.comm = comm
        self.eps = eps
        self.weight = weights.gain(size, f"{name}.weight", zero_centered)

    def __call__(self, parts: Tensor | PendingSum, x: Tensor | None) -> tuple[Tensor, Tensor]:
        """Adds the sum of all ranks' parts [N, H] to x [N, H], None: 0; returns the normalised and the plain sum."""
        return self.comm.all_reduce_norm(parts, x, self.weight, self.eps)

    def of(self, x: Tensor) -> Tensor:
        """Normalises x [N, H] without an all-reduce."""
        return rms_norm(x, self.weight, self.eps)[0]
