"""RMSNorm, replicated, and where norms stand beside the residual stream."""

from __future__ import annotations

from torch import Tensor

from comm.base import Communicator
from comm.pending import PendingSum, computed
from helix.layers.weights import ModelShard
from helix.worker.dealt import sum_rows
from helix.worker.step import DealtRows
from kernels.dense.rms_norm import rms_norm


class AllReduceNorm:
    """Norm w * s / rms(s) over the last dimension, of the residual stream s plus the all-reduced parts of the ranks."""

    def __init__(self, shard: ModelShard, name: str, size: int, eps: float) -> None:
        self.comm, self.eps = shard.comm, eps
        self.weight = shard.weights.gain(f"{name}.weight", size)

    def __call__(self, parts: Tensor | PendingSum, x: Tensor | None) -> tuple[Tensor, Tensor]:
        """Adds the sum of all ranks' parts [N, H] to x [N, H], None: 0; returns the normalised and the plain sum."""
        return self.comm.all_reduce_norm(parts, x, self.weight, self.eps)

    def of(self, x: Tensor) -> Tensor:
        """Normalises x [N, H] without an all-reduce."""
        return rms_norm(x, self.weight, self.eps)[0]


class JoinNorm:
    """Norms between a half of a layer and the next one: of what the first adds, and of what the second reads.

    Args:
        added: norm of the sum of the ranks' parts, before it is added to the stream; None: there is none.
        read: norm of the stream; None: the next half reads the stream itself.
    """

    def __init__(self, comm: Communicator, added: AllReduceNorm | None, read: AllReduceNorm | None) -> None:
        self.comm, self.added, self.read = comm, added, read

    def __call__(
        self, parts: Tensor | PendingSum, x: Tensor | None, dealt: DealtRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """Adds the sum of all ranks' parts [N, H] to x [N, H], None: 0; returns what is read next, and the sum.

        Both are of this rank's rows, and so is `x`, if rows are dealt.
        """
        if dealt is not None:
            assert self.added is None and self.read is not None, "no family of these choosing tokens has such norms"
            return rms_norm(sum_rows(dealt, self.comm, computed(parts)), self.read.weight, self.read.eps, x)
        if self.added is None:
            if self.read is not None:
                return self.read(parts, x)
            assert x is None, "the embedding's parts"
            total = self.comm.all_reduce(computed(parts))
            return total, total
        y, _ = self.added(parts, None)
        assert x is not None
        if self.read is not None:
            return rms_norm(y, self.read.weight, self.read.eps, x)
        total = x + y
        return total, total

    def of(self, x: Tensor) -> Tensor:
        """Returns what the next half reads of x [N, H]."""
        return x if self.read is None else self.read.of(x)
