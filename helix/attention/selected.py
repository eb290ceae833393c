"""Attention of drafts, over keys or latents selected before and all newer ones, and verification that scores keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from helix.attention.base import AttentionPolicy, LayerAttention
from helix.attention.dense import DenseAttention, attend_selected
from helix.worker.kv_cache import KVCache, LayerCache
from helix.worker.score_pages import ScorePages
from helix.worker.step import DecodeState, Step
from kernels.attention.flash_decode import decode_parts
from kernels.attention.split_kv import PartialAttention
from kernels.mla.decode import decode_parts as mla_decode_parts
from kernels.paged_keys import PagedKeys


class SelectedAttention(AttentionPolicy):
    """Reads the cache slots in a table per sequence and KV head, like pages of one token; latents are one head.

    Args:
        layers: indices of the layers that read whole sequences; layers with a window stay dense.
        heads: KV heads of this rank, or 1: all read the same keys.
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
        lo, hi = self._read_ranges(step)
        table = self.tables[self._layer_indices[cache.index], step.first : step.first + n]
        if layer.latent is not None:
            latents = cache.selected_latents(layer.latent, table[:, 0], lo, hi, layer.scale)
            return attend_selected(q, latents, prefill=False, sms=layer.sms(q.device), lane=layer.chunk)
        lo, hi = lo[:, None], hi[:, None]
        keys, values = (x.flatten(0, 1).unsqueeze(1) for x in (cache.keys, cache.values))  # [slots, 1, Hkv, D]
        table = table.expand(-1, keys.shape[2], -1)
        selected = PagedKeys(keys, values, table, lo, hi, layer.scale, layer.sinks, *cache.scales)
        return decode_parts(q[:, None], selected, sms=layer.sms(q.device), early=True, lane=layer.chunk)


class StoredSelection(AttentionPolicy):
    """Reads the latents that indexers selected for the last token in the cache, and all newer ones.

    Draft steps reuse selections that the indexers have stored (`IndexerSpec.stored_topk`), so they score no index keys.

    Args:
        sources: for each layer, the layer whose indexer selects for it.
        tail: maximum number of newer tokens.
    """

    def __init__(self, cache: KVCache, sources: Mapping[int, int], tail: int) -> None:
        (group,) = (group for group in cache.groups if "selected" in group.tensors)
        self.cache, self.tail = cache, tail
        self._positions = {layer: group.layers.index(source) for layer, source in sources.items()}
        # A sequence's first row is read; newer tokens follow the selected ones, if need be over the next row.
        self._rows, self._counts = group.tensors["selected"], group.tensors["num_selected"]
        self.tables = self._rows.flatten(2)  # [indexers, slots, rows * topk]
        assert tail <= self.tables.shape[2] - self._rows.shape[3]
        self._num_candidates = self._counts.new_zeros(0)  # [rows], local tokens that the selections saw

    def begin(self, state: DecodeState, rows: int) -> None:
        """Takes the selections of the last accepted tokens of the first `rows` rows, before their first draft step."""
        placement, tables = self.cache.placement, state.block_tables[:rows]
        lengths, starts, live = state.lengths[:rows], state.starts[:rows], state.active[:rows]
        at = torch.arange(rows, device=lengths.device), (self.cache.accepted[:rows] - 1).clamp(min=0)
        self._rows[:, :rows, 0] = self._rows[:, *at]
        counts = torch.where(live, self._counts[:, *at], 0)
        self._counts[:, :rows, 0] = counts
        self._num_candidates = placement.bounds(lengths - 1, starts, live, None)[1]
        page, newer = placement.page_size, torch.arange(self.tail, device=lengths.device)
        local = self._num_candidates[:, None].long() + newer
        slots = tables.gather(1, (local // page).clamp(max=tables.shape[1] - 1)) * page + local % page  # [rows, tail]
        columns = counts[..., None] + newer
        self.tables[:, :rows].scatter_(2, columns, slots.int().expand(columns.shape))

    def prepare(self, step: Step, windows: set[int | None]) -> None:
        self._read_ranges(step)

    def _read_ranges(self, step: Step) -> tuple[Tensor, ...]:
        # Columns [lo, hi) of each row's table: lo [N], and hi [N, indexers].
        def make() -> tuple[Tensor, ...]:
            n = len(step.slots)
            lo, hi = step.bounds(None)
            newer = hi.view(-1, n) - self._num_candidates  # of one step or several
            read = (newer[..., None] + self._counts[:, :n, 0].T).clamp(0, self.tables.shape[2])
            return torch.zeros_like(lo), torch.where(hi[:, None] > 0, read.flatten(0, 1), 0)

        return step.once(StoredSelection, make)

    def attend(self, q: Tensor, cache: LayerCache, step: Step, layer: LayerAttention) -> PartialAttention:
        assert layer.latent is not None and len(q) == len(step.slots), "a draft step has one query per sequence"
        lo, hi = self._read_ranges(step)
        position = self._positions[cache.index]
        table = self.tables[position, step.first : step.first + len(q)]
        keys = cache.selected_latents(layer.latent, table, lo, hi[:, position], layer.scale)
        return attend_selected(q, keys, prefill=False, sms=layer.sms(q.device), lane=layer.chunk)


class ScoringAttention(DenseAttention):
    """Exact attention that stores the scores of all keys, in layers without a window.

    Args:
        planes: returns the score planes of a step with a number of queries per sequence.
    """

    def __init__(self, scores: ScorePages, planes: Callable[[int], int]) -> None:
        self.scores, self.planes = scores, planes

    def attend(self, q: Tensor, cache: LayerCache, step: Step, layer: LayerAttention) -> PartialAttention:
        if step.cu_q is not None or layer.window is not None:
            return super().attend(q, cache, step, layer)
        n = len(step.block_tables)
        lo, hi = (bound.view(n, -1) for bound in step.bounds(None))
        scores = self.scores.layer(cache.index, slice(step.first, step.first + n), self.planes(lo.shape[1]))
        rows, sms = q.unflatten(0, (n, -1)), layer.sms(q.device)
        if layer.latent is not None:
            latents = cache.paged_latents(layer.latent, step.block_tables, lo, hi, layer.scale)
            return mla_decode_parts(rows, latents, sms=sms, early=True, scores=scores, lane=layer.chunk)
        keys = cache.paged(step.block_tables, lo, hi, layer.scale, layer.sinks)
        return decode_parts(rows, keys, sms=sms, early=True, scores=scores, lane=layer.chunk)
