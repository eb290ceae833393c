"""`synthetic_drafts` in plain torch."""

from __future__ import annotations

import torch

from kernels.reference.uniform import DRAFT, SYNTHETIC, uniform

CHANCE_UNITS = 1 << 30  # probability 1: a kernel's argument is an integer or rounded to fp32


def synthetic_drafts(
    lengths: torch.Tensor, drafts: int, acceptance: float, seed: int, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws random drafts and the tokens drawn in their place; shapes as in `kernels.tokens.synthetic_drafts`."""
    slot = torch.arange(len(lengths), device=lengths.device)[:, None]
    position = lengths[:, None] + 1 + torch.arange(drafts, device=lengths.device)
    seeds = torch.full_like(position, seed)
    tokens = (uniform(seeds, position, DRAFT, slot) * vocab).long()
    kept = uniform(seeds, position, SYNTHETIC, slot) * CHANCE_UNITS < round(acceptance * CHANCE_UNITS)
    return tokens, torch.where(kept, tokens, (tokens + 1) % vocab)
