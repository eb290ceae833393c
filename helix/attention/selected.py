"""Attention of sparse drafts, over keys selected before and all newer ones, and verification that scores every key."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from helix.attention.base import AttentionPolicy, LayerAttention
from helix.attention.dense import DenseAttention
from helix.worker.kv_cache import LayerCache
from helix.worker.score_pages import ScorePages
from helix.worker.step import Step
from kernels.attention.flash_decode import decode_parts
from kernels.attention.split_kv import PartialAttention
from kernels.paged_keys import PagedKeys


class SelectedAttention(AttentionPolicy):
    """Reads the cache slots in a table per sequence and KV head, like pages of one token.

    Args:
        layers: indices of the layers that read whole sequences; layers with a window stay dense.
        heads: KV heads of this rank.
        width: columns of the tables.

    Attributes:
        tables: [layers, max_batch, heads, width] int32: the selected cache slots in local order, then the slots of keys
            that are newer than the candidates.
        num_candidates: [max_batch] int32, number of local keys that the selection saw.
        counts: [max_batch] int32, number of selected keys.
    """

    def __init__(self, layers: Sequence[int], max_batch: int, heads: int, width: int, device: torch.device) -> None:
        self.dense = DenseAttention()
        self.tables = torch.zeros(len(layers), max_batch, heads, width, dtype=torch.int32, device=device)
        self.num_candidates = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self.counts = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self._layer_indices = {index: i for i, index in enumerate(layers)}

    def prepare(self, step: Step, windows: set[int | None]) -> None:
        self.dense.prepare(step, windows - {None})
        self._read_ranges(step)

    def _read_ranges(self, step: Step) -> tuple[Tensor, ...]:
        # Columns [lo, hi) of each table row: the selected keys, and newer ones up to the query's.
        def make() -> tuple[Tensor, ...]:
            n = len(step.block_tables)
            rows = slice(step.first, step.first + n)
            hi = step.bounds(None)[1].view(-1, n)  # of one step or several
            behind = hi - self.num_candidates[rows] + self.counts[rows]
            # After steps without drafts, a sequence's newest keys may have no column until the next selection.
            hi = torch.where(hi > 0, behind.clamp(0, self.tables.shape[3]), 0).flatten()
            return torch.zeros_like(hi), hi

        return step.once(SelectedAttention, make)

    def attend(self, q: Tensor, cache: LayerCache, step: Step, layer: LayerAttention) -> PartialAttention:
        if layer.window is not None:
            return self.dense.attend(q, cache, step, layer)
        n = len(step.block_tables)
        assert len(q) == n, "a draft step has one query per sequence"
        lo, hi = (bound[:, None] for bound in self._read_ranges(step))
        table = self.tables[self._layer_indices[cache.index], step.first : step.first + n]
        keys, values = (x.flatten(0, 1).unsqueeze(1) for x in (cache.keys, cache.values))  # [slots, 1, Hkv, D]
        selected = PagedKeys(keys, values, table, lo, hi, layer.scale, layer.sinks, *cache.scales)
        return decode_parts(q[:, None], selected, sms=layer.sms(q.device), early=True, lane=layer.chunk)


class ScoringAttention(DenseAttention):
    """Exact attention that stores the scores of all keys, in layers without a window."""

    def __init__(self, scores: ScorePages) -> None:
        self.scores = scores

    def attend(self, q: Tensor, cache: LayerCache, step: Step, layer: LayerAttention) -> PartialAttention:
        if step.cu_q is not None or layer.window is not None:
            return super().attend(q, cache, step, layer)
        n = len(step.block_tables)
        lo, hi = (bound.view(n, -1) for bound in step.bounds(None))
        keys = cache.paged(step.block_tables, lo, hi, layer.scale, layer.sinks)
        scores = self.scores.layer(cache.index, slice(step.first, step.first + n))
        return decode_parts(
            q.unflatten(0, (n, -1)), keys, sms=layer.sms(q.device), early=True, scores=scores, lane=layer.chunk
        )
