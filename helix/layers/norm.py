"""RMSNorm, replicated, and where norms stand beside the residual stream."""

from __future__ import annotations

from torch import Tensor

from comm.base import Communicator
from comm.partial import PartialSum, materialize
from helix.layers.weights import ModelShard
from helix.worker.row_shard import reduce_scatter_rows
from helix.worker.step import RowShard
from kernels.dense.rms_norm import rms_norm


class AllReduceNorm:
    """Norm w * s / rms(s) over the last dimension, of the residual stream s plus the all-reduced parts of the ranks."""

    def __init__(self, shard: ModelShard, name: str, size: int, eps: float) -> None:
        self.comm, self.eps = shard.comm, eps
        self.weight = shard.weights.norm_weight(f"{name}.weight", size)

    def __call__(self, parts: Tensor | PartialSum, x: Tensor | None) -> tuple[Tensor, Tensor]:
        """Adds the sum of all ranks' parts [N, H] to x [N, H], None: 0; returns the normalised and the plain sum."""
        return self.comm.all_reduce_norm(parts, x, self.weight, self.eps)

    def normalize(self, x: Tensor) -> Tensor:
        """Normalises x [N, H] without an all-reduce."""
        return rms_norm(x, self.weight, self.eps)[0]


class ResidualNorm:
    """Norms between a half of a layer and the next one: of what the first adds, and of what the second reads.

    Args:
        post_norm: norm of the sum of the ranks' parts, before it is added to the stream; None: there is none.
        pre_norm: norm of the stream; None: the next half reads the stream itself.
    """

    def __init__(self, comm: Communicator, post_norm: AllReduceNorm | None, pre_norm: AllReduceNorm | None) -> None:
        self.comm, self.post_norm, self.pre_norm = comm, post_norm, pre_norm

    def __call__(
        self, parts: Tensor | PartialSum, x: Tensor | None, shard: RowShard | None = None
    ) -> tuple[Tensor, Tensor]:
        """Adds the sum of all ranks' parts [N, H] to x [N, H], None: 0; returns what is read next, and the sum.

        Both are of this rank's rows, and so is `x`, if rows are dealt.
        """
        if shard is not None:
            assert self.post_norm is None and self.pre_norm is not None, (
                "no family of these choosing tokens has such norms"
            )
            return rms_norm(
                reduce_scatter_rows(shard, self.comm, materialize(parts)), self.pre_norm.weight, self.pre_norm.eps, x
            )
        if self.post_norm is None:
            if self.pre_norm is not None:
                return self.pre_norm(parts, x)
            assert x is None, "the embedding's parts"
            total = self.comm.all_reduce(materialize(parts))
            return total, total
        y, _ = self.post_norm(parts, None)
        assert x is not None
        if self.pre_norm is not None:
            return rms_norm(y, self.pre_norm.weight, self.pre_norm.eps, x)
        total = x + y
        return total, total

    def normalize(self, x: Tensor) -> Tensor:
        """Returns what the next half reads of x [N, H]."""
        return x if self.pre_norm is None else self.pre_norm.normalize(x)
