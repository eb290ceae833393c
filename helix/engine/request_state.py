"""State of waiting and running requests on rank 0's host, including what is in flight for each."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

import numpy as np

from helix.engine.block_tables import BlockTable
from helix.engine.request import Logprobs, Request, RequestUpdate
from helix.engine.scheduler_output import BlockTableUpdate, NewRequest
from helix.engine.stripe_store import Stripe


@dataclass(eq=False, slots=True)
class Restore:
    """The restore of a waiting request's prefix from host memory.

    Attributes:
        deadline: when the request stops waiting for it.
        is_done: the request does not wait for it, or not any more.
        is_read: what was on disk is in host memory now.
        loading: stripes that are being copied to pages.
        tokens, disk_tokens: restored tokens, and how many of them were read from disk.
    """

    deadline: float
    is_done: bool = False
    is_read: bool = False
    loading: Collection[Stripe] = ()
    tokens: int = 0
    disk_tokens: int = 0


@dataclass(eq=False, slots=True)
class Offer:
    """A prefix to store in host memory.

    Attributes:
        start: kvp rank of its first block.
        tokens: int32 [tokens of whole stripes].
        known: its first stripes, in slabs or on the way there.
    """

    cache_salt: Hashable
    start: int
    tokens: np.ndarray
    known: list[Stripe]


@dataclass(eq=False, slots=True)
class RequestState:
    """A waiting or running request.

    Attributes:
        tokens: input of its prefill, int32 [n]: the prompt, and the tokens generated before its admission.
        output_token_ids: generated tokens that rank 0 has read.
        ends: tokens that end it.
        cached_tokens: prefix hit of its first admission.
        num_confirmed_tokens: prompt tokens that are cached or computed, as far as rank 0 has read.
        min_new, max_new, expected_new: bounds and estimate of its tokens in flight.
        num_computed_tokens: tokens of `tokens` that are cached or computed after all batches in flight.
        snapshot_ends: after how many of `tokens` to take snapshots, ascending.
        preemption_exempt: it resumed after a preemption, and is not preempted again until it needs more pages.
        work: work of its prompt without what was cached when it was queued.
        restore: of its prefix; None until it was considered since it was queued.
        offer: of its prefix, the last one.
        retry_pages, retry_at: retry once `retry_pages` pages are available, or at time `retry_at`.
    """

    request: Request
    order: tuple[int, float, int]
    tokens: np.ndarray
    prompt_tokens: int
    output_token_ids: array[int] = field(default_factory=lambda: array("i"))
    ends: Collection[int] = ()
    cached_tokens: int = 0
    num_confirmed_tokens: int = 0
    min_new: int = 0
    max_new: int = 0
    expected_new: int = 0
    slot: int | None = None
    block_table: BlockTable | None = None
    num_computed_tokens: int = 0
    snapshot_ends: list[int] = field(default_factory=list)
    reserved: int = 0
    ended: bool = False
    preemption_exempt: bool = False
    first_rejected_at: float | None = None
    work: int = 0
    restore: Restore | None = None
    offer: Offer | None = None
    retry_pages: int = 0
    retry_at: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output that rank 0 has read."""
        return self.prompt_tokens + len(self.output_token_ids)

    @property
    def remaining(self) -> int:
        return self.request.max_tokens - len(self.output_token_ids)

    @property
    def max_unscheduled_tokens(self) -> int:
        """Upper bound of the tokens left to generate after those in flight."""
        return self.remaining - self.min_new

    @property
    def is_decoding(self) -> bool:
        return self.num_computed_tokens == len(self.tokens) and not self.ended and self.max_unscheduled_tokens > 0

    def end(self) -> None:
        """Notes its end: others do not wait for its restore."""
        self.ended = True
        if self.restore is not None:
            self.restore.is_done = True

    def record_admission(self, admission: NewRequest, eos: Collection[int]) -> bool:
        """Records which tokens end the request; at its first admission also the prefix hit, and returns True."""
        self.ends = self.request.sampling.ends(eos)
        if admission.num_output_tokens:
            return False
        self.num_confirmed_tokens = admission.num_computed_tokens
        if self.preemption_exempt:  # it was preempted during its prefill, and finds its own chunks
            return False
        self.cached_tokens = admission.num_computed_tokens
        return True

    def update(
        self, new_token_ids: tuple[int, ...] = (), finish_reason: str | None = None, logprobs: tuple[Logprobs, ...] = ()
    ) -> RequestUpdate:
        done = self.prompt_tokens, self.cached_tokens, self.num_confirmed_tokens
        return RequestUpdate(self.request.id, *done, new_token_ids, finish_reason, None, logprobs)

    def logprob_token_ids(self, end: int) -> np.ndarray:
        """Returns the prompt tokens to score in the chunk that ends at `end`: each follows a token of it."""
        if self.request.sampling.prompt_logprobs is None:
            return self.tokens[:0]
        return self.tokens[
            self.num_computed_tokens + 1 : min(end + 1, self.prompt_tokens - self.request.num_prior_output_tokens)
        ]

    def token_ids(self) -> np.ndarray:
        """Returns all tokens that rank 0 has read, int32 [n]."""
        more = self.num_tokens - len(self.tokens)
        return np.concatenate((self.tokens, self.output_token_ids[-more:])) if more else self.tokens

    @property
    def num_kv_tokens(self) -> int:
        """Tokens in the cache, as far as rank 0 has read; the last sampled token is appended by the next step."""
        return self.num_computed_tokens if self.num_tokens == len(self.tokens) else self.num_tokens - 1


@dataclass(eq=False, slots=True)
class PendingTokens:
    """Bounds and estimate of a sequence's unread tokens in one batch."""

    s: RequestState
    min_new: int = 0
    max_new: int = 0
    expected_new: int = 0

    def expect(self, min_new: int, max_new: int, expected_new: int) -> None:
        for each in (self, self.s):
            each.min_new, each.max_new, each.expected_new = (
                each.min_new + min_new,
                each.max_new + max_new,
                each.expected_new + expected_new,
            )


@dataclass(frozen=True, eq=False)
class PendingTableUpdate:
    """Changed columns `[first, first + count)` of a block table that the ranks do not have yet."""

    s: RequestState
    block_table: BlockTable
    first: int
    count: int

    def to_update(self) -> BlockTableUpdate | None:
        """Returns the update for the ranks; None if nothing changed or the sequence has left its slot."""
        if not self.count or self.s.block_table is not self.block_table or self.s.slot is None:
            return None
        return BlockTableUpdate(
            self.s.slot, self.first, self.block_table.pages[self.first : self.first + self.count].copy()
        )
