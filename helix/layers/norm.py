"""RMSNorm, replicated."""

from __future__ import annotations

from torch import Tensor

from comm.base import Communicator
from comm.pending import PendingSum
from helix.layers.weights import Weights
from kernels.dense.rms_norm import rms_norm


class AllReduceNorm:
    """y = w * s / rms(s) over the last dimension, of the residual stream s with the ranks' newest parts added."""

    def __init__(self, weights: Weights, comm: Communicator, name: str, size: int, eps: float) -> None:
        self.comm = comm
        self.eps = eps
        self.weight = weights.parameter(size)
        weights.bind(self.weight, f"{name}.weight", (size,))

    def __call__(self, parts: Tensor | PendingSum, x: Tensor | None) -> tuple[Tensor, Tensor]:
        """parts [N, H], this rank's; x [N, H] -> (y, x + the sum of parts); all but parts are the same on all ranks."""
        return self.comm.all_reduce_norm(parts, x, self.weight, self.eps)

    def of(self, x: Tensor) -> Tensor:
        """What it makes of a residual stream x [N, H] to which ranks add nothing."""
        return rms_norm(x, self.weight, self.eps)[0]
