"""The contract of a drafter.

A decode step appends a sequence's last token and its drafts, draws a token behind each, and keeps those drafts that
were drawn: tokens are what they would be without drafts, whatever these are, because every draw depends on the seed,
the position and the tokens before it alone. So a drafter may guess anything, and nothing but speed depends on it.

A drafter that draws its guesses for sampled requests says from what: then drafts are kept by rejection sampling
(`helix.speculation.acceptance`), which keeps more of them; tokens are other ones, distributed as before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from helix.attention.base import AttentionPolicy
from helix.decision import Admission, StepKind, TableWrite
from helix.step import DecodeState
from kernels.tokens.accept import Distribution


@dataclass(frozen=True)
class Draft:
    """Tokens that might follow the last ones of some sequences.

    Attributes:
        tokens: ids [rows, n] int64; -1 for no token, nor is there one behind it.
        sampled_from: the distributions, over this rank's columns, from which they were drawn; None where each was the
            only choice.
        outcome: [rows, n] what counts as drawn in their places, whatever the model says; for benchmarks.
    """

    tokens: Tensor
    sampled_from: Distribution | None = None
    outcome: Tensor | None = None


class Drafter(ABC):
    """Args:
    limit: the most tokens proposed for each sequence and step.

    Attributes:
    verification: what steps with drafts read in place of the target's own policy, which is dense; None: nothing else.
    learns: `verified` is to be called.
    lags: its cache may lack tokens that were drawn, so that what it has of them cannot be shared.
    own_pages: sequences that share pages of the cache do not share its own, of which there are as many.
    """

    verification: AttentionPolicy | None = None
    learns = False
    lags = False
    own_pages = False

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def admit(self, admission: Admission) -> None:
        """A sequence has taken a slot; called on every rank alike, as is all that follows."""
        return

    def write(self, table: TableWrite) -> None:
        """The table of a slot's sequence has other pages from a column on."""
        return

    def copy(self, sources: Tensor, to: Tensor) -> None:
        """Pages `sources` [n] int32 of the target's cache are copied to the pages `to`."""
        return

    def retire(self, slot: int) -> None:
        """The sequence of a slot has ended."""
        return

    def prefill(self, state: DecodeState, segments: list[tuple[int, int, Tensor]]) -> None:
        """Prompt chunks have gone through the target, those of `DecodeState.prefill_step`."""
        return

    def catch_up(self, state: DecodeState) -> None:
        """Steps without drafts have gone by, and one with drafts comes next; may wait for the device."""
        return

    def verified(self, state: DecodeState, rows: int, drafts: int, before: Tensor) -> None:
        """A step has verified `drafts` tokens of each of the first `rows` slots, and `state` has taken what held.

        Part of a captured step, as `propose` is.

        Args:
            before: `state.lengths` [rows] before that.
        """
        return

    def check(self, wait: bool = True) -> None:
        """Looks at collectives of its own, by `Communicator.check`."""
        return

    @abstractmethod
    def propose(self, state: DecodeState, kind: StepKind) -> Draft:
        """Proposes `kind.drafts` tokens, from 1 to `limit`, for each of the first `kind.rows` slots.

        The same on all ranks, of fixed shape, without waiting for the host: it is part of a captured step.
        """
