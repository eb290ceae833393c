"""Scheduler, on rank 0's host only: which requests to admit, what to prefill, and how many decode steps to run.

All ranks execute batches on one stream, each in the order of its fields, so the next one may be scheduled and launched
while earlier ones run. A sequence with tokens in flight counts with their upper bound. Released slots and pages are
reusable at once: earlier launches may still write to them, but finish before later launches begin.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from zlib import crc32

import numpy as np

from helix.config import ScheduleConfig
from helix.engine.block_tables import BlockTable, BlockTables
from helix.engine.prefill_time import PrefillTime
from helix.engine.prefix_moves import PrefixMoves
from helix.engine.request import Request
from helix.engine.request_state import PendingTableUpdate, PendingTokens, RequestState
from helix.engine.schedule_policy import SchedulePolicy
from helix.engine.scheduler_output import NewRequest, PrefillChunk, SchedulerOutput, SharedPrefix, StepPlan, StripeMove
from helix.engine.shared_prefix import shared_prefixes
from helix.worker.graph_keys import SHARED_PREFIXES, DecodeGraphKey
from helix.worker.model_runner import ModelRunner

MIN_CHUNK = 32  # tokens: a shorter chunk takes as long
MAX_CHUNK_S = 2.0  # even if nothing decodes: aborts and new requests wait for the end of the chunk
UNTIMED_WORK = 512.0  # work of the first chunk, while times are unknown
LOOK_AHEAD = 32  # waiting requests to consider per DP rank and batch: the device may be idle meanwhile
UNTIMED_STEPS = 2  # decode steps of a run of unknown duration: new requests wait for all of them
SALT_MASK = (1 << 39) - 1  # bits of `hash(salt)` that ranks get; the hash differs between processes
RETRY_S = 1.0  # interval to retry a request that did not fit: its prefix may be cached by then


class Scheduler:
    """Schedules all ranks. No cost grows with the context, except numpy passes over matched tokens.

    The engine calls `schedule` and launches the result, and may do so again before that batch has run. When it reads
    the oldest batch in flight, it calls `record_token` for each token, `end` if that ends the request, then
    `finish_batch`.

    Args:
        tables: page allocators: one, or one per DP rank; slot s belongs to DP rank `s % len(tables)`.
        times: predicts prefill times, and orders preemptions by their work.
        plan_steps: (rows, KV tokens of these, whether a slot takes drafts) -> plan of the next run; see `DraftPolicy`.
        moves: of prefixes to and from host memory, if any; not in mode dp.
    """

    def __init__(
        self,
        tables: Sequence[BlockTables],
        times: PrefillTime,
        runner: ModelRunner,
        schedule: ScheduleConfig,
        plan_steps: Callable[[int, int, Mapping[int, bool]], StepPlan] = lambda rows, kv_tokens, takes_drafts: (
            StepPlan()
        ),
        moves: PrefixMoves | None = None,
    ) -> None:
        self._dp_tables, self._times, self._runner, self._plan_steps = tables, times, runner, plan_steps
        self._stripes = tables[0].tree.stripes
        self.moves = moves
        if moves is not None:
            moves.prefill_start = self._prefill_start
        self._policy = SchedulePolicy(schedule)
        self._schedule = schedule
        # With KV offload each chunk fetches the KV before it: short chunks would be bound by the host link.
        self._max_chunk_s = math.inf if runner.cache.fetches else MAX_CHUNK_S
        # A heap per DP rank: low slots first, so that steps have few rows.
        slots = runner.sizes.slots * len(tables)
        self._free_slots = [list(range(dp_rank, slots, len(tables))) for dp_rank in range(len(tables))]
        self._requests: dict[str | int, RequestState] = {}
        self._waiting: list[tuple[tuple[int, float, int], RequestState]] = []  # sorted; keys are unique
        self._waiting_work = 0
        self._in_flight: deque[dict[int, PendingTokens]] = deque()  # by slot
        self._deferred_tokens = 0  # maximum tokens per sequence of the last batch if it defers sampling, else 0
        self._deferred_slots = frozenset[int]()  # of the sequences of that step, not of those with a first token only
        self._pending_updates: list[PendingTableUpdate] = []  # table changes by the last batch's prefill chunk
        self._decode_debt_s = 0.0  # seconds to decode before the next prefill chunk
        self._prefill_stall_s = 0.0  # seconds of prefill since the last step of decoding sequences
        self._may_admit_more = False  # LOOK_AHEAD kept the last batch from considering all waiting requests
        self._number = self._submitted = 0
        self._prefix_tables: list[tuple[int, BlockTable, int]] = []  # those of which `_prefixes` are
        self._prefixes: list[tuple[SharedPrefix, ...]] = []
        self.running: dict[int, RequestState] = {}
        self.preemptions = 0

    @property
    def _run_tokens(self) -> int:
        return self._runner.sizes.run_steps * (1 + self._runner.sizes.drafts)

    @property
    def _lookahead_tokens(self) -> int:
        """Tokens for which a sequence reserves pages at a time: at least one batch's."""
        return max(self._schedule.lookahead_tokens, 1 + self._run_tokens)

    # ---- requests

    def submit(self, request: Request, now: float) -> str | None:
        """Queues a request; returns the reason if it can never be served."""
        if request.id in self._requests:
            return f"request id={request.id!r} is in use: choose another id"
        pool, stripes = self._dp_tables[0].pool, self._stripes
        need = len(request.prompt) + request.max_tokens + self._runner.sizes.drafts
        pages = stripes.pages_for(need)
        if pages > pool.pages:
            drafts = f" and {self._runner.sizes.drafts} drafts" if self._runner.sizes.drafts else ""
            return (
                f"prompt of {len(request.prompt)} tokens plus max_tokens={request.max_tokens}{drafts} needs {need} "
                f"tokens of KV ({pages} pages), but the cache holds {pool.pages * stripes.page_tokens} "
                f"({pool.pages} pages): {self._runner.cache.remedy}"
            )
        self._submitted += 1
        tokens = np.asarray(request.prompt, dtype=np.int32)
        s = RequestState(request, (-request.priority, now, self._submitted), tokens, len(tokens))
        self._requests[request.id] = s
        self._queue(s)
        return None

    def end(self, request_id: str | int) -> RequestState | None:
        """Ends a waiting or running request, finished or aborted; returns it, or None if there is none.

        The next batch frees its slot and pages.
        """
        s = self._requests.pop(request_id, None)
        if s is not None:
            s.end()
            if s.slot is None:
                self._unqueue(bisect_left(self._waiting, s.order, key=lambda entry: entry[0]))
        return s

    def record_token(self, slot: int, token: int) -> RequestState | None:
        """Records a token of the oldest batch in flight; returns its request, or None if that has ended."""
        pending = self._in_flight[0][slot]
        s = pending.s
        if s.ended:
            return None
        s.output_token_ids.append(token)
        if s.request.matcher is not None:
            s.request.matcher.accept_token(token)
        pending.expect(-min(pending.min_new, 1), -min(pending.max_new, 1), -min(pending.expected_new, 1))
        return s

    def finish_batch(self) -> None:
        """Removes the oldest batch in flight, all of whose tokens are recorded."""
        for pending in self._in_flight.popleft().values():
            pending.expect(-pending.min_new, -pending.max_new, -pending.expected_new)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_prefill(self) -> bool:
        return any(s.num_computed_tokens < len(s.tokens) for s in self.running.values())

    @property
    def expects_chunk(self) -> bool:
        """Whether the next batch may have a prefill chunk, of a running request or one that it admits."""
        return self.has_prefill or self._may_admit_more

    # ---- scheduling

    def schedule(self, now: float) -> SchedulerOutput | None:
        """Schedules the next batch; returns None if it has to wait for a batch in flight or a new request.

        None without any batch in flight means that no request is left, or that those left wait for their prefixes to
        come from host memory. If any request has a grammar, sampling is deferred to the next batch, which waits for all
        earlier tokens: the grammar's mask depends on them.
        """
        guided = [s for s in self.running.values() if s.request.matcher is not None]
        if any(s.max_new > self._deferred_tokens and not s.ended for s in guided):
            return None
        waiting = self._in_flight[-1] if self._deferred_tokens else {}
        masks = {
            slot: pending.s.request.matcher.token_bitmask()
            for slot, pending in waiting.items()
            if slot in self._deferred_slots and pending.s.request.matcher is not None and not pending.s.ended
        }
        retire = [slot for slot, s in self.running.items() if s.ended]
        for slot in retire:
            self._release(self.running[slot])
        writes, self._pending_updates = self._pending_updates, []
        decoding = [s for s in self.running.values() if s.is_decoding]
        run_tokens = self._run_tokens
        short = [s for s in decoding if s.reserved < self._tokens_to_reserve(s, run_tokens)]
        for s in sorted(short, key=lambda s: s.order):
            if s.slot is not None:  # else `_extend` preempted it for an earlier one
                retire += self._extend(s, writes)
        if short:
            decoding = [s for s in decoding if s.slot is not None]
        slot_moves = self._compact()
        admit = tuple(self._admit(now))
        prefill = tuple(self._chunk(bool(decoding), writes))
        pending = {chunk.slot: PendingTokens(self.running[chunk.slot]) for chunk in prefill if chunk.last}
        for first in pending.values():
            first.expect(1, 1, 1)
            if first.s.max_unscheduled_tokens:
                decoding.append(first.s)
        rows = self._rows
        masked = any(s.request.matcher is not None for s in decoding)
        plan, steps = StepPlan(), 0
        # A sequence whose last token is probably in flight gets no further step until its tokens are read.
        left = [n for s in decoding if (n := s.request.max_tokens - len(s.output_token_ids) - s.expected_new) > 0]
        if left and not (prefill and self._continues_prefill()):
            takes_drafts = {k: not s.request.sampling.needs_logits_processor for k, s in self.running.items()}
            plan = self._plan_steps(rows, sum(s.num_kv_tokens for s in self.running.values()), takes_drafts)
            steps = self._steps(plan, min(left), 1 if masked else self._runner.sizes.run_steps)
        max_new, sparse_from = steps * (1 + plan.drafts), self._runner.policy.from_tokens
        has_deferred, self._deferred_tokens = bool(self._deferred_tokens), max_new if masked else 0
        self._deferred_slots = frozenset(s.slot for s in decoding if s.slot is not None and self._deferred_tokens)
        for s in decoding:
            assert s.slot is not None
            pending.setdefault(s.slot, PendingTokens(s)).expect(steps, max_new, int(steps * plan.tokens))
        # Sparse steps read all keys of shorter sequences, so their tokens do not depend on the batch.
        sparse = sparse_from is not None and any(s.num_tokens + s.max_new > sparse_from for s in decoding)
        prefixes = self._shared_prefixes(decoding) if steps and not sparse else []
        tables = tuple(write for change in writes if (write := change.to_update()) is not None)
        moves = self._move(prefill, now)
        if not (retire or slot_moves or tables or admit or prefill or steps or has_deferred or moves):
            return None
        self._in_flight.append(pending)
        self._number += 1
        return SchedulerOutput(
            self._number,
            tuple(retire),
            slot_moves,
            tables,
            admit,
            prefill,
            steps,
            DecodeGraphKey.of(
                [s.request.sampling for s in self.running.values()],
                rows=rows,
                drafts=plan.drafts,
                sparse=sparse,
                shared_prefixes=next(n for n in SHARED_PREFIXES if n >= max(map(len, prefixes), default=0)),
            ),
            row_tokens=sum(s.num_tokens + s.max_new for s in decoding) // max(rows, 1),
            draft_limits=plan.draft_limits,
            defers_sampling=self._deferred_tokens > 0,
            token_bitmasks=masks,
            shared_prefixes=tuple(prefix for of_rank in prefixes for prefix in of_rank),
            moves=moves,
        )

    def _move(self, prefill: Iterable[PrefillChunk], now: float) -> tuple[StripeMove, ...]:
        """Returns the moves of prefixes to start, prompts read in this batch included."""
        if self.moves is None:
            return ()
        for chunk in prefill:
            if chunk.last:
                s = self.running[chunk.slot]
                self.moves.offer(s, s.tokens)
        return self.moves.take(len(self.running) * self._stripes.pages_for(self._run_tokens), now)

    # ---- slots and pages

    @property
    def _rows(self) -> int:
        """Rows of a step: a power of two that has all occupied slots, or all slots."""
        slot = max(self.running, default=0) // len(self._dp_tables)
        return min(1 << slot.bit_length(), self._runner.sizes.slots) if self.running else 0

    def _compact(self) -> tuple[tuple[int, int], ...]:
        """Moves sequences to lower slots if a step then has fewer rows; returns (from, to) of each.

        When many sequences have ended, those left may be in any slots. While others wait, these fill the lower slots.
        """
        if self._waiting or not self.running or not self._runner.moves_slots:
            return ()
        dp_ranks = len(self._dp_tables)
        count = max(Counter(slot % dp_ranks for slot in self.running).values())
        rows = 1 << (count - 1).bit_length()
        if rows >= self._rows:
            return ()
        moved = dict[int, int]()
        for slot in sorted(slot for slot in self.running if slot >= rows * dp_ranks):
            free = self._free_slots[slot % dp_ranks]
            moved[slot] = heapq.heapreplace(free, slot)
            self.running[slot].slot = moved[slot]
        self.running = {moved.get(slot, slot): s for slot, s in self.running.items()}
        return tuple(moved.items())

    def _admit(self, now: float) -> Iterator[NewRequest]:
        at, max_candidates = 0, min(len(self._waiting), LOOK_AHEAD * len(self._dp_tables))
        self._may_admit_more = max_candidates < len(self._waiting)
        for _ in range(max_candidates):
            if not any(self._free_slots):
                self._may_admit_more = False
                return
            _, s = self._waiting[at]
            if self._waits_for_fork(s):
                at += 1
                continue
            fit = self._fit(s, now)
            if fit is None:
                self._may_admit_more = False
                if s.retry_pages:  # else it waits for its prefix or for tokens in flight, and keeps nothing from others
                    s.first_rejected_at = now if s.first_rejected_at is None else s.first_rejected_at
                    if now - s.first_rejected_at >= self._schedule.patience_s:
                        return
                at += 1
                continue
            self._unqueue(at)
            dp_rank, table = fit
            s.slot, s.block_table = heapq.heappop(self._free_slots[dp_rank]), table
            snapshot_index = self._resume(s, table)
            self.running[s.slot] = s
            request = s.request
            yield NewRequest(
                request.id,
                s.slot,
                len(s.tokens),
                s.tokens if self._runner.sizes.drafts or request.sampling.counts_tokens else s.tokens[:0],
                table.start,
                table.pages.copy(),  # the table changes while the batch runs
                s.reserved,
                s.prompt_tokens + request.max_tokens - 1,  # the last token is never appended
                request.sampling,
                table.num_cached_tokens,
                s.num_computed_tokens,
                table.copy_from,
                table.copy_to,
                request.num_prior_output_tokens + len(s.output_token_ids),
                None if request.matcher is None else request.matcher.token_bitmask(),
                snapshot_index,
                hash(request.prefix_salt) & SALT_MASK,
            )

    def _resume(self, s: RequestState, table: BlockTable) -> int:
        """Decides where the prefill of an admitted request begins, and after which tokens to take snapshots.

        Returns:
            The snapshot from which it resumes; -1: none.
        """
        snapshots, known = self._tables(s).snapshots, table.num_inserted_tokens
        snapshot_end, index = snapshots.find(table.node, known)
        ends = snapshots.ends(len(s.tokens), known, s.request.last_message_start)
        # Windows are exact after a hit, not before: to take a snapshot at its last whole stripe, begin earlier.
        exact = known if known in ends and known > snapshot_end else table.num_cached_tokens
        s.num_computed_tokens = self._prefill_start(exact)
        if index >= 0 and snapshot_end >= s.num_computed_tokens:
            s.num_computed_tokens = exact = snapshot_end
        else:
            index = -1
        s.snapshot_ends = [end for end in ends if end >= exact or not s.num_computed_tokens]
        return index

    def _fit(self, s: RequestState, now: float) -> tuple[int, BlockTable] | None:
        """Allocates pages for a waiting request on a DP rank; returns rank and pages, or None if it fits nowhere now.

        It waits, too, while tokens from before its preemption are in flight.
        """
        available = sum(tables.pool.available for tables in self._dp_tables)
        if s.max_new or (available < s.retry_pages and now < s.retry_at):
            return None
        s.tokens = s.token_ids()
        s.reserved = self._tokens_to_reserve(s, self._lookahead_tokens)
        s.retry_pages = 0
        if self.moves is not None and self.moves.restores(s, len(self._free_slots[0]), now):
            return None
        # Any KVP rank may own the first block, but equal prefixes share pages only if it is the same rank.
        start = crc32(s.tokens[: self._stripes.tokens].tobytes()) % self._stripes.layout.kvp
        for dp_rank in self._by_preference(s):
            table = self._dp_tables[dp_rank].admit(s.tokens, s.reserved, start, s.request.prefix_salt)
            if table is not None:
                return dp_rank, table
        s.retry_pages, s.retry_at = available + 1, now + RETRY_S
        return None

    def _waits_for_fork(self, s: RequestState) -> bool:
        """Returns whether a prompt that is being read will leave a snapshot where a waiting one parts from it.

        With states it can resume only there, and would otherwise compute the shared tokens again. It does not wait for
        less than half of what it has to compute.
        """
        reading = [o for o in self.running.values() if o.num_computed_tokens < len(o.tokens)]
        if not reading or s.max_new or not math.isinf(self._runner.recomputed_tokens):
            return False
        if s.request.sampling.prompt_logprobs is not None:
            return False
        tokens, salt, (tables, *_) = s.token_ids(), s.request.prefix_salt, self._dp_tables
        hit = tables.tree.match(tokens, salt)
        snapshot = tables.tree.last_snapshot(hit.node, hit.shared)
        begin = 0 if snapshot is None else snapshot.tokens
        best, reader = begin + (len(tokens) - begin) // 2, None
        for other in reading:
            if other.request.prefix_salt == salt:
                end = tables.snapshots.fork(tokens, other.tokens)
                if end > max(best, other.num_computed_tokens):
                    best, reader = end, other
        if reader is not None and best not in reader.snapshot_ends:
            insort(reader.snapshot_ends, best)
        return reader is not None

    def _by_preference(self, s: RequestState) -> list[int]:
        """Returns the DP ranks with a free slot: longest prefix hit first, then most free slots."""
        free = self._free_slots
        dp_ranks = [dp_rank for dp_rank in range(len(free)) if free[dp_rank]]
        if len(dp_ranks) < 2:
            return dp_ranks
        hits = {
            dp_rank: self._dp_tables[dp_rank].tree.match(s.tokens, s.request.prefix_salt).tokens for dp_rank in dp_ranks
        }
        # Ignore short hits: a shared template would put all sequences on one rank, and steps of all DP ranks have as
        # many rows as the fullest one.
        hits = {dp_rank: hit if 2 * hit >= len(s.tokens) else 0 for dp_rank, hit in hits.items()}
        return sorted(dp_ranks, key=lambda dp_rank: (-hits[dp_rank], -len(free[dp_rank]), dp_rank))

    def _shared_prefixes(self, decoding: Sequence[RequestState]) -> list[tuple[SharedPrefix, ...]]:
        """Returns the shared prefixes of decoding sequences, by DP rank; found again when tables have changed."""
        min_pages, dp_ranks = self._runner.min_shared_pages, len(self._dp_tables)
        if math.isinf(min_pages):
            return []
        tables = [
            (s.slot, s.block_table, s.block_table.num_inserted_tokens)
            for s in decoding
            if s.slot is not None and s.block_table is not None
        ]
        if tables != self._prefix_tables:
            self._prefix_tables = tables
            by_rank: list[dict[int, np.ndarray]] = [{} for _ in range(dp_ranks)]
            for slot, table, tokens in tables:
                by_rank[slot % dp_ranks][slot] = table.pages[self._stripes.columns(0, tokens)]
            share = self._runner.min_sharing_rows
            self._prefixes = [
                shared_prefixes(pages, min_pages, min_slots=max(2, math.ceil(share * len(pages)))) for pages in by_rank
            ]
        return self._prefixes

    def _tables(self, s: RequestState) -> BlockTables:
        assert s.slot is not None
        return self._dp_tables[s.slot % len(self._dp_tables)]

    def _extend(self, s: RequestState, writes: list[PendingTableUpdate]) -> list[int]:
        """Allocates pages for a sequence's lookahead, or at least its next run; returns slots preempted for it."""
        preempted: list[int] = []
        while s.block_table is not None:
            column = len(s.block_table.pages)
            for count in (self._lookahead_tokens, self._run_tokens):
                reserved = self._tokens_to_reserve(s, count)
                if (more := self._tables(s).grow(s.block_table, reserved)) is not None:
                    s.reserved, s.preemption_exempt = reserved, False
                    writes.append(PendingTableUpdate(s, s.block_table, column, len(more)))
                    return preempted
            preempted.append(self._preempt_for(s))
        return preempted

    def _preempt_for(self, s: RequestState) -> int:
        """Preempts `s` or a sequence of no higher priority, the cheapest to recompute; returns its slot."""

        def loss(other: RequestState) -> tuple[int, float]:
            assert other.block_table is not None
            shared = self._tables(other).pool.count_shared(other.block_table.pages) // self._stripes.pages
            end = other.num_kv_tokens
            return other.request.priority, self._times.work(min(shared * self._stripes.tokens, end), end)

        priority = s.request.priority
        others = [
            o
            for o in self.running.values()
            if self._tables(o) is self._tables(s) and not o.preemption_exempt and o.request.priority <= priority
        ]
        victim = min([*others, s], key=loss)
        slot = victim.slot
        assert slot is not None
        self._release(victim)
        victim.preemption_exempt, victim.first_rejected_at, victim.retry_pages, victim.restore = True, None, 0, None
        self._queue(victim)
        self.preemptions += 1
        return slot

    def _release(self, s: RequestState) -> None:
        assert s.slot is not None and s.block_table is not None
        token_ids = s.tokens if self._runner.drafter.may_lag else s.token_ids()
        if self.moves is not None:
            self.moves.offer(s, token_ids[: s.num_kv_tokens])
        self._tables(s).end(s.block_table, token_ids[: s.num_kv_tokens])
        heapq.heappush(self._free_slots[s.slot % len(self._dp_tables)], s.slot)
        del self.running[s.slot]
        s.slot, s.block_table, s.num_computed_tokens = None, None, 0

    def _tokens_to_reserve(self, s: RequestState, more: int) -> int:
        return min(s.num_tokens + s.max_new + more, s.prompt_tokens + s.request.max_tokens) + self._runner.sizes.drafts

    def _queue(self, s: RequestState) -> None:
        token_ids = s.token_ids()
        begin = 0
        for tables in self._dp_tables:
            hit = tables.tree.match(token_ids, s.request.prefix_salt)
            snapshot = tables.tree.last_snapshot(hit.node, hit.shared)
            begin = max(begin, self._prefill_start(hit.tokens), 0 if snapshot is None else snapshot.tokens)
        s.work = int(self._times.work(begin, len(token_ids)))
        self._waiting_work += s.work
        insort(self._waiting, (s.order, s))

    def _unqueue(self, at: int) -> None:
        _, s = self._waiting.pop(at)
        self._waiting_work -= s.work

    # ---- time

    def _chunk(self, decoding: bool, writes: list[PendingTableUpdate]) -> Iterator[PrefillChunk]:
        """Yields the parts of a prefill chunk if one is due: half for the oldest prompt, then the shortest first."""
        prompts = [s for s in self.running.values() if s.num_computed_tokens < len(s.tokens)]
        if not decoding:
            self._decode_debt_s = self._prefill_stall_s = 0.0
        if not prompts or self._decode_debt_s > 0:
            return
        max_prefill_stall = self._max_prefill_stall_s()
        if self._prefill_stall_s >= max_prefill_stall:
            return
        oldest = min(prompts, key=lambda s: s.order[1:])
        others = sorted(
            (s for s in prompts if s is not oldest), key=lambda s: (s.order[0], len(s.tokens) - s.num_computed_tokens)
        )
        tokens = self._runner.sizes.chunk
        work = self._times.max_idle_work(self._max_chunk_s) or UNTIMED_WORK
        if decoding:
            work = min(work, self._times.max_work(max_prefill_stall - self._prefill_stall_s))
        self._rematch(oldest, writes)
        min_tokens = min(MIN_CHUNK, tokens, len(oldest.tokens) - oldest.num_computed_tokens)
        half = max(self._cut(oldest, -(-tokens // 2), work / 2), min_tokens)
        half_work = self._times.work(oldest.num_computed_tokens, oldest.num_computed_tokens + half)
        tokens, work = tokens - half, work - half_work
        ends: dict[RequestState, int] = {}
        computed = {self._next_stripe(oldest)}
        for s in others:
            if tokens <= 0 or work < 1:
                break
            self._rematch(s, writes)
            stripe = self._next_stripe(s)
            if stripe is not None and stripe in computed:
                continue  # another prompt in this chunk computes that stripe: share its pages later
            computed.add(stripe)
            count = self._cut(s, tokens, work)
            tokens, work = tokens - count, work - self._times.work(s.num_computed_tokens, s.num_computed_tokens + count)
            ends[s] = s.num_computed_tokens + count
        ends[oldest] = oldest.num_computed_tokens + max(half, self._cut(oldest, half + tokens, half_work + work))
        if decoding or sum(end - s.num_computed_tokens for s, end in ends.items()) < self._runner.sizes.chunk:
            self._round(oldest, ends)
        done = 0.0
        for s, end in ends.items():
            if end > s.num_computed_tokens:
                assert s.slot is not None and s.block_table is not None
                snapshot, at = (-1, -1), bisect_right(s.snapshot_ends, s.num_computed_tokens)
                end = min([end, *s.snapshot_ends[at : at + 1]])
                columns = self._tables(s).insert(s.block_table, s.tokens[:end])
                self._pending_updates.append(PendingTableUpdate(s, s.block_table, columns.start, len(columns)))
                if end in s.snapshot_ends[at : at + 1]:
                    snapshot = self._tables(s).snapshots.add(s.block_table.node, end)
                new = s.tokens[s.num_computed_tokens : end]
                last = end == len(s.tokens)
                yield PrefillChunk(
                    s.slot,
                    s.num_computed_tokens,
                    end,
                    last,
                    new,
                    s.block_table.num_cached_tokens,
                    *snapshot,
                    s.logprob_token_ids(end),
                )
                done += self._times.work(s.num_computed_tokens, end)
                s.num_computed_tokens = end
        if decoding:
            seconds = self._times.seconds(done)
            self._decode_debt_s, self._prefill_stall_s = (
                self._policy.decode_debt_s(seconds, max_prefill_stall),
                self._prefill_stall_s + seconds,
            )

    def _round(self, oldest: RequestState, ends: dict[RequestState, int]) -> None:
        """Trims a chunk to a captured size, at the expense of a prompt that continues in a later chunk anyway."""
        sizes, counts = self._runner.chunk_sizes, {s: end - s.num_computed_tokens for s, end in ends.items()}
        size = max((size for size in sizes if size <= sum(counts.values()) <= sizes[-1]), default=0)
        later = [s for s, end in ends.items() if end < len(s.tokens)]
        if not size or not later:
            return
        last = max(later, key=lambda s: (s is not oldest, len(s.tokens) - s.num_computed_tokens))
        left = counts[last] - (sum(counts.values()) - size)
        if left > 0 and (last is not oldest or 2 * left >= size):
            ends[last] = last.num_computed_tokens + left

    def _max_prefill_stall_s(self) -> float:
        prompts = [s for s in self.running.values() if s.num_computed_tokens < len(s.tokens)]
        oldest = min(prompts, key=lambda s: s.order[1:], default=None)
        waiting = self._waiting_work + sum(
            self._times.work(s.num_computed_tokens, len(s.tokens)) for s in prompts if s is not oldest
        )
        return self._policy.max_prefill_stall_s(self._times.seconds(waiting) if waiting else 0.0)

    def _continues_prefill(self) -> bool:
        """Returns whether to prefill on before any decode step: none is owed, and half of the stall is left."""
        return (
            self.expects_chunk
            and self._decode_debt_s <= 0
            and 0 < 2 * self._prefill_stall_s <= self._max_prefill_stall_s()
        )

    def _rematch(self, s: RequestState, writes: list[PendingTableUpdate]) -> None:
        assert s.block_table is not None
        num_cached_tokens, columns = self._tables(s).rematch(
            s.block_table, s.tokens, max(s.num_computed_tokens, s.block_table.num_cached_tokens)
        )
        if num_cached_tokens > s.block_table.num_cached_tokens and num_cached_tokens > s.num_computed_tokens:
            s.block_table.num_cached_tokens = num_cached_tokens
            if (begin := self._prefill_start(num_cached_tokens)) > s.num_computed_tokens:
                s.num_computed_tokens = begin
                s.snapshot_ends = [end for end in s.snapshot_ends if end >= num_cached_tokens]
        writes.append(PendingTableUpdate(s, s.block_table, columns.start, len(columns)))

    def _prefill_start(self, num_cached_tokens: int) -> int:
        """Returns where prefill resumes after a prefix hit: windows and states need tokens before its end again."""
        return int(max(num_cached_tokens - self._runner.recomputed_tokens, 0))

    def _next_stripe(self, s: RequestState) -> Hashable:
        assert s.block_table is not None
        stripe = self._tables(s).next_stripe(s.block_table, s.tokens)
        return None if stripe is None else (self._tables(s), stripe)

    def _cut(self, s: RequestState, tokens: int, work: float) -> int:
        tokens = min(tokens, len(s.tokens) - s.num_computed_tokens)
        return tokens if math.isinf(work) else min(tokens, self._times.tokens(s.num_computed_tokens, work))

    def _steps(self, plan: StepPlan, left: int, bound: int) -> int:
        max_steps = min(bound, math.ceil(left / plan.tokens), plan.steps or bound)
        prompts, self._prefill_stall_s = self.expects_chunk, 0.0
        if plan.seconds is None:
            self._decode_debt_s = 0.0
            return 1 if prompts else min(max_steps, plan.steps or UNTIMED_STEPS)
        max_steps = min(max_steps, int(self._schedule.max_decode_run_ms / 1e3 / plan.seconds))
        if prompts:
            max_steps = min(max_steps, math.ceil(self._decode_debt_s / plan.seconds))
        self._decode_debt_s = max(self._decode_debt_s - max(max_steps, 1) * plan.seconds, 0.0)
        return max(max_steps, 1)
