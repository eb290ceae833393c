"""`SchedulerOutput` and its parts: all that the ranks need to execute a batch. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import numpy as np

from helix.kv_placement import NO_PAGES
from helix.sampling_params import SamplingParams
from helix.worker.graph_keys import DecodeGraphKey


@dataclass(frozen=True, eq=False)
class NewRequest:
    """Admits a sequence to a slot.

    Attributes:
        length: tokens of its prompt and, after a preemption, those generated before.
        token_ids: these tokens, int32 [length], if ranks need them for drafts or penalties; else int32 [0].
        start: kvp rank of its first block.
        pages: the beginning of its block table, int32 [m], the same on every rank.
        limit: tokens in the cache at which it ends.
        num_cached_tokens: tokens whose pages are shared or copied.
        num_computed_tokens: where prefill begins: `num_cached_tokens`, or earlier if windows or states need
            recomputing.
        copy_from, copy_to: pages to copy on every rank, in the order of admissions.
        num_output_tokens: how many of the last tokens of `length` were generated.
        token_bitmask: tokens that it may sample next, int32 [W], see `Grammar`; None: all.
        snapshot_index: snapshot from which its states resume; -1: they begin with zeros.
        cache_salt: from 0 to 2^39 - 1; only sequences with equal ones may learn from each other, see `Request`.
    """

    id: str | int
    slot: int
    length: int
    token_ids: np.ndarray
    start: int
    pages: np.ndarray
    reserved: int
    limit: int
    sampling: SamplingParams
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    copy_from: np.ndarray = field(default_factory=lambda: NO_PAGES)
    copy_to: np.ndarray = field(default_factory=lambda: NO_PAGES)
    num_output_tokens: int = 0
    token_bitmask: np.ndarray | None = None
    snapshot_index: int = -1
    cache_salt: int = 0


@dataclass(frozen=True, eq=False)
class BlockTableUpdate:
    """New pages, int32 [n], of a slot's block table from `column` on; other columns stay."""

    slot: int
    column: int
    pages: np.ndarray


@dataclass(frozen=True, eq=False)
class PrefillChunk:
    """Prompt tokens `[begin, end)` of a slot, int32 [end - begin].

    Attributes:
        num_cached_tokens: tokens of the sequence whose KV is in its pages already.
        snapshot_index: where to save a snapshot of its states after `end`; -1: nowhere.
        evict_to: where to move the snapshot that was there; -1: there was none, or it is dropped.
        logprob_token_ids: prompt tokens, int32 [m], whose log-probabilities are reported; the i-th follows the i-th of
            `tokens`.
    """

    slot: int
    begin: int
    end: int
    last: bool
    tokens: np.ndarray
    num_cached_tokens: int = 0
    snapshot_index: int = -1
    evict_to: int = -1
    logprob_token_ids: np.ndarray = field(default_factory=lambda: NO_PAGES)


@dataclass(frozen=True)
class SharedPrefix:
    """Pages that several decoding sequences share, and that a step reads once for all of them.

    Attributes:
        slots: of the sequences, ascending.
        begin, end: columns `[begin, end)` of their block tables, whole stripes.
    """

    slots: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class StripeHeader:
    """What a stripe on disk holds.

    Attributes:
        key, parent: its chain hash, and that of the stripe before it (`helix.engine.stripe_store`).
        generation: number of its write, which is greater than those of earlier ones.
        start: kvp rank of the first block of its sequence.
        depth: tokens before it.
        tokens: its tokens, int32; empty where they are not known.
    """

    key: bytes
    parent: bytes
    generation: int
    start: int
    depth: int
    tokens: np.ndarray = field(default_factory=lambda: NO_PAGES)


@dataclass(frozen=True, eq=False)
class StripeMove:
    """Copies n stripes of prefixes between pages, host memory and disk; every rank reports when it is done.

    Attributes:
        number: of the report (`Communicator.report`): `(number, seconds, indices of stripes that failed)`.
        kind: store: pages to slabs, after this batch; load: slabs to pages, after this batch's admissions; write: slabs
            to records; read: records to slabs.
        slabs: int32 [n].
        pages: int32 [n, p], the p pages of each stripe, of stores and loads.
        snapshot: of stores and loads: the slabs hold the parts of this snapshot, in order; -1: they hold pages.
        records, headers: of writes and reads, n each.
    """

    number: int
    kind: MoveKind
    slabs: np.ndarray
    pages: np.ndarray = field(default_factory=lambda: NO_PAGES)
    records: tuple[int, ...] = ()
    headers: tuple[StripeHeader, ...] = ()
    snapshot: int = -1


