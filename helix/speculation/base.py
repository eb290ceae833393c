"""The contract of a drafter.

A decode step appends a sequence's last token and its drafts, draws a token behind each, and keeps those drafts that
were drawn: tokens are what they would be without drafts, whatever these are, because every draw depends on the seed,
the position and the tokens before it alone. So a drafter may guess anything, and nothing but speed depends on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from helix.step import DecodeState


class Drafter(ABC):
    """Args:
    drafts: tokens proposed for each sequence and step.
    """

    def __init__(self, drafts: int) -> None:
        self.drafts = drafts

    @abstractmethod
    def propose(self, state: DecodeState, rows: int) -> Tensor:
        """Token ids [rows, drafts] int64 that might follow the last tokens of the first `rows` slots.

        The same on all ranks, of fixed shape, without waiting for the host: it is part of a captured step.
        """
