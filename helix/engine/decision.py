"""Decisions of rank 0, which all ranks execute.

Plain data, no torch: a `Decision` is all that the ranks need to act alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from helix.placement import NO_PAGES
from helix.sampling_params import SamplingParams
from helix.worker.graph_keys import StepKind


@dataclass(frozen=True, eq=False)
class Admission:
    """Admission of a sequence to a slot.

    Attributes:
        length: tokens of its prompt and, after a preemption, those that it had drawn.
        text: these tokens, int32 [length], if ranks need them for drafts or penalties; else int32 [0].
        start: kvp rank of its first block.
        pages: the beginning of its table, int32 [m], the same on every rank.
        reserved: tokens that these pages have room for.
        limit: tokens in the cache at which it ends.
        known: number of its first tokens that are in its pages already, or in those to copy.
        resumes: position of the first token to compute: `known`, or less if layers keep more than pages.
        copy_from, copy_to: pages to copy on every rank, in the order of admissions.
        drawn: number of the last tokens of `length` that were drawn.
        allowed: mask of the tokens that it may draw next, int32 [W], see `Grammar`; None: all.
        state: place of the snapshot with which its states begin; -1: they begin with zeros.
        salt: number from 0 to 2^39 - 1; equal ones may learn from each other, see `Request`.
    """

    id: str | int
    slot: int
    length: int
    text: np.ndarray
    start: int
    pages: np.ndarray
    reserved: int
    limit: int
    sampling: SamplingParams
    known: int = 0
    resumes: int = 0
    copy_from: np.ndarray = field(default_factory=lambda: NO_PAGES)
    copy_to: np.ndarray = field(default_factory=lambda: NO_PAGES)
    drawn: int = 0
    allowed: np.ndarray | None = None
    state: int = -1
    salt: int = 0


@dataclass(frozen=True, eq=False)
class TableWrite:
    """New pages, int32 [n], of a slot's table from a column on; other columns stay."""

    slot: int
    column: int
    pages: np.ndarray


@dataclass(frozen=True, eq=False)
class Segment:
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
    known: int = 0
    saves: int = -1
    moves: int = -1
    scored: np.ndarray = field(default_factory=lambda: NO_PAGES)


_AtSlot = TypeVar("_AtSlot", Admission, TableWrite, Segment)


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
class Decision:
    """Work of all ranks, in the order of the attributes; the decode steps run back to back.

    If the previous decision has a held step, its tokens are drawn first. A held step is one whose logits are computed
    and whose tokens are not drawn yet.

    Attributes:
        masks: masks of the tokens that slots may draw in the held step, int32 [W], see `Grammar`.
        tables: table writes of slots that are in use before `admit`.
        kind: kind of the decode steps; the prompts' first tokens are drawn in the same way.
        row_tokens: tokens of the decode steps' sequences, per row of a step.
        draft_limits: limits of the decode steps; see `StepPlan`.
        holds_draw: the only decode step is held: the allowed tokens depend on tokens that rank 0 has not read.
        counts: of a rank's share in mode dp: prompt tokens of each rank; empty: as many on all ranks.
        captures: nobody is served: a size of chunks that ran eagerly is captured.
        scored: in mode dp, the largest number of scored tokens of a rank; else 0.
    """

    number: int
    retire: tuple[int, ...]
    tables: tuple[TableWrite, ...]
    admit: tuple[Admission, ...]
    prefill: tuple[Segment, ...]
    decode_steps: int
    kind: StepKind = field(default_factory=StepKind)
    row_tokens: int = 0
    draft_limits: tuple[int, ...] = ()
    holds_draw: bool = False
    masks: dict[int, np.ndarray] = field(default_factory=dict)
    counts: tuple[int, ...] = ()
    captures: bool = False
    scored: int = 0

    @classmethod
    def nothing(cls, retire: tuple[int, ...] = (), captures: bool = False) -> Decision:
        """Creates a decision that computes nothing for anybody."""
        return cls(0, retire, (), (), (), 0, captures=captures)

    def share(self, rank: int, ranks: int) -> Decision:
        """Returns the part of one of `ranks` ranks that own sequences: slot s is slot `s // ranks` of rank `s % ranks`.

        All ranks launch the same steps, of the same rows and without drafts; a chunk has what each rank's prompts have.
        """
        if ranks == 1:
            return self

        def own(events: tuple[_AtSlot, ...]) -> tuple[_AtSlot, ...]:
            return tuple(replace(e, slot=e.slot // ranks) for e in events if e.slot % ranks == rank)

        counts, scored = [0] * ranks, [0] * ranks
        for segment in self.prefill:
            counts[segment.slot % ranks] += segment.end - segment.begin
            scored[segment.slot % ranks] += len(segment.scored)
        return replace(
            self,
            retire=tuple(slot // ranks for slot in self.retire if slot % ranks == rank),
            tables=own(self.tables),
            admit=own(self.admit),
            prefill=own(self.prefill),
            masks={slot // ranks: mask for slot, mask in self.masks.items() if slot % ranks == rank},
            counts=tuple(counts) if self.prefill else (),
            scored=max(scored),
        )
