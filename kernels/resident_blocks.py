"""Blocks of an offloaded KV cache in host memory, and the GPU blocks that hold some of them.

A block is one page of one KV head in one layer, contiguous: to these kernels, 32-bit words. On the host it is block
`page * Hkv + head` of its layer. GPU blocks are numbered within a layer: first the pages that are being written (a ring
per sequence of the batch), then resident blocks, KV head by KV head.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self

import torch

NOT_RESIDENT = -(2**31)  # of a page without a GPU block


@dataclass(frozen=True)
class ResidentBlocks:
    """The resident blocks of one layer, or of all, with a leading dimension.

    Attributes:
        gpu_block_of: [Hkv, pages] int32: index of the head's resident block that holds a page, or NOT_RESIDENT.
        page_of: [Hkv, blocks] int32: the page that a block was last filled with, -1 for none.
        lru_order: [2, Hkv, blocks] int32: each head's blocks, least recently selected first; the half at `lru_half` is
            valid.
        lru_half: [Hkv] int32, 0 or 1.
        in_use: [Hkv, blocks] int32: scratch, 0 between launches.
        begin: the layer's first resident block.
        ring_pages: ring size of a sequence: its local page i, unless full of committed tokens, is page i % ring_pages
            of its ring.
    """

    gpu_block_of: torch.Tensor
    page_of: torch.Tensor
    lru_order: torch.Tensor
    lru_half: torch.Tensor
    in_use: torch.Tensor
    begin: int
    ring_pages: int

    @classmethod
    def create(
        cls, layers: int, heads: int, pages: int, num_blocks: int, begin: int, ring_pages: int, device: torch.device
    ) -> ResidentBlocks:

        def full(value: int, *shape: int) -> torch.Tensor:
            return torch.full((layers, *shape), value, dtype=torch.int32, device=device)

        lru_order = torch.arange(num_blocks, dtype=torch.int32, device=device).repeat(layers, 2, heads, 1)
        return cls(
            full(NOT_RESIDENT, heads, pages), full(-1, heads, num_blocks), lru_order, full(0, heads),
            full(0, heads, num_blocks), begin,
            ring_pages,
        )  # fmt: skip

    def layer(self, index: int) -> ResidentBlocks:
        return replace(self, **{f.name: getattr(self, f.name)[index] for f in fields(self)[:-2]})

    @property
    def num_blocks(self) -> int:
        return self.page_of.shape[-1]


@dataclass(frozen=True)
class BlockList:
    """Blocks to copy, listed on the device, so that the copy kernel needs no host.

    Attributes:
        source, target: [lists, max_blocks] int32, rows contiguous: block indices.
        counts: [lists] int32: length of each list.
    """

    source: torch.Tensor
    target: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def create(cls, lists: int, max_blocks: int, device: torch.device, *more: Any) -> Self:
        source, target = (torch.zeros(lists, max_blocks, dtype=torch.int32, device=device) for _ in range(2))
        return cls(source, target, torch.zeros(lists, dtype=torch.int32, device=device), *more)


@dataclass(frozen=True)
class FetchList(BlockList):
    """Blocks of a layer to fetch, and the GPU blocks assigned to them, a list per KV head.

    Attributes:
        hit_counts: [2] int64: table entries whose blocks were resident, and blocks to fetch, over all tables so far.
            Pages in rings count for neither.
        is_prefetch: tables are a prediction; the actual selection will be resolved later.
    """

    hit_counts: torch.Tensor
    is_prefetch: bool = False


class QueryRanges(NamedTuple):
    """The N queries of a step that read pages, `per_sequence` of each sequence.

    Attributes:
        hi: [N] int32, contiguous: one past the last key in a query's table.
        pages: [N] int32, contiguous: pages of the query's sequence on this rank; with subblocks, used subblocks.
        positions: [N] int64, contiguous: the first of a sequence at its committed length.
        starts: [N] int64, contiguous: kvp rank of the sequence's first block.
        first_row: row of the first sequence in the batch.
    """

    hi: torch.Tensor
    pages: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor
    per_sequence: int
    first_row: int = 0
