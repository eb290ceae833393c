"""The contract of a drafter.

A decode step appends a sequence's last token and its drafts, draws a token behind each, and keeps those drafts that
were drawn: tokens are what they would be without drafts, whatever these are, because every draw depends on the seed,
the position and the tokens before it alone. So a drafter may guess anything, and nothing but speed depends on it.

A drafter that draws its guesses for sampled requests says from what: then drafts are kept by rejection sampling
(`helix.speculation.acceptance`), which keeps more of them; tokens are other ones, distributed as before.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from helix.attention.base import AttentionPolicy
from helix.events.decision import StepKind
from helix.events.follower import Follower
from helix.steps.step import DecodeState
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


class Drafter(Follower):
    """Proposes tokens, and follows the sequences as far as it needs.

    Args:
        limit: the most tokens proposed for each sequence and step.

    Attributes:
        verification: what steps with drafts read in place of the target's own policy, which is dense; None: nothing
            else.
        lags: its cache may lack tokens that were drawn, so that what it has of them cannot be shared.
        own_pages: sequences that share pages of the cache do not share its own, of which there are as many.
        lacking: as of `KVCache`, of its own cache.
    """

    verification: AttentionPolicy | None = None
    lags = False
    own_pages = False
    lacking = 0.0

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def catch_up(self, state: DecodeState) -> None:
        """Follows steps without drafts that have gone by, before one with drafts; may wait for the device."""

    def check(self, wait: bool = True) -> None:
        """Looks at collectives of its own, by `Communicator.check`."""

    def propose(self, state: DecodeState, kind: StepKind) -> Draft:
        """Proposes `kind.drafts` tokens, from 1 to `limit`, for each of the first `kind.rows` slots.

        The same on all ranks, of fixed shape, without waiting for the host: it is part of a captured step.
        """
        raise NotImplementedError


class NoDrafts(Drafter):
    """The drafter of steps that draw one token."""

    def __init__(self) -> None:
        super().__init__(0)
