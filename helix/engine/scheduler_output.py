"""Decisions of rank 0, which all ranks execute.

Plain data, no torch: a `SchedulerOutput` is all that the ranks need to act alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from helix.kv_placement import NO_PAGES
from helix.sampling_params import SamplingParams
from helix.worker.graph_keys import DecodeGraphKey


@dataclass(frozen=True, eq=False)
class NewRequest:
    """Admission of a sequence to a slot.

    Attributes:
        length: tokens of its prompt and, after a preemption, those that it had drawn.
        text: these tokens, int32 [length], if ranks need them for drafts or penalties; else int32 [0].
        start: kvp rank of its first block.
        pages: the beginning of its table, int32 [m], the same on every rank.
        reserved: tokens that these pages have room for.
        limit: tokens in the cache at which it ends.
        known: number of its first tokens that are in its pages already, or in those to copy.
        resumes: position of the first token to compute: `num_cached_tokens`, or less if layers keep more than pages.
        copy_from, copy_to: pages to copy on every rank, in the order of admissions.
        drawn: number of the last tokens of `length` that were drawn.
        allowed: mask of the tokens that it may draw next, int32 [W], see `Grammar`; None: all.
        state: place of the snapshot with which its states begin; -1: they begin with zeros.
        salt: number from 0 to 2^39 - 1; equal ones may learn from each other, see `Request`.
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
    """New pages, int32 [n], of a slot's table from a column on; other columns stay."""

    slot: int
    column: int
    pages: np.ndarray


@dataclass(frozen=True, eq=False)
class PrefillChunk:
    """Prompt tokens `[begin, end)` of a slot, int32 [end - begin].

    Attributes:
        last: whether the prompt ends with them.
        known: number of the sequence's first tokens that are in its pages already.
        saves: place of the snapshot that is taken of its states behind them; -1: none is.
        moves: place to which the snapshot that was there moves before; -1: there was none, or it goes.
        scored: prompt tokens, int32 [m], whose log-probabilities are reported: each follows one of its first m tokens.
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


_AtSlot = TypeVar("_AtSlot", NewRequest, BlockTableUpdate, PrefillChunk)


@dataclass(frozen=True)
class StepPlan:
    """Plan of a run of decode steps.

    Attributes:
        drafts: tokens that each step proposes for each sequence.
        tokens: expected tokens per sequence and step.
        steps: most steps in one decision; None: no limit.
        draft_limits: most drafts verified in slots 0, 1, ..; empty: unchanged.
        seconds: predicted seconds of a step; None if unknown.
    """

    drafts: int = 0
    tokens: float = 1.0
    steps: int | None = None
    draft_limits: tuple[int, ...] = ()
    seconds: float | None = None


@dataclass(frozen=True)
class SchedulerOutput:
    """Work of all ranks, in the order of the attributes; the decode steps run back to back.

    If the previous decision has a held step, its tokens are drawn first. A held step is one whose logits are computed
    and whose tokens are not drawn yet.

    Attributes:
        masks: masks of the tokens that slots may draw in the held step, int32 [W], see `Grammar`.
        tables: table writes of slots that are in use before `new_requests`.
        kind: kind of the decode steps; the prompts' first tokens are drawn in the same way.
        row_tokens: tokens of the decode steps' sequences, per row of a step.
        draft_limits: limits of the decode steps; see `StepPlan`.
        defers_sampling: the only decode step is held: the allowed tokens depend on tokens that rank 0 has not read.
        counts: of a rank's share in mode dp: prompt tokens of each rank; empty: as many on all ranks.
        captures: nobody is served: a size of chunks that ran eagerly is captured.
        scored: in mode dp, the largest number of scored tokens of a rank; else 0.
    """

    number: int
    released_slots: tuple[int, ...]
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

    @classmethod
    def empty(cls, retire: tuple[int, ...] = (), capture_graph: bool = False) -> SchedulerOutput:
        """Creates a decision that computes nothing for anybody."""
        return cls(0, retire, (), (), (), 0, capture_graph=capture_graph)

    def for_dp_rank(self, rank: int, ranks: int) -> SchedulerOutput:
        """Returns the part of one of `ranks` ranks that own sequences: slot s is slot `s // ranks` of rank `s % ranks`.

        All ranks launch the same steps, of the same rows and without drafts; a chunk has what each rank's prompts have.
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
            table_updates=local(self.table_updates),
            new_requests=local(self.new_requests),
            prefill_chunks=local(self.prefill_chunks),
            token_bitmasks={slot // ranks: mask for slot, mask in self.token_bitmasks.items() if slot % ranks == rank},
            num_tokens_across_dp=tuple(counts) if self.prefill_chunks else (),
            max_logprob_tokens=max(scored),
        )
