"""The control plane's choices, made on rank 0's host alone: who is admitted, what is prefilled, how far decode runs.

Pure bookkeeping, no torch: a `Decision` is all that the ranks need to do the same thing. They carry decisions out in
order, on one stream, and each in the order of its fields: retire, write tables, admit and copy, prefill, decode.

So the next decision may be made, and launched, while the one before is still computed. A sequence whose tokens are not
read yet counts with the most that it may have taken. A slot and its pages are free as soon as a decision says so: what
was launched before may still write to them, and is over before anything that was launched later begins.
"""

from __future__ import annotations

import heapq
import math
from array import array
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from helix.control.block_tables import BlockTable, BlockTables
from helix.control.prefill_time import PrefillTime
from helix.events.decision import Admission, Decision, Segment, StepKind, StepPlan, TableWrite
from helix.events.request import Request

LEAST_CHUNK = 32  # tokens: shorter chunks cost as much, whatever time there is
LOOK_AHEAD = 32  # so many of those that wait are looked at for one decision
UNTIMED_STEPS = 2  # in a run, where nobody knows how long they take: who comes meanwhile waits for all of them
RETRY_S = 1.0  # after so long, others may have computed what one that does not fit begins with


@dataclass(eq=False, slots=True)
class Scheduled:
    """A request that waits, or runs in a slot.

    Attributes:
        order: who comes first: by priority, then by arrival.
        prompt_tokens: of the request.
        drawn: tokens that it has drawn and rank 0 has read.
        least, most, likely: further tokens that it has drawn in what is under way.
        slot: None while it waits.
        held: its pages, while it runs.
        tokens: what goes through prefill, int32 [n]: the prompt, and what it had drawn when it was admitted.
        prefilled: of these, what is computed once all that was launched is.
        reserved: tokens for which it has pages.
        ended: nothing that it draws counts any more.
        leased: it was preempted, and is not once more before it needs more pages than it comes back with.
        refused: when it was found not to fit.
        room, again: it is worth trying again where so many pages can be had, or at that time.
    """

    request: Request
    order: tuple[int, float, int]
    tokens: np.ndarray
    prompt_tokens: int
    drawn: array[int] = field(default_factory=lambda: array("i"))
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
    room: int = 0
    again: float = 0.0

    @property
    def known(self) -> int:
        """Tokens of prompt and continuation that rank 0 knows."""
        return self.prompt_tokens + len(self.drawn)

    @property
    def undrawn(self) -> int:
        """Tokens that it may still draw, as far as rank 0 has read."""
        return self.request.max_new_tokens - len(self.drawn)

    @property
    def left(self) -> int:
        """Tokens that it may still draw behind those under way, at most."""
        return self.undrawn - self.least

    @property
    def decoding(self) -> bool:
        return self.prefilled == len(self.tokens) and not self.ended and self.left > 0

    def text(self) -> np.ndarray:
        """All tokens that rank 0 knows, int32 [n]."""
        more = self.known - len(self.tokens)
        return np.concatenate((self.tokens, self.drawn[-more:])) if more else self.tokens

    @property
    def cached(self) -> int:
        """Tokens in the cache, as far as rank 0 knows: the last one drawn is not, until the next step appends it."""
        return self.prefilled if self.known == len(self.tokens) else self.known - 1


class Scheduler:
    """Decides for all ranks. Nothing that it does costs by length of context but numpy over tokens that are matched.

    The engine calls `decide` and launches what it says, maybe again before that is over. Of the first decision whose
    tokens it has not read it reads them, calls `record_token` for each, `end` where one ends its request, and `landed`.

    Args:
        tables: hands out pages.
        times: predicts chunks, and orders preemptions.
        max_batch: slots.
        prefill_chunk: most prompt tokens in one prefill step.
        run_steps: most decode steps under one decision.
        run_s: most seconds of the decode steps under one decision.
        stall_s: most seconds of a chunk while somebody decodes.
        decode_share: of the time that decode steps have while somebody decodes.
        patience_s: so long others may pass a request that does not fit; then pages are kept for it.
        lease: tokens beyond those that are known for which pages are taken at a time.
        drafts: the most tokens that a step appends beyond those that may count.
        keep_drawn: whether what was drawn is kept for others, like prompts.
        pace: how steps of so many rows go on, of which some slots take no drafts; called before each run of them.
        sparse_from: tokens from which on a sequence's decode steps are sparse; None: none are.
        lacking: tokens before the end of what is found in pages that are computed again.
        remedy: what makes room for more pages.

    Attributes:
        running: by slot.
        preemptions: how many there were.
    """

    def __init__(
        self,
        tables: BlockTables,
        times: PrefillTime,
        *,
        max_batch: int,
        prefill_chunk: int,
        run_steps: int = 8,
        run_s: float = 0.020,
        stall_s: float = 0.050,
        decode_share: float = 0.25,
        patience_s: float = 30.0,
        lease: int = 1024,
        drafts: int = 0,
        keep_drawn: bool = True,
        pace: Callable[[int, Collection[int]], StepPlan] = lambda rows, without: StepPlan(),
        sparse_from: int | None = None,
        lacking: float = 0.0,
        remedy: str,
    ) -> None:
        self._remedy = remedy
        self._tables, self._times, self._pace = tables, times, pace
        self._max_batch, self._prefill_chunk, self._drafts = max_batch, prefill_chunk, drafts
        self._run_steps, self._run_s, self._stall_s = run_steps, run_s, stall_s
        self._owed_per_second = decode_share / (1 - decode_share)
        self._patience_s = patience_s
        self._keep_drawn = keep_drawn
        self._lacking = lacking
        self._run_tokens = run_steps * (1 + drafts)
        self._lease = max(lease, 1 + self._run_tokens)  # a prompt that ends decodes in the same decision
        self._sparse_from = math.inf if sparse_from is None else sparse_from
        self._free_slots = list(range(max_batch))  # a heap: low slots first, so that steps have few rows
        self._requests: dict[str | int, Scheduled] = {}
        self._waiting: list[tuple[tuple[int, float, int], Scheduled]] = []  # in order; keys are unique
        self._launched: deque[dict[int, _Drawing]] = deque()  # by slot
        self._undrawn = 0  # the most tokens that a sequence takes of the last decision's step, where that is undrawn
        self._changed: list[_Change] = []  # by the chunk of the last decision
        self._owed = 0.0  # seconds of decode steps before the next chunk
        self._number = self._submitted = 0
        self.running: dict[int, Scheduled] = {}
        self.preemptions = 0

    # ---- requests

    def submit(self, request: Request, now: float) -> str | None:
        """Queues a request; returns the reason where it can never be served."""
        if request.id in self._requests:
            return f"a request with id={request.id!r} is under way: take another id"
        pool, stripes = self._tables.pool, self._tables.tree.stripes
        need = len(request.prompt) + request.max_new_tokens + self._drafts
        pages = stripes.pages_for(need)
        if pages > pool.pages:
            drafts = f" and {self._drafts} drafts" if self._drafts else ""
            return (
                f"prompt of {len(request.prompt)} tokens and {request.max_new_tokens} new ones{drafts} need {need} "
                f"tokens of KV, {pages} pages; the cache holds {pool.pages * stripes.page_tokens}, "
                f"{pool.pages} pages ({self._remedy})"
            )
        self._submitted += 1
        tokens = np.asarray(request.prompt, dtype=np.int32)
        s = Scheduled(request, (-request.priority, now, self._submitted), tokens, len(tokens))
        self._requests[request.id] = s
        insort(self._waiting, (s.order, s))
        return None

    def end(self, request_id: str | int) -> bool:
        """Ends a request, whether it waits or runs: it was aborted, or what it drew says so; False if it is not there.

        The next decision frees what it holds.
        """
        s = self._requests.pop(request_id, None)
        if s is None:
            return False
        s.ended = True
        if s.slot is None:
            del self._waiting[self._place(s)]
        return True

    def end_all(self) -> None:
        """Ends all requests."""
        for request_id in list(self._requests):
            self.end(request_id)

    def record_token(self, slot: int, token: int) -> Scheduled | None:
        """Notes a token of the first decision that has not landed; None where it does not count: its request has ended.

        A request ends here with its last token by `max_new_tokens`, else by `end`.
        """
        drawing = self._launched[0][slot]
        s = drawing.s
        if s.ended:
            return None
        s.drawn.append(token)
        if s.request.grammar is not None:
            s.request.grammar.take(token)
        drawing.expect(-min(drawing.least, 1), -min(drawing.most, 1), -min(drawing.likely, 1))
        if len(s.drawn) == s.request.max_new_tokens:
            self.end(s.request.id)
        return s

    def landed(self) -> None:
        """All tokens of the first decision that had not landed are recorded."""
        for drawing in self._launched.popleft().values():
            drawing.expect(-drawing.least, -drawing.most, -drawing.likely)

    @property
    def under_way(self) -> int:
        """Decisions that have not landed."""
        return len(self._launched)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def prefills(self) -> bool:
        """Whether a prompt that runs is not computed to its end."""
        return any(s.prefilled < len(s.tokens) for s in self.running.values())

    # ---- decisions

    def decide(self, now: float) -> Decision | None:
        """The next decision, or None where nothing can be done until a decision lands or a request comes.

        Where none is under way and None is returned, no request is left. Steps in which somebody has a grammar are left
        undrawn, and the next decision waits for what was drawn before: on it depends what may be drawn.
        """
        guided = [s for s in self.running.values() if s.request.grammar is not None]
        if any(s.most > self._undrawn and not s.ended for s in guided):
            return None
        undrawn = self._launched[-1] if self._undrawn else {}
        masks = {
            slot: drawing.s.request.grammar.allowed()
            for slot, drawing in undrawn.items()
            if drawing.s.request.grammar is not None and drawing.most and not drawing.s.ended
        }
        retire = [slot for slot, s in self.running.items() if s.ended]
        for slot in retire:
            self._leave(self.running[slot])
        writes, self._changed = self._changed, []
        decoding = [s for s in self.running.values() if s.decoding]
        short = [s for s in decoding if s.reserved < self._room(s, self._run_tokens)]
        for s in sorted(short, key=lambda s: s.order):
            if s.slot is not None:  # else it was preempted for one before it
                retire += self._extend(s, writes)
        if short:
            decoding = [s for s in decoding if s.slot is not None]
        admit = tuple(self._admit(now))
        prefill = tuple(self._chunk(bool(decoding), writes))
        drawing = {segment.slot: _Drawing(self.running[segment.slot]) for segment in prefill if segment.last}
        for first in drawing.values():
            first.expect(1, 1, 1)
            if first.s.left:
                decoding.append(first.s)
        rows = min(1 << max(self.running).bit_length(), self._max_batch) if self.running else 0
        masked = any(s.request.grammar is not None for s in decoding)
        plan, steps = StepPlan(), 0
        # Who has most likely drawn all that it may needs no further step; what is under way will tell.
        if left := [n for s in decoding if (n := s.request.max_new_tokens - len(s.drawn) - s.likely) > 0]:
            plan = self._pace(rows, {slot for slot, s in self.running.items() if s.request.sampling.is_shaped})
            steps = self._steps(plan, min(left), 1 if masked else self._run_steps)
        most = steps * (1 + plan.drafts)
        held, self._undrawn = bool(self._undrawn), most if masked else 0
        for s in decoding:
            assert s.slot is not None
            drawing.setdefault(s.slot, _Drawing(s)).expect(steps, most, int(steps * plan.tokens))
        tables = tuple(write for change in writes if (write := change.write()) is not None)
        if not (retire or tables or admit or prefill or steps or held):
            return None
        self._launched.append(drawing)
        self._number += 1
        return Decision(
            self._number,
            tuple(retire),
            tables,
            admit,
            prefill,
            steps,
            StepKind.of(
                [s.request.sampling for s in self.running.values()],
                rows=rows,
                drafts=plan.drafts,
                # Shorter ones read everything in a sparse step as well: who shares the batch changes nothing.
                sparse=any(s.known + s.most > self._sparse_from for s in decoding),
            ),
            draft_limits=plan.draft_limits,
            undrawn=self._undrawn > 0,
            masks=masks,
        )

    # ---- slots and pages

    def _admit(self, now: float) -> Iterator[Admission]:
        at = 0
        while self._free_slots and at < min(len(self._waiting), LOOK_AHEAD):
            _, s = self._waiting[at]
            held = self._fit(s, now)
            if held is None:
                s.refused = now if s.refused is None else s.refused
                if now - s.refused >= self._patience_s:
                    return
                at += 1
                continue
            del self._waiting[at]
            s.slot, s.held, s.prefilled = heapq.heappop(self._free_slots), held, self._resumes(held.known)
            self.running[s.slot] = s
            request = s.request
            yield Admission(
                request.id,
                s.slot,
                len(s.tokens),
                s.tokens if self._drafts or request.sampling.changes_logits else s.tokens[:0],
                held.start,
                held.pages.copy(),  # the table changes while this is carried out
                s.reserved,
                s.prompt_tokens + request.max_new_tokens - 1,  # the last token is never appended
                request.sampling,
                held.known,
                s.prefilled,
                held.copy_from,
                held.copy_to,
                request.drawn + len(s.drawn),
                None if request.grammar is None else request.grammar.allowed(),
            )

    def _fit(self, s: Scheduled, now: float) -> BlockTable | None:
        """Pages for one that waits; None where they do not fit, or it has drawn tokens that are not read yet."""
        pool = self._tables.pool
        if s.most or (pool.room < s.room and now < s.again):
            return None
        s.tokens = s.text()
        s.reserved = self._room(s, self._lease)
        stripes = self._tables.tree.stripes
        # Any kvp rank may have the first block; prompts that begin alike share pages if it is the same one.
        start = crc32(s.tokens[: stripes.tokens].tobytes()) % stripes.layout.kvp
        held = self._tables.admit(s.tokens, s.reserved, start, s.request.salt)
        if held is None:
            s.room, s.again = pool.room + 1, now + RETRY_S
        return held

    def _extend(self, s: Scheduled, writes: list[_Change]) -> list[int]:
        """Gets a sequence the pages of its next run, at best of a lease; returns slots of those preempted for it."""
        gone: list[int] = []
        while s.held is not None:
            column = len(s.held.pages)
            for count in (self._lease, self._run_tokens):
                reserved = self._room(s, count)
                if (more := self._tables.grow(s.held, reserved)) is not None:
                    s.reserved, s.leased = reserved, False
                    writes.append(_Change(s, s.held, column, len(more)))
                    return gone
            gone.append(self._preempt_for(s))
        return gone

    def _preempt_for(self, s: Scheduled) -> int:
        """Preempts whoever is the cheapest to compute again, of no higher priority, maybe `s` itself."""

        def loss(other: Scheduled) -> tuple[int, float]:
            assert other.held is not None
            stripes = self._tables.tree.stripes
            kept = self._tables.pool.shared(other.held.pages) // stripes.pages * stripes.tokens
            return other.request.priority, self._times.work(min(kept, other.cached), other.cached)

        priority = s.request.priority
        others = [o for o in self.running.values() if not o.leased and o.request.priority <= priority]
        victim = min([*others, s], key=loss)
        slot = victim.slot
        assert slot is not None
        self._leave(victim)
        victim.leased, victim.refused, victim.room = True, None, 0
        insort(self._waiting, (victim.order, victim))
        self.preemptions += 1
        return slot

    def _leave(self, s: Scheduled) -> None:
        """Frees a slot and its pages, whose tokens stay known."""
        assert s.slot is not None and s.held is not None
        known = s.text() if self._keep_drawn else s.tokens
        self._tables.end(s.held, known[: s.cached])
        heapq.heappush(self._free_slots, s.slot)
        del self.running[s.slot]
        s.slot, s.held, s.prefilled = None, None, 0

    def _room(self, s: Scheduled, more: int) -> int:
        """Tokens for which it needs pages to draw so many more."""
        return min(s.known + s.most + more, s.prompt_tokens + s.request.max_new_tokens) + self._drafts

    def _place(self, s: Scheduled) -> int:
        return bisect_left(self._waiting, s.order, key=lambda entry: entry[0])

    # ---- time

    def _chunk(self, decoding: bool, writes: list[_Change]) -> Iterator[Segment]:
        """A chunk of prompts, where it is time for one: half of it the oldest one's, then the shortest ones first."""
        prompts = [s for s in self.running.values() if s.prefilled < len(s.tokens)]
        if not decoding:
            self._owed = 0.0
        if not prompts or self._owed > 0:
            return
        tokens, work = self._prefill_chunk, self._times.within(self._stall_s) if decoding else math.inf
        oldest = min(prompts, key=lambda s: s.order[1:])
        others = sorted(
            (s for s in prompts if s is not oldest), key=lambda s: (s.order[0], len(s.tokens) - s.prefilled)
        )
        self._advance(oldest, writes)
        least = min(LEAST_CHUNK, tokens, len(oldest.tokens) - oldest.prefilled)
        half = max(self._cut(oldest, -(-tokens // 2), work / 2), least)
        of_half = self._times.work(oldest.prefilled, oldest.prefilled + half)
        tokens, work = tokens - half, work - of_half
        ends: dict[Scheduled, int] = {}
        computed = {self._next_stripe(oldest)}
        for s in others:
            if tokens <= 0 or work < 1:
                break
            self._advance(s, writes)
            stripe = self._next_stripe(s)
            if stripe is not None and stripe in computed:
                continue  # it will take over what another one computes now
            computed.add(stripe)
            count = self._cut(s, tokens, work)
            tokens, work = tokens - count, work - self._times.work(s.prefilled, s.prefilled + count)
            ends[s] = s.prefilled + count
        ends[oldest] = oldest.prefilled + max(half, self._cut(oldest, half + tokens, of_half + work))
        done = 0.0
        for s, end in ends.items():
            if end > s.prefilled:
                assert s.slot is not None and s.held is not None
                new = s.tokens[s.prefilled : end]
                yield Segment(s.slot, s.prefilled, end, end == len(s.tokens), new, s.held.known)
                done += self._times.work(s.prefilled, end)
                s.prefilled = end
                columns = self._tables.enter(s.held, s.tokens[:end])
                self._changed.append(_Change(s, s.held, columns.start, len(columns)))
        if decoding:
            self._owed += self._times.seconds(done) * self._owed_per_second

    def _advance(self, s: Scheduled, writes: list[_Change]) -> None:
        """Takes over what others have computed of a prompt meanwhile."""
        assert s.held is not None
        known, columns = self._tables.advance(s.held, s.tokens, max(s.prefilled, s.held.known))
        if known > s.held.known and known > s.prefilled:
            s.held.known, s.prefilled = known, max(s.prefilled, self._resumes(known))
        writes.append(_Change(s, s.held, columns.start, len(columns)))

    def _resumes(self, known: int) -> int:
        """Where a prompt goes on of which so many tokens are in its pages."""
        return int(max(known - self._lacking, 0))

    def _next_stripe(self, s: Scheduled) -> Hashable:
        assert s.held is not None
        return self._tables.next_stripe(s.held, s.tokens)

    def _cut(self, s: Scheduled, tokens: int, work: float) -> int:
        """How much of a prompt comes next, within so many tokens and so much work."""
        tokens = min(tokens, len(s.tokens) - s.prefilled)
        return tokens if math.isinf(work) else min(tokens, self._times.tokens(s.prefilled, work))

    def _steps(self, plan: StepPlan, left: int, bound: int) -> int:
        """Decode steps under one decision, at least one: until the first sequence must end, which frees its slot."""
        most = min(bound, math.ceil(left / plan.tokens), plan.steps or bound)
        prompts = self.prefills
        if plan.seconds is None:
            self._owed = 0.0
            return 1 if prompts else min(most, plan.steps or UNTIMED_STEPS)
        most = min(most, int(self._run_s / plan.seconds))
        if prompts:
            most = min(most, math.ceil(self._owed / plan.seconds))
        self._owed = max(self._owed - max(most, 1) * plan.seconds, 0.0)
        return max(most, 1)


@dataclass(eq=False, slots=True)
class _Drawing:
    """What a sequence draws at least, at most and likely in a decision, as far as it is not recorded yet."""

    s: Scheduled
    least: int = 0
    most: int = 0
    likely: int = 0

    def expect(self, least: int, most: int, likely: int) -> None:
        """So many more."""
        for each in (self, self.s):
            each.least, each.most, each.likely = each.least + least, each.most + most, each.likely + likely


@dataclass(frozen=True, eq=False)
class _Change:
    """Columns `[first, first + count)` of a table that the ranks do not have yet."""

    s: Scheduled
    held: BlockTable
    first: int
    count: int

    def write(self) -> TableWrite | None:
        """What tells them; None where there is nothing to tell, or the sequence has left."""
        if not self.count or self.s.held is not self.held or self.s.slot is None:
            return None
        return TableWrite(self.s.slot, self.first, self.held.pages[self.first : self.first + self.count].copy())
