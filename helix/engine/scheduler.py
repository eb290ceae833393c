"""Scheduler, on rank 0's host alone: chooses which requests are admitted, what is prefilled, and how long decode runs.

Pure bookkeeping: a `Decision` is all that the ranks need to act alike. They execute decisions in order, on
one stream, and each in the order of its fields: retire, write tables, admit and copy, prefill, decode.

So the next decision may be made, and launched, while the previous one is still computed. A sequence whose tokens are
not read yet counts with the most that it may have taken. A slot and its pages are free as soon as a decision frees
them: earlier launches may still write to them, but end before any later launch begins.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from helix.config import ScheduleConfig
from helix.engine.block_tables import BlockTable, BlockTables
from helix.engine.decision import Admission, Decision, Segment, StepPlan
from helix.engine.prefill_time import PrefillTime
from helix.engine.request import Request
from helix.engine.scheduled import Scheduled, TableChange, UnreadTokens
from helix.worker.graph_keys import StepKind
from helix.worker.model_runner import ModelRunner

LEAST_CHUNK = 32  # tokens: a shorter chunk costs as much
LONGEST_S = 2.0  # of a chunk, even if nothing decodes: an abort is seen and a new request is admitted after it
UNTIMED_WORK = 512.0  # of the first chunk, whose time cannot be predicted
LOOK_AHEAD = 32  # waiting requests that one decision considers for each home: the device may be idle meanwhile
UNTIMED_STEPS = 2  # most steps of a run of unknown duration: new requests wait for all of them
SALTS = (1 << 39) - 1  # an admission's salt is so many bits of its request's, by a hash that differs in each process
RETRY_S = 1.0  # interval after which a request that did not fit is tried again: its prefix may be cached by then


@dataclass(frozen=True)
class Bounds:
    """Bounds of prompts beside decode steps.

    Attributes:
        stall_ms: most milliseconds of chunks between two decode steps.
        decode_share: share of the time for decode steps; 0: one between two pauses.
    """

    stall_ms: float
    decode_share: float


GOALS = {  # bounds while prompts hardly wait, and those while they wait for long
    "latency": (Bounds(25.0, 0.5), Bounds(25.0, 0.5)),
    "balance": (Bounds(50.0, 0.25), Bounds(400.0, 0.0)),
    "throughput": (Bounds(400.0, 0.0), Bounds(1000.0, 0.0)),
}


class Goal:
    """Bounds of chunks, by the time for which prompts wait.

    `schedule.stall_ms` and `schedule.decode_share` replace those of `schedule.goal`.
    """

    def __init__(self, schedule: ScheduleConfig) -> None:
        self.least, self.most = (
            Bounds(
                of_goal.stall_ms if schedule.stall_ms is None else schedule.stall_ms,
                of_goal.decode_share if schedule.decode_share is None else schedule.decode_share,
            )
            for of_goal in GOALS[schedule.goal]
        )

    def stall_s(self, waiting_s: float) -> float:
        """Returns the most seconds of chunks between two steps while other prompts wait for `waiting_s` seconds."""
        return min(max(self.least.stall_ms / 1e3, waiting_s), self.most.stall_ms / 1e3)

    def owed_s(self, seconds: float, stall_s: float) -> float:
        """Returns the seconds of decode steps after a chunk, which fall to none as the bound `stall_s` widens."""
        least, most = self.least, self.most
        wide = (1e3 * stall_s - least.stall_ms) / max(most.stall_ms - least.stall_ms, 1.0)
        share = least.decode_share + wide * (most.decode_share - least.decode_share)
        return share / (1 - share) * min(seconds, least.stall_ms / 1e3)


class Scheduler:
    """Scheduler of all ranks. No cost grows with the context, except numpy passes over matched tokens.

    The engine calls `decide` and launches the decision; it may do so again before the decision has run. Then it reads
    the tokens of the oldest unread decision, calls `record_token` for each, `end` where one ends its request, `landed`.

    Args:
        tables: allocates pages: one allocator, or one for each rank that owns sequences (mode dp). Slot s then belongs
            to rank `s % len(tables)`.
        times: predicts the time of prompt chunks; its work orders preemptions.
        runner: executes the decisions; the scheduler reads its sizes and limits alone.
        schedule: how requests share the ranks.
        pace: chooses drafts and steps for rows, tokens in their cache and slots without drafts; called before each run.

    Attributes:
        running: running requests by slot.
        preemptions: number of preemptions.
    """

    def __init__(
        self,
        tables: Sequence[BlockTables],
        times: PrefillTime,
        runner: ModelRunner,
        schedule: ScheduleConfig,
        pace: Callable[[int, int, Collection[int]], StepPlan] = lambda rows, kv_tokens, without: StepPlan(),
    ) -> None:
        self._homes, self._times, self._runner, self._pace = tables, times, runner, pace
        self._stripes = tables[0].tree.stripes
        self._goal = Goal(schedule)
        self._schedule = schedule
        # Chunks over host memory fetch the keys before them: shorter ones would wait for the link.
        self._longest_s = math.inf if runner.cache.fetches else LONGEST_S
        # A heap for each home: low slots first, so that steps have few rows.
        slots = runner.sizes.slots * len(tables)
        self._free_slots = [list(range(home, slots, len(tables))) for home in range(len(tables))]
        self._requests: dict[str | int, Scheduled] = {}
        self._waiting: list[tuple[tuple[int, float, int], Scheduled]] = []  # in order; keys are unique
        self._queued = 0  # work of the prompts of these
        self._launched: deque[dict[int, UnreadTokens]] = deque()  # by slot
        self._held_tokens = 0  # most tokens per sequence of the last decision's step if it is held, else 0
        self._changed: list[TableChange] = []  # table changes by the prompt chunk of the last decision
        self._owed = 0.0  # seconds of decode steps before the next prompt chunk
        self._paused = 0.0  # seconds of chunks since the last step, while somebody decodes
        self._more = False  # whether the next decision may admit requests that the last one did not consider
        self._number = self._submitted = 0
        self.running: dict[int, Scheduled] = {}
        self.preemptions = 0

    @property
    def _run_tokens(self) -> int:
        """Most tokens of a sequence in the decode steps of a decision."""
        return self._runner.sizes.run_steps * (1 + self._runner.sizes.drafts)

    @property
    def _lease(self) -> int:
        """Tokens that a sequence reserves pages for at a time: at least those of the decision that ends its prompt."""
        return max(self._schedule.lease, 1 + self._run_tokens)

    # ---- requests

    def submit(self, request: Request, now: float) -> str | None:
        """Queues a request; returns the reason if it can never be served."""
        if request.id in self._requests:
            return f"a request with id={request.id!r} is under way: take another id"
        pool, stripes = self._homes[0].pool, self._stripes
        need = len(request.prompt) + request.max_tokens + self._runner.sizes.drafts
        pages = stripes.pages_for(need)
        if pages > pool.pages:
            drafts = f" and {self._runner.sizes.drafts} drafts" if self._runner.sizes.drafts else ""
            return (
                f"prompt of {len(request.prompt)} tokens and {request.max_tokens} new ones{drafts} need {need} "
                f"tokens of KV, {pages} pages; the cache holds {pool.pages * stripes.page_tokens}, "
                f"{pool.pages} pages ({self._runner.cache.remedy})"
            )
        self._submitted += 1
        tokens = np.asarray(request.prompt, dtype=np.int32)
        s = Scheduled(request, (-request.priority, now, self._submitted), tokens, len(tokens))
        self._requests[request.id] = s
        self._queue(s)
        return None

    def end(self, request_id: str | int) -> Scheduled | None:
        """Ends a waiting or running request, because of its tokens or an abort; returns it, or None if there is none.

        The next decision frees its slot and pages.
        """
        s = self._requests.pop(request_id, None)
        if s is not None:
            s.ended = True
            if s.slot is None:
                self._unqueue(bisect_left(self._waiting, s.order, key=lambda entry: entry[0]))
        return s

    def record_token(self, slot: int, token: int) -> Scheduled | None:
        """Records a token of the oldest unread decision; returns its request, or None if that has ended."""
        drawing = self._launched[0][slot]
        s = drawing.s
        if s.ended:
            return None
        s.drawn.append(token)
        if s.request.matcher is not None:
            s.request.matcher.take(token)
        drawing.expect(-min(drawing.least, 1), -min(drawing.most, 1), -min(drawing.likely, 1))
        return s

    def landed(self) -> None:
        """Marks the oldest unread decision as read: all its tokens are recorded."""
        for drawing in self._launched.popleft().values():
            drawing.expect(-drawing.least, -drawing.most, -drawing.likely)

    @property
    def under_way(self) -> int:
        """Number of launched decisions that are not read yet."""
        return len(self._launched)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def prefills(self) -> bool:
        """Whether the prompt of any running request is not fully prefilled."""
        return any(s.prefilled < len(s.tokens) for s in self.running.values())

    @property
    def expects_chunk(self) -> bool:
        """Whether the next decision may have a prompt chunk: of a running request, or of one that it admits."""
        return self.prefills or self._more

    # ---- decisions

    def decide(self, now: float) -> Decision | None:
        """Makes the next decision; returns None if nothing can be done before a decision is read or a request arrives.

        None without any unread decision means that no request is left. A step in which any request has a grammar is
        held, and the next decision waits for the tokens before it: the allowed tokens depend on them.
        """
        guided = [s for s in self.running.values() if s.request.matcher is not None]
        if any(s.most > self._held_tokens and not s.ended for s in guided):
            return None
        waiting = self._launched[-1] if self._held_tokens else {}
        masks = {
            slot: drawing.s.request.matcher.allowed()
            for slot, drawing in waiting.items()
            if drawing.s.request.matcher is not None and drawing.most and not drawing.s.ended
        }
        retire = [slot for slot, s in self.running.items() if s.ended]
        for slot in retire:
            self._leave(self.running[slot])
        writes, self._changed = self._changed, []
        decoding = [s for s in self.running.values() if s.decoding]
        run_tokens = self._run_tokens
        short = [s for s in decoding if s.reserved < self._room(s, run_tokens)]
        for s in sorted(short, key=lambda s: s.order):
            if s.slot is not None:  # else it was preempted for an earlier one
                retire += self._extend(s, writes)
        if short:
            decoding = [s for s in decoding if s.slot is not None]
        admit = tuple(self._admit(now))
        prefill = tuple(self._chunk(bool(decoding), writes))
        drawing = {segment.slot: UnreadTokens(self.running[segment.slot]) for segment in prefill if segment.last}
        for first in drawing.values():
            first.expect(1, 1, 1)
            if first.s.left:
                decoding.append(first.s)
        homes = len(self._homes)
        slot = max(self.running, default=0) // homes
        rows = min(1 << slot.bit_length(), self._runner.sizes.slots) if self.running else 0
        masked = any(s.request.matcher is not None for s in decoding)
        plan, steps = StepPlan(), 0
        # A sequence that has probably drawn its last token gets no further step until its unread tokens are read.
        left = [n for s in decoding if (n := s.request.max_tokens - len(s.drawn) - s.likely) > 0]
        if left and not (prefill and self._goes_on()):
            shaped = {slot for slot, s in self.running.items() if s.request.sampling.is_shaped}
            plan = self._pace(rows, sum(s.cached for s in self.running.values()), shaped)
            steps = self._steps(plan, min(left), 1 if masked else self._runner.sizes.run_steps)
        most, sparse_from = steps * (1 + plan.drafts), self._runner.policy.from_tokens
        held, self._held_tokens = bool(self._held_tokens), most if masked else 0
        for s in decoding:
            assert s.slot is not None
            drawing.setdefault(s.slot, UnreadTokens(s)).expect(steps, most, int(steps * plan.tokens))
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
                # Shorter sequences read all keys in a sparse step too, so the batch does not affect their tokens.
                sparse=sparse_from is not None and any(s.known + s.most > sparse_from for s in decoding),
            ),
            row_tokens=sum(s.known + s.most for s in decoding) // max(rows, 1),
            draft_limits=plan.draft_limits,
            holds_draw=self._held_tokens > 0,
            masks=masks,
        )

    # ---- slots and pages

    def _admit(self, now: float) -> Iterator[Admission]:
        at, most = 0, min(len(self._waiting), LOOK_AHEAD * len(self._homes))
        self._more = most < len(self._waiting)
        for _ in range(most):
            if not any(self._free_slots):
                self._more = False
                return
            _, s = self._waiting[at]
            fit = self._fit(s, now)
            if fit is None:
                s.refused = now if s.refused is None else s.refused
                self._more = False
                if now - s.refused >= self._schedule.patience_s:
                    return
                at += 1
                continue
            self._unqueue(at)
            home, held = fit
            behind, state = self._homes[home].states.find(s.tokens, held.known, s.request.prefix_salt)
            s.slot, s.held = heapq.heappop(self._free_slots[home]), held
            s.prefilled = max(self._resumes(held.known), behind)
            self.running[s.slot] = s
            request = s.request
            yield Admission(
                request.id,
                s.slot,
                len(s.tokens),
                s.tokens if self._runner.sizes.drafts or request.sampling.changes_logits else s.tokens[:0],
                held.start,
                held.pages.copy(),  # the table changes while the decision runs
                s.reserved,
                s.prompt_tokens + request.max_tokens - 1,  # the last token is never appended
                request.sampling,
                held.known,
                s.prefilled,
                held.copy_from,
                held.copy_to,
                request.drawn + len(s.drawn),
                None if request.matcher is None else request.matcher.allowed(),
                state,
                hash(request.prefix_salt) & SALTS,
            )

    def _fit(self, s: Scheduled, now: float) -> tuple[int, BlockTable] | None:
        """Allocates pages for a waiting request, at home on one of the ranks that own sequences.

        That is the rank with the most of its prompt, if that is half of it; else the one with the fewest sequences.

        Returns:
            The home and the pages; None if they fit nowhere or it has unread tokens.
        """
        room = sum(home.pool.room for home in self._homes)
        if s.most or (room < s.room and now < s.again):
            return None
        s.tokens = s.text()
        s.reserved = self._room(s, self._lease)
        # Any kvp rank may own the first block; equal prefixes share pages only if it is the same rank.
        start = crc32(s.tokens[: self._stripes.tokens].tobytes()) % self._stripes.layout.kvp
        for home in self._by_preference(s):
            held = self._homes[home].admit(s.tokens, s.reserved, start, s.request.prefix_salt)
            if held is not None:
                return home, held
        s.room, s.again = room + 1, now + RETRY_S
        return None

    def _by_preference(self, s: Scheduled) -> list[int]:
        """Returns the homes with a free slot, the best for a request first."""
        free = self._free_slots
        homes = [home for home in range(len(free)) if free[home]]
        if len(homes) < 2:
            return homes
        hits = {home: self._homes[home].tree.match(s.tokens, s.request.prefix_salt).tokens for home in homes}
        # A few tokens in common would bring all sequences to one rank: steps have as many rows as the fullest rank.
        hits = {home: hit if 2 * hit >= len(s.tokens) else 0 for home, hit in hits.items()}
        return sorted(homes, key=lambda home: (-hits[home], -len(free[home]), home))

    def _tables(self, s: Scheduled) -> BlockTables:
        """Returns the allocator of a running request's pages."""
        assert s.slot is not None
        return self._homes[s.slot % len(self._homes)]

    def _extend(self, s: Scheduled, writes: list[TableChange]) -> list[int]:
        """Allocates pages for a sequence's next lease, or at least its next run; returns slots preempted for it."""
        gone: list[int] = []
        while s.held is not None:
            column = len(s.held.pages)
            for count in (self._lease, self._run_tokens):
                reserved = self._room(s, count)
                if (more := self._tables(s).grow(s.held, reserved)) is not None:
                    s.reserved, s.leased = reserved, False
                    writes.append(TableChange(s, s.held, column, len(more)))
                    return gone
            gone.append(self._preempt_for(s))
        return gone

    def _preempt_for(self, s: Scheduled) -> int:
        """Preempts the sequence of no higher priority that is cheapest to recompute, maybe `s`; returns its slot."""

        def loss(other: Scheduled) -> tuple[int, float]:
            assert other.held is not None
            stripes = self._stripes
            kept = self._tables(other).pool.shared(other.held.pages) // stripes.pages * stripes.tokens
            return other.request.priority, self._times.work(min(kept, other.cached), other.cached)

        priority = s.request.priority
        others = [
            o
            for o in self.running.values()
            if self._tables(o) is self._tables(s) and not o.leased and o.request.priority <= priority
        ]
        victim = min([*others, s], key=loss)
        slot = victim.slot
        assert slot is not None
        self._leave(victim)
        victim.leased, victim.refused, victim.room = True, None, 0
        self._queue(victim)
        self.preemptions += 1
        return slot

    def _leave(self, s: Scheduled) -> None:
        """Frees a sequence's slot and pages; their content stays in the prefix cache."""
        assert s.slot is not None and s.held is not None
        known = s.tokens if self._runner.drafter.lags else s.text()
        self._tables(s).end(s.held, known[: s.cached])
        heapq.heappush(self._free_slots[s.slot % len(self._homes)], s.slot)
        del self.running[s.slot]
        s.slot, s.held, s.prefilled = None, None, 0

    def _room(self, s: Scheduled, more: int) -> int:
        """Returns the tokens for which a sequence needs pages to draw `more` tokens."""
        return min(s.known + s.most + more, s.prompt_tokens + s.request.max_tokens) + self._runner.sizes.drafts

    def _queue(self, s: Scheduled) -> None:
        text = s.text()
        cached = max(home.tree.match(text, s.request.prefix_salt).tokens for home in self._homes)
        s.work = int(self._times.work(self._resumes(cached), len(text)))
        self._queued += s.work
        insort(self._waiting, (s.order, s))

    def _unqueue(self, at: int) -> None:
        _, s = self._waiting.pop(at)
        self._queued -= s.work

    # ---- time

    def _chunk(self, decoding: bool, writes: list[TableChange]) -> Iterator[Segment]:
        """Yields the segments of a prompt chunk if one is due: half for the oldest prompt, then the shortest first."""
        prompts = [s for s in self.running.values() if s.prefilled < len(s.tokens)]
        if not decoding:
            self._owed = self._paused = 0.0
        if not prompts or self._owed > 0:
            return
        stall = self._stall_s()
        if self._paused >= stall:
            return
        oldest = min(prompts, key=lambda s: s.order[1:])
        others = sorted(
            (s for s in prompts if s is not oldest), key=lambda s: (s.order[0], len(s.tokens) - s.prefilled)
        )
        tokens = self._runner.sizes.chunk
        work = self._times.longest(self._longest_s) or UNTIMED_WORK
        if decoding:
            work = min(work, self._times.within(stall - self._paused))
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
                continue  # it will share the pages that another prompt computes now
            computed.add(stripe)
            count = self._cut(s, tokens, work)
            tokens, work = tokens - count, work - self._times.work(s.prefilled, s.prefilled + count)
            ends[s] = s.prefilled + count
        ends[oldest] = oldest.prefilled + max(half, self._cut(oldest, half + tokens, of_half + work))
        if decoding or sum(end - s.prefilled for s, end in ends.items()) < self._runner.sizes.chunk:
            self._round(oldest, ends)
        done = 0.0
        for s, end in ends.items():
            if end > s.prefilled:
                assert s.slot is not None and s.held is not None
                states = self._tables(s).states
                snapped, snapshot = states.end(s.tokens), (-1, -1)
                is_snapped = s.prefilled < snapped <= end
                end = snapped if is_snapped else end
                columns = self._tables(s).enter(s.held, s.tokens[:end])
                self._changed.append(TableChange(s, s.held, columns.start, len(columns)))
                if is_snapped:
                    snapshot = states.take(s.tokens[:end], s.request.prefix_salt, s.held.node)
                new = s.tokens[s.prefilled : end]
                last = end == len(s.tokens)
                yield Segment(s.slot, s.prefilled, end, last, new, s.held.known, *snapshot, s.scored(end))
                done += self._times.work(s.prefilled, end)
                s.prefilled = end
        if decoding:
            seconds = self._times.seconds(done)
            self._owed, self._paused = self._goal.owed_s(seconds, stall), self._paused + seconds

    def _round(self, oldest: Scheduled, ends: dict[Scheduled, int]) -> None:
        """Limits a chunk to one of the runner's sizes, at a prompt that goes on behind it anyway."""
        sizes, counts = self._runner.chunk_sizes, {s: end - s.prefilled for s, end in ends.items()}
        size = max((size for size in sizes if size <= sum(counts.values()) <= sizes[-1]), default=0)
        later = [s for s, end in ends.items() if end < len(s.tokens)]
        if not size or not later:
            return
        last = max(later, key=lambda s: (s is not oldest, len(s.tokens) - s.prefilled))
        left = counts[last] - (sum(counts.values()) - size)
        if left > 0 and (last is not oldest or 2 * left >= size):
            ends[last] = last.prefilled + left

    def _stall_s(self) -> float:
        """Returns the most seconds of chunks between two steps, by the prompts that wait beside the oldest."""
        prompts = [s for s in self.running.values() if s.prefilled < len(s.tokens)]
        oldest = min(prompts, key=lambda s: s.order[1:], default=None)
        waiting = self._queued + sum(self._times.work(s.prefilled, len(s.tokens)) for s in prompts if s is not oldest)
        return self._goal.stall_s(self._times.seconds(waiting) if waiting else 0.0)

    def _goes_on(self) -> bool:
        """Returns whether a chunk follows the last one, beside which somebody decodes, before any step.

        No step is owed, and half of the pause is left.
        """
        return self.expects_chunk and self._owed <= 0 and 0 < 2 * self._paused <= self._stall_s()

    def _advance(self, s: Scheduled, writes: list[TableChange]) -> None:
        """Shares pages of a prompt that other sequences have computed since."""
        assert s.held is not None
        known, columns = self._tables(s).advance(s.held, s.tokens, max(s.prefilled, s.held.known))
        if known > s.held.known and known > s.prefilled:
            s.held.known, s.prefilled = known, max(s.prefilled, self._resumes(known))
        writes.append(TableChange(s, s.held, columns.start, len(columns)))

    def _resumes(self, known: int) -> int:
        """Returns the position at which a prompt's prefill resumes, with `known` tokens in its pages."""
        return int(max(known - self._runner.lacking, 0))

    def _next_stripe(self, s: Scheduled) -> Hashable:
        assert s.held is not None
        stripe = self._tables(s).next_stripe(s.held, s.tokens)
        return None if stripe is None else (self._tables(s), stripe)

    def _cut(self, s: Scheduled, tokens: int, work: float) -> int:
        """Returns the number of a prompt's next tokens, within limits of tokens and work."""
        tokens = min(tokens, len(s.tokens) - s.prefilled)
        return tokens if math.isinf(work) else min(tokens, self._times.tokens(s.prefilled, work))

    def _steps(self, plan: StepPlan, left: int, bound: int) -> int:
        """Returns the decode steps of one decision, at least one: at most until the first sequence must end."""
        most = min(bound, math.ceil(left / plan.tokens), plan.steps or bound)
        prompts, self._paused = self.expects_chunk, 0.0
        if plan.seconds is None:
            self._owed = 0.0
            return 1 if prompts else min(most, plan.steps or UNTIMED_STEPS)
        most = min(most, int(self._schedule.run_ms / 1e3 / plan.seconds))
        if prompts:
            most = min(most, math.ceil(self._owed / plan.seconds))
        self._owed = max(self._owed - max(most, 1) * plan.seconds, 0.0)
        return max(most, 1)
