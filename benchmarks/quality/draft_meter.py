"""What the keys that drafts read keep of each draft's attention, beside the keys that the draft itself would choose.

One rank computes all of it, and also what several ranks would choose that each take their share of their own keys: a
block of appended tokens is a page, and a page's number says whose it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality.draft_variants import choose_by_queries
from helix.attention.base import AttentionPolicy, LayerAttention
from helix.attention.chosen import ChosenAttention
from helix.layout import HelixLayout
from helix.placement import Placement
from helix.speculation import SparseDrafter
from helix.worker.kv_cache import LayerCache
from helix.worker.model_runner import ModelRunner
from helix.worker.step import Step
from kernels.attention.split_kv import PartialAttention
from kernels.sparse.select_tokens import select_tokens


class DraftMeter:
    """Means over drafts, layers and KV heads, of all batches that a way goes through.

    Drafts count from the first verification on; before it nothing but the latest keys can be chosen.

    Args:
        ranks: numbers of ranks.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self._sums: defaultdict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])

    def of(self, drafter: SparseDrafter, runner: ModelRunner) -> MeteredAttention | None:
        """Attention of a drafter that is measured from now on; None where it chooses no keys before it drafts."""
        if drafter.chosen is None:
            return None
        metered = MeteredAttention(drafter, drafter.chosen, runner, self)
        drafter.policy = metered
        return metered

    def add(self, values: Tensor, *key: Any) -> None:
        cell = self._sums[key]
        cell[0] += float(values.double().sum())
        cell[1] += values.numel()

    def mean(self, *key: Any) -> float:
        total, count = self._sums[key]
        return total / count

    def row(self) -> dict[str, Any] | None:
        """Shares by what they are: over all drafts, by a draft's place, and for each number of ranks.

        recall: of the keys that the draft would choose, how many were; mass: of its attention's weight, what the keys
        that it reads have (best: with those that it would choose); overlap: of what two drafts of a step would choose,
        what is the same, by how far they are apart, from 1 on; ranks: the same of the choice that ranks make for
        themselves (same: of the one choice over all, what they find; most: the fullest rank's keys of the one choice,
        over an even share).
        """
        if not self._sums:
            return None
        places = sorted({key[1] for key in self._sums if key[0] == "recall"})

        def over(name: str) -> float:
            total, count = (sum(self._sums[name, place][i] for place in places) for i in (0, 1))
            return total / count

        apart = sorted({key[1] for key in self._sums if key[0] == "overlap"})
        ranks = {key[1] for key in self._sums if key[0] == "same"}
        return {
            **{name: over(name) for name in ("recall", "mass", "best")},
            **{f"{name}_by_place": [self.mean(name, place) for place in places] for name in ("recall", "mass")},
            "overlap": [self.mean("overlap", distance) for distance in apart],
            "ranks": {
                str(n): {name: self.mean(name, n) for name in ("same", "most", "local_recall", "local_mass")}
                for n in sorted(ranks)
            },
        }


BEFORE = -2  # of a step's drafts: all are prepared for together, then each


