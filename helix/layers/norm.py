"""RMSNorm, fused with the all-reduce and the residual add, as pre- and post-norms."""

from __future__ import annotations

from torch import Tensor

from comm.base import Communicator
from comm.partial import PartialSum, materialize
from helix.layers.weights import ModelShard
from helix.worker.row_shard import reduce_scatter_rows
from helix.worker.step import RowShard
from kernels.dense.rms_norm import rms_norm


class AllReduceNorm:
    """RMSNorm of the residual stream plus the all-reduced partial sums."""

    def __init__(self, shard: ModelShard, name: str, size: int, eps: float) -> None:
        self.comm, self.eps = shard.comm, eps
        self.weight = shard.weights.norm_weight(f"{name}.weight", size)

    def __call__(self, parts: Tensor | PartialSum, x: Tensor | None) -> tuple[Tensor, Tensor]:
        """All-reduces `parts` [N, H] and adds x [N, H] (None: 0); returns the normalized sum and the sum."""
        return self.comm.all_reduce_norm(parts, x, self.weight, self.eps)

    def normalize(self, x: Tensor) -> Tensor:
        """RMSNorm of x [N, H], without an all-reduce."""
        return rms_norm(x, self.weight, self.eps)[0]


class ResidualNorm:
    """All-reduce, residual add and norms between two sublayers (attention, FFN).

    Args:
        post_norm: norm of the first sublayer's output, before the residual add; None: there is none.
        pre_norm: norm of the second sublayer's input; None: it reads the residual stream.
    """

    def __init__(self, comm: Communicator, post_norm: AllReduceNorm | None, pre_norm: AllReduceNorm | None) -> None:
        self.comm, self.post_norm, self.pre_norm = comm, post_norm, pre_norm

    def __call__(
        self, parts: Tensor | PartialSum, x: Tensor | None, shard: RowShard | None = None
    ) -> tuple[Tensor, Tensor]:
        """All-reduces `parts` [N, H] and adds x [N, H] (None: 0); returns the next sublayer's input, and the stream.

        With `shard`, x and both results have only this rank's rows.
        """
        if shard is not None:
            assert self.post_norm is None and self.pre_norm is not None, (
                "no DSA model has post-norms, or lacks pre-norms"
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
        """Returns the next sublayer's input for the stream x [N, H]."""
        return x if self.pre_norm is None else self.pre_norm.normalize(x)
