"""Prompt lookup: the sequence goes on as it did where it last read the same."""

from __future__ import annotations

from helix.events.decision import StepKind
from helix.speculation.base import Draft, Drafter
from helix.steps.step import DecodeState
from kernels.tokens.ngram import ngram


class NgramDrafter(Drafter):
    """Args:
    limit: the most tokens proposed for each sequence and step.
    longest: most tokens at the end of a sequence that are looked for in what stands before them.
    """

    def __init__(self, limit: int, longest: int) -> None:
        super().__init__(limit)
        self.longest = longest

    def propose(self, state: DecodeState, kind: StepKind) -> Draft:
        rows = slice(0, kind.rows)
        return Draft(ngram(state.history[rows], state.lengths[rows] + 1, kind.drafts, self.longest))
