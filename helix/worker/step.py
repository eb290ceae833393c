"""`Step`, the tokens of a forward pass, and `DecodeState`, the state of all slots on the device.

Lengths, positions and block tables live on the device with fixed shapes, so that a step neither waits for the host nor
changes shape as sequences grow.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from comm.dual_batch_overlap import MicroBatch
from helix.config import MAX_QUERIES
from helix.engine.scheduler_output import BlockTableUpdate, NewRequest, SharedPrefix
from helix.kv_placement import ChunkPart, KVPlacement, PromptChunk
from helix.worker.graph_keys import SHARED_PREFIXES, PrefillGraphKey
from helix.worker.prefix_keys import PrefixKeys
from helix.worker.sampling import SamplingState
from helix.worker.sequence_observer import RequestReleased, SequenceObserver, Span
from helix.worker.transfers import to_device
from kernels.tokens.commit import PLACEHOLDER_TOKEN_ID, Candidates, commit

__all__ = ["PLACEHOLDER_TOKEN_ID", "SELECTED", "DecodeState", "Step"]

SELECTED = "selected"  # key in `Step.shared` of the tokens that an indexer selected, see `Step.selected`

CACHED, NEW = 1, 2  # tokens of a prefill step that are in pages already, or not; 0 is padding


@dataclass(frozen=True)
class StagedChunk:
    """GPU pages for the new tokens of a prefill step with KV offload.

    Attributes:
        tables: [n, P] int32: pages of the chunk, from the page on in which a sequence's part begins.
        edges: [N] int32: the first local token of that page, of each token's sequence.
    """

    parts: tuple[ChunkPart, ...]
    tables: Tensor
    edges: Tensor


@dataclass(frozen=True)
class RowShard:
    """Rows of a prefill step that this rank attends, see `helix.worker.row_shard`.

    Attributes:
        step: these rows, over gathered sequences.
        rows: N, rows of the whole step.
        local: which of them `step` has.
        rows_per_rank: the last rank has fewer if they do not divide evenly.
        run_length: consecutive tokens that lie together in gathered pages.
        pages: this rank's pages [n * columns] int64 of all sequences.
        slots: slot mapping of the whole step in gathered pages [N] int64, -1 for padding.
        gathered: gathered pages of a layer and the next one, by name and layer, with the event of their arrival.
    """

    step: Step
    rows: int
    local: slice
    rows_per_rank: int
    run_length: int
    pages: Tensor
    slots: Tensor
    gathered: dict[tuple[str, int], tuple[Tensor, torch.cuda.Event | None]]


@dataclass
class Step:
    """The N tokens of one forward pass.

    Attributes:
        tokens: token ids [N] int64.
        positions: global positions [N] int64.
        starts: kvp rank of the first block of each token's sequence [N] int64.
        live: [N], False for padding rows: they read and write no KV.
        slots: slots of the n sequences [n] int64.
        tables: by window, None for layers without one: pages [n, P] int32 of the n sequences.
        slot_mappings: by window: flat cache slots [N] int64, -1 for tokens that this rank does not store.
        cu_q: offsets [n + 1] int32 of each sequence's tokens (prefill), or None: N / n tokens each (decode).
        max_q: maximum tokens of a sequence in the step.
        max_k: upper bound of the keys that a sequence reads on this rank; prefill only.
        chunks: batch chunks whose attention overlaps the exchange of the chunk before (HOP-B).
        first: slot of the first sequence of a decode step; its slots are consecutive.
        micro_batch: which half of a prefill step it is under dual batch overlap; None: not split.
        padded: how many of the last sequences of a prefill step are padding, which reads no keys.
        row_shard: rows that this rank attends over whole sequences; None: all rows, over its shard of the KV.
        expands: queries read keys and values of their heads, expanded from latents.
        shared: tensors [N] that all layers read, by key.
        staged: GPU pages of a prefill step's new tokens, with KV offload.
        selects: indexers select tokens; if False, they only add keys, or do nothing after `with_selection`.
        num_tokens_across_dp: in mode dp, prefill tokens of each rank; empty: the same number on all ranks.
        prefixes: of all tokens of a decode step, the keys in prefixes that sequences share; None: each reads its own.
        drafted: number of preceding steps that the model drafted in, whose tokens are not committed yet.
    """

    placement: KVPlacement
    tokens: Tensor
    positions: Tensor
    starts: Tensor
    live: Tensor
    slots: Tensor
    tables: dict[int | None, Tensor]
    slot_mappings: dict[int | None, Tensor]
    cu_q: Tensor | None
    max_q: int
    max_k: int = 0
    chunks: int = 1
    first: int = 0
    micro_batch: MicroBatch | None = None
    padded: int = 0
    row_shard: RowShard | None = None
    expands: bool = False
    shared: dict[Hashable, tuple[Tensor, ...]] = field(default_factory=dict)
    staged: StagedChunk | None = None
    selects: bool = True
    num_tokens_across_dp: tuple[int, ...] = ()
    prefixes: PrefixKeys | None = None
    drafted: int = 0

    def pages(self, window: int | None) -> Tensor:
        """Returns the pages [n, P] int32 that layers with this window read: their ring's, if there is one."""
        return self.tables.get(window, self.tables[None])

    def slot_mapping(self, window: int | None) -> Tensor:
        """Returns the flat cache slots [N] int64 of new tokens in layers with this window, as in `slot_mappings`."""
        return self.slot_mappings.get(window, self.slot_mappings[None])

    @property
    def block_tables(self) -> Tensor:
        """Pages [n, P] int32 of layers without a window."""
        return self.tables[None]

    def once(self, key: Hashable, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Returns the tensors [N] of a key, computed by `make` the first time."""
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]

    @property
    def selected(self) -> tuple[Tensor, ...] | None:
        """The tokens that the latest indexer layer selected for each query; None: all.

        Cache slots [N, width] int32 on this rank in local order, and the valid columns [lo, hi) [N] int32.
        """
        return self.shared.get(SELECTED)

    def with_selection(self, selection: tuple[Tensor, ...]) -> Step:
        """Returns this step with an earlier selection of tokens, see `selected`, for all layers."""
        return replace(self, selects=False, shared=self.shared | {SELECTED: selection})

    def owners(self) -> Tensor | None:
        """Returns the index [N] int64 of each token's sequence in a prefill step; None in a decode step."""
        cu_q = self.cu_q
        if cu_q is None:
            return None
        rows = torch.arange(len(self.tokens), dtype=torch.int32, device=cu_q.device)
        return self.once("owners", lambda: (torch.searchsorted(cu_q[1:].contiguous(), rows, right=True),))[0]

    def micro_batches(self) -> tuple[Step, Step]:
        middle, end = (len(self.tokens) + 1) // 2, len(self.tokens)
        first, second = self.part(0, middle), self.part(middle, end)
        micro_batch = MicroBatch(first=True)
        return replace(first, micro_batch=micro_batch), replace(
            second, micro_batch=MicroBatch(False, micro_batch.events)
        )

    def part(self, begin: int, end: int) -> Step:
        assert self.cu_q is not None
        rows = slice(begin, end)
        return replace(
            self,
            tokens=self.tokens[rows],
            positions=self.positions[rows],
            starts=self.starts[rows],
            live=self.live[rows],
            slot_mappings={window: slots[rows] for window, slots in self.slot_mappings.items()},
            cu_q=self.cu_q.clamp(begin, end) - begin,
            max_q=min(self.max_q, end - begin),
            shared={},
        )

    def last_tokens(self) -> tuple[Tensor, Step]:
        """Returns the rows [m] int64 of each sequence's last token, and their prefill step.

        The first n are of the sequences. The rest is padding up to a power of two, so that fewer kernels are compiled;
        the row of a sequence without tokens is padding, too.
        """
        assert self.cu_q is not None
        n = len(self.slots)
        more = (1 << (n - 1).bit_length()) - n
        rows = F.pad((self.cu_q[1:].long() - 1).clamp(min=0), (0, more))
        last = replace(
            self,
            tokens=self.tokens[rows],
            positions=self.positions[rows],
            starts=self.starts[rows],
            live=self.live[rows] & F.pad(self.cu_q.diff() > 0, (0, more)),
            slots=F.pad(self.slots, (0, more), value=-1),
            tables={window: F.pad(table, (0, 0, 0, more)) if more else table for window, table in self.tables.items()},
            slot_mappings={window: slots[rows] for window, slots in self.slot_mappings.items()},
            cu_q=torch.arange(n + more + 1, dtype=torch.int32, device=rows.device),
            max_q=1,
            padded=self.padded + more,
            shared={},
        )
        return rows, last

    def bounds(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Returns the local keys `[lo, hi)` that each query reads, int32 [N]; computed once per window."""
        lo, hi = self.once(window, lambda: self.placement.bounds(self.positions, self.starts, self.live, window))
        return lo, hi


@dataclass(frozen=True)
class DraftSteps:
    """Consecutive steps of one token each, before their tokens are known.

    Attributes:
        joint: all steps concatenated, so that policies prepare all of them at once.
        rows: rows of a step; those beyond a sequence's limits are not `live`.
    """

    joint: Step
    rows: int

    def step(self, draft_index: int, tokens: Tensor) -> Step:
        rows = slice(draft_index * self.rows, (draft_index + 1) * self.rows)
        joint = self.joint
        return replace(
            joint,
            tokens=tokens,
            positions=joint.positions[rows],
            starts=joint.starts[rows],
            live=joint.live[rows],
            slot_mappings={window: slots[rows] for window, slots in joint.slot_mappings.items()},
            shared={key: tuple(per_token[rows] for per_token in made) for key, made in joint.shared.items()},
            drafted=draft_index,
        )


class DecodeState(SequenceObserver):
    """State of all slots on the device: `max_batch` rows, one per sequence.

    Args:
        history: tokens per sequence to store for drafters; 0 if none reads them.
        rings: pages of each slot's ring, to which new tokens are appended, by window; under None for layers without a
            window, with KV offload.

    Attributes:
        tokens: last token of each sequence [B] int64, not in the cache yet.
        lengths: tokens in the cache, over all ranks [B] int64.
        starts: kvp rank of the first block [B] int64.
        limits: tokens in the cache at which a sequence ends [B] int64.
        draft_limits: maximum drafts to verify [B] int64, set by rank 0.
        active: rows that decode [B] bool.
        history: all tokens of each sequence, the last one included [B, L] int32.
        block_tables: pages on this rank [B, P] int32.
        append_tables: by window, pages for new tokens of decode steps [B, P] int32.
        prefix_slots: for each shared prefix, the slot whose pages are read [G] int64.
        prefix_keys: the local keys `[lo, hi)` that each slot reads there [2, G, B] int32; none: 0, 0.
    """

    def __init__(
        self,
        max_batch: int,
        max_pages: int,
        placement: KVPlacement,
        device: torch.device,
        history: int = 0,
        rings: Mapping[int | None, int] | None = None,
    ) -> None:
        self.placement = placement
        self.tokens = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self.starts = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self.limits = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self.draft_limits = torch.full((max_batch,), MAX_QUERIES, dtype=torch.int64, device=device)
        self.active = torch.zeros(max_batch, dtype=torch.bool, device=device)
        self.block_tables = torch.zeros(max_batch, max(max_pages, 1), dtype=torch.int32, device=device)
        self.rings = dict(rings or {})
        self._windows = [window for window in self.rings if window is not None]
        self._slots = torch.arange(max_batch, device=device)
        columns = torch.arange(self.block_tables.shape[1], device=device)
        self.append_tables: dict[int | None, Tensor] = {None: self.block_tables}
        for window, pages in self.rings.items():
            self.append_tables[window] = (self._slots[:, None] * pages + columns % pages).int()
        self._starts = [0] * max_batch
        self.prefix_slots = torch.zeros(SHARED_PREFIXES[-1], dtype=torch.int64, device=device)
        self.prefix_keys = torch.zeros(2, SHARED_PREFIXES[-1], max_batch, dtype=torch.int32, device=device)
        self._prefixes: tuple[SharedPrefix, ...] = ()
        self.history = torch.zeros(max_batch, history, dtype=torch.int32, device=device)
        self.sampling = SamplingState.create(max_batch, device)

    def admit(self, *admissions: NewRequest) -> None:
        """Sets up the rows of new sequences; they decode once `activate` has set their first tokens."""
        self.write_tables(*(BlockTableUpdate(a.slot, 0, a.pages) for a in admissions))
        numbers = torch.tensor([(a.slot, a.start, a.limit) for a in admissions], dtype=torch.int64)
        rows, starts, limits = to_device(numbers.T.contiguous(), self.starts.device)
        self.starts.index_copy_(0, rows, starts)
        self.limits.index_copy_(0, rows, limits)
        self.active.index_fill_(0, rows, False)
        self.sampling.set(rows, [a.sampling for a in admissions])
        for a in admissions:
            self._starts[a.slot] = a.start
            if self.history.shape[1]:
                self.history[a.slot, : len(a.token_ids)] = to_device(torch.from_numpy(a.token_ids), self.history.device)

    def move_slots(self, sources: Sequence[int], to: Sequence[int]) -> None:
        old, new = to_device(torch.tensor((sources, to)), self.tokens.device)
        for of_slots in (
            self.tokens, self.lengths, self.starts, self.limits, self.draft_limits, self.active, self.block_tables,
            self.history, self.sampling.real.T, self.sampling.integer.T,
        ):  # fmt: skip
            of_slots[new] = of_slots[old]
        self.active.index_fill_(0, old, False)
        for source, slot in zip(sources, to, strict=True):
            self._starts[slot] = self._starts[source]

    def write_tables(self, *tables: BlockTableUpdate) -> None:
        width = self.block_tables.shape[1]
        offsets = [np.arange(len(t.pages)) + (t.slot * width + t.column) for t in tables]
        entries = np.stack([np.concatenate(offsets), np.concatenate([t.pages for t in tables])])
        at, pages = to_device(torch.from_numpy(entries), self.block_tables.device)
        self.block_tables.view(-1).index_copy_(0, at, pages.int())

    def set_prefixes(self, prefixes: tuple[SharedPrefix, ...]) -> None:
        """Sets the shared prefixes of the following decode steps."""
        if prefixes == self._prefixes:
            return
        slots, keys = (torch.zeros_like(x, device="cpu") for x in (self.prefix_slots, self.prefix_keys))
        for i, prefix in enumerate(prefixes):
            slots[i] = prefix.slots[0]
            keys[0, i, list(prefix.slots)] = prefix.begin * self.placement.page_size
            keys[1, i, list(prefix.slots)] = prefix.end * self.placement.page_size
        self.prefix_slots.copy_(to_device(slots, self.prefix_slots.device))
        self.prefix_keys.copy_(to_device(keys, self.prefix_keys.device))
        self._prefixes = prefixes

    def activate(self, rows: Tensor, tokens: Tensor, lengths: Tensor) -> None:
        """Starts decoding in `rows` [n] int64 with their first tokens, after prompts of `lengths` tokens."""
        self.tokens[rows] = tokens
        self.lengths[rows] = lengths
        self.active.index_fill_(0, rows, True)
        if self.history.shape[1]:
            self.history[rows, lengths] = tokens.int()

    def release(self, *released: RequestReleased) -> None:
        slots = torch.tensor([one.slot for one in released])
        self.active.index_fill_(0, to_device(slots, self.active.device), False)

    def span(self, rows: int, before: Tensor, after: Tensor, max_tokens: int) -> Span:
        """Returns the span of the first `rows` rows, from `before` to `after` tokens [rows], `max_tokens` at most."""
        return Span(self.block_tables[:rows], self.starts[:rows], before, after, max_tokens)

    def prompts_span(self, prompts: Sequence[PromptChunk]) -> Span:
        slots, before, after = (
            to_device(torch.tensor(x), self.lengths.device)
            for x in zip(*((p.slot, *p.written) for p in prompts), strict=True)
        )
        max_tokens = max(len(p.tokens) for p in prompts)
        return Span(self.block_tables[slots], self.starts[slots], before, after, max_tokens)

    def release_event(self, row: int) -> RequestReleased:
        at = slice(row, row + 1)
        return RequestReleased(row, self.block_tables[row], self.starts[at], self.lengths[at], self.history[row])

    def within_limits(self, drafts: Tensor) -> Tensor:
        """Returns drafts [rows, n] with -1 in place of those beyond a row's `draft_limits` or its end."""
        rows, n = drafts.shape
        return torch.where(torch.arange(n, device=drafts.device) < self.max_drafts(rows)[:, None], drafts, -1)

    def max_drafts(self, rows: int) -> Tensor:
        """Returns the maximum drafts [rows] int64 that a step may verify: within `draft_limits` and before the end."""
        return torch.minimum(self.draft_limits[:rows], self.limits[:rows] - self.lengths[:rows] - 1)

    def uncounted(self, rows: int) -> Tensor:
        """Returns the last tokens [rows] int64 of decoding rows, -1 for others; penalties have not counted them yet."""
        return torch.where(self.active[:rows], self.tokens[:rows], -1)

    def decode_step(self, rows: int, drafts: Tensor | None = None, chunks: int = 1, prefixes: int = 0) -> Step:
        """Creates the step that appends the last token of each of the first `rows` rows and predicts the next.

        Args:
            drafts: [rows, n] possible next tokens, which are appended and continued as well; -1 is padding.
            prefixes: number of shared prefixes, of those set by `set_prefixes`.
        """
        lengths, starts, active = self.lengths[:rows], self.starts[:rows], self.active[:rows]
        tokens, positions, owner = self.tokens[:rows], lengths, None
        if drafts is not None:
            each = 1 + drafts.shape[1]
            offsets = torch.arange(each, device=drafts.device)
            owner = torch.arange(rows, device=drafts.device).repeat_interleave(each)
            tokens = torch.cat((tokens[:, None], drafts), 1).flatten()
            positions = (lengths[:, None] + offsets).flatten()
            starts, active = starts[owner], active[owner] & (tokens >= 0)
        prefix_keys: PrefixKeys | None = None
        if prefixes:
            keys = self.prefix_keys[:, :prefixes, :rows]
            keys = torch.where(active, keys if owner is None else keys[:, :, owner], 0)
            tables = self.block_tables[self.prefix_slots[:prefixes]]
            prefix_keys = PrefixKeys(tables, keys[0], keys[1], keys[1].amax(0))
        return Step(
            self.placement,
            tokens=tokens,
            positions=positions,
            starts=starts,
            live=active,
            slots=self._slots[:rows],
            tables=self._tables(rows),
            slot_mappings={
                window: self.placement.compute_slot_mapping(positions, starts, active, table[:rows], owner)
                for window, table in self.append_tables.items()
            },
            cu_q=None,
            max_q=len(tokens) // rows,
            chunks=chunks,
            prefixes=prefix_keys,
        )

    def draft_steps(self, rows: int, count: int) -> DraftSteps:
        draft_index = torch.arange(count, device=self.lengths.device)[:, None]
        owner = torch.arange(rows, device=self.lengths.device).repeat(count)
        positions = (self.lengths[:rows] + draft_index).flatten()
        live = (self.active[:rows] & (draft_index < self.max_drafts(rows))).flatten()
        starts = self.starts[:rows].repeat(count)
        return DraftSteps(
            Step(
                self.placement,
                tokens=torch.empty_like(positions),
                positions=positions,
                starts=starts,
                live=live,
                slots=self._slots[:rows],
                tables=self._tables(rows),
                slot_mappings={
                    window: self.placement.compute_slot_mapping(positions, starts, live, table[:rows], owner)
                    for window, table in self.append_tables.items()
                },
                cu_q=None,
                max_q=1,
            ),
            rows,
        )

    def commit(
        self, rows: int, candidates: Candidates, drafts: Tensor | None = None, outcome: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Samples and commits the tokens of a decode step of the first `rows` rows; only this advances `lengths`.

        A draft is accepted if it equals the token sampled at its position and all drafts before it are accepted. The
        next step overwrites the KV of rejected drafts.

        Args:
            candidates: for the tokens after the last one and after each draft.
            drafts: [rows, n], -1 for padding; None: no drafts.
            outcome: `Draft.forced_tokens`.

        Returns:
            The committed tokens of each row, then PLACEHOLDER_TOKEN_ID [rows, 1 + n]; the lengths before [rows].
        """
        first = slice(0, rows)
        return commit(
            candidates,
            drafts,
            outcome,
            self.tokens[first],
            self.lengths[first],
            self.limits[first],
            self.active[first],
            self.history[first],
        )

    def _tables(self, rows: int) -> dict[int | None, Tensor]:
        return {
            window: (self.block_tables if window is None else table)[:rows]
            for window, table in self.append_tables.items()
        }

    def prefill_step(self, chunks: Sequence[PromptChunk], num_tokens_across_dp: tuple[int, ...] = ()) -> Step:
        counts = [len(chunk.tokens) for chunk in chunks]
        size = PrefillGraphKey(sum(counts), len(counts), max(counts), self.max_keys(chunks))
        step = replace(
            self.packed_step(self.packed(chunks, size), size), num_tokens_across_dp=num_tokens_across_dp, padded=0
        )
        if None not in self.rings:
            return step
        assert step.cu_q is not None
        sequence = torch.repeat_interleave(step.cu_q.diff(), output_size=size.tokens)
        staged = self._stage(self.placement.parts(chunks, self._firsts(chunks), whole=False))
        cached = to_device(
            torch.cat([torch.arange(c.begin, c.end) < c.num_cached_tokens for c in chunks]), self.tokens.device
        )
        slots = self.placement.compute_slot_mapping(step.positions, step.starts, ~cached, staged.tables, sequence)
        return replace(step, slot_mappings=step.slot_mappings | {None: slots}, staged=staged)

    def parts(self, chunks: Sequence[PromptChunk]) -> tuple[ChunkPart, ...]:
        """Locates the tokens of a prefill step in the pages of layers with windows; empty if there are none."""
        return self.placement.parts(chunks, self._firsts(chunks), whole=True) if self._windows else ()

    def _firsts(self, chunks: Sequence[PromptChunk]) -> list[int]:
        return [self._starts[chunk.slot] for chunk in chunks]

    def max_keys(self, chunks: Sequence[PromptChunk]) -> int:
        """Computes an upper bound of the keys that a sequence of a prefill step reads on this rank."""
        longest = max(chunk.end for chunk in chunks)
        return self.placement.layout.local_length(longest, 0, self.placement.append_block)

    def packed(self, chunks: Sequence[PromptChunk], size: PrefillGraphKey) -> Tensor:
        """Packs all host data of a prefill step into one int64 tensor on the device; see `packed_step`."""
        counts = [len(chunk.tokens) for chunk in chunks]
        total, n = sum(counts), len(chunks)
        assert total == size.tokens or (total < size.tokens and n < size.sequences), "padding is another sequence's"
        packed = torch.zeros(_packed_words(size), dtype=torch.int64)
        tokens, positions, owner, state, slots, columns, pages, ends = _unpacked(packed, size)
        torch.cat([chunk.tokens for chunk in chunks], out=tokens[:total])
        torch.cat([torch.arange(chunk.begin, chunk.end) for chunk in chunks], out=positions[:total])
        owner[:total] = torch.repeat_interleave(torch.arange(n), torch.tensor(counts))
        owner[total:] = n
        cached = torch.tensor([chunk.num_cached_tokens for chunk in chunks])
        state[:total] = torch.where(positions[:total] < cached[owner[:total]], CACHED, NEW)
        slots[:n] = torch.tensor([chunk.slot for chunk in chunks])
        slots[n:] = -1
        for i, part in enumerate(self.parts(chunks)):
            columns[i], pages[i] = part.columns.start, part.page
        ends[1 : n + 1] = torch.tensor(counts).cumsum(0)
        ends[n + 1 :] = size.tokens
        return to_device(packed, self.tokens.device)

    def packed_step(self, packed: Tensor, size: PrefillGraphKey) -> Step:
        """Creates a prefill step from the result of `packed`; the launches depend only on `size`."""
        tokens, positions, owner, state, slots, columns, pages, ends = _unpacked(packed, size)
        starts, table, live = self.starts[slots][owner], self.block_tables[slots], state > 0
        tables: dict[int | None, Tensor] = {None: table}
        new = self.placement.compute_slot_mapping(positions, starts, state == NEW, table, owner)
        slot_mappings: dict[int | None, Tensor] = {None: new}
        for window in self._windows:
            tables[window] = self._ring_tables(window, slots, columns, pages)
            slot_mappings[window] = self.placement.compute_slot_mapping(positions, starts, live, tables[window], owner)
        return Step(
            self.placement,
            tokens=tokens,
            positions=positions,
            starts=starts,
            live=live,
            slots=slots,
            tables=tables,
            slot_mappings=slot_mappings,
            cu_q=ends.int(),
            max_q=size.max_tokens,
            max_k=size.keys,
            padded=1,
            expands=size.expands,
        )

    def padding_step(self, num_tokens_across_dp: tuple[int, ...]) -> Step:
        """Creates a prefill step of one padding row, for a DP rank without prompts while others prefill."""
        nothing = torch.zeros(1, dtype=torch.int64, device=self.tokens.device)
        return Step(
            self.placement,
            tokens=nothing,
            positions=nothing,
            starts=nothing,
            live=nothing > 0,
            slots=nothing,
            tables=self._tables(1),
            slot_mappings=dict.fromkeys(self.append_tables, nothing - 1),
            cu_q=self._slots.new_tensor([0, 1]).int(),
            max_q=1,
            max_k=1,
            num_tokens_across_dp=num_tokens_across_dp,
        )

    def _ring_tables(self, window: int | None, slots: Tensor, first: Tensor, page: Tensor) -> Tensor:
        """Returns a window's pages [n, P] int32 in a prefill step: pages of the ring, then pages of the chunk.

        Args:
            first: column [n] in which each sequence's part begins; it is in the ring.
            page: the part's first page [n] among the pages of all chunks.
        """
        columns = torch.arange(self.block_tables.shape[1], device=slots.device)
        chunk_pages = len(self.active) * self.rings[window] + page[:, None] + columns - first[:, None]
        return torch.where(columns > first[:, None], chunk_pages, self.append_tables[window][slots]).int()

    def _stage(self, parts: tuple[ChunkPart, ...]) -> StagedChunk:
        columns = self.block_tables.shape[1]
        firsts = torch.tensor([part.columns.start for part in parts])
        tables = torch.tensor([part.page for part in parts])[:, None] - firsts[:, None] + torch.arange(columns)
        counts = torch.tensor([part.queries.stop - part.queries.start for part in parts])
        edges = (firsts * self.placement.page_size).repeat_interleave(counts)
        return StagedChunk(parts, *(to_device(x.int(), self.tokens.device) for x in (tables, edges)))


def _packed_words(size: PrefillGraphKey) -> int:
    return 4 * _stride(size) + 4 * size.sequences + 1


def _stride(size: PrefillGraphKey) -> int:
    return size.tokens + size.tokens % 2  # kernels want rows at multiples of 16 bytes


def _unpacked(packed: Tensor, size: PrefillGraphKey) -> tuple[Tensor, ...]:
    """Returns views: tokens, positions, sequence, CACHED or NEW [N]; slots, columns, pages [n]; offsets [n + 1].

    Padding sequences have slot -1.
    """
    n = size.sequences
    rows, rest = packed.split([4 * _stride(size), 4 * n + 1])
    per_token = rows.view(4, -1)[:, : size.tokens]
    return *per_token, *rest.split([n, n, n, n + 1])
