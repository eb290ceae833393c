"""What rank 0 tells all ranks to do next.

Plain data, no torch: a `Decision` is all that the ranks need to do the same thing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from helix.events.sampling_params import SamplingParams
from helix.placement import NO_PAGES


@dataclass(frozen=True, eq=False)
class Admission:
    """A sequence that takes a slot.

    Attributes:
        length: tokens of its prompt and, where it comes back after a preemption, those that it had drawn as well.
        text: these tokens, int32 [length], where ranks look back at them, for drafts or penalties; else int32 [0].
        start: kvp rank of its first block.
        pages: the beginning of its table, int32 [m], the same on every rank.
        reserved: tokens for which these are taken.
        limit: tokens in the cache at which it ends.
        known: the first so many tokens are in its pages already, or in those to copy.
        resumes: position of the first token that is computed: behind these, or before, where pages are not all that
            layers keep.
        copy_from, copy_to: pages to copy on every rank, in the order of admissions.
        drawn: so many of `length` were drawn, the last ones.
        allowed: which tokens it may draw behind them, int32 [W], as of `Grammar`; None: all.
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


@dataclass(frozen=True, eq=False)
class TableWrite:
    """Pages, int32 [n], that a slot's table has from a column on; the others stay."""

    slot: int
    column: int
    pages: np.ndarray


@dataclass(frozen=True, eq=False)
class Segment:
    """Prompt tokens `[begin, end)` of a slot, int32 [end - begin].

    Attributes:
        last: the prompt ends with them.
        known: the first so many tokens of the sequence are in its pages already.
    """

    slot: int
    begin: int
    end: int
    last: bool
    tokens: np.ndarray
    known: int = 0


@dataclass(frozen=True, order=True)
class StepKind:
    """A kind of decode step: what its captured graph is made for.

    Attributes:
        rows: slots [0, rows) take part: a power of two, or all, so that few graphs serve all.
        drafts: tokens that the step verifies for each sequence.
        stochastic: some sequence has a temperature above 0.
        filtered: some sequence has top-k, top-p or min-p.
        shaped: some sequence wants something of its logits, or log-probabilities.
        sparse: attention chooses which keys it reads: some sequence is long enough.
        chunks: runs of sequences whose attention and exchange take turns (HOP-B).
    """

    rows: int = 0
    drafts: int = 0
    stochastic: bool = False
    filtered: bool = False
    shaped: bool = False
    sparse: bool = False
    chunks: int = 1

    @classmethod
    def of(cls, sampling: Collection[SamplingParams], **more: Any) -> StepKind:
        """Makes the kind of a step that draws for all of these; `more` is its other attributes."""
        return cls(
            stochastic=any(not s.is_greedy for s in sampling),
            filtered=any(s.is_filtered for s in sampling),
            shaped=any(s.is_shaped for s in sampling),
            **more,
        )


@dataclass(frozen=True)
class StepPlan:
    """How a run of decode steps goes on.

    Attributes:
        drafts: tokens that each step proposes for each sequence.
        tokens: how many a sequence is expected to take of a step.
        steps: at most so many under one decision; None for as many as there may be.
        draft_limits: drafts of slots 0, 1, .. that are verified, empty where they stay what they were.
        seconds: of a step; None where it is not known.
    """

    drafts: int = 0
    tokens: float = 1.0
    steps: int | None = None
    draft_limits: tuple[int, ...] = ()
    seconds: float | None = None


@dataclass(frozen=True)
class Decision:
    """What all ranks do next, in this order; the decode steps follow each other back to back.

    First of all they draw the tokens of the step that the decision before has left `undrawn`, if it has.

    Attributes:
        masks: which tokens slots may draw in that step, int32 [W], as of `Grammar`.
        tables: of slots that are in use before `admit`.
        kind: of the decode steps; the prompts' first tokens are drawn alike.
        draft_limits: of the decode steps; see `StepPlan`.
        undrawn: the decode step, a single one, ends with its logits: what may be drawn depends on tokens before it that
            rank 0 has not read.
    """

    number: int
    retire: tuple[int, ...]
    tables: tuple[TableWrite, ...]
    admit: tuple[Admission, ...]
    prefill: tuple[Segment, ...]
    decode_steps: int
    kind: StepKind = StepKind()
    draft_limits: tuple[int, ...] = ()
    undrawn: bool = False
    masks: dict[int, np.ndarray] = field(default_factory=dict)

    @classmethod
    def nothing(cls, retire: tuple[int, ...] = ()) -> Decision:
        """A decision that computes nothing."""
        return cls(0, retire, (), (), (), 0)
