"""Blocks of a cache in host memory, and the GPU places that hold some of them.

A block is a page of one KV head in one layer: its keys, then its values, [2, page_size, D], contiguous. On the host
it is block `page * Hkv + head` of its layer. Places are numbered within a layer: first those of pages that are being
written (a ring of pages for each sequence of the batch), then those of hot blocks, KV head by KV head.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

NOWHERE = -(2**31)  # of a page that has no place


@dataclass(frozen=True)
class HotBlocks:
    """The hot blocks of one layer, or of all, with a leading dimension.

    Attributes:
        place_of: [Hkv, pages] int32: index of the head's place that holds a page, NOWHERE if none does.
        page_of: [Hkv, places] int32: the page that a place was last filled with, -1 for none.
        order: [2, Hkv, places] int32: each head's places, the least recently chosen first; the half at `turn` is valid.
        turn: [Hkv] int32, 0 or 1.
        chosen: [Hkv, places] int32: scratch, 0 between launches.
        begin: the layer's first place of hot blocks.
    """

    place_of: torch.Tensor
    page_of: torch.Tensor
    order: torch.Tensor
    turn: torch.Tensor
    chosen: torch.Tensor
    begin: int

    @classmethod
    def create(cls, layers: int, heads: int, pages: int, places: int, begin: int, device: torch.device) -> HotBlocks:
        """Creates the state of all layers without any hot block."""

        def full(value: int, *shape: int) -> torch.Tensor:
            return torch.full((layers, *shape), value, dtype=torch.int32, device=device)

        order = torch.arange(places, dtype=torch.int32, device=device).repeat(layers, 2, heads, 1)
        return cls(
            full(NOWHERE, heads, pages), full(-1, heads, places), order, full(0, heads), full(0, heads, places), begin
        )

    def layer(self, index: int) -> HotBlocks:
        of_layer = {f.name: getattr(self, f.name)[index] for f in fields(self) if f.name != "begin"}
        return replace(self, **of_layer)

    @property
    def places(self) -> int:
        """Number of places of each KV head."""
        return self.page_of.shape[-1]


@dataclass(frozen=True)
class BlockList:
    """Blocks to copy, listed on the device, so that the copy kernel needs no host.

    Attributes:
        source, target: [lists, most] int32, rows contiguous: blocks or places.
        counts: [lists] int32: length of each list.
    """

    source: torch.Tensor
    target: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def create(cls, lists: int, most: int, device: torch.device) -> BlockList:
        source, target = (torch.zeros(lists, most, dtype=torch.int32, device=device) for _ in range(2))
        return cls(source, target, torch.zeros(lists, dtype=torch.int32, device=device))
