"""The dense FFN: tensor parallel (TP) over all ranks, whatever the attention grid is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from comm.base import Communicator
from comm.pending import PendingProjection
from helix.layers.linear import ColumnParallel, RowParallel, Rows
from helix.layers.weights import Weights
from helix.layout import HelixLayout
from kernels.dense.sigmoid_mul import sigmoid_mul


@dataclass(frozen=True)
class MLPSpec:
    """Shape of one layer's dense FFN in the checkpoint.

    Attributes:
        width: number of inner columns.
        bias: whether all three products have a bias.
    """

    width: int
    bias: bool = False

    def build(self, weights: Weights, comm: Communicator, layout: HelixLayout, hidden: int, layer: str) -> GatedMLP:
        """Builds this rank's part; `layer` is the name of the layer in the checkpoint."""
        return GatedMLP(weights, comm, layout, hidden, self.width, self.bias, f"{layer}.mlp")

    def multiplications(self, hidden: int) -> int:
        """Counts multiplications with weights for one token, over all ranks."""
        return 3 * hidden * self.width

    def buffers(self, layout: HelixLayout, rank: int, hidden: int) -> int:
        """Counts the activations per token of a prefill step on a rank: gate, up and their product."""
        return 3 * len(layout.ffn_columns(rank, self.width))


class GatedMLP:
    """FFN W_down (silu(W_gate x) * W_up x), each rank with its inner columns: a part of the sum over ranks."""

    def __init__(
        self, weights: Weights, comm: Communicator, layout: HelixLayout, hidden: int, width: int, bias: bool, name: str
    ) -> None:
        columns = layout.ffn_columns(comm.rank, width)
        self.gate_up = ColumnParallel(
            weights, hidden, [Rows(f"{name}.{part}_proj", width, columns, bias) for part in ("gate", "up")]
        )
        self.down = RowParallel(weights, comm, f"{name}.down_proj", columns, width, hidden, bias)

    def __call__(self, x: Tensor, gate: Tensor | None = None) -> PendingProjection:
        """Computes this rank's part [N, H] from x [N, H], the same on every rank, times the sigmoid of gate [N, 1]."""
        inner = self.gate_up(x, gated=True)
        return self.down(inner if gate is None else sigmoid_mul(inner, gate))
