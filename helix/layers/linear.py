"""Column- and row-parallel projections, and embedding and LM head sharded over the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from comm.partial import PartialProjection
from helix.layers.weights import ModelShard, Weights
from kernels.dense.embedding import embedding
from kernels.dense.linear import linear
from kernels.scaled import Matrix, matrix_rows


@dataclass(frozen=True)
class Rows:
    """This rank's share of the output rows of a checkpoint matrix."""

    name: str
    total: int
    share: range
    bias: bool = False


class ColumnParallel:
    """Projection x W^T + b with this rank's output rows of one or more stacked matrices: QKV, gate and up."""

    def __init__(self, weights: Weights, in_features: int, parts: Sequence[Rows]) -> None:
        rows = sum(len(p.share) for p in parts)
        self.weight = weights.matrix(rows, in_features, names=[f"{p.name}.weight" for p in parts])
        self.bias = weights.parameter(rows) if any(p.bias for p in parts) else None
        begin = 0
        for p in parts:
            end = begin + len(p.share)
            weights.bind(matrix_rows(self.weight, begin, end), f"{p.name}.weight", (p.total, in_features), p.share)
            if self.bias is not None:
                assert p.bias, "stacked matrices either all have a bias or none has"
                weights.bind(self.bias[begin:end], f"{p.name}.bias", (p.total,), p.share)
            begin = end

    def __call__(self, x: Tensor, *, gated: bool = False, exact: bool = False) -> Tensor:
        """Projects x [N, H] to [N, rows]; `gated`: silu of the first half times the second; `exact`: see `linear`."""
        return linear(x, self.weight, self.bias, gated=gated, exact=exact)


class RowParallel:
    """Projection x W^T + b with this rank's input columns, a partial sum: output and down projections.

    The next norm all-reduces. A rank without columns gives zeros. Only rank 0 has the bias.
    """

    def __init__(
        self, shard: ModelShard, name: str, columns: range, in_features: int, out_features: int, bias: bool = False
    ) -> None:
        weights, names = shard.weights, [f"{name}.weight"]
        self.weight = weights.matrix(out_features, len(columns), names=names, columns=columns, total=in_features)
        weights.bind(self.weight, f"{name}.weight", (out_features, in_features), range(out_features), columns)
        self.bias = weights.parameter(out_features) if bias and shard.comm.rank == 0 else None
        if bias:
            weights.bind(self.bias, f"{name}.bias", (out_features,))

    def __call__(self, x: Tensor) -> PartialProjection:
        return PartialProjection(x, self.weight, self.bias)


class Embedding:
    """Token embedding: ranks without a token's row return zeros; the next norm all-reduces."""

    def __init__(self, weights: Weights, name: str, rows: range, vocab: int, hidden: int) -> None:
        self.rows = rows
        self.weight = weights.parameter(len(rows), hidden)
        weights.bind(self.weight, f"{name}.weight", (vocab, hidden), rows)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Looks up tokens [N] int64 -> [N, H], a partial sum."""
        return embedding(tokens, self.weight, self.rows.start)


class Head:
    """LM head: logits of this rank's rows of the vocabulary, in fp32."""

    def __init__(self, weights: Weights, name: str | None, embedding: Embedding, vocab: int, hidden: int) -> None:
        self.rows = embedding.rows
        self.weight: Matrix = embedding.weight
        if name is not None:  # untied
            self.weight = weights.matrix(len(self.rows), hidden, names=[f"{name}.weight"])
            weights.bind(self.weight, f"{name}.weight", (vocab, hidden), self.rows)

    def __call__(self, x: Tensor) -> Tensor:
        """Computes logits [n, V_local] fp32 from hidden states [n, H]."""
        return linear(x, self.weight).float()
