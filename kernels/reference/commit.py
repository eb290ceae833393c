"""`commit` in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.reference.best_token import best_of_ranks

PAST = -2  # padding behind the last token that a sequence takes in a step


@dataclass(frozen=True)
class Candidates:
    """Candidates of all ranks for the tokens that a step draws; the best is drawn, as `best_of_ranks` says.

    Attributes:
        pairs: score and token id [N, R, 2] fp64, contiguous, N for each token: of B sequences with n drafts the tokens
            after the last one and after each draft, R = B * (1 + n); with `accepted`, those after these drafts, R = B.
        accepted: drafts that rejection sampling accepted [B] int64; None: those equal to the drawn tokens are.
    """

    pairs: torch.Tensor
    accepted: torch.Tensor | None = None


def commit(
    drawn: Candidates,
    drafts: torch.Tensor | None,
    outcome: torch.Tensor | None,
    last: torch.Tensor,
    lengths: torch.Tensor,
    limits: torch.Tensor,
    active: torch.Tensor,
    history: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Commits accepted tokens to lengths and history; shapes as in `kernels.tokens.commit`."""
    drafts = last.new_empty(len(last), 0) if drafts is None else drafts
    tokens = best_of_ranks(drawn.pairs)[1].view(len(last), -1)
    if drawn.accepted is not None:
        of_drafts = torch.cat((drafts, tokens), 1)
        tokens = of_drafts.scatter(1, drawn.accepted[:, None], tokens)
    if outcome is not None:  # broken rows stay broken
        tokens[:, :-1] = torch.where(tokens[:, :-1] < 0, tokens[:, :-1], outcome)
    held = ((drafts == tokens[:, :-1]) & (drafts >= 0)).long().cumprod(1).sum(1)
    count = torch.minimum(held + 1, limits - lengths) * active
    place = torch.arange(tokens.shape[1], device=tokens.device)
    taken = place < count[:, None]
    last.copy_(torch.where(count > 0, tokens.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0], last))
    if history.shape[1]:
        row = torch.arange(len(tokens), device=tokens.device)[:, None].expand_as(tokens)
        at = (lengths[:, None] + 1 + place)[taken]
        history[row[taken], at] = tokens[taken].int()
    before = lengths.clone()
    lengths += count
    return torch.where(taken, tokens, PAST), before