MoveKind = Literal["store", "load", "write", "read"]

_AtSlot = TypeVar("_AtSlot", NewRequest, BlockTableUpdate, PrefillChunk)


@dataclass(frozen=True)
class StepPlan:
    """Plan of a run of decode steps.

    Attributes:
        tokens: expected tokens per sequence and step.
        steps: maximum steps of the run; None: no limit.
        draft_limits: maximum drafts to verify in slots 0, 1, ..; empty: unchanged.
    """

    drafts: int = 0
    tokens: float = 1.0
    steps: int | None = None
    draft_limits: tuple[int, ...] = ()
    seconds: float | None = None


@dataclass(frozen=True)
class SchedulerOutput:
    """Work for all ranks, executed in the order of the attributes; decode steps run back to back.

    If the previous batch deferred sampling, its tokens are sampled first.

    Attributes:
        slot_moves: (from, to) of sequences that change their slots, so that a step has fewer rows.
        kind: of the decode steps; first tokens of prompts are sampled alike.
        row_tokens: context tokens per row, averaged over the rows of a step.
        defers_sampling: there is one decode step, and it stops at its logits: the token masks depend on tokens that
            rank 0 has not read.
        token_bitmasks: by slot, tokens allowed in the deferred step, int32 [W], see `Grammar`.
        num_tokens_across_dp: in mode dp, prefill tokens of each rank; empty: the same number on all ranks.
        capture_graph: no request is served: capture a prefill size that ran eagerly.
        max_logprob_tokens: in mode dp, the maximum over ranks of scored prompt tokens; else 0.
        moves: copies of prefixes, which run beside later batches.
        drains_moves: wait until all moves are done: pages and slabs are free from here on.
        shared_prefixes: of the decode steps, at most `kind.shared_prefixes` on each DP rank.
    """

    number: int
    released_slots: tuple[int, ...]
    slot_moves: tuple[tuple[int, int], ...]
    table_updates: tuple[BlockTableUpdate, ...]
    new_requests: tuple[NewRequest, ...]
    prefill_chunks: tuple[PrefillChunk, ...]
    decode_steps: int
    kind: DecodeGraphKey = field(default_factory=DecodeGraphKey)
    row_tokens: int = 0
    draft_limits: tuple[int, ...] = ()
    defers_sampling: bool = False
    token_bitmasks: dict[int, np.ndarray] = field(default_factory=dict)
    num_tokens_across_dp: tuple[int, ...] = ()
    capture_graph: bool = False
    max_logprob_tokens: int = 0
    shared_prefixes: tuple[SharedPrefix, ...] = ()
    moves: tuple[StripeMove, ...] = ()
    drains_moves: bool = False

    @classmethod
    def empty(cls, retire: tuple[int, ...] = (), capture_graph: bool = False) -> SchedulerOutput:
        """Creates a batch that computes nothing."""
        return cls(0, retire, (), (), (), (), 0, capture_graph=capture_graph)

    def for_dp_rank(self, rank: int, ranks: int) -> SchedulerOutput:
        """Returns the part of one of `ranks` DP ranks: slot s is slot `s // ranks` of rank `s % ranks`.

        All DP ranks launch the same decode steps, with as many rows and without drafts; each prefills its own prompts.
        """
        if ranks == 1:
            return self

        def local(events: tuple[_AtSlot, ...]) -> tuple[_AtSlot, ...]:
            return tuple(replace(e, slot=e.slot // ranks) for e in events if e.slot % ranks == rank)

        counts, scored = [0] * ranks, [0] * ranks
        for chunk in self.prefill_chunks:
            counts[chunk.slot % ranks] += chunk.end - chunk.begin
            scored[chunk.slot % ranks] += len(chunk.logprob_token_ids)
        return replace(
            self,
            released_slots=tuple(slot // ranks for slot in self.released_slots if slot % ranks == rank),
            slot_moves=tuple((old // ranks, new // ranks) for old, new in self.slot_moves if new % ranks == rank),
            table_updates=local(self.table_updates),
            new_requests=local(self.new_requests),
            prefill_chunks=local(self.prefill_chunks),
            token_bitmasks={slot // ranks: mask for slot, mask in self.token_bitmasks.items() if slot % ranks == rank},
            num_tokens_across_dp=tuple(counts) if self.prefill_chunks else (),
            max_logprob_tokens=max(scored),
            shared_prefixes=tuple(
                replace(prefix, slots=tuple(slot // ranks for slot in prefix.slots))
                for prefix in self.shared_prefixes
                if prefix.slots[0] % ranks == rank
            ),
        )
