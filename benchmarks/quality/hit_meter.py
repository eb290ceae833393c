"""Counts how many selected blocks a resident-block cache would hit, if the cache were in host memory.

The engine's `resolve` counts them, for each layer and several cache sizes, over the policy's selections,
and with its prefetches (`kv.offload_prefetch`); nothing is copied, and tokens are those of a cache on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from comm.base import Communicator
from helix.attention.block_sparse import BlockSparseAttention
from helix.kv_placement import BlockBudget, KVPlacement
from helix.worker.kv_cache import LayerCache
from helix.worker.step import Step
from kernels.offload.resolve import resolve
from kernels.resident_blocks import FetchList, QueryRanges, ResidentBlocks

NO_PREFETCH, AFTER_PREFETCH, PREFETCH = range(3)  # selections, selections after a prefetch, and the prefetches


class HitMeter(BlockSparseAttention):
    """Block-sparse attention that counts hits.

    Args:
        shares: resident shares of the sequences' pages; those that cannot hold one selection of all sequences are
            left out.
    """

    prefetches = True

    def __init__(
        self,
        shares: Sequence[float],
        budget: BlockBudget,
        placement: KVPlacement,
        max_length: int,
        device: torch.device,
        comm: Communicator | None = None,
    ) -> None:
        super().__init__(budget, placement, max_length, device, comm)
        self.shares = shares
        self._guess: dict[int, Tensor] = {}  # by layer, until it selects
        self._resident: dict[tuple[int, float], ResidentBlocks] = {}  # without prefetch, and with it
        self._counts: dict[tuple[int, float], Tensor] = {}
        self._predicted: dict[int, Tensor] = {}

    def hits(self) -> dict[float, list[list[int]]]:
        """Returns counts by share and layer.

        Hits and misses without prefetch; both after prefetch; both of the prefetch itself; then, of blocks selected
        from more than the budget, those that the prefetch predicted, and all.
        """
        return {
            share: [
                [*self._counts[layer, share].flatten().tolist(), *self._predicted[layer].tolist()]
                for layer, of in sorted(self._counts)
                if of == share
            ]
            for share in self.shares
            if any(of == share for _, of in self._counts)
        }

    def prefetch(self, queries: Callable[[], Tensor], cache: LayerCache, step: Step) -> None:
        table = self.select_for_prefetch(queries(), cache, step)
        self._guess[cache.index] = self._selected(table, self.local_budget, step)
        self._count(PREFETCH, table, self.local_budget, cache, step)

    def select(self, q: Tensor, cache: LayerCache, step: Step, sms: int) -> Tensor:
        table = super().select(q, cache, step, sms)
        predicted = self._predicted.setdefault(cache.index, torch.zeros(2, dtype=torch.int64, device=q.device))
        if (guess := self._guess.pop(cache.index, None)) is not None:
            selected = self._selected(table, self.budget, step)
            same = (selected[..., None] == guess[..., None, :]).any(-1) & (selected >= 0)
            predicted += torch.stack([same.sum(), (selected >= 0).sum()])
        self._count(NO_PREFETCH, table, self.budget, cache, step)
        self._count(AFTER_PREFETCH, table, self.budget, cache, step)
        return table

    def _selected(self, table: Tensor, budget: BlockBudget, step: Step) -> Tensor:
        """Keeps the pages of a table that were selected from more; -1 in place of the others."""
        first, last, *_ = (x[:, None, None] for x in self.ranges(step, budget))
        column = torch.arange(table.shape[2], device=table.device)
        inside = (column >= first) & (column < first + budget.topk) & (last - first > budget.topk)
        return torch.where(inside, table, -1)

    def _count(self, kind: int, table: Tensor, budget: BlockBudget, cache: LayerCache, step: Step) -> None:
        """Counts hits of a table, for every cache size that can hold one."""
        *_, held, hi, _ = self.ranges(step, budget)
        pages, heads = cache.keys.shape[0], table.shape[1]
        read = int(held.sum())
        for share in self.shares:
            key, num_resident = (cache.index, share), int(share * read)
            if key not in self._resident:
                if num_resident < self.width * len(table):
                    continue
                self._resident[key] = ResidentBlocks.create(2, heads, pages, num_resident, 0, 1, table.device)
                self._counts[key] = torch.zeros(3, 2, dtype=torch.int64, device=table.device)
            resident, counted = self._resident[key].layer(int(kind != NO_PREFETCH)), self._counts[key][kind]
            misses = FetchList.create(heads, resident.num_blocks, table.device, counted, kind == PREFETCH)
            readers = QueryRanges(hi, held, step.positions, step.starts, step.max_q, step.first)
            resolve(table.clone(), readers, resident, misses, **step.placement.grid, page_size=step.placement.page_size)
