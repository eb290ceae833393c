"""This rank's shard of the KV cache: where a token goes, the pages that hold it, how many there can be."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from helix.config import MAX_QUERIES
from helix.decision import StepKind
from helix.follower import Follower, Prefilled, Span, Taken
from helix.layout import HelixLayout
from helix.pages import Stripes
from kernels import dispatch
from kernels.attention import placement
from kernels.sparse.block_bounds import fold_blocks
from kernels.sparse.block_ranges import block_ranges
from kernels.sparse.draft_ranges import MILLION, draft_ranges


@dataclass(frozen=True)
class BlockBudget:
    """How many blocks, of a page each, a query of a block-sparse step reads; sink and window are of all ranks together.

    Attributes:
        sink_blocks: first blocks of the sequence, always read.
        local_blocks: last blocks, the query's own included, always read.
        topk: blocks chosen between them, on this rank.
        from_tokens: a query that sees fewer tokens than this reads them all.
    """

    sink_blocks: int
    local_blocks: int
    topk: int
    from_tokens: int


@dataclass(frozen=True)
class KeyBudget:
    """How many keys of a sequence drafts read; shares are in millionths.

    Attributes:
        sink_tokens: first tokens of the sequence, always read.
        least: keys of a rank that are read at least.
        share: of a rank's keys.
        latest: of those, the share that the sink and the latest keys have whatever is chosen.
    """

    sink_tokens: int
    least: int
    share: int
    latest: int

    def of(self, known: Tensor) -> Tensor:
        """How many of so many local keys are read."""
        return torch.minimum(((known * self.share + MILLION - 1) // MILLION).clamp(min=self.least), known)


@dataclass(frozen=True)
class Placement:
    """Where the tokens of a sequence live on one kvp rank: round-robin blocks, cut into pages in local order."""

    layout: HelixLayout
    kvp_rank: int
    append_block: int
    page_size: int

    def bounds(self, positions: Tensor, starts: Tensor, live: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        """Local keys `[lo, hi)` that causal queries at global `positions` read; none where not `live`.

        Args:
            positions, starts: int64 [N]; `starts` is the kvp rank of each sequence's first block.
            live: bool [N].
            window: sliding window in tokens, the query's own included; None for all.

        Returns:
            lo, hi: int32 [N].
        """
        if dispatch.on_gpu(positions):
            return placement.local_bounds(positions, starts, live, **self.grid, window=window)
        lo, hi = self.layout.local_bounds(positions, self.kvp_rank, self.append_block, starts, window)
        return lo.int(), torch.where(live, hi, lo).int()

    def cache_slots(
        self, positions: Tensor, starts: Tensor, live: Tensor, block_tables: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Flat cache slots `page * page_size + offset` of new tokens, -1 for tokens of other ranks or not `live`.

        Args:
            positions, starts: int64 [N].
            live: bool [N].
            block_tables: int32 [n, P], the pages of each sequence.
            rows: int64 [N], the row of each token's sequence in `block_tables`; None: token i's is row i.
        """
        if dispatch.on_gpu(positions):
            where = {"page_size": self.page_size, **self.grid}
            return placement.cache_slots(positions, starts, live, block_tables, rows, **where)
        block_tables = block_tables if rows is None else block_tables[rows]
        slot = self.layout.token_slot(positions, self.append_block)
        column = (slot // self.page_size).clamp(max=block_tables.shape[1] - 1)  # others' slots may lie past our pages
        page = block_tables.gather(1, column[:, None]).squeeze(1).long()
        mine = self.layout.token_owner(positions, self.append_block, starts) == self.kvp_rank
        return torch.where(mine & live, page * self.page_size + slot % self.page_size, -1)

    def block_ranges(
        self, positions: Tensor, starts: Tensor, live: Tensor, queries: int, budget: BlockBudget
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Which local pages queries read whatever they say, and among which they choose; nothing where not `live`.

        Of `pages` local pages, those before `first` (the sink's) and from `last` on (the window's, and all that hold
        tokens which are not committed) are read anyway.

        Args:
            positions, starts: int64 [N], `queries` of each sequence, the first at the sequence's committed length.
            live: bool [N].

        Returns:
            first, last, pages, hi: int32 [N]; `hi` is one past the last key in a table of the pages that are read.
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
        left_out = last - first - (last - first).clamp(max=budget.topk)
        return first.int(), last.int(), pages.int(), (length - left_out * page).int()

    def draft_ranges(
        self, positions: Tensor, starts: Tensor, live: Tensor, budget: KeyBudget
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Among which local keys drafts choose, those of tokens up to `positions`, and how many they read.

        Args:
            positions, starts: int64 [n].
            live: bool [n]; the others have no keys.

        Returns:
            known, counts, sinks, recent: int32 [n]: the first `known` keys are chosen from, `counts` of them are read,
            the first `sinks` and the last `recent` whatever they score.
        """
        if dispatch.on_gpu(positions):
            return draft_ranges(positions, starts, live, **self.grid, **asdict(budget))

        def local(tokens: Tensor) -> Tensor:
            return self.layout.local_length(tokens, self.kvp_rank, self.append_block, starts)

        length = torch.where(live, positions + 1, 0)
        known = local(length)
        counts = budget.of(known)
        sinks = torch.minimum(local(length.clamp(max=budget.sink_tokens)), counts)
        recent = (counts * budget.latest // MILLION - sinks).clamp(min=0)
        return known.int(), counts.int(), sinks.int(), recent.int()

    @property
    def grid(self) -> dict[str, int]:
        """What kernels need to know of it."""
        return {"kvp": self.layout.kvp, "kvp_rank": self.kvp_rank, "append_block": self.append_block}

    def most_blocks(self, budget: BlockBudget, max_length: int) -> int:
        """Pages that a query of a sequence of up to `max_length` tokens reads, at most."""

        def touched(tokens: int) -> int:
            """Local pages that a run of so many tokens can lie in."""
            cycle = self.append_block * self.layout.kvp
            return -(-(tokens // cycle + 1) * self.append_block // self.page_size) + 1

        fixed = (budget.sink_blocks + budget.local_blocks) * self.page_size + MAX_QUERIES
        sparse = touched(budget.sink_blocks * self.page_size) + budget.topk + touched(fixed)
        return min(max(sparse, touched(min(budget.from_tokens, max_length))), touched(max_length) + budget.topk)

    @property
    def stripes(self) -> Stripes:
        """How sequences fill pages, on all ranks alike."""
        return Stripes(self.layout, self.append_block, self.page_size)


@dataclass(frozen=True)
class LayerCache:
    """One layer's part of the cache on this rank.

    Attributes:
        index: of the layer.
        keys: [pages, page_size, Hkv, D]; latents: [pages, page_size, R + P].
        values: like `keys`; latents: the first R of the numbers in `keys`.
        bounds: [pages, Hkv, 2, D], what stands for a page that is full of committed tokens; None where nobody chooses.
    """

    index: int
    keys: Tensor
    values: Tensor
    bounds: Tensor | None = None


class KVCache(Follower):
    """What this rank stores of the tokens it owns, paged, for every layer.

    Rank 0 says who has which page (`helix.block_tables`). Memory is left uninitialised: whatever reads it masks by
    length.

    Args:
        entries: shapes of what one token stores in one layer: `(Hkv, D)` twice for keys and values, `(R + P,)` for a
            latent.
        score: what stands for a page where queries choose, as `kernels.sparse.block_bounds` has it; None: nothing.
        tensors: the memory; None: allocated on `device`.

    Attributes:
        tensors: one for each entry, [layers, pages, page_size, *entry].
        bounds: [layers, pages, Hkv, 2, D], or None.
        remedy: what makes room for more.
    """

    remedy = "raise kv.tokens or kv.memory_fraction, or use a larger layout.kvp"

    def __init__(
        self,
        layers: int,
        pages: int,
        placement: Placement,
        entries: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        score: str | None = None,
        tensors: list[Tensor] | None = None,
    ) -> None:
        self.pages = pages
        self.placement = placement
        self.score = score
        self.device = device
        self.bytes_per_token = token_bytes(layers, entries, dtype)
        self.tensors = tensors or [
            torch.empty(layers, pages, placement.page_size, *entry, dtype=dtype, device=device) for entry in entries
        ]
        self.bounds: Tensor | None = None
        if score is not None:
            heads, dim = entries[0]
            self.bounds = torch.empty(layers, pages, heads, 2, dim, dtype=dtype, device=device)

    def layer(self, index: int, latent: int | None = None, prefill: bool = False) -> LayerCache:
        """One layer's part; `latent` is R of a cache of latents; `prefill`: for a step of prompts."""
        keys = self.tensors[0][index]
        values = self.tensors[1][index] if latent is None else keys[..., :latent]
        return LayerCache(index, keys, values, None if self.bounds is None else self.bounds[index])

    def fold(self, span: Span) -> None:
        """Writes the bounds of pages that are full now, in all layers; nothing where nobody chooses."""
        if self.bounds is not None and self.score is not None:
            fold_blocks(
                self.tensors[0], self.bounds, span.tables, span.starts, span.before, span.after,
                span.most // self.placement.page_size + 1, self.score, **self.placement.grid,
            )  # fmt: skip

    def prefilled(self, chunk: Prefilled) -> None:
        self.fold(chunk.span)

    def takes(self, kind: StepKind) -> bool:
        return self.bounds is not None

    def taken(self, step: Taken) -> None:
        self.fold(step.span)

    def close(self) -> None:
        """Gives back what is not torch's; no kernel may use the cache any more. A second call does nothing."""

    def copy(self, sources: Tensor, to: Tensor) -> None:
        for tensor in [*self.tensors, *([] if self.bounds is None else [self.bounds])]:
            tensor[:, to] = tensor[:, sources]


def page_bytes(
    layers: int, entries: Sequence[tuple[int, ...]], dtype: torch.dtype, page_size: int, bounds: bool = False
) -> int:
    """Bytes of a page in the caches of all layers, and of what stands for it where queries choose."""
    return (
        token_bytes(layers, entries, dtype) * page_size + bounds * layers * 2 * math.prod(entries[0]) * dtype.itemsize
    )


def token_bytes(layers: int, entries: Sequence[tuple[int, ...]], dtype: torch.dtype) -> int:
    """Bytes that a token takes in the caches of all layers on the rank that stores it."""
    return layers * sum(math.prod(entry) for entry in entries) * dtype.itemsize


def free_bytes(device: torch.device) -> int:
    """Memory that nobody uses now: the GPU's, or an equal share of this host's for each of the ranks on it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # as torchrun sets it
    raise RuntimeError("/proc/meminfo has no MemAvailable: set kv.tokens and run on Linux")
