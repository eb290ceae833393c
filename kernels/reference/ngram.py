"""Plain-torch `ngram`."""

from __future__ import annotations

import torch


def ngram(history: torch.Tensor, lengths: torch.Tensor, drafts: int, longest: int) -> torch.Tensor:
    L = history.shape[1]
    place = torch.arange(L, device=history.device)
    last = lengths[:, None] - 1  # [B, 1]
    same = torch.ones_like(history, dtype=torch.bool)
    matched = torch.zeros_like(history, dtype=torch.int64)
    for i in range(longest):
        suffix = history.gather(1, (last - i).clamp(min=0))
        earlier = history.roll(i, 1)
        same = same & (earlier == suffix) & (place >= i) & (last >= i)
        matched += same
    # The longest match, ties to the latest; the suffix itself does not count.
    score = torch.where(place < last, matched * L + place, -1)
    best = score.max(1, keepdim=True).values  # [B, 1]
    at = torch.where(best >= L, best % L, last - 1)  # no match: repeats the last token
    period = (last - at).clamp(min=1)
    ahead = at + 1 + torch.arange(drafts, device=history.device) % period
    return history.gather(1, ahead.clamp(min=0).clamp(max=last)).long()
