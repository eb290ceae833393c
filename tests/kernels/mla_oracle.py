"""Paged caches of latents, and attention over them in float64: the keys of one KV head are its values as well."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from kernels.paged_keys import PagedKeys
from tests.kernels.oracle import Case, make_case


@dataclass(kw_only=True)
class LatentCase(Case):
    """A case whose values are the first `latent` dims of its keys; `cache` [pages, page_size, R + P] holds both."""

    latent: int

    @property
    def cache(self) -> Tensor:
        return self.k_cache[:, :, 0]

    def paged(self, B: int | None = None) -> PagedKeys:
        return replace(super().paged(B), k=self.cache, v=self.cache[..., : self.latent])

    def expected(self) -> tuple[Tensor, Tensor]:
        """Output [N, Hq, R] and natural-log LSE [N, Hq], float64."""
        out, lse = super().expected()
        return out[..., : self.latent], lse


def make_latent_case(
    counts: list[int], lengths: list[int], *, heads: int = 4, latent: int = 32, rope: int = 8, **options: Any
) -> LatentCase:
    """Sequences as `make_case` makes them; the value cache is no part of it."""
    case = make_case(counts, lengths, heads=(heads, 1), dim=latent + rope, **options)
    fields = vars(case) | {"values": case.keys, "v_cache": case.k_cache}
    return LatentCase(**fields, latent=latent)
