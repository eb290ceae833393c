"""`commit` in plain torch."""

from __future__ import annotations

import torch

PAST = -2  # padding behind the last token that a sequence takes in a step


def commit(
    drawn: torch.Tensor,
    drafts: torch.Tensor | None,
    last: torch.Tensor,
    lengths: torch.Tensor,
    limits: torch.Tensor,
    active: torch.Tensor,
    history: torch.Tensor,
) -> torch.Tensor:
    """Commits accepted tokens to lengths and history; shapes as in `kernels.tokens.commit`."""
    held = torch.zeros_like(lengths)
    if drafts is not None:
        held = ((drafts == drawn[:, :-1]) & (drafts >= 0)).long().cumprod(1).sum(1)
    count = torch.minimum(held + 1, limits - lengths) * active
    place = torch.arange(drawn.shape[1], device=drawn.device)
    taken = place < count[:, None]
    last.copy_(torch.where(count > 0, drawn.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0], last))
    if history.shape[1]:
        row = torch.arange(len(drawn), device=drawn.device)[:, None].expand_as(drawn)
        at = (lengths[:, None] + 1 + place)[taken]
        history[row[taken], at] = drawn[taken].int()
    lengths += count
    return torch.where(taken, drawn, PAST)
