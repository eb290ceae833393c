"""KV cache in host memory, with the newest tokens and the recently selected blocks on the GPU.

A page moves to the host once it is full of committed tokens, as blocks: one KV head of a page each
(`helix.worker.blocks`). Until then it lies in its sequence's ring on the GPU: local page i is page `i % ring_pages`.
`kernels.resident_blocks` assigns GPU blocks to selected blocks, layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from helix.engine.scheduler_output import NewRequest
from helix.kv_placement import ChunkPart, KVPlacement
from helix.worker.blocks import BlockLayout
from helix.worker.host_store import HostStore
from helix.worker.kv_cache import KVCache, LayerCache
from helix.worker.kv_cache_spec import LISTS, EngineSizes, KVCacheSpec
from helix.worker.sequence_observer import FirstTokenSampled, RequestReleased, StepCommitted
from kernels.offload.copy_blocks import copy_blocks
from kernels.offload.write_back import write_back
from kernels.paged_keys import part_stride
from kernels.resident_blocks import NOT_RESIDENT, BlockList, FetchList, ResidentBlocks


@dataclass(frozen=True, kw_only=True)
class OffloadedLayer(LayerCache):
    """One layer's part on this rank. New tokens go to `tensors`: rings, or pages of a prefill chunk.

    Attributes:
        host: [1, pages * Hkv, words] int32, the layer's blocks in host memory.
        gpu_blocks: [1, blocks, words] int32: rings, then resident blocks.
        resident: maps blocks to resident GPU blocks.
        chunk: [1, n * Hkv, words] int32, pages of a prefill chunk, reused by all layers.
        pieces: like `chunk`: pages of the tokens before it.
        misses: blocks to fetch for the selection, reused by all layers.
        prefetch: predicted blocks to fetch, reused by every other layer.
        lane: index of `prefetch` among its two lists.
    """

    block: BlockLayout
    host: Tensor
    gpu_blocks: Tensor
    resident: ResidentBlocks
    chunk: Tensor
    pieces: Tensor
    misses: FetchList
    prefetch: FetchList
    lane: int

    @property
    def all_gpu_blocks(self) -> LayerCache:
        """The layer's GPU blocks as pages, in which all heads share a block."""
        return self._of(self.block.shared_by_heads(self.gpu_blocks[0]))

    def part_stride(self, parts: int) -> int:
        """Returns the stride of `gpu_blocks` in parts, of which a page's keys have `parts`; 1 for whole pages."""
        return 1 if parts == 1 else part_stride(self.all_gpu_blocks.keys, parts)

    @property
    def fetched(self) -> LayerCache:
        """The pages of `pieces`."""
        return self._of(self.block.pages(self.pieces[0]))

    def _of(self, tensors: dict[str, Tensor]) -> LayerCache:
        return LayerCache(self.index, tensors, self.accepted)

    def blocks(self, source: Tensor, target: Tensor) -> BlockList:
        """Lists the copies of all blocks of pages `source` [n] to pages `target` [n]; both int, on the device."""
        heads = torch.arange(self.block.heads, dtype=torch.int32, device=source.device)
        count = torch.full((1,), len(source) * len(heads), dtype=torch.int32, device=source.device)
        source, target = ((pages.int()[:, None] * len(heads) + heads).view(1, -1) for pages in (source, target))
        return BlockList(source, target, count)

    def begin(self, part: ChunkPart) -> None:
        """Copies the unfinished page of earlier chunks from its ring to the chunk.

        Args:
            part: part of a step whose tokens are appended already.
        """
        page_size, heads = self.block.page_size, self.block.heads
        if num_valid := part.begin % page_size:
            ring = self._ring(part.row, part.begin // page_size)
            of_ring = self.block.pages(self.gpu_blocks[0, ring : ring + heads])
            for spec in self.block.parts:
                tokens = -1 if spec.by_head else 0  # dim
                to, source = self.tensors[spec.name][part.page], of_ring[spec.name][0]
                to.narrow(tokens, 0, num_valid).copy_(source.narrow(tokens, 0, num_valid))

    def end(self, part: ChunkPart, table: Tensor) -> None:
        """Writes a chunk's pages to the host pages of `table` [P], and the unfinished one to its ring as well."""
        page_size, heads = self.block.page_size, self.block.heads
        first, last = part.begin // page_size, -(-part.end // page_size)
        if last > first:
            at = torch.arange(part.page, part.page + last - first, device=table.device)
            pages = table[first:last]
            copy_blocks(self.chunk, self.host, self.blocks(at, pages))
            self.resident.gpu_block_of.index_fill_(1, pages.long(), NOT_RESIDENT)
        if part.end % page_size:
            here, ring = (part.page + last - 1 - first) * heads, self._ring(part.row, last - 1)
            self.gpu_blocks[0, ring : ring + heads] = self.chunk[0, here : here + heads]

    def _ring(self, row: int, column: int) -> int:
        return (row * self.resident.ring_pages + column % self.resident.ring_pages) * self.block.heads


@dataclass(frozen=True)
class OffloadMemory:
    """Memory of layers whose pages lie on the host.

    Attributes:
        store: host memory, [layers, pages * Hkv, words] int32.
        num_resident: resident blocks of each KV head in each layer, at least as many as a step can select.
        piece_pages: pages of the tokens before a chunk that are on the GPU at once, in two halves.
        states: host memory of snapshots, see `KVCache`.
    """

    store: HostStore
    num_resident: int
    piece_pages: int
    states: HostStore | None = None


class OffloadedCache(KVCache):
    """KV cache with the pages of layers without a window in host memory; arguments as in `KVCache`.

    Attributes:
        resident: maps blocks to resident GPU blocks, in all these layers.
        gpu_blocks: [layers, blocks, words] int32.
        fetch_counts: [2] int64, on the device: selected blocks that were resident, and blocks fetched for selections.
        prefetch_counts: like `fetch_counts`, for predictions; a prefetched block is resident when it is selected.
    """

    fetches = True
    remedy = "raise kv.offload_host_bytes and kv.offload_gpu_bytes, or layout.kvp"

    def __init__(
        self,
        layer_specs: Sequence[tuple[KVCacheSpec, ...]],
        placement: KVPlacement,
        sizes: EngineSizes,
        device: torch.device,
        offload: OffloadMemory,
    ) -> None:
        assert offload.store.tensor is not None
        self.block = BlockLayout.of(layer_specs, placement.page_size)
        self.store, self.host = offload.store, offload.store.tensor
        self._heads, layers, num_resident = self.block.heads, len(self.host), offload.num_resident
        super().__init__(layer_specs, placement, sizes, device, offload.states)
        self._decoding = torch.zeros(sizes.slots, dtype=torch.bool, device=device)
        self.ring_pages = self.rings[None] = ring_pages(placement.page_size, sizes.queries)
        heads, words = self._heads, self.block.words
        self._rings = sizes.slots * self.ring_pages * heads
        chunk_pages = placement.chunk_pages(sizes.chunk, sizes.slots)
        # Zeros, since benchmarks read sequences that were never written.
        self.gpu_blocks = torch.zeros(
            layers, self._rings + heads * num_resident, words, dtype=torch.int32, device=device
        )
        self.resident = ResidentBlocks.create(
            layers, heads, sizes.pages, num_resident, self._rings, self.ring_pages, device
        )
        self.fetch_counts, self.prefetch_counts = torch.zeros(2, 2, dtype=torch.int64, device=device)
        self._chunk, self._pieces = (
            torch.empty(1, n * heads, words, dtype=torch.int32, device=device)
            for n in (chunk_pages, offload.piece_pages)
        )
        self._misses = FetchList.create(heads, num_resident, device, self.fetch_counts)
        self._prefetch = [
            FetchList.create(heads, num_resident, device, self.prefetch_counts, True) for _ in range(LISTS - 1)
        ]

    def _allocate(self, spec: KVCacheSpec, layers: int) -> Tensor:
        if not spec.is_paged or spec.per != "token":
            return super()._allocate(spec, layers)
        return self.block.pages(self.host)[spec.name]

    @property
    def on_gpu(self) -> list[Tensor]:
        return [self.gpu_blocks, self._chunk, self._pieces]

    def layer(self, index: int, prefill: bool = False) -> LayerCache:
        group, position = self._layer_positions[index]
        if not group.kv_cache_specs[0].is_paged:
            return super().layer(index, prefill)
        tensors = self.block.pages(self._chunk[0] if prefill else self.gpu_blocks[position, : self._rings])
        bounds = {k.name: group.tensors[k.name][position] for k in group.kv_cache_specs if k.per == "page"}
        at = slice(position, position + 1)
        return OffloadedLayer(
            index, tensors | bounds, self.accepted, block=self.block,
            host=self.host[at], gpu_blocks=self.gpu_blocks[at], resident=self.resident.layer(position),
            chunk=self._chunk,
            pieces=self._pieces, misses=self._misses, prefetch=self._prefetch[position % 2], lane=position % 2,
        )  # fmt: skip

    def on_step(self, step: StepCommitted) -> None:
        span, page = step.span, self.placement.page_size
        write_back(
            self.gpu_blocks, self.host, self.resident.gpu_block_of, span.tables, span.starts, span.before, span.after,
            (page + span.max_tokens - 1) // page, 0, self.ring_pages, **self.placement.grid, page_size=page,
        )  # fmt: skip
        super().on_step(step)

    def _admit(self, admission: NewRequest) -> None:
        super()._admit(admission)
        self._decoding[admission.slot].fill_(False)
        where = self.placement
        local = where.local_length(admission.num_cached_tokens, admission.start)
        column, heads = local // where.page_size, self._heads
        if local % where.page_size:
            ring = (admission.slot * self.ring_pages + column % self.ring_pages) * heads
            page = int(admission.pages[column]) * heads
            self.gpu_blocks[:, ring : ring + heads] = self.host[:, page : page + heads]

    def on_first_token(self, begun: FirstTokenSampled) -> None:
        self._decoding.index_fill_(0, begun.slots, True)

    def release(self, *released: RequestReleased) -> None:
        for one in released:
            self._release(one)

    def _release(self, released: RequestReleased) -> None:
        where = self.placement
        local = where.layout.local_length(released.length, where.kvp_rank, where.append_block, released.start)
        column = local // where.page_size
        heads = torch.arange(self._heads, device=released.table.device)
        page = released.table[column.clamp(max=len(released.table) - 1)]
        source = (released.slot * self.ring_pages + column % self.ring_pages) * self._heads + heads
        # Before it decodes, the host has all of it, and its length and ring may still be the previous sequence's.
        unfinished = (local % where.page_size > 0) * self._decoding[released.slot] * self._heads
        target = page * self._heads + heads
        blocks = BlockList(source.int()[None], target.int()[None], unfinished.int())
        copy_blocks(self.gpu_blocks, self.host, blocks)

    def close(self) -> None:
        super().close()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.store.close()

    def copy_pages(self, sources: Tensor, to: Tensor) -> None:
        super().copy_pages(sources, to)
        self.resident.gpu_block_of.index_fill_(2, to.long(), NOT_RESIDENT)


def ring_pages(page_size: int, queries: int) -> int:
    """Computes the maximum pages on a rank that hold uncommitted tokens, of which a sequence has up to `queries`."""
    return (page_size + queries - 2) // page_size + 1
