"""Requests that wait or run, as rank 0's host knows them, and the part of each in a launched decision."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from helix.engine.block_tables import BlockTable
from helix.engine.decision import Admission, TableWrite
from helix.engine.request import Logprobs, Request, RequestUpdate


@dataclass(eq=False, slots=True)
class Scheduled:
    """A waiting or running request.

    Attributes:
        order: sort key: priority, then arrival.
        prompt_tokens: length of the request's prompt.
        ends: tokens that end it.
        cached_tokens: prompt tokens that were cached at its first admission.
        computed: prompt tokens that are cached or computed, as rank 0 has read.
        drawn: its drawn tokens that rank 0 has read.
        least, most, likely: bounds and estimate of its tokens in launched decisions that are not read yet.
        slot: its slot; None while it waits.
        held: its block table while it runs.
        tokens: input of its prefill, int32 [n]: the prompt, and the tokens drawn before its admission.
        prefilled: number of these computed by all launched decisions.
        reserved: tokens that its pages have room for.
        ended: it has ended; later tokens are discarded.
        leased: resumed after a preemption; exempt from another until its pages run out.
        work: work of its prompt, less what was cached when it began to wait.
        refused: time at which it first did not fit.
        room, again: retry once `room` pages are free, or at time `again`.
    """

    request: Request
    order: tuple[int, float, int]
    tokens: np.ndarray
    prompt_tokens: int
    drawn: array[int] = field(default_factory=lambda: array("i"))
    ends: Collection[int] = ()
    cached_tokens: int = 0
    computed: int = 0
    least: int = 0
    most: int = 0
    likely: int = 0
    slot: int | None = None
    held: BlockTable | None = None
    prefilled: int = 0
    reserved: int = 0
    ended: bool = False
    leased: bool = False
    refused: float | None = None
    work: int = 0
    room: int = 0
    again: float = 0.0

    @property
    def known(self) -> int:
        """Number of tokens of prompt and continuation that rank 0 has read."""
        return self.prompt_tokens + len(self.drawn)

    @property
    def remaining(self) -> int:
        """Number of tokens left to draw, after those that rank 0 has read."""
        return self.request.max_tokens - len(self.drawn)

    @property
    def left(self) -> int:
        """Upper bound of the tokens left to draw, after those of launched decisions."""
        return self.remaining - self.least

    @property
    def decoding(self) -> bool:
        return self.prefilled == len(self.tokens) and not self.ended and self.left > 0

    def admitted(self, admission: Admission, eos: Collection[int]) -> None:
        """Records the first admission's prefix hit, and which tokens end the request."""
        self.ends = self.request.sampling.ends(eos)
        if not admission.drawn:
            self.cached_tokens = self.computed = admission.resumes

    def update(
        self, new_ids: tuple[int, ...] = (), finish_reason: str | None = None, logprobs: tuple[Logprobs, ...] = ()
    ) -> RequestUpdate:
        """Returns an update for the client."""
        done = self.prompt_tokens, self.cached_tokens, self.computed
        return RequestUpdate(self.request.id, *done, new_ids, finish_reason, None, logprobs)

    def scored(self, end: int) -> np.ndarray:
        """Returns the prompt tokens to score in the chunk that ends at `end`: each follows a token of that chunk."""
        if self.request.sampling.prompt_logprobs is None:
            return self.tokens[:0]
        return self.tokens[self.prefilled + 1 : min(end + 1, self.prompt_tokens - self.request.drawn)]

    def text(self) -> np.ndarray:
        """Returns all tokens that rank 0 has read, int32 [n]."""
        more = self.known - len(self.tokens)
        return np.concatenate((self.tokens, self.drawn[-more:])) if more else self.tokens

    @property
    def cached(self) -> int:
        """Number of tokens in the cache, after those that rank 0 has read; the next step appends the last one drawn."""
        return self.prefilled if self.known == len(self.tokens) else self.known - 1


@dataclass(eq=False, slots=True)
class UnreadTokens:
    """Bounds and estimate of the tokens of a sequence in one decision that are not recorded yet."""

    s: Scheduled
    least: int = 0
    most: int = 0
    likely: int = 0

    def expect(self, least: int, most: int, likely: int) -> None:
        """Adds to the bounds and the estimate, here and in the sequence's totals."""
        for each in (self, self.s):
            each.least, each.most, each.likely = each.least + least, each.most + most, each.likely + likely


@dataclass(frozen=True, eq=False)
class TableChange:
    """Changed columns `[first, first + count)` of a table, not sent to the ranks yet."""

    s: Scheduled
    held: BlockTable
    first: int
    count: int

    def write(self) -> TableWrite | None:
        """Returns the write for the ranks; None if nothing changed or the sequence has left."""
        if not self.count or self.s.held is not self.held or self.s.slot is None:
            return None
        return TableWrite(self.s.slot, self.first, self.held.pages[self.first : self.first + self.count].copy())
