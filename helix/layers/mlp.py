"""The dense FFN: TP over all FFN ranks, whatever the attention grid was."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from comm.base import Communicator
from comm.pending import PendingProjection
from helix.layers.linear import ColumnParallel, RowParallel, Rows
from helix.layers.weights import Weights
from helix.layout import HelixLayout


@dataclass(frozen=True)
class MLPSpec:
    """One layer's dense FFN, as the checkpoint has it.

    Attributes:
        width: its inner columns.
        bias: all three products have one.
    """

    width: int
    bias: bool = False

    def build(self, weights: Weights, comm: Communicator, layout: HelixLayout, hidden: int, layer: str) -> GatedMLP:
        """Makes this rank's part; `layer` is the name of the layer in the checkpoint."""
        return GatedMLP(weights, comm, layout, hidden, self.width, self.bias, f"{layer}.mlp")

    def multiplications(self, hidden: int) -> int:
        """Counts multiplications with weights for one token, over all ranks."""
        return 3 * hidden * self.width

    def buffers(self, layout: HelixLayout, rank: int, hidden: int) -> int:
        """Counts the numbers that a token of a prefill step takes on a rank: gate, up and their product."""
        return 3 * len(layout.ffn_columns(rank, self.width))


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
