"""Plain-torch `suffix`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

TOKEN_BITS = 24  # of an entry; the salt has the other 39


@dataclass(frozen=True)
class OtherTexts:
    """Texts of other sequences, in which those of the same salt are searched too.

    Attributes:
        entries: ring [N] int64 of `salt << TOKEN_BITS | token`, contiguous; -1: no token.
        cursor: place of the oldest entry [1] int64.
        salts: salt of each sequence that is drafted for [B] int64, from 0 on, contiguous.
    """

    entries: torch.Tensor
    cursor: torch.Tensor
    salts: torch.Tensor


def suffix(
    history: torch.Tensor, lengths: torch.Tensor, others: OtherTexts | None, drafts: int, longest: int
) -> torch.Tensor:
    L = history.shape[1]
    place = torch.arange(L, device=history.device)
    last = lengths[:, None] - 1  # [B, 1]

    def matches(texts: torch.Tensor, inside: torch.Tensor, salt: torch.Tensor | int) -> torch.Tensor:
        """Counts the tokens before each place [B, n] that equal the suffix."""
        at, same = torch.arange(texts.shape[1], device=texts.device), inside
        matched = torch.zeros_like(texts, dtype=torch.int64)
        for i in range(longest):
            token = history.gather(1, (last - i).clamp(min=0)) + salt
            same = same & (at >= i) & (last >= i) & (texts.roll(i, 1) == token)
            matched += same
        return matched

    # The longest match, ties to the latest; the suffix itself does not count.
    own = matches(history, place < last, 0)
    best = torch.where(place < last, own * L + place, -1).max(1, keepdim=True).values
    at = torch.where(best >= L, best % L, last - 1)  # no match: repeats the last token
    turn = torch.arange(drafts, device=history.device)
    ahead = at + 1 + turn % (last - at).clamp(min=1)
    of_own = history.gather(1, ahead.clamp(min=0).clamp(max=last)).long()
    if others is None:
        return of_own
    N, salts = len(others.entries), others.salts[:, None]
    order = torch.arange(N, device=history.device)
    theirs = others.entries[(others.cursor + order) % N].expand(len(history), N)  # oldest first
    more = matches(theirs, theirs >= 0, salts << TOKEN_BITS)
    most = (more * N + order).max(1, keepdim=True).values
    ahead = most % N + 1 + turn
    entry = torch.where(ahead < N, theirs.gather(1, ahead.clamp(max=N - 1)), -1)
    alive = (entry >> TOKEN_BITS == salts).int().cummin(1).values > 0
    of_others = torch.where(alive, entry & ((1 << TOKEN_BITS) - 1), -1)
    return torch.where(more.amax(1, keepdim=True) > own.amax(1, keepdim=True), of_others, of_own)
