"""Prompt lookup: the sequence goes on as it did where it last read the same."""

from __future__ import annotations

from torch import Tensor

from helix.speculation.base import Drafter
from helix.step import DecodeState
from kernels.ngram import ngram


class NgramDrafter(Drafter):
    """Args:
    drafts: tokens proposed for each sequence and step.
    longest: most tokens at the end of a sequence that are looked for in what stands before them.
    """

    def __init__(self, drafts: int, longest: int) -> None:
        super().__init__(drafts)
        self.longest = longest

    def propose(self, state: DecodeState, rows: int) -> Tensor:
        return ngram(state.history[:rows], state.lengths[:rows] + 1, self.drafts, self.longest)
