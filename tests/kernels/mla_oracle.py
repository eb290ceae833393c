"""Paged caches of latents, and attention over them in float64: the keys of one KV head are its values as well."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels.paged_keys import PagedKeys
from kernels.scaled_keys import rounded_latents
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


@dataclass(kw_only=True)
class FewBitsCase(LatentCase):
    """A case whose latents are e4m3 with scales, and NaN where `cache` is; `keys` are the numbers they stand for."""

    planes: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, case: LatentCase, decades: bool = False) -> FewBitsCase:
        """Rounds the latents of a case; with `decades`, groups of a token are from 1e-3 to 1 times as large."""
        R, cache = case.latent, case.cache.float()
        groups = -(-R // 128)
        if decades:
            gen = torch.Generator().manual_seed(1)
            factor = 10 ** -(torch.rand(*cache.shape[:2], groups, generator=gen) * 3).to(cache)
            cache[..., :R] *= factor.repeat_interleave(128, -1)[..., :R]
        latents, scales = rounded_latents(cache[..., :R].nan_to_num())
        whole = latents.float() * scales.repeat_interleave(128, -1)[..., :R]
        absent = cache[..., 0].isnan()
        latents = latents.float().masked_fill(absent[..., None], torch.nan).to(torch.float8_e4m3fn)
        scales = scales.masked_fill(absent[..., None], torch.nan)
        # Pages lie apart, as in one cache of several layers.
        latents, ropes = (torch.stack((x, x), 1)[:, 1] for x in (latents, case.cache[..., R:]))
        keys = []
        for i, k in enumerate(case.keys):
            at = torch.arange(len(k), device=cache.device)
            page = case.block_table[i][at // cache.shape[1]].long()
            stored = torch.cat((whole, ropes.float()), -1)[page, at % cache.shape[1]]
            keys.append(stored[:, None].to(k))
        fields = vars(case) | {"keys": keys, "values": keys}
        return cls(**fields, planes=(latents, scales.mT.contiguous(), ropes))

    def paged(self, B: int | None = None) -> PagedKeys:
        latents, scales, ropes = self.planes
        return replace(super().paged(B), k=latents, v=latents, k_scale=scales, rope=ropes)


def make_latent_case(
    counts: list[int], lengths: list[int], *, heads: int = 4, latent: int = 32, rope: int = 8, **options: Any
) -> LatentCase:
    """Sequences as `make_case` makes them; the value cache is no part of it."""
    case = make_case(counts, lengths, heads=(heads, 1), dim=latent + rope, **options)
    fields = vars(case) | {"values": case.keys, "v_cache": case.k_cache}
    return LatentCase(**fields, latent=latent)
