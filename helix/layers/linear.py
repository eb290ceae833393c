"""Projections, sharded by output rows (no communication) or by input columns (partial sums, then all-reduce)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from comm.base import Communicator
from helix.layers.weights import Weights


@dataclass(frozen=True)
class Rows:
    """A share of one checkpoint matrix's output rows."""

    name: str
    total: int
    share: range
    bias: bool = False


class RowShards:
    """y = x W^T + b for this rank's rows of one or more matrices, stacked into one: QKV, gate and up."""

    def __init__(self, weights: Weights, in_features: int, parts: Sequence[Rows]) -> None:
        rows = sum(len(p.share) for p in parts)
        self.weight = weights.parameter(rows, in_features)
        self.bias = weights.parameter(rows) if any(p.bias for p in parts) else None
        begin = 0
        for p in parts:
            end = begin + len(p.share)
            weights.read(self.weight[begin:end], f"{p.name}.weight", (p.total, in_features), p.share)
            if self.bias is not None:
                assert p.bias, "stacked matrices either all have a bias or none has"
                weights.read(self.bias[begin:end], f"{p.name}.bias", (p.total,), p.share)
            begin = end

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class ColumnShard:
    """y = all-reduce(x W^T) + b with this rank's input columns of W: output and down projections.

    A rank without columns adds zeros. The bias is replicated and added once, after the sum.
    """

    def __init__(
        self,
        weights: Weights,
        comm: Communicator,
        name: str,
        columns: range,
        in_features: int,
        out_features: int,
        bias: bool,
    ) -> None:
        self.comm = comm
        self.weight = weights.parameter(out_features, len(columns))
        weights.read(self.weight, f"{name}.weight", (out_features, in_features), range(out_features), columns)
        self.bias = None
        if bias:
            self.bias = weights.parameter(out_features)
            weights.read(self.bias, f"{name}.bias", (out_features,))

    def __call__(self, x: Tensor) -> Tensor:
        y = self.comm.all_reduce(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias
