"""The control plane's choices, made on rank 0's host alone: who is admitted, what is prefilled, how far decode runs.

Pure bookkeeping, no torch: a `Decision` is all that the ranks need to do the same thing.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from helix.request import Request
from helix.sampling import SamplingParams


@dataclass(frozen=True)
class Admission:
    """A sequence that takes a slot: its whole prompt, and the tokens for which pages are taken now.

    Attributes:
        limit: tokens in the cache at which it ends.
    """

    id: str | int
    slot: int
    prompt: Sequence[int]
    start: int
    reserved: int
    limit: int
    sampling: SamplingParams


@dataclass(frozen=True)
class Segment:
    """Prompt tokens `[begin, end)` of a slot; `last` is set where the prompt ends with them."""

    slot: int
    begin: int
    end: int
    last: bool


@dataclass(frozen=True)
class StepPlan:
    """How a run of decode steps goes on.

    Attributes:
        drafts: tokens that each step proposes for each sequence.
        tokens: how many a sequence is expected to take of a step.
        steps: at most so many under one decision; None for as many as there may be.
        draft_limits: drafts of slots 0, 1, .. that are verified, empty where they stay what they were.
    """

    drafts: int = 0
    tokens: float = 1.0
    steps: int | None = None
    draft_limits: tuple[int, ...] = ()


@dataclass(frozen=True)
class Decision:
    """What all ranks do next: retire, admit, prefill one chunk, then decode so many steps back to back.

    Attributes:
        rows: slots [0, rows) take part in the decode steps: a power of two, or all, so that few graphs serve all.
        drafts, draft_limits: of the decode steps; see `StepPlan`.
        sparse: whether the decode steps choose which keys they read: some sequence is long enough.
    """

    number: int
    retire: tuple[int, ...]
    admit: tuple[Admission, ...]
    prefill: tuple[Segment, ...]
    decode_steps: int
    rows: int
    stochastic: bool
    filtered: bool
    drafts: int = 0
    draft_limits: tuple[int, ...] = ()
    sparse: bool = False


@dataclass
class Running:
    """A sequence in a slot."""

    request: Request
    slot: int
    start: int
    pages: tuple[int, ...]  # on each kvp rank
    reserved: int
    prefilled: int = 0
    produced: int = 0
    finished: bool = False

    @property
    def decoding(self) -> bool:
        return not self.finished and self.prefilled == len(self.request.prompt)

    @property
    def left(self) -> int:
        """Tokens that it may still take."""
        return self.request.max_new_tokens - self.produced

    @property
    def cached(self) -> int:
        """Tokens in the cache: the last one drawn is not, until the next step appends it."""
        return self.prefilled + max(self.produced - 1, 0)


class Scheduler:
    """First come, first served; a request waits until a slot and, on every kvp rank, its pages are free.

    Args:
        pages: pages that `length` tokens take on a kvp rank, `(length, start, kvp_rank) -> pages`.
        free_pages: free pages of each kvp rank.
        token_budget: most tokens reserved at a time.
        max_batch: slots.
        prefill_chunk: most prompt tokens in one prefill step.
        run_steps: most decode steps under one decision.
        drafts: the most tokens that a step appends beyond those that may count.
        pace: how steps of so many rows go on; called before each run of them.
        sparse_from: tokens from which on a sequence's decode steps are sparse; None: none are.
    """

    def __init__(
        self,
        pages: Callable[[int, int, int], int],
        free_pages: Sequence[int],
        token_budget: int,
        max_batch: int,
        prefill_chunk: int,
        run_steps: int,
        drafts: int = 0,
        pace: Callable[[int], StepPlan] = lambda rows: StepPlan(),
        sparse_from: int | None = None,
    ) -> None:
        self._pace = pace
        self._drafts = drafts
        self._sparse_from = math.inf if sparse_from is None else sparse_from
        self._pages = pages
        self._free_pages = list(free_pages)
        self._free_tokens = token_budget
        self._max_batch = max_batch
        self._free_slots = list(range(max_batch))  # a heap: low slots first, so that steps have few rows
        self._prefill_chunk = prefill_chunk
        self._run_steps = run_steps
        self._waiting: deque[Request] = deque()
        self._capacity = (list(free_pages), token_budget)
        self._number = 0
        self._admissions = 0
        self.running: dict[int, Running] = {}

    def submit(self, request: Request) -> str | None:
        """Queues a request; returns the reason where it can never fit."""
        need = self._need(request)
        pages, tokens = self._capacity
        kvp = len(pages)
        lacking, k = max((self._pages(need, start, k) - pages[k], k) for start in range(kvp) for k in range(kvp))
        if need > tokens or lacking > 0:
            drafts = f" and {self._drafts} drafts" if self._drafts else ""
            holds = f"the cache holds {tokens}"
            if need <= tokens:
                holds = f"kvp rank {k} has {pages[k]} pages, and these may take {pages[k] + lacking} of them"
            return (
                f"prompt of {len(request.prompt)} tokens and {request.max_new_tokens} new ones{drafts} need {need} "
                f"tokens of KV; {holds} (raise kv.tokens or kv.memory_fraction, or use a larger layout.kvp)"
            )
        self._waiting.append(request)
        return None

    def decide(self) -> Decision | None:
        """The next decision, or None where nothing is left to do."""
        retire = tuple(slot for slot, s in self.running.items() if s.finished)
        for slot in retire:
            self._release(self.running.pop(slot))
        admit = self._admit()
        if not self.running:
            return None
        rows = min(1 << max(self.running).bit_length(), self._max_batch)
        pace = self._pace(rows)
        prefill = self._prefill_segments()
        decoding = [s for s in self.running.values() if s.decoding]
        steps = 0
        if decoding:
            # Alternate while prompts come in; else run at most until the first sequence must end, which frees its slot.
            first = {segment.slot for segment in prefill}  # their first token is drawn by the prefill
            left = [s.left - (s.slot in first) for s in decoding]
            most = 1 if len(decoding) < len(self.running) else self._run_steps
            steps = min(math.ceil(min(left) / pace.tokens), most, pace.steps or most)
            # Some may end with the prefill: they take no further token, and the others do not wait for them.
            steps = max(steps, int(max(left) > 0))
        sampling = [s.request.sampling for s in self.running.values()]
        self._number += 1
        return Decision(
            self._number,
            retire,
            admit,
            prefill,
            steps,
            rows,
            stochastic=any(not p.is_greedy for p in sampling),
            filtered=any(p.is_filtered for p in sampling),
            drafts=pace.drafts,
            draft_limits=pace.draft_limits,
            # Shorter ones read everything in a sparse step as well: who shares the batch changes nothing.
            sparse=any(s.cached + steps * (1 + pace.drafts) >= self._sparse_from for s in decoding),
        )

    def record_token(self, slot: int, finished: bool) -> None:
        """Notes a token drawn for a slot, and whether it is the sequence's last."""
        sequence = self.running[slot]
        sequence.produced += 1
        sequence.finished = finished

    def _admit(self) -> tuple[Admission, ...]:
        admitted = []
        while self._waiting and self._free_slots:
            request = self._waiting[0]
            # The first block goes to another kvp rank each time, so that short sequences spread out.
            start = self._admissions % len(self._free_pages)
            need = self._need(request)
            pages = tuple(self._pages(need, start, k) for k in range(len(self._free_pages)))
            if need > self._free_tokens or any(n > free for n, free in zip(pages, self._free_pages, strict=True)):
                break
            self._waiting.popleft()
            self._admissions += 1
            self._free_tokens -= need
            self._free_pages = [free - n for free, n in zip(self._free_pages, pages, strict=True)]
            sequence = Running(request, heapq.heappop(self._free_slots), start, pages, need)
            self.running[sequence.slot] = sequence
            admitted.append(
                Admission(
                    request.id,
                    sequence.slot,
                    request.prompt,
                    start,
                    need,
                    len(request.prompt) + request.max_new_tokens - 1,  # the last token is never appended
                    request.sampling,
                )
            )
        return tuple(admitted)

    def _need(self, request: Request) -> int:
        return len(request.prompt) + request.max_new_tokens + self._drafts

    def _release(self, sequence: Running) -> None:
        heapq.heappush(self._free_slots, sequence.slot)
        self._free_tokens += sequence.reserved
        self._free_pages = [free + n for free, n in zip(self._free_pages, sequence.pages, strict=True)]

    def _prefill_segments(self) -> tuple[Segment, ...]:
        budget, segments = self._prefill_chunk, []
        for s in self.running.values():
            count = min(budget, len(s.request.prompt) - s.prefilled)
            if count > 0:
                end = s.prefilled + count
                segments.append(Segment(s.slot, s.prefilled, end, end == len(s.request.prompt)))
                s.prefilled, budget = end, budget - count
        return tuple(segments)
