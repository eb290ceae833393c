"""Policies from papers to compare with, set by import path.

attention.policy=benchmarks.papers.policies:MeanBlocks (Attention Pays Its Bill, Table 5) scores blocks by the mean of
their keys, and MeanQueries by the mean query of a KV head's group as well. With
speculation.policy=benchmarks.papers.policies:full self-drafts read every key, so that none is rejected: the other end
of Vegas' Figure 8.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from helix.attention.block_sparse import BlockSparseAttention
from helix.attention.dense import DenseAttention
from helix.worker.kv_cache import KVCache, LayerCache
from helix.worker.kv_cache_spec import EngineSizes
from helix.worker.sequence_observer import Span

FULL = f"{__name__}:full"


def fold_means(cache: KVCache) -> None:
    """Overwrites both bounds of each page by the mean of its keys, so that its score is q times the mean.

    It updates all pages, which on a GPU avoids a sync: pages that are not full are read whatever their bounds.
    """
    for group in cache.groups:
        if (bounds := group.tensors.get("bounds")) is not None:
            scales, parts = group.tensors.get("key_scales"), group.tensors.get("part_bounds")
            for layer, keys in enumerate(group.tensors["keys"]):  # [pages, page_size, Hkv, D]
                layer_keys = keys.float()
                if scales is not None:
                    layer_keys *= scales[layer].transpose(1, 2)[..., None]
                bounds[layer] = layer_keys.mean(1)[:, :, None]
                if parts is not None:  # [layers, pages, Hkv, parts, 2, D]
                    part_means = layer_keys.unflatten(1, (parts.shape[3], -1)).mean(2)
                    parts[layer] = part_means.transpose(1, 2)[:, :, :, None]


class MeanCache(KVCache):
    """A cache whose page bounds are mean keys."""

    def fold(self, span: Span) -> None:
        fold_means(self)


class MeanBlocks(BlockSparseAttention):
    """Block-sparse attention that selects blocks by mean keys."""

    cache = MeanCache


class MeanQueries(MeanBlocks):
    """Block-sparse attention that selects by mean keys and the mean query of a KV head, not by its best query."""

    def select_local(self, q: Tensor, cache: LayerCache, *args: Any, **more: Any) -> Tensor:
        groups = q.unflatten(1, (cache.bounds.shape[1], -1))
        means = groups.mean(2, keepdim=True).expand_as(groups).flatten(1, 2)
        return super().select_local(means, cache, *args, **more)


def full(cache: KVCache, sizes: EngineSizes) -> DenseAttention:
    """Returns dense attention for drafts."""
    return DenseAttention()
