"""A KV cache in host memory, with the newest tokens and the last chosen blocks on the GPU.

A page moves to the host once it is full of committed tokens, in blocks: all of one KV head in a page, contiguous
(`helix.worker.blocks`). Until then it lies on the GPU in its sequence's ring of pages: local page i is page
`i % ring_pages` of the ring. `kernels.hot_blocks` assigns GPU places to chosen blocks, layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from helix.engine.decision import Admission
from helix.placement import ChunkPart, Placement
from helix.worker.blocks import BlockShape
from helix.worker.follower import Begun, Retired, Taken
from helix.worker.host_store import HostStore
from helix.worker.keeps import LISTS, EngineSizes, Keeps
from helix.worker.kv_cache import KVCache, LayerCache
from kernels.hot_blocks import NOWHERE, BlockList, FetchList, HotBlocks
from kernels.paged_keys import parts_apart
from kernels.tier.copy_blocks import copy_blocks
from kernels.tier.write_back import write_back


@dataclass(frozen=True, kw_only=True)
class TieredLayer(LayerCache):
    """One layer's part on this rank. New tokens go to what it keeps: rings, or pages of a prompt chunk.

    Attributes:
        block: order of a block's bytes.
        host: [1, pages * Hkv, words] int32, the layer's blocks in host memory.
        places: [1, places, words] int32: rings, then hot places.
        hot: assignment of hot places to blocks.
        chunk: [1, n * Hkv, words] int32, pages of a prompt chunk, used by all layers in turn.
        pieces: like `chunk`: pages of the tokens before it.
        misses: blocks to fetch for the choice, used by all layers in turn.
        ahead: blocks to fetch for a guess, used by every other layer in turn.
        lane: index of `ahead` among its two lists.
    """

    block: BlockShape
    host: Tensor
    places: Tensor
    hot: HotBlocks
    chunk: Tensor
    pieces: Tensor
    misses: FetchList
    ahead: FetchList
    lane: int

    @property
    def every_place(self) -> LayerCache:
        """The layer's places as pages, in which all heads share the place's block."""
        return self._of(self.block.under_every_head(self.places[0]))

    def parts_apart(self, parts: int) -> int:
        """Returns how many parts of a page, `parts` of which are keys, a place is long; 1 for whole pages."""
        return 1 if parts == 1 else parts_apart(self.every_place.keys, parts)

    @property
    def fetched(self) -> LayerCache:
        """The pages of `pieces`."""
        return self._of(self.block.pages(self.pieces[0]))

    def _of(self, kept: dict[str, Tensor]) -> LayerCache:
        return LayerCache(self.index, kept, self.accepted)

    def blocks(self, source: Tensor, target: Tensor) -> BlockList:
        """Lists the copies of all blocks of pages `source` [n] to pages `target` [n]; both int, on the device."""
        heads = torch.arange(self.block.heads, dtype=torch.int32, device=source.device)
        count = torch.full((1,), len(source) * len(heads), dtype=torch.int32, device=source.device)
        source, target = ((pages.int()[:, None] * len(heads) + heads).view(1, -1) for pages in (source, target))
        return BlockList(source, target, count)

    def begin(self, part: ChunkPart) -> None:
        """Copies the unfinished page of earlier chunks from its ring to the chunk, which has the new tokens already.

        Args:
            part: part of a step whose tokens were appended.
        """
        page_size, heads = self.block.page_size, self.block.heads
        if known := part.begin % page_size:
            ring = self._ring(part.row, part.begin // page_size)
            of_ring = self.block.pages(self.places[0, ring : ring + heads])
            for kept in self.block.parts:
                tokens = -1 if kept.by_head else 0  # dim
                to, of = self.kept[kept.name][part.page], of_ring[kept.name][0]
                to.narrow(tokens, 0, known).copy_(of.narrow(tokens, 0, known))

    def end(self, part: ChunkPart, table: Tensor) -> None:
        """Writes a chunk's pages to the host pages of `table` [P], and the unfinished one to its ring as well."""
        page_size, heads = self.block.page_size, self.block.heads
        first, last = part.begin // page_size, -(-part.end // page_size)
        if last > first:
            at = torch.arange(part.page, part.page + last - first, device=table.device)
            pages = table[first:last]
            copy_blocks(self.chunk, self.host, self.blocks(at, pages))
            self.hot.place_of.index_fill_(1, pages.long(), NOWHERE)
        if part.end % page_size:
            here, ring = (part.page + last - 1 - first) * heads, self._ring(part.row, last - 1)
            self.places[0, ring : ring + heads] = self.chunk[0, here : here + heads]

    def _ring(self, row: int, column: int) -> int:
        """Returns the first place of a local page in its sequence's ring."""
        return (row * self.hot.ring_pages + column % self.hot.ring_pages) * self.block.heads


@dataclass(frozen=True)
class HostTier:
    """Memory of layers whose pages lie on the host, and places on the GPU for some of it.

    Attributes:
        store: host memory, [layers, pages * Hkv, words] int32.
        hot: hot places of each KV head in each layer, at least as many as the blocks that a step can choose.
        piece_pages: pages of the tokens before a chunk that are on the GPU at once, in two halves.
        states: host memory of snapshots, see `KVCache`.
    """

    store: HostStore
    hot: int
    piece_pages: int
    states: HostStore | None = None


