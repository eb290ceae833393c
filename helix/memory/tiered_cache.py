"""A KV cache in host memory, and what of it is on the GPU: what is being written, and the blocks that were chosen last.

A page goes to the host once it is full of committed tokens, in blocks: a page of one KV head, its keys and then its
values, in one piece. Until then it lies on the GPU in a ring of pages that its sequence has: local page i is page
`i % ring_pages` of the ring. Where blocks have places is `kernels.hot_blocks`' matter, layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from helix.events.decision import Admission
from helix.events.follower import Retired, Taken
from helix.memory.host_store import HostStore
from helix.memory.keeps import Keeps
from helix.memory.kv_cache import KVCache, LayerCache
from helix.placement import ChunkPart, Placement
from kernels.hot_blocks import NOWHERE, BlockList, HotBlocks
from kernels.tier.copy_blocks import copy_blocks
from kernels.tier.write_back import write_back

LISTS = 3  # of what has to come: for a choice, and for the guesses of two layers


@dataclass(frozen=True, kw_only=True)
class TieredLayer(LayerCache):
    """One layer's part on this rank. `keys` and `values` are where new tokens go: rings, or pages of a prompt's chunk.

    Attributes:
        host: [1, pages * Hkv, 2, page_size, D], the layer's blocks in host memory.
        places: [1, places, 2, page_size, D]: rings, then hot places.
        hot: which blocks have a place.
        chunk: [1, n * Hkv, 2, page_size, D], pages of a prompt's chunk, for all layers in turn.
        pieces: like `chunk`: pages of what is before it.
        misses: what has to come, for all layers in turn.
        ahead: what has to come for a guess, for every other layer in turn.
        lane: which of the two these are.
        counted: [2] int64: blocks chosen that had a place, and blocks that came.
        counted_ahead: like `counted`, of guesses.
        ring_pages: of a sequence.
    """

    host: Tensor
    places: Tensor
    hot: HotBlocks
    chunk: Tensor
    pieces: Tensor
    misses: BlockList
    ahead: BlockList
    lane: int
    counted: Tensor
    counted_ahead: Tensor
    ring_pages: int

    @property
    def every_place(self) -> tuple[Tensor, Tensor]:
        """Keys and values [places, page_size, Hkv, D] in which every head finds a place's block."""
        keys, values = (self.places[0, :, i, :, None].expand(-1, -1, self.keys.shape[2], -1) for i in range(2))
        return keys, values

    def blocks(self, source: Tensor, target: Tensor) -> BlockList:
        """All blocks of pages `source` [n], for those of pages `target` [n]; both int, on the device."""
        heads = torch.arange(self.keys.shape[2], dtype=torch.int32, device=source.device)
        count = torch.full((1,), len(source) * len(heads), dtype=torch.int32, device=source.device)
        source, target = ((pages.int()[:, None] * len(heads) + heads).view(1, -1) for pages in (source, target))
        return BlockList(source, target, count)

    def begin(self, part: ChunkPart) -> None:
        """Takes the page that earlier chunks have left unfinished out of its ring; new tokens are in the chunk already.

        Args:
            part: of a step whose tokens were appended.
        """
        page_size, heads = self.keys.shape[1:3]
        if known := part.begin % page_size:
            here, ring = part.page * heads, self._ring(part.row, part.begin // page_size)
            of_chunk, of_ring = self.chunk[0, here : here + heads], self.places[0, ring : ring + heads]
            of_chunk[:, :, :known] = of_ring[:, :, :known]

    def end(self, part: ChunkPart, table: Tensor) -> None:
        """Writes a chunk's full pages to the host's of `table` [P], and puts the unfinished one into its ring."""
        page_size, heads = self.keys.shape[1:3]
        first, last = part.begin // page_size, part.end // page_size
        if last > first:
            at = torch.arange(part.page, part.page + last - first, device=table.device)
            pages = table[first:last]
            copy_blocks(self.chunk, self.host, self.blocks(at, pages))
            self.hot.place_of.index_fill_(1, pages.long(), NOWHERE)
        if part.end % page_size:
            here, ring = (part.page + last - first) * heads, self._ring(part.row, last)
            self.places[0, ring : ring + heads] = self.chunk[0, here : here + heads]

    def _ring(self, row: int, column: int) -> int:
        """The first place of a local page in its sequence's ring."""
        return (row * self.ring_pages + column % self.ring_pages) * self.keys.shape[2]


class TieredCache(KVCache):
    """What this rank stores, with the pages of layers that read whole sequences in host memory.

    Other arguments are as in `KVCache`.

    Args:
        store: host memory, [layers, pages * Hkv, 2, page_size, D], of these layers.
        ring_pages: of each slot; `ring_pages` says how many.
        hot: places of each KV head in each layer, for at least as many blocks as a step can choose.
        chunk: tokens of a prefill step, at most.
        piece_pages: of what lies before a chunk, that are on the GPU at once, in two halves.

    Attributes:
        hot: which blocks have a place, in all these layers.
        places: [layers, places, 2, page_size, D].
        counted: [2] int64, on the device: blocks chosen that had a place, and blocks that came over the link for them.
        counted_ahead: like `counted`, of guesses: what a guess has let come has a place when it is chosen.
    """

    remedy = "raise kv.host_bytes and kv.gpu_bytes, or use a larger layout.kvp"

    def __init__(
        self,
        keeps: Sequence[tuple[Keeps, ...]],
        pages: int,
        placement: Placement,
        device: torch.device,
        *,
        slots: int,
        rows: int,
        chunk: int,
        score: str,
        store: HostStore,
        hot: int,
        piece_pages: int,
    ) -> None:
        assert store.tensor is not None
        paged = [kept[0] for kept in keeps if kept[0].is_paged]
        (heads, dim), dtype, layers = paged[0].entry, paged[0].dtype, len(paged)
        self._heads = heads
        self.store, self.host = store, store.tensor
        super().__init__(keeps, pages, placement, device, slots=slots, rows=rows, chunk=chunk, score=score)
        self.ring_pages = self.rings[None] = ring_pages(placement.page_size, rows)
        self._rings, block = slots * self.ring_pages * heads, (2, placement.page_size, dim)
        # Zeros: a benchmark's sequences were never written.
        self.places = torch.zeros(layers, self._rings + heads * hot, *block, dtype=dtype, device=device)
        self.hot = HotBlocks.create(layers, heads, pages, hot, self._rings, device)
        self.counted, self.counted_ahead = torch.zeros(2, 2, dtype=torch.int64, device=device)
        self._chunk, self._pieces = (
            torch.empty(1, n * heads, *block, dtype=dtype, device=device) for n in (self._chunk_pages, piece_pages)
        )
        self._misses, *self._ahead = (BlockList.create(heads, hot, device) for _ in range(LISTS))

    def _allocate(self, kept: Keeps, layers: int) -> Tensor:
        if not kept.is_paged or kept.per != "token":
            return super()._allocate(kept, layers)
        keys, values = pages_of(self.host, self._heads)
        return keys if kept.name == "keys" else values

    @property
    def on_gpu(self) -> list[Tensor]:
        """All blocks that are not in host memory."""
        return [self.places, self._chunk, self._pieces]

    def layer(self, index: int, prefill: bool = False) -> LayerCache:
        group, place = self._places[index]
        if not group.keeps[0].is_paged:
            return super().layer(index, prefill)
        keys, values = pages_of(self._chunk[0] if prefill else self.places[place, : self._rings], self._heads)
        at = slice(place, place + 1)
        return TieredLayer(
            index, {"keys": keys, "values": values, "bounds": group.tensors["bounds"][place]}, self.accepted,
            host=self.host[at], places=self.places[at], hot=self.hot.layer(place), chunk=self._chunk,
            pieces=self._pieces, misses=self._misses, ahead=self._ahead[place % 2], lane=place % 2,
            counted=self.counted, counted_ahead=self.counted_ahead, ring_pages=self.ring_pages,
        )  # fmt: skip

    def taken(self, step: Taken) -> None:
        span, page = step.span, self.placement.page_size
        write_back(
            self.places, self.host, self.hot.place_of, span.tables, span.starts, span.before, span.after,
            (page + span.most - 1) // page, 0, self.ring_pages, **self.placement.grid, page_size=page,
        )  # fmt: skip
        super().taken(step)

    def admit(self, admission: Admission) -> None:
        super().admit(admission)
        where = self.placement
        local = where.local_length(admission.known, admission.start)
        column, heads = local // where.page_size, self._heads
        if local % where.page_size:
            ring = (admission.slot * self.ring_pages + column % self.ring_pages) * heads
            page = int(admission.pages[column]) * heads
            self.places[:, ring : ring + heads] = self.host[:, page : page + heads]

    def retire(self, gone: Retired) -> None:
        where = self.placement
        local = where.layout.local_length(gone.length, where.kvp_rank, where.append_block, gone.start)
        column = local // where.page_size
        heads = torch.arange(self._heads, device=gone.table.device)
        page = gone.table[column.clamp(max=len(gone.table) - 1)]
        source = (gone.slot * self.ring_pages + column % self.ring_pages) * self._heads + heads
        unfinished = (local % where.page_size > 0) * self._heads
        target = page * self._heads + heads
        blocks = BlockList(source.int()[None], target.int()[None], unfinished.int())
        copy_blocks(self.places, self.host, blocks)

    def close(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.store.close()

    def copy(self, sources: Tensor, to: Tensor) -> None:
        super().copy(sources, to)
        self.hot.place_of.index_fill_(2, to.long(), NOWHERE)


def ring_pages(page_size: int, queries: int) -> int:
    """Pages that tokens of a rank can lie in which are not committed, and which have `queries` at most."""
    return (page_size + queries - 2) // page_size + 1


def pages_of(blocks: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values [..., n, page_size, heads, D] in blocks [..., n * heads, 2, page_size, D]."""
    keys, values = (x.transpose(-3, -2) for x in blocks.unflatten(-4, (-1, heads)).unbind(-3))
    return keys, values
