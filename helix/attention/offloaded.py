"""Block-sparse decode over a KV cache in host memory: selects blocks, fetches them to the GPU and reads them there.

It reads the same blocks as over a cache on the GPU, so tokens are the same. Prefill stays dense and exact: a chunk
reads its own keys on the GPU, and earlier keys in pieces fetched from the host; partial outputs are merged by LSE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from comm.base import Communicator
from helix.attention.base import LayerAttention
from helix.attention.block_sparse import BlockSparseAttention
from helix.kv_placement import BlockBudget, ChunkPart, KVPlacement
from helix.worker.kv_cache import LayerCache
from helix.worker.offloaded_cache import OffloadedLayer
from helix.worker.step import Step
from helix.worker.transfers import to_device
from kernels.attention.flash_decode import decode_parts
from kernels.attention.flash_prefill import flash_prefill
from kernels.attention.merge_states import merge_states
from kernels.attention.split_kv import PartialAttention
from kernels.offload.copy_blocks import copy_blocks
from kernels.offload.resolve import resolve
from kernels.resident_blocks import FetchList, QueryRanges


class OffloadedAttention(BlockSparseAttention):
    """Policy of all steps over a cache in host memory, including short sequences and layers with windows.

    Arguments and attributes as in `BlockSparseAttention`. With `prefetches`, it fetches the blocks that approximate
    queries select while the previous layer computes.
    """

    def __init__(
        self,
        budget: BlockBudget,
        placement: KVPlacement,
        max_length: int,
        device: torch.device,
        comm: Communicator | None = None,
    ) -> None:
        super().__init__(budget, placement, max_length, device, comm)
        self.from_tokens = 0  # short sequences are in host memory, too
        self.blocks = placement.max_blocks(self.budget, max_length)
        on_gpu = device.type == "cuda"
        self._side_stream = torch.cuda.Stream(device) if on_gpu else None
        # Two alternating streams: one layer's selection runs while another's blocks are fetched.
        self._prefetch_streams = [torch.cuda.Stream(device) if on_gpu else None for _ in range(2)]
        self._prefetch_queries: dict[int, Callable[[], Tensor]] = {}  # of prefetches in flight, by layer

    def min_resident_blocks(self, drafts: int) -> int:
        """Returns the resident blocks per KV head that a sequence's queries of one step may need."""
        return self.blocks + drafts * self.budget.blocks

    def prepare(self, step: Step, windows: set[int | None]) -> None:
        super().prepare(step, windows)
        if self.prefetches and step.cu_q is None and None in windows:
            self.ranges(step, self.local_budget)

    def prefetch(self, queries: Callable[[], Tensor], cache: LayerCache, step: Step) -> None:
        """Fetches the blocks that approximate queries select; `attend` fetches what is still missing."""
        assert isinstance(cache, OffloadedLayer)
        lane = cache.lane
        self._prefetch_queries[cache.index] = queries  # keeps its inputs' memory allocated
        with self._on_stream(self._prefetch_streams[lane]):
            table = self.select_for_prefetch(queries(), cache, step, lane=1 + lane)
            self._fetch(table, cache, step, self.local_budget, cache.prefetch)

    def attend(self, q: Tensor, cache: LayerCache, step: Step, layer: LayerAttention) -> PartialAttention:
        if layer.window is not None:
            return self.dense.attend(q, cache, step, layer)
        assert isinstance(cache, OffloadedLayer)
        if step.cu_q is not None:
            return self._prefill(q, cache, step, layer)
        _, _, _, hi, lo, *_ = self.ranges(step)
        sms = layer.sms(q.device)
        table = self.select(q, cache, step, sms)
        if self._prefetch_queries.pop(cache.index, None):
            self._wait_stream(self._prefetch_streams[cache.lane])
        self._fetch(table, cache, step, self.budget, cache.misses)
        keys = cache.all_gpu_blocks.paged(table, lo[:, None], hi[:, None], layer.scale, layer.sinks)
        keys = keys.in_parts(self.budget.parts)
        return decode_parts(q[:, None], keys, sms=sms, early=True, lane=layer.chunk)

    def _fetch(self, table: Tensor, cache: OffloadedLayer, step: Step, budget: BlockBudget, misses: FetchList) -> None:
        # Replaces the pages of a table by resident blocks on the GPU, and fetches the missing ones.
        _, _, pages, hi, _, *part_ranges = self.ranges(step, budget)
        num_blocks, parts = part_ranges[-1] if part_ranges else pages, budget.parts
        readers = QueryRanges(hi, num_blocks, step.positions, step.starts, step.max_q, step.first)
        where = {**step.placement.grid, "page_size": step.placement.page_size, "parts": parts}
        resolve(table, readers, cache.resident, misses, **where, part_stride=cache.part_stride(parts))
        copy_blocks(cache.host, cache.gpu_blocks, misses)

    @contextmanager
    def _on_stream(self, side: torch.cuda.Stream | None) -> Iterator[None]:
        if side is not None:
            side.wait_stream(torch.cuda.current_stream(side.device))
        with torch.cuda.stream(side):
            yield

    def _wait_stream(self, side: torch.cuda.Stream | None) -> None:
        if side is not None:
            torch.cuda.current_stream(side.device).wait_stream(side)

    def _prefill(self, q: Tensor, cache: OffloadedLayer, step: Step, layer: LayerAttention) -> PartialAttention:
        assert step.cu_q is not None and step.staged is not None
        lo, hi = step.bounds(None)
        for part in step.staged.parts:
            cache.begin(part)
        max_pages = cache.pieces.shape[1] // cache.block.heads // 2  # pages: one piece is fetched while another is read
        pieces = [
            piece
            for part, table in zip(step.staged.parts, step.block_tables, strict=True)
            for piece in _prefix_pieces(part, table, cache.block.page_size, max_pages)
        ]

        def fetch(i: int) -> None:
            # The side stream waits for earlier launches, which read that half of the buffer.
            with self._on_stream(self._side_stream):
                copy_blocks(cache.host, cache.pieces, cache.blocks(pieces[i].pages, buffer_pages(i)))

        def buffer_pages(i: int) -> Tensor:
            return torch.arange(len(pieces[i].pages), dtype=torch.int32, device=q.device) + i % 2 * max_pages

        if pieces:
            fetch(0)
        out, lse = q.new_empty(2, *q.shape), q.new_empty(2, *q.shape[:2], dtype=torch.float32)
        column = min(part.begin for part in step.staged.parts) // cache.block.page_size
        begin = column * cache.block.page_size
        newest, longest = torch.maximum(lo, step.staged.edges) - begin, max(p.end for p in step.staged.parts) - begin
        chunk_keys = cache.paged(step.staged.tables[:, column:], newest, hi - begin, layer.scale, layer.sinks)
        flash_prefill(q, chunk_keys, step.cu_q, step.max_q, longest, out=out[0], lse=lse[0])
        for i, piece in enumerate(pieces):
            self._wait_stream(self._side_stream)
            if i + 1 < len(pieces):
                fetch(i + 1)
            at, tokens = piece.queries, len(piece.pages) * cache.block.page_size
            first = (lo[at] - piece.first).clamp(0, tokens)
            last = (hi[at] - piece.first).clamp(0, tokens)  # recomputed queries may lie before the piece's end
            keys = cache.fetched.paged(buffer_pages(i)[None], first, last, layer.scale, None)
            cu_q = to_device(torch.tensor([0, len(first)], dtype=torch.int32), q.device)
            flash_prefill(q[at], keys, cu_q, len(first), tokens, out=out[1, at], lse=lse[1, at])
            merge_states(out[:, at], lse[:, at], out=out[0, at], out_lse=lse[0, at], return_lse=True)
        for part, table in zip(step.staged.parts, step.block_tables, strict=True):
            cache.end(part, table)
        return PartialAttention(out[0], lse[0])


@dataclass(frozen=True)
class _Piece:
    # Full pages before a part of a chunk, which its queries read.
    queries: slice
    pages: Tensor  # in host memory
    first: int  # local token


def _prefix_pieces(part: ChunkPart, table: Tensor, page_size: int, max_pages: int) -> Iterator[_Piece]:
    stop = part.begin // page_size
    for page in range(0, stop, max_pages):
        yield _Piece(part.queries, table[page : min(page + max_pages, stop)], page * page_size)
