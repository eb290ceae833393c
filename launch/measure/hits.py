"""How many of the blocks that steps choose would be on the GPU already, were the cache in host memory.

The product's own `resolve` says so, of each layer and for several sizes of the hot cache, over what the policy chooses;
nothing moves, and tokens are those of a cache on the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from comm.base import Communicator
from helix.attention.block_sparse import BlockSparseAttention
from helix.kv_cache import BlockBudget, LayerCache, Placement
from helix.step import Step
from kernels.hot_blocks import BlockList, HotBlocks
from kernels.tier.resolve import resolve


class HitMeter(BlockSparseAttention):
    """Counts hits beside its choices.

    Args:
        shares: of the pages that sequences have here, for which there are hot places; too few for one choice of all
            sequences are left out.
    """

    def __init__(
        self,
        shares: Sequence[float],
        budget: BlockBudget,
        score: str,
        placement: Placement,
        max_length: int,
        device: torch.device,
        comm: Communicator | None = None,
    ) -> None:
        super().__init__(budget, score, placement, max_length, device, comm)
        self.shares = shares
        self._hot: dict[tuple[int, float], HotBlocks] = {}
        self._counts: dict[tuple[int, float], Tensor] = {}

    def hits(self) -> dict[float, list[list[int]]]:
        """By share, of each layer: blocks that had a place, and those that would have come."""
        return {
            share: [self._counts[layer, share].tolist() for layer, of in sorted(self._counts) if of == share]
            for share in self.shares
            if any(of == share for _, of in self._counts)
        }

    def choose(self, q: Tensor, cache: LayerCache, step: Step, sms: int) -> Tensor:
        table = super().choose(q, cache, step, sms)
        *_, held, hi, _ = self._ranges(step)
        pages, heads = cache.keys.shape[0], table.shape[1]
        read = int(held.sum())
        for share in self.shares:
            places = int(share * read)
            if (cache.index, share) not in self._hot:
                if places < self.width * len(table):
                    continue
                self._hot[cache.index, share] = HotBlocks.create(1, heads, pages, places, 0, q.device).layer(0)
                self._counts[cache.index, share] = torch.zeros(2, dtype=torch.int64, device=q.device)
            hot, counted = self._hot[cache.index, share], self._counts[cache.index, share]
            misses = BlockList.create(heads, hot.places, q.device)
            resolve(
                table.clone(), hi, held, step.positions, step.starts, step.max_q, hot, misses, counted, step.first, 1,
                None, False, **step.placement.grid, page_size=step.placement.page_size,
            )  # fmt: skip
        return table
