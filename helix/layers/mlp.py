"""The dense FFN: tensor parallel (TP) over all ranks, whatever the attention grid is."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from comm.base import Communicator
from comm.pending import PendingProjection
from helix.layers.linear import ColumnParallel, RowParallel, Rows
from helix.layers.specs import MLPSpec
from helix.layers.weights import Weights
from helix.layout import HelixLayout
from kernels.dense.sigmoid_mul import sigmoid_mul


class GatedMLP:
    """FFN W_down (f(W_gate x) * W_up x) with activation f, each rank with its inner columns: a part of the sum."""

    def __init__(
        self, weights: Weights, comm: Communicator, layout: HelixLayout, hidden: int, spec: MLPSpec, name: str
    ) -> None:
        width, bias, self.activation = spec.width, spec.bias, spec.activation
        columns = layout.ffn_columns(comm.rank, width)
        rows = [Rows(f"{name}.{part}_proj", width, columns, bias) for part in ("gate", "up")]
        if spec.fused:
            ups = range(width + columns.start, width + columns.stop)
            rows = [Rows(f"{name}.gate_up_proj", 2 * width, part, bias) for part in (columns, ups)]
        self.gate_up = ColumnParallel(weights, hidden, rows)
        self.down = RowParallel(weights, comm, f"{name}.down_proj", columns, width, hidden, bias)

    def __call__(self, x: Tensor, weight: Tensor | None = None) -> PendingProjection:
        """Computes this rank's part [N, H] from x [N, H], the same on all, times the sigmoid of weight [N, 1]."""
        if self.activation == "silu":
            inner = self.gate_up(x, gated=True)
        else:
            gate, up = self.gate_up(x).chunk(2, 1)
            inner = F.gelu(gate, approximate="tanh").mul_(up)
        return self.down(inner if weight is None else sigmoid_mul(inner, weight))
