"""What a layer keeps of sequences: the only source of what memory holds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Keeps:
    """One thing that a layer keeps on a rank.

    Attributes:
        name: such as keys, values, latents, bounds, state.
        entry: shape of one entry.
        per: what has an entry. `token`: each token that the rank owns. `page`: each page of such tokens. `slot`: each
            sequence of the batch. `row`: each token of a sequence's last decode step, drafts included.
        reach: tokens that queries read of it at most, the query's own included: a sliding window; None: all.
    """

    name: str
    entry: tuple[int, ...]
    dtype: torch.dtype
    per: Literal["token", "page", "slot", "row"] = "token"
    reach: int | None = None

    @property
    def bytes(self) -> int:
        """Bytes of an entry."""
        return math.prod(self.entry) * self.dtype.itemsize

    @property
    def is_paged(self) -> bool:
        """Whether sequences share it, by pages."""
        return self.per in ("token", "page") and self.reach is None


def token_bytes(keeps: Iterable[Keeps]) -> int:
    """Counts the bytes that a token takes in paged memory on the rank that owns it, those of pages left out."""
    return sum(k.bytes for k in keeps if k.is_paged and k.per == "token")


def page_bytes(keeps: Iterable[Keeps], page_size: int) -> int:
    """Counts the bytes of a page of paged memory."""
    return sum(k.bytes * (page_size if k.per == "token" else 1) for k in keeps if k.is_paged)


def lacking(keeps: Iterable[Iterable[Keeps]]) -> float:
    """Counts the tokens before a place that are computed again where pages are all there is of them.

    A layer with a window is right again a window behind where its input is; a state is right from the first token on.

    Args:
        keeps: what each layer keeps, in order.
    """
    tokens = 0.0
    for layer in keeps:
        kept = [*layer]
        if any(k.per == "slot" for k in kept):
            return math.inf
        tokens += max((k.reach - 1 for k in kept if k.reach is not None), default=0)
    return tokens