class MeteredAttention(AttentionPolicy):
    """Attends as a drafter does, and measures."""

    def __init__(self, drafter: SparseDrafter, chosen: ChosenAttention, runner: ModelRunner, meter: DraftMeter) -> None:
        layout = runner.layout
        assert layout.kvp == layout.tpa == 1, "one rank computes what several would choose"
        self.drafter, self.chosen, self.state, self.meter = drafter, chosen, runner.state, meter
        self.page = runner.placement.page_size
        self.places: dict[int, int] = {}  # of layers
        # Which key of its sequence a slot of the cache holds.
        self.key_of = torch.empty(runner.cache.pages * self.page, dtype=torch.int64, device=runner.device)
        for slot, admission in runner.admitted.items():
            pages = self.state.block_tables[slot, : len(admission.pages)]
            of_page = torch.arange(self.page, device=runner.device)
            slots = (pages.long()[:, None] * self.page + of_page).flatten()
            self.key_of[slots] = torch.arange(len(slots), device=runner.device)
        self.judged = torch.zeros(len(runner.admitted), dtype=torch.bool, device=runner.device)
        self.draft = BEFORE
        self.wanted: dict[tuple[int, int, int], Tensor] = {}  # by layer, row and draft: what it would choose
        self.local: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by ranks: of each its table and counts

    def verified(self, rows: Tensor) -> None:
        """Sequences `rows` [n] bool have been verified, and keys were chosen for their next drafts."""
        self.judged |= rows
        self.draft = BEFORE
        self.wanted.clear()
        self.local.clear()
        scores = self.drafter.scores
        if scores is None:
            return
        assert scores.planes.shape[1] == 1, "verification of fewer queries would leave some planes as they were"
        for ranks in self.meter.ranks:
            self.local[ranks] = [self._of_rank(rank, ranks) for rank in range(ranks)]

    def _of_rank(self, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        """What a rank of several would choose among its own keys: tables [L, n, heads, width] and counts [n]."""
        drafter, scores = self.drafter, self.drafter.scores
        assert scores is not None
        n, budget = len(self.judged), drafter.budget
        place = Placement(HelixLayout.create("helix", ranks), rank, self.page, self.page)
        known = self.chosen.known[:n].long()
        ranges = place.draft_ranges(known - 1, torch.zeros_like(known), known > 0, budget.keys(ranks))
        mine = slice(rank, None, ranks)
        score_tables, block_tables = (x[:n, mine].contiguous() for x in (scores.tables, self.state.block_tables))
        layers, _, heads, width = self.chosen.tables.shape
        table = torch.zeros(layers, n, heads, width, dtype=torch.int32, device=known.device)
        flags = torch.zeros(n, dtype=torch.bool, device=known.device)
        select_tokens(scores.planes, score_tables, block_tables, *ranges, flags, table, 0, reach=budget.reach)
        return table, ranges[1]

    def prepare(self, step: Step, windows: set[int | None]) -> None:
        self.chosen.prepare(step, windows)
        self.draft += 1

    def attend(self, q: Tensor, cache: LayerCache, step: Step, layer: LayerAttention) -> PartialAttention:
        found = self.chosen.attend(q, cache, step, layer)
        if layer.window is None:
            self._measure(q, cache, step, layer.scale)
        return found

    def _measure(self, q: Tensor, cache: LayerCache, step: Step, scale: float) -> None:
        n, heads = len(q), cache.keys.shape[2]
        place = self.places.setdefault(cache.index, len(self.places))
        known, counts = self.chosen.known[:n], self.chosen.counts[:n]
        own = torch.zeros(1, n, heads, self.chosen.tables.shape[3], dtype=torch.int32, device=q.device)
        choose_by_queries(q, cache, step, scale, known, counts, own, 0)
        ends = step.positions + 1
        for row in (self.judged & step.live[:n]).nonzero().flatten().tolist():
            count, end = int(counts[row]), int(ends[row])
            pages = step.block_tables[row, : -(-end // self.page)].long()
            keys = cache.keys[pages].flatten(0, 1)[:end].float()  # [S, Hkv, D]
            logits = torch.einsum("hgd,shd->hgs", q[row].float().unflatten(0, (heads, -1)) * scale, keys)
            weights = logits.softmax(-1).mean(1)  # [Hkv, S]
            behind = weights[:, int(known[row]) :].sum(1)
            chosen = self._mask(self.chosen.tables[place, row, :, :count], weights)
            wanted = self.wanted[place, row, self.draft] = self._mask(own[0, row, :, :count], weights)
            add = self.meter.add
            add((chosen & wanted).sum(1) / count, "recall", self.draft)
            add((weights * chosen).sum(1) + behind, "mass", self.draft)
            add((weights * wanted).sum(1) + behind, "best", self.draft)
            for earlier in range(self.draft):
                before = self.wanted[place, row, earlier]  # of fewer keys
                same = before & wanted[:, : before.shape[1]]
                add(same.sum(1) / count, "overlap", self.draft - earlier)
            for ranks, tables in self.local.items():
                parts = [self._mask(table[place, row, :, : int(k[row])], weights) for table, k in tables]
                local = torch.stack(parts).any(0)
                add((local & chosen).sum(1) / count, "same", ranks)
                add((local & wanted).sum(1) / count, "local_recall", ranks)
                add((weights * local).sum(1) + behind, "local_mass", ranks)
                column = torch.arange(weights.shape[1], device=q.device) // self.page % ranks
                held = torch.stack([chosen[:, column == rank].sum(1) for rank in range(ranks)])
                add(held.amax(0) * ranks / count, "most", ranks)

    def _mask(self, slots: Tensor, weights: Tensor) -> Tensor:
        """Which keys a table [heads, k] names: bool like `weights` [Hkv, S]."""
        found = torch.zeros_like(weights, dtype=torch.bool)
        return found.scatter_(1, self.key_of[slots.long()].expand(len(weights), -1), True)
