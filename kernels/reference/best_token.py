"""best_of_rank and best_of_ranks in plain torch."""

from __future__ import annotations

import torch


def best_of_rank(scores: torch.Tensor, first: int) -> torch.Tensor:
    """Finds each row's best token, as pairs [1, B, 2]; shapes as in `kernels.tokens.best_token.best_of_rank`."""
    value, column = scores.max(dim=1)  # ties: the first
    return torch.stack([value.double(), (column + first).double()], dim=1)[None]


def best_of_ranks(pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the best of all ranks: score and id; shapes as in `kernels.tokens.best_token.best_of_ranks`."""
    values, tokens = pairs.unbind(-1)  # [N, B] each
    best = values.amax(dim=0)
    token = torch.where(values == best, tokens, torch.inf).amin(dim=0)
    return best, torch.where(best.isfinite(), token, -1.0).long()
