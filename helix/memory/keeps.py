"""Declarations of the data that layers keep of sequences: the only source of the memory's layout."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from kernels.scaled_keys import GROUP


@dataclass(frozen=True)
class Keeps:
    """One kind of data that a layer keeps on a rank.

    Attributes:
        name: for example keys, values, latents, bounds, state.
        entry: shape of one entry.
        per: unit with one entry. `token`: each token that the rank owns. `page`: each page of such tokens. `slot`: each
            sequence of the batch. `row`: each token of a sequence's last decode step, drafts included. `recent`: each
            such token, and `before` tokens before them.
        reach: size of the sliding window, in tokens, the query's own included; None: queries read all entries.
        before: see `recent`.
        by_head: whether a page holds its entries [heads] head by head, [heads, page_size].
    """

    name: str
    entry: tuple[int, ...]
    dtype: torch.dtype
    per: Literal["token", "page", "slot", "row", "recent"] = "token"
    reach: int | None = None
    before: int = 0
    by_head: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of an entry."""
        return math.prod(self.entry) * self.dtype.itemsize

    @property
    def is_paged(self) -> bool:
        """Whether it lies in pages, which sequences can share."""
        return self.per in ("token", "page") and self.reach is None


def keys_and_values(heads: int, width: int, dtype: torch.dtype, kv: str, reach: int | None) -> tuple[Keeps, ...]:
    """Lists what a layer keeps of keys and values: those of a window in `dtype`, others as kv.dtype (`kv`) has it.

    Numbers in e4m3 have a scale for each token and head, see `kernels.scaled_keys`.
    """
    kept: list[Keeps] = []
    for name, few in (("keys", kv in ("fp8", "fp8_all")), ("values", kv != "auto")):
        few = few and reach is None
        kept.append(Keeps(name, (heads, width), torch.float8_e4m3fn if few else dtype, reach=reach))
        if few:
            kept.append(Keeps(f"{name[:-1]}_scales", (heads,), torch.float32, by_head=True))
    return tuple(kept)


def latents(latent: int, rope: int, dtype: torch.dtype, kv: str) -> tuple[Keeps, ...]:
    """Lists what a layer keeps of latents: all numbers of an entry in `dtype`, or as kv.dtype=fp8 (`kv`) has it.

    Then latents are e4m3, with a scale for each 128 numbers of a token, and rotated values lie apart in `dtype`.
    """
    if kv == "auto":
        return (Keeps("latents", (latent + rope,), dtype),)
    assert kv != "k16v8", f"latents are keys and values at once: kv.dtype={kv}"
    return (
        Keeps("latents", (latent,), torch.float8_e4m3fn),
        Keeps("latent_scales", (-(-latent // GROUP.value),), torch.float32, by_head=True),
        Keeps("ropes", (rope,), dtype),
    )


def token_bytes(keeps: Iterable[Keeps]) -> int:
    """Counts the bytes of a token in paged memory on the rank that owns it, without entries per page."""
    return sum(k.bytes for k in keeps if k.is_paged and k.per == "token")


def page_bytes(keeps: Iterable[Keeps], page_size: int) -> int:
    """Counts the bytes of a page of paged memory."""
    return sum(k.bytes * (page_size if k.per == "token" else 1) for k in keeps if k.is_paged)


def lacking(keeps: Iterable[Iterable[Keeps]]) -> float:
    """Counts the tokens before a position that are computed again if only their pages are cached.

    A layer with a window is exact one window after its input is exact; a state needs all tokens from the first on.

    Args:
        keeps: data that each layer keeps, in order.
    """
    tokens = 0.0
    for layer in keeps:
        kept = [*layer]
        if any(k.per == "slot" for k in kept):
            return math.inf
        tokens += max((k.reach - 1 for k in kept if k.reach is not None), default=0)
    return tokens
