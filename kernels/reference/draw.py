"""`draw` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.accept import Distribution
from kernels.reference.best_token import best_of_rank
from kernels.reference.uniform import gumbel


def draw(p: Distribution, greedy: Tensor, seed: Tensor, positions: Tensor, stream: int, first: int) -> Tensor:
    """Computes candidates [1, B * T, 2]; shapes as in `kernels.tokens.draw`."""
    ids = torch.arange(first, first + p.logits.shape[2], device=p.logits.device)
    noise = gumbel(seed[:, None, None], positions[..., None], stream, ids)
    drawn = best_of_rank((p.log_weights() + noise).flatten(0, 1), first)
    own = torch.stack((torch.where(greedy >= 0, 0.0, -torch.inf).double(), greedy.double()), -1)
    return torch.where(p.temperature[:, None, None] > 0, drawn.view_as(own), own).view(1, -1, 2)
