"""Token embedding and head, both sharded over the vocabulary; tied weights are one tensor."""

from __future__ import annotations

from torch import Tensor

from helix.layers.weights import Weights
from kernels.dense.embedding import embedding
from kernels.dense.linear import linear


class Embedding:
    """Looks a token up where its row lives; the other ranks give zeros, and a norm adds up."""

    def __init__(self, weights: Weights, name: str, rows: range, vocab: int, hidden: int) -> None:
        self.rows = rows
        self.weight = weights.parameter(len(rows), hidden)
        weights.bind(self.weight, f"{name}.weight", (vocab, hidden), rows)

    def __call__(self, tokens: Tensor) -> Tensor:
        """[N] int64 -> [N, H]."""
        return embedding(tokens, self.weight, self.rows.start)


class Head:
    """Logits of this rank's rows of the vocabulary, in fp32."""

    def __init__(self, weights: Weights, name: str | None, embedding: Embedding, vocab: int, hidden: int) -> None:
        self.rows = embedding.rows
        self.weight = embedding.weight
        if name is not None:  # untied
            self.weight = weights.parameter(len(self.rows), hidden)
            weights.bind(self.weight, f"{name}.weight", (vocab, hidden), self.rows)

    def __call__(self, x: Tensor) -> Tensor:
        """[n, H] -> [n, V_local] fp32."""
        return linear(x, self.weight).float()
