"""Plain-torch `suffix`."""

from __future__ import annotations

import torch

TOKEN_BITS = 24  # of an entry; the salt has the other 39


def suffix(
    history: torch.Tensor,
    lengths: torch.Tensor,
    others: torch.Tensor,
    cursor: torch.Tensor,
    salts: torch.Tensor,
    drafts: int,
    longest: int,
) -> torch.Tensor:
    L, N = history.shape[1], len(others)
    place, order = (torch.arange(n, device=history.device) for n in (L, N))
    theirs = others[(cursor + order) % N].expand(len(history), N)  # oldest first
    last = lengths[:, None] - 1  # [B, 1]
    salt = salts[:, None] << TOKEN_BITS

    def matches(texts: torch.Tensor, inside: torch.Tensor, salt: torch.Tensor | int) -> torch.Tensor:
        """Counts the tokens before each place [B, n] that equal the suffix."""
        at, same = torch.arange(texts.shape[1], device=texts.device), inside
        matched = torch.zeros_like(texts, dtype=torch.int64)
        for i in range(longest):
            token = history.gather(1, (last - i).clamp(min=0)) + salt
            same = same & (at >= i) & (last >= i) & (texts.roll(i, 1) == token)
            matched += same
        return matched

    own, more = matches(history, place < last, 0), matches(theirs, theirs >= 0, salt)
    best = torch.where(place < last, own * L + place, -1).max(1, keepdim=True).values
    at = torch.where(best >= L, best % L, last - 1)  # no match: repeats the last token
    turn = torch.arange(drafts, device=history.device)
    ahead = at + 1 + turn % (last - at).clamp(min=1)
    of_own = history.gather(1, ahead.clamp(min=0).clamp(max=last)).long()
    most = (more * N + order).max(1, keepdim=True).values
    ahead = most % N + 1 + turn
    entry = torch.where(ahead < N, theirs.gather(1, ahead.clamp(max=N - 1)), -1)
    alive = (entry >> TOKEN_BITS == salts[:, None]).int().cummin(1).values > 0
    of_others = torch.where(alive, entry & ((1 << TOKEN_BITS) - 1), -1)
    return torch.where(more.amax(1, keepdim=True) > own.amax(1, keepdim=True), of_others, of_own)
