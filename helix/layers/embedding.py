"""Token embedding and output head, both sharded over the vocabulary; tied weights are one tensor."""

from __future__ import annotations

from torch import Tensor

from helix.layers.weights import Weights
from kernels.dense.embedding import embedding
from kernels.dense.linear import linear


class Embedding:
    """Token embedding: the rank with a token's row returns it, the others zeros; the next norm adds them up."""

    def __init__(self, weights: Weights, name: str, rows: range, vocab: int, hidden: int) -> None:
        self.rows = rows
        self.weight = weights.parameter(len(rows), hidden)
        weights.bind(self.weight, f"{name}.weight", (vocab, hidden), rows)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Looks up tokens [N] int64 -> [N, H]."""
        return embedding(tokens, self.weight, self.rows.start)


class Head:
    """Output head: logits of this rank's rows of the vocabulary, in fp32."""

    def __init__(self, weights: Weights, name: str | None, embedding: Embedding, vocab: int, hidden: int) -> None:
        self.rows = embedding.rows
        self.weight = embedding.weight
        if name is not None:  # untied
            self.weight = weights.parameter(len(self.rows), hidden)
            weights.bind(self.weight, f"{name}.weight", (vocab, hidden), self.rows)

    def __call__(self, x: Tensor) -> Tensor:
        """Computes logits [n, V_local] fp32 from hidden states [n, H]."""
        return linear(x, self.weight).float()
