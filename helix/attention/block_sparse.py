"""Block-sparse decode: each KV head reads the sink blocks, the latest blocks and the best-scoring others.

A block is a page. Its key bounds are written once, when it is full of committed tokens (`KVCache.fold`), so rejected
drafts have no effect; pages that are not full are always read. With subblocks, the blocks with the best bounds are
candidates, and the bounds of their subblocks decide. Every query selects its own blocks in each layer, so tokens depend
neither on the rest of the batch nor on drafts. Prefill and layers with a window stay dense.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from comm.base import Communicator
from helix.attention.base import AttentionPolicy, LayerAttention
from helix.attention.dense import DenseAttention
from helix.kv_placement import BlockBudget, KVPlacement
from helix.worker.kv_cache import KVCache, LayerCache
from helix.worker.step import Step
from kernels.attention.flash_decode import decode_parts
from kernels.attention.split_kv import PartialAttention
from kernels.overlap import sm_count
from kernels.sparse.keep_best import keep_best
from kernels.sparse.select_blocks import select_blocks


class BlockSparseAttention(AttentionPolicy):
    """Reads a limited number of blocks per query and KV head.

    Args:
        budget: of a sequence over all ranks.
        max_length: most tokens of a sequence.
        comm: for one selection over all ranks of a kvp group; None: each rank selects its share from its own blocks.

    Attributes:
        cache: class of the cache on the GPU, which stores the blocks' key bounds.
        local_budget: budget of a rank that selects its share from its own blocks.
        counted: [2] int64, on the device: blocks read, summed over queries and KV heads, and number of selections.
    """

    cache: ClassVar[type[KVCache]] = KVCache

    def __init__(
        self,
        budget: BlockBudget,
        placement: KVPlacement,
        max_length: int,
        device: torch.device,
        comm: Communicator | None = None,
    ) -> None:
        self.dense = DenseAttention()
        self.comm = comm if placement.layout.kvp > 1 and budget.topk else None
        kvp = placement.layout.kvp
        self.from_tokens = budget.from_tokens
        self.local_budget = budget.per_rank(kvp)
        self.budget = budget if self.comm else self.local_budget
        assert budget.parts == 1 or self.comm is None, "each rank selects subblocks of its own blocks"
        self.width = placement.max_blocks(self.budget, max_length)
        if budget.parts > 1:
            self.max_candidates = placement.max_blocks(self.budget, max_length, self.budget.candidates)
            self.width = placement.max_blocks(self.budget, max_length, 0) * budget.parts + self.budget.topk
        self.counted = torch.zeros(2, dtype=torch.int64, device=device)
        self._uncounted = torch.zeros_like(self.counted)

    def blocks_read(self) -> float | None:
        """Returns the average number of blocks read per query and KV head on this rank; None before any selection."""
        read, choices = self.counted.tolist()
        return read / choices / self.budget.parts if choices else None

    def prepare(self, step: Step, windows: set[int | None]) -> None:
        self.dense.prepare(step, windows if step.cu_q is not None else windows - {None})
        if step.cu_q is None and None in windows:
            self.ranges(step)

    def ranges(self, step: Step, budget: BlockBudget | None = None) -> tuple[Tensor, ...]:
        """Returns `KVPlacement.block_ranges` of a step, computed once for all layers."""
        budget = budget or self.budget

        def make() -> tuple[Tensor, ...]:
            tokens = step.positions, step.starts, step.live
            first, last, pages, hi, *part_ranges = step.placement.block_ranges(*tokens, step.max_q, budget)
            return first, last, pages, hi, torch.zeros_like(hi), *part_ranges

        return step.once(budget, make)

    def attend(self, q: Tensor, cache: LayerCache, step: Step, layer: LayerAttention) -> PartialAttention:
        if step.cu_q is not None or layer.window is not None:
            return self.dense.attend(q, cache, step, layer)
        _, _, _, hi, lo, *_ = self.ranges(step)
        sms = layer.sms(q.device)
        table = self.select(q, cache, step, sms)
        keys = cache.paged(table, lo[:, None], hi[:, None], layer.scale, layer.sinks).in_parts(self.budget.parts)
        return decode_parts(q[:, None], keys, sms=sms, early=True, lane=layer.chunk)

    def select(self, q: Tensor, cache: LayerCache, step: Step, sms: int) -> Tensor:
        """Selects blocks in one layer; returns a table of pages or subblocks, [N, Hkv, width]."""
        local_candidates = None
        if self.comm is not None:
            shape = len(q), cache.bounds.shape[1], self.budget.topk, 2
            local_candidates = torch.empty(shape, dtype=torch.int32, device=q.device)
        table = self.select_local(q, cache, step, self.budget, self.counted, sms, candidates=local_candidates)
        if self.comm is not None and local_candidates is not None:
            ranks = len(self.comm.kvp_group)
            all_candidates = self.comm.all_to_all(local_candidates.expand(ranks, *local_candidates.shape).contiguous())
            keep_best(all_candidates, self.ranges(step)[0], step.starts, table, self.comm.kvp_rank, self.counted)
        return table

    def select_for_prefetch(self, q: Tensor, cache: LayerCache, step: Step, lane: int = 0) -> Tensor:
        """Selects blocks for approximate queries: like `select`, but local to the rank and not counted."""
        return self.select_local(q, cache, step, self.local_budget, self._uncounted, sm_count(q.device), lane=lane)

    def select_local(
        self, q: Tensor, cache: LayerCache, step: Step, budget: BlockBudget, counted: Tensor, sms: int, **more: Any
    ) -> Tensor:
        first, last, pages, _, _, *part_ranges = self.ranges(step, budget)
        blocks = q, cache.bounds, step.block_tables, first, last, pages
        if budget.parts == 1:
            return select_blocks(*blocks, budget.topk, self.width, counted, sms=sms, **more)
        candidates = select_blocks(
            *blocks, budget.candidates, self.max_candidates, self._uncounted, stretches=True, sms=sms, **more
        )  # fmt: skip
        first, last, pages, _ = part_ranges
        return select_blocks(
            q, cache.part_bounds, candidates, first, last, pages, budget.topk, self.width, counted,
            max_pages=budget.candidates * budget.parts, sms=sms, **more,
        )  # fmt: skip
