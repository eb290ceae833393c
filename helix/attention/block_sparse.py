"""Block-sparse decode: each KV head reads the sequence's sink blocks, its latest blocks and the best-scored others.

A block is a page. Its key bounds are written once, when it is full of committed tokens (`KVCache.fold`), so a rejected
draft leaves no trace; pages that are not full are always read. Where parts of blocks are chosen, the blocks with the
best bounds are candidates, and the bounds of their parts decide. Each query chooses blocks of its own in each layer, so
tokens depend neither on the rest of the batch nor on drafts. Prefill and layers with a window stay dense.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from comm.base import Communicator
from helix.attention.base import AttentionPolicy, LayerAttention
from helix.attention.dense import DenseAttention
from helix.placement import BlockBudget, Placement
from helix.worker.kv_cache import KVCache, LayerCache
from helix.worker.step import Step
from kernels.attention.flash_decode import decode_parts
from kernels.attention.split_kv import PartialAttention
from kernels.overlap import sm_count
from kernels.sparse.keep_best import keep_best
from kernels.sparse.select_blocks import select_blocks


class BlockSparseAttention(AttentionPolicy):
    """Policy that reads a number of blocks bounded by a budget.

    Args:
        budget: budget of a sequence over all ranks.
        placement: placement of the cache that steps attend to.
        max_length: most tokens of a sequence.
        comm: communicator for one choice over all ranks of a kvp group; None: each rank chooses its share of `topk`
            from its own blocks.

    Attributes:
        cache: class of the cache on the GPU, which keeps what blocks are judged by.
        share: budget of a rank that chooses its share of `topk` from its own blocks.
        counted: [2] int64, on the device: blocks read by all queries and KV heads, and number of choices.
    """

    cache: ClassVar[type[KVCache]] = KVCache

    def __init__(
        self,
        budget: BlockBudget,
        placement: Placement,
        max_length: int,
        device: torch.device,
        comm: Communicator | None = None,
    ) -> None:
        self.dense = DenseAttention()
        self.comm = comm if placement.layout.kvp > 1 and budget.topk else None
        kvp = placement.layout.kvp
        self.from_tokens = budget.from_tokens
        self.share = budget.over(kvp)
        self.budget = budget if self.comm else self.share
        assert budget.parts == 1 or self.comm is None, "each rank chooses parts of its own blocks"
        self.width = placement.most_blocks(self.budget, max_length)
        if budget.parts > 1:
            self.looked_at = placement.most_blocks(self.budget, max_length, self.budget.candidates)
            self.width = placement.most_blocks(self.budget, max_length, 0) * budget.parts + self.budget.topk
        self.counted = torch.zeros(2, dtype=torch.int64, device=device)
        self._uncounted = torch.zeros_like(self.counted)

    def blocks_read(self) -> float | None:
        """Returns the average number of blocks read per query and KV head on this rank; None before any choice."""
        read, choices = self.counted.tolist()
        return read / choices / self.budget.parts if choices else None

    def prepare(self, step: Step, windows: set[int | None]) -> None:
        self.dense.prepare(step, windows if step.cu_q is not None else windows - {None})
        if step.cu_q is None and None in windows:
            self.ranges(step)

    def ranges(self, step: Step, budget: BlockBudget | None = None) -> tuple[Tensor, ...]:
        """Computes the bounds of what a step's queries choose among, once for all layers."""
        budget = budget or self.budget

        def make() -> tuple[Tensor, ...]:
            tokens = step.positions, step.starts, step.live
            first, last, pages, hi, *of_parts = step.placement.block_ranges(*tokens, step.max_q, budget)
            return first, last, pages, hi, torch.zeros_like(hi), *of_parts

        return step.once(budget, make)

    def attend(self, q: Tensor, cache: LayerCache, step: Step, layer: LayerAttention) -> PartialAttention:
        if step.cu_q is not None or layer.window is not None:
            return self.dense.attend(q, cache, step, layer)
        _, _, _, hi, lo, *_ = self.ranges(step)
        sms = layer.sms(q.device)
        table = self.choose(q, cache, step, sms)
        keys = cache.paged(table, lo[:, None], hi[:, None], layer.scale, layer.sinks).in_parts(self.budget.parts)
        return decode_parts(q[:, None], keys, sms=sms, early=True, lane=layer.chunk)

    def choose(self, q: Tensor, cache: LayerCache, step: Step, sms: int) -> Tensor:
        """Chooses blocks in one layer; returns each query's and KV head's table of pages or parts, [N, Hkv, width]."""
        offered = None
        if self.comm is not None:
            shape = len(q), cache.bounds.shape[1], self.budget.topk, 2
            offered = torch.empty(shape, dtype=torch.int32, device=q.device)
        table = self.promising(q, cache, step, self.budget, self.counted, sms, candidates=offered)
        if self.comm is not None and offered is not None:
            ranks = len(self.comm.kvp_group)
            everyone = self.comm.all_to_all(offered.expand(ranks, *offered.shape).contiguous())
            keep_best(everyone, self.ranges(step)[0], step.starts, table, self.comm.kvp_rank, self.counted)
        return table

    def named(self, q: Tensor, cache: LayerCache, step: Step, lane: int = 0) -> Tensor:
        """Chooses blocks for a guess: like `choose`, but uncounted, and each rank chooses its share of `topk`.

        Args:
            lane: see `select_blocks`.
        """
        return self.promising(q, cache, step, self.share, self._uncounted, sm_count(q.device), lane=lane)

    def promising(
        self, q: Tensor, cache: LayerCache, step: Step, budget: BlockBudget, counted: Tensor, sms: int, **more: Any
    ) -> Tensor:
        """Chooses the blocks, or parts, that promise most to this rank, within a budget."""
        first, last, pages, _, _, *of_parts = self.ranges(step, budget)
        blocks = q, cache.bounds, step.block_tables, first, last, pages
        if budget.parts == 1:
            return select_blocks(*blocks, budget.topk, self.width, counted, sms=sms, **more)
        looked_at = select_blocks(
            *blocks, budget.candidates, self.looked_at, self._uncounted, stretches=True, sms=sms, **more
        )  # fmt: skip
        first, last, pages, _ = of_parts
        return select_blocks(
            q, cache.part_bounds, looked_at, first, last, pages, budget.topk, self.width, counted,
            most=budget.candidates * budget.parts, sms=sms, **more,
        )  # fmt: skip