class TieredCache(KVCache):
    """Cache with the pages of layers that read whole sequences in host memory; arguments as in `KVCache`.

    Attributes:
        hot: assignment of hot places to blocks, in all these layers.
        block: order of a block's bytes.
        places: [layers, places, words] int32.
        counted: [2] int64, on the device: chosen blocks that had a place, and blocks fetched for choices.
        counted_ahead: like `counted`, for guesses; a block fetched for a guess has a place when it is chosen.
    """

    fetches = True
    remedy = "raise kv.host_bytes and kv.gpu_bytes, or use a larger layout.kvp"

    def __init__(
        self,
        keeps: Sequence[tuple[Keeps, ...]],
        placement: Placement,
        sizes: EngineSizes,
        device: torch.device,
        tier: HostTier,
    ) -> None:
        assert tier.store.tensor is not None
        self.block = BlockShape.of(keeps, placement.page_size)
        self.store, self.host = tier.store, tier.store.tensor
        self._heads, layers, hot = self.block.heads, len(self.host), tier.hot
        super().__init__(keeps, placement, sizes, device, tier.states)
        self._decoding = torch.zeros(sizes.slots, dtype=torch.bool, device=device)
        self.ring_pages = self.rings[None] = ring_pages(placement.page_size, sizes.queries)
        heads, words = self._heads, self.block.words
        self._rings = sizes.slots * self.ring_pages * heads
        chunk_pages = placement.chunk_pages(sizes.chunk, sizes.slots)
        # Zeros, since benchmarks read sequences that were never written.
        self.places = torch.zeros(layers, self._rings + heads * hot, words, dtype=torch.int32, device=device)
        self.hot = HotBlocks.create(layers, heads, sizes.pages, hot, self._rings, self.ring_pages, device)
        self.counted, self.counted_ahead = torch.zeros(2, 2, dtype=torch.int64, device=device)
        self._chunk, self._pieces = (
            torch.empty(1, n * heads, words, dtype=torch.int32, device=device) for n in (chunk_pages, tier.piece_pages)
        )
        self._misses = FetchList.create(heads, hot, device, self.counted)
        self._ahead = [FetchList.create(heads, hot, device, self.counted_ahead, True) for _ in range(LISTS - 1)]

    def _allocate(self, kept: Keeps, layers: int) -> Tensor:
        if not kept.is_paged or kept.per != "token":
            return super()._allocate(kept, layers)
        return self.block.pages(self.host)[kept.name]

    @property
    def on_gpu(self) -> list[Tensor]:
        """All memory for blocks on the GPU."""
        return [self.places, self._chunk, self._pieces]

    def layer(self, index: int, prefill: bool = False) -> LayerCache:
        group, place = self._places[index]
        if not group.keeps[0].is_paged:
            return super().layer(index, prefill)
        kept = self.block.pages(self._chunk[0] if prefill else self.places[place, : self._rings])
        bounds = {k.name: group.tensors[k.name][place] for k in group.keeps if k.per == "page"}
        at = slice(place, place + 1)
        return TieredLayer(
            index, kept | bounds, self.accepted, block=self.block,
            host=self.host[at], places=self.places[at], hot=self.hot.layer(place), chunk=self._chunk,
            pieces=self._pieces, misses=self._misses, ahead=self._ahead[place % 2], lane=place % 2,
        )  # fmt: skip

    def taken(self, step: Taken) -> None:
        span, page = step.span, self.placement.page_size
        write_back(
            self.places, self.host, self.hot.place_of, span.tables, span.starts, span.before, span.after,
            (page + span.most - 1) // page, 0, self.ring_pages, **self.placement.grid, page_size=page,
        )  # fmt: skip
        super().taken(step)

    def _admit(self, admission: Admission) -> None:
        super()._admit(admission)
        self._decoding[admission.slot].fill_(False)
        where = self.placement
        local = where.local_length(admission.known, admission.start)
        column, heads = local // where.page_size, self._heads
        if local % where.page_size:
            ring = (admission.slot * self.ring_pages + column % self.ring_pages) * heads
            page = int(admission.pages[column]) * heads
            self.places[:, ring : ring + heads] = self.host[:, page : page + heads]

    def begun(self, begun: Begun) -> None:
        self._decoding.index_fill_(0, begun.slots, True)

    def retire(self, *gone: Retired) -> None:
        for one in gone:
            self._retire(one)

    def _retire(self, gone: Retired) -> None:
        where = self.placement
        local = where.layout.local_length(gone.length, where.kvp_rank, where.append_block, gone.start)
        column = local // where.page_size
        heads = torch.arange(self._heads, device=gone.table.device)
        page = gone.table[column.clamp(max=len(gone.table) - 1)]
        source = (gone.slot * self.ring_pages + column % self.ring_pages) * self._heads + heads
        # Before, the host has all of it, and what its length and its ring say may be another sequence's.
        unfinished = (local % where.page_size > 0) * self._decoding[gone.slot] * self._heads
        target = page * self._heads + heads
        blocks = BlockList(source.int()[None], target.int()[None], unfinished.int())
        copy_blocks(self.places, self.host, blocks)

    def close(self) -> None:
        super().close()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.store.close()

    def copy(self, sources: Tensor, to: Tensor) -> None:
        super().copy(sources, to)
        self.hot.place_of.index_fill_(2, to.long(), NOWHERE)


def ring_pages(page_size: int, queries: int) -> int:
    """Computes the most pages on a rank that can hold uncommitted tokens, at most `queries` of a sequence."""
    return (page_size + queries - 2) // page_size + 1
