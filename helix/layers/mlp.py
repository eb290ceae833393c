"""The dense FFN: TP over all FFN ranks, whatever the attention grid was."""

from __future__ import annotations

from torch import Tensor

from comm.base import Communicator
from comm.pending import PendingProjection
from helix.layers.linear import ColumnParallel, RowParallel, Rows
from helix.layers.weights import Weights
from helix.layout import HelixLayout


class GatedMLP:
    """y = W_down (silu(W_gate x) * W_up x), each rank with its columns of the inner width: a part of the sum."""

    def __init__(
        self, weights: Weights, comm: Communicator, layout: HelixLayout, hidden: int, width: int, bias: bool, name: str
    ) -> None:
        columns = layout.ffn_columns(comm.rank, width)
        self.gate_up = ColumnParallel(
            weights, hidden, [Rows(f"{name}.{part}_proj", width, columns, bias) for part in ("gate", "up")]
        )
        self.down = RowParallel(weights, comm, f"{name}.down_proj", columns, width, hidden, bias)

    def __call__(self, x: Tensor) -> PendingProjection:
        """x [N, H], the same on every rank -> this rank's part [N, H]."""
        return self.down(self.gate_up(x, gated=True))
