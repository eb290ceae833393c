"""How many of the blocks that steps choose would be on the GPU already, were the cache in host memory.

The product's own `resolve` says so, of each layer and for several sizes of the hot cache, over what the policy chooses,
and over what it guesses as well (`kv.ahead`); nothing moves, and tokens are those of a cache on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from comm.base import Communicator
from helix.attention.block_sparse import BlockSparseAttention
from helix.placement import BlockBudget, Placement
from helix.worker.kv_cache import LayerCache
from helix.worker.step import Step
from kernels.hot_blocks import FetchList, HotBlocks, Readers
from kernels.tier.resolve import resolve

ALONE, BEHIND, GUESS = range(3)  # choices, choices behind guesses, and the guesses


class HitMeter(BlockSparseAttention):
    """Counts hits beside its choices.

    Args:
        shares: of the pages that sequences have here, for which there are hot places; too few for one choice of all
            sequences are left out.
    """

    guesses = True

    def __init__(
        self,
        shares: Sequence[float],
        budget: BlockBudget,
        placement: Placement,
        max_length: int,
        device: torch.device,
        comm: Communicator | None = None,
    ) -> None:
        super().__init__(budget, placement, max_length, device, comm)
        self.shares = shares
        self._guess: dict[int, Tensor] = {}  # by layer, until it chooses
        self._hot: dict[tuple[int, float], HotBlocks] = {}  # without guesses, and with them
        self._counts: dict[tuple[int, float], Tensor] = {}
        self._named: dict[int, Tensor] = {}

    def hits(self) -> dict[float, list[list[int]]]:
        """By share, of each layer: blocks that had a place, and those that would have come; the same with guesses; of
        the guesses; and blocks that a guess had named, of those that were chosen among more.
        """
        return {
            share: [
                [*self._counts[layer, share].flatten().tolist(), *self._named[layer].tolist()]
                for layer, of in sorted(self._counts)
                if of == share
            ]
            for share in self.shares
            if any(of == share for _, of in self._counts)
        }

    def guess(self, queries: Callable[[], Tensor], cache: LayerCache, step: Step) -> None:
        table = self.named(queries(), cache, step)
        self._guess[cache.index] = self._chosen(table, self.share, step)
        self._count(GUESS, table, self.share, cache, step)

    def choose(self, q: Tensor, cache: LayerCache, step: Step, sms: int) -> Tensor:
        table = super().choose(q, cache, step, sms)
        named = self._named.setdefault(cache.index, torch.zeros(2, dtype=torch.int64, device=q.device))
        if (guess := self._guess.pop(cache.index, None)) is not None:
            chosen = self._chosen(table, self.budget, step)
            same = (chosen[..., None] == guess[..., None, :]).any(-1) & (chosen >= 0)
            named += torch.stack([same.sum(), (chosen >= 0).sum()])
        self._count(ALONE, table, self.budget, cache, step)
        self._count(BEHIND, table, self.budget, cache, step)
        return table

    def _chosen(self, table: Tensor, budget: BlockBudget, step: Step) -> Tensor:
        """Pages of a table that were chosen among more, -1 in place of all others."""
        first, last, *_ = (x[:, None, None] for x in self.ranges(step, budget))
        column = torch.arange(table.shape[2], device=table.device)
        inside = (column >= first) & (column < first + budget.topk) & (last - first > budget.topk)
        return torch.where(inside, table, -1)

    def _count(self, kind: int, table: Tensor, budget: BlockBudget, cache: LayerCache, step: Step) -> None:
        """Looks up what is in a table, in every size of the hot cache that holds one."""
        *_, held, hi, _ = self.ranges(step, budget)
        pages, heads = cache.keys.shape[0], table.shape[1]
        read = int(held.sum())
        for share in self.shares:
            key, places = (cache.index, share), int(share * read)
            if key not in self._hot:
                if places < self.width * len(table):
                    continue
                self._hot[key] = HotBlocks.create(2, heads, pages, places, 0, 1, table.device)
                self._counts[key] = torch.zeros(3, 2, dtype=torch.int64, device=table.device)
            hot, counted = self._hot[key].layer(int(kind != ALONE)), self._counts[key][kind]
            misses = FetchList.create(heads, hot.places, table.device, counted, kind == GUESS)
            readers = Readers(hi, held, step.positions, step.starts, step.max_q, step.first)
            resolve(table.clone(), readers, hot, misses, **step.placement.grid, page_size=step.placement.page_size)
