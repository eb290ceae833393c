"""Where a sequence's tokens lie in the KV cache of a rank: `HelixLayout`'s token arithmetic, plus pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from helix.config import MAX_QUERIES
from helix.layout import HelixLayout
from kernels import dispatch
from kernels.attention import placement
from kernels.sparse.block_ranges import block_ranges
from kernels.sparse.draft_ranges import MILLION, draft_ranges

NO_PAGES = np.empty(0, dtype=np.int32)


@dataclass(frozen=True)
class Stripes:
    """How many pages sequences need; a page number stands for one page on every rank.

    A stripe is the shortest run of append blocks that fills whole pages on every kvp rank. Example with two kvp ranks,
    append blocks of 2 tokens, pages of 4, `start` 0: tokens 0-7 fill a page on each rank; tokens 8-12 fill a part of
    the second stripe, which takes a column of the block table as well.

        column       0             1
        kvp rank 0   0  1  4  5    8  9  12
        kvp rank 1   2  3  6  7    10 11

    `start` 1 swaps the two ranks. A stripe's columns and the number of pages are the same for every `start`; the tokens
    in a page are not.

    Attributes:
        append_block: consecutive tokens on one kvp rank.
        page_size: tokens per page on one rank.
    """

    layout: HelixLayout
    append_block: int
    page_size: int

    @property
    def tokens(self) -> int:
        """Tokens per stripe."""
        return math.lcm(self.page_size, self.append_block) * self.layout.kvp

    @property
    def pages(self) -> int:
        """Pages per stripe on each rank."""
        return math.lcm(self.page_size, self.append_block) // self.page_size

    @property
    def page_tokens(self) -> int:
        """Tokens that one page number holds, over all kvp ranks."""
        return self.page_size * self.layout.kvp

    def columns(self, begin: int, end: int) -> slice:
        """Returns the block-table columns from the stripe of token `begin` up to, excluding, that of token `end`."""
        return slice(begin // self.tokens * self.pages, end // self.tokens * self.pages)

    def pages_for(self, length: int) -> int:
        """Returns the pages that `length` tokens need on the fullest rank, which has the first block; any `start`.

        Every other rank leaves at most ceil(append_block / page_size) of them empty.
        """
        return -(-self.layout.local_length(length, 0, self.append_block) // self.page_size)

    def tokens_in(self, pages: int) -> int:
        """Returns the number of tokens that `pages` pages hold: the inverse of `pages_for`."""
        rounds, rest = divmod(pages * self.page_size, self.append_block)
        return rounds * self.append_block * self.layout.kvp + rest

    def pages_for_all(self, tokens: int, sequences: int) -> int:
        """Returns an upper bound of the pages of `sequences` sequences with `tokens` tokens in total."""
        # All sequences but one may round up by a block and by a page.
        return self.pages_for(tokens) + (sequences - 1) * (-(-self.append_block // self.page_size) + 1)


@dataclass(frozen=True)
class BlockBudget:
    """Number of blocks (a page each) that a query of a block-sparse step reads.

    Attributes:
        sink_blocks: first blocks of the sequence, always read; counted over all ranks.
        local_blocks: last blocks, including the query's own, always read; counted over all ranks.
        topk: blocks, or subblocks, that the query selects between them on this rank.
        from_tokens: shorter sequences are read entirely.
        parts: subblocks per block; 1: queries select blocks.
        candidates: blocks with the best bounds on this rank, whose subblocks are scored.
    """

    sink_blocks: int
    local_blocks: int
    topk: int
    from_tokens: int
    parts: int = 1
    candidates: int = 0

    @property
    def blocks(self) -> int:
        """Most blocks between sink and local blocks that a query reads from."""
        return self.topk if self.parts == 1 else min(self.topk, self.candidates)

    def per_rank(self, ranks: int) -> BlockBudget:
        """Returns one rank's share, rounded up, if each of `ranks` ranks selects from its own blocks."""
        return replace(self, topk=-(-self.topk // ranks), candidates=-(-self.candidates // ranks))


@dataclass(frozen=True)
class KeyBudget:
    """Number of keys of a sequence that drafts read; shares are in millionths.

    Attributes:
        sink_tokens: first tokens of the sequence, always read.
        min_keys: per rank.
        share: share of a rank's keys that is read.
        latest: share of these that goes to the sink and the latest keys, which are always read.
    """

    sink_tokens: int
    min_keys: int
    share: int
    latest: int

    def num_keys(self, num_candidates: Tensor) -> Tensor:
        return torch.minimum(
            ((num_candidates * self.share + MILLION - 1) // MILLION).clamp(min=self.min_keys), num_candidates
        )


@dataclass(frozen=True)
class KVPlacement:
    """Maps a sequence's tokens to one kvp rank's cache: append blocks go round-robin, pages fill in local order."""

    layout: HelixLayout
    kvp_rank: int
    append_block: int
    page_size: int

    def bounds(self, positions: Tensor, starts: Tensor, live: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        """Returns the local keys `[lo, hi)` that causal queries at global `positions` read; none unless `live`.

        Args:
            positions, starts: int64 [N]; `starts` is the kvp rank of each sequence's first block.
            live: bool [N].
            window: sliding window in tokens, including the query's; None: all tokens.

        Returns:
            lo, hi: int32 [N].
        """
        if dispatch.on_gpu(positions):
            return placement.local_bounds(positions, starts, live, **self.grid, window=window)
        lo, hi = self.layout.local_bounds(positions, self.kvp_rank, self.append_block, starts, window)
        return lo.int(), torch.where(live, hi, lo).int()

    def compute_slot_mapping(
        self, positions: Tensor, starts: Tensor, live: Tensor, block_tables: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Returns the cache slots `page * page_size + offset` of new tokens; -1 for other ranks' tokens and not `live`.

        Args:
            positions, starts: int64 [N].
            live: bool [N].
            block_tables: int32 [n, P], the pages of each sequence.
            rows: int64 [N], each token's row of `block_tables`; None: token i has row i.
        """
        if dispatch.on_gpu(positions):
            where = {"page_size": self.page_size, **self.grid}
            return placement.compute_slot_mapping(positions, starts, live, block_tables, rows, **where)
        block_tables = block_tables if rows is None else block_tables[rows]
        slot = self.layout.token_slot(positions, self.append_block)
        column = (slot // self.page_size).clamp(max=block_tables.shape[1] - 1)  # other ranks' slots may exceed it
        page = block_tables.gather(1, column[:, None]).squeeze(1).long()
        is_local = self.layout.token_owner(positions, self.append_block, starts) == self.kvp_rank
        return torch.where(is_local & live, page * self.page_size + slot % self.page_size, -1)

    def block_ranges(
        self, positions: Tensor, starts: Tensor, live: Tensor, queries: int, budget: BlockBudget
    ) -> tuple[Tensor, ...]:
        """Splits a rank's pages into those that queries always read and those to select from; none unless `live`.

        Of `pages` local pages, queries always read those before `first` (the sink) and from `last` on (the local
        blocks, and all pages with uncommitted tokens).

        Args:
            positions, starts: int64 [N], `queries` per sequence, the first at the sequence's committed length.
            live: bool [N].

        Returns:
            first, last, pages, hi: int32 [N]; `hi` is the number of keys in the table of pages that are read. With
            subblocks also part_first, part_last, part_pages: the first three in subblocks, for a table of the pages
            that are always read and the candidate blocks (selected by their own bounds); and the sequence's number
            of subblocks.
        """
        if dispatch.on_gpu(positions):
            where = {"page_size": self.page_size, **self.grid, **asdict(budget)}
            return block_ranges(positions, starts, live, queries, **where)

        def local(tokens: Tensor) -> Tensor:
            return self.layout.local_length(tokens, self.kvp_rank, self.append_block, starts)

        page = self.page_size
        committed = positions.view(-1, queries)[:, :1].expand(-1, queries).flatten()
        window = (positions // page - budget.local_blocks + 1).clamp(min=0) * page
        length = torch.where(live, local(positions + 1), 0)
        pages = -(-length // page)
        first = torch.minimum(-(-local(torch.full_like(positions, budget.sink_blocks * page)) // page), pages)
        last = torch.minimum(local(window), local(committed)) // page
        last = torch.minimum(torch.maximum(last, first), pages)
        short = positions + 1 < budget.from_tokens
        first, last = (torch.where(short, pages, x) for x in (first, last))
        parts = budget.parts
        considered = (last - first).clamp(max=budget.candidates) if parts > 1 else last - first
        left_out = (last - first) * parts - (considered * parts).clamp(max=budget.topk)
        found = [first, last, pages, length - left_out * (page // parts)]
        if parts > 1:
            found += [x * parts for x in (first, first + considered, pages - (last - first) + considered)]
            found.append(-(-length // (page // parts)))
        return tuple(x.int() for x in found)

    def draft_ranges(
        self, positions: Tensor, starts: Tensor, live: Tensor, budget: KeyBudget
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns how many local keys drafts select from, of tokens up to `positions`, and how many they read.

        Args:
            positions, starts: int64 [n].
            live: bool [n]; other sequences have no keys.

        Returns:
            num_candidates, counts, sinks, recent: int32 [n]: of the first `num_candidates` keys, `counts` are read,
            always including the first `sinks` and the last `recent`.
        """
        if dispatch.on_gpu(positions):
            return draft_ranges(positions, starts, live, **self.grid, **asdict(budget))

        def local(tokens: Tensor) -> Tensor:
            return self.layout.local_length(tokens, self.kvp_rank, self.append_block, starts)

        length = torch.where(live, positions + 1, 0)
        num_candidates = local(length)
        counts = budget.num_keys(num_candidates)
        sinks = torch.minimum(local(length.clamp(max=budget.sink_tokens)), counts)
        recent = (counts * budget.latest // MILLION - sinks).clamp(min=0)
        return num_candidates.int(), counts.int(), sinks.int(), recent.int()

    def local_length(self, tokens: int, start: int) -> int:
        """Returns this rank's share of the first `tokens` of a sequence whose first block is on kvp rank `start`."""
        return self.layout.local_length(tokens, self.kvp_rank, self.append_block, start)

    @property
    def grid(self) -> dict[str, int]:
        return {"kvp": self.layout.kvp, "kvp_rank": self.kvp_rank, "append_block": self.append_block}

    def parts(self, chunks: Sequence[PromptChunk], starts: Sequence[int], whole: bool) -> tuple[ChunkPart, ...]:
        """Assigns pages of the chunk's own buffer to the new tokens of a prefill step.

        Args:
            starts: kvp rank of each sequence's first block.
            whole: assign pages to all tokens; else only to those that the cache does not hold yet.
        """
        parts: list[ChunkPart] = []
        offset = page = 0
        for chunk, start in zip(chunks, starts, strict=True):
            span = (chunk.begin, chunk.end) if whole else chunk.written
            begin, end = (self.local_length(tokens, start) for tokens in span)
            columns = range(begin // self.page_size, -(-end // self.page_size))
            queries = slice(offset, offset := offset + len(chunk.tokens))
            parts.append(ChunkPart(chunk.slot, queries, begin, end, columns, page))
            page += len(columns)
        return tuple(parts)

    def max_tokens(self, tables: Tensor) -> int:
        """Returns an upper bound of the tokens, over all ranks, of a sequence that fills its row of `tables`."""
        return (tables.shape[1] * self.page_size + self.append_block) * self.layout.kvp

    def max_pages_touched(self, tokens: int) -> int:
        """Returns the most local pages that `tokens` consecutive tokens can touch."""
        cycle = self.append_block * self.layout.kvp
        return -(-(tokens // cycle + 1) * self.append_block // self.page_size) + 1

    def chunk_pages(self, tokens: int, sequences: int) -> int:
        """Returns the most local pages of a prefill step with `tokens` tokens in `sequences` sequences."""
        block = self.append_block
        local = -(-tokens // (self.layout.kvp * block)) * block + sequences * block
        return -(-local // self.page_size) + 2 * sequences

    def max_blocks(self, budget: BlockBudget, max_length: int, between: int | None = None) -> int:
        """Returns the most pages that a query reads, for sequences of up to `max_length` tokens.

        Args:
            between: pages between sink and local blocks; None: the budget's.
        """
        between = budget.blocks if between is None else between
        fixed = (budget.sink_blocks + budget.local_blocks) * self.page_size + MAX_QUERIES
        sparse = self.max_pages_touched(budget.sink_blocks * self.page_size) + between + self.max_pages_touched(fixed)
        return min(
            max(sparse, self.max_pages_touched(min(budget.from_tokens, max_length))),
            self.max_pages_touched(max_length) + between,
        )

    @property
    def stripes(self) -> Stripes:
        return Stripes(self.layout, self.append_block, self.page_size)


@dataclass(frozen=True)
class ChunkPart:
    """A sequence's part of a prefill step that first writes new tokens to the chunk's own pages.

    Attributes:
        row: row of the sequence in the batch.
        queries: its tokens in the step.
        begin, end: range of local tokens that it writes.
        columns: block-table columns that it writes.
        page: the chunk's page for the first column; the others follow.
    """

    row: int
    queries: slice
    begin: int
    end: int
    columns: range
    page: int


@dataclass(frozen=True)
class PromptChunk:
    """Tokens of a prompt that one step computes.

    Attributes:
        slot: the sequence's row in the batch.
        begin: global position of the first token.
        tokens: int64 [m], on the host.
        num_cached_tokens: tokens whose KV is in the cache already; the step computes only their states and windows.
        snapshot_index, evict_to: see `helix.engine.scheduler_output.PrefillChunk`.
    """

    slot: int
    begin: int
    tokens: Tensor
    num_cached_tokens: int = 0
    snapshot_index: int = -1
    evict_to: int = -1

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)

    @property
    def written(self) -> tuple[int, int]:
        """Number of the sequence's tokens in the cache before and after the step."""
        return max(self.begin, self.num_cached_tokens), max(self.end, self.num_cached_tokens)
