"""Prompt lookup: drafts continue the last earlier occurrence of a sequence's final tokens."""

from __future__ import annotations

from helix.speculation.base import Draft, Drafter
from helix.worker.graph_keys import StepKind
from helix.worker.step import DecodeState
from kernels.tokens.ngram import ngram


class NgramDrafter(Drafter):
    """Drafter by prompt lookup.

    Args:
        limit: most tokens proposed per sequence and step.
        longest: most final tokens of a sequence that are searched for earlier in it.
    """

    def __init__(self, limit: int, longest: int) -> None:
        super().__init__(limit)
        self.longest = longest

    def propose(self, state: DecodeState, kind: StepKind) -> Draft:
        rows = slice(0, kind.rows)
        return Draft(ngram(state.history[rows], state.lengths[rows] + 1, kind.drafts, self.longest))
