"""embedding in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def embedding(tokens: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
    """Looks up rows of a slice of the vocabulary; shapes as in `kernels.dense.embedding.embedding`."""
    if len(weight) == 0:
        return weight.new_zeros(len(tokens), weight.shape[1])
    row = tokens - first
    mine = (row >= 0) & (row < len(weight))
    return F.embedding(row.clamp(0, len(weight) - 1), weight).masked_fill_(~mine[:, None], 0)
