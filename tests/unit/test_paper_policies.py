"""Policies that settings name by import path bring what they need."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from benchmarks.papers.policies import MeanBlocks, MeanCache, fold_means
from helix.attention.policies import policy_of
from helix.config import AttentionConfig

MEAN = f"{MeanBlocks.__module__}:{MeanBlocks.__qualname__}"


def test_a_policy_brings_its_cache() -> None:
    config = AttentionConfig(policy=MEAN)
    assert policy_of(config) is MeanBlocks and policy_of(config).cache is MeanCache


def test_means_are_those_of_what_is_stored() -> None:
    """The means of pages and of their halves, exactly: whole numbers times powers of two."""
    layers, pages, page, heads, dim = 2, 3, 8, 2, 4
    generator = torch.Generator().manual_seed(1)
    keys = torch.randint(-8, 8, (layers, pages, page, heads, dim), generator=generator)
    scales = 2.0 ** torch.randint(-2, 3, (layers, pages, heads, page), generator=generator)
    kept = {
        "keys": keys.to(torch.float8_e4m3fn),
        "key_scales": scales,
        "bounds": torch.full((layers, pages, heads, 2, dim), torch.nan),
        "part_bounds": torch.full((layers, pages, heads, 2, 2, dim), torch.nan),
    }
    cache: Any = SimpleNamespace(groups=[SimpleNamespace(tensors=kept), SimpleNamespace(tensors={})])
    fold_means(cast(MeanCache, cache))
    for layer in range(layers):
        for number in range(pages):
            for head in range(heads):
                head_keys = keys[layer, number, :, head] * scales[layer, number, head][:, None]
                both = head_keys.mean(0).expand(2, -1)
                assert kept["bounds"][layer, number, head].equal(both)
                halves = head_keys.view(2, -1, dim).mean(1)
                assert kept["part_bounds"][layer, number, head].equal(halves[:, None].expand(-1, 2, -1))
