"""Simulates the ranks that execute a scheduler's outputs, with a simulated clock.

Launched work is computed at once, in order, as on a stream. Tokens are read later, after `lookahead` further
scheduler outputs. A cache slot holds a hash of all tokens up to its own, as keys depend on them, so that sharing or
copying the wrong page, or reading one that was overwritten, is noticed.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from helix.config import ScheduleConfig
from helix.engine.block_tables import BlockTables
from helix.engine.pages import PagePool
from helix.engine.prefill_time import PrefillTime
from helix.engine.prefix import PrefixTree
from helix.engine.prefix_moves import PrefixMoves
from helix.engine.request import Request
from helix.engine.schedule_policy import SchedulePolicy
from helix.engine.scheduler import MAX_CHUNK_S, MIN_CHUNK, Scheduler
from helix.engine.scheduler_output import NewRequest, SchedulerOutput, StepPlan, StripeHeader, StripeMove
from helix.engine.snapshots import StateSnapshots
from helix.engine.stripe_store import StripeStore
from helix.kv_placement import NO_PAGES, Stripes
from helix.layout import HelixLayout
from helix.worker.graph_keys import SHARED_PREFIXES
from helix.worker.kv_cache_spec import EngineSizes
from helix.worker.model_runner import ModelRunner

TOKEN_S = 1e-4  # per prefill token at the beginning of a context
STEP_S = 2e-3
DOUBLING = 500.0
SNAPSHOT_SLABS = 2


def calls_of(work: Callable[[], object]) -> int:
    """Counts the function calls of some work: a measure of time that does not depend on the machine's load."""
    events: list[str] = []
    sys.setprofile(lambda frame, event, arg: events.append(event))
    try:
        work()
    finally:
        sys.setprofile(None)
    return sum(event in ("call", "c_call") for event in events)


def chain(tokens: Iterable[int], cache_salt: Hashable) -> list[int]:
    """Returns the cache's content for each token: a hash of all tokens up to it."""
    numbers, last = [], hash(cache_salt) % 997
    for token in tokens:
        last = (last * 1_000_003 + token + 1) % (1 << 61)
        numbers.append(last)
    return numbers


@dataclass(eq=False)
class SimulatedRequest:
    """A request, its predetermined output, and its results.

    Attributes:
        reply: tokens up to the model's EOS.
        times: when each was sampled.
    """

    request: Request
    reply: list[int]
    arrived_at: float
    drawn: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    admissions: list[NewRequest] = field(default_factory=list)
    computed: int = 0
    ended: bool = False


@dataclass
class CountingMatcher:
    """A grammar whose mask has its request's id and the number of accepted tokens."""

    name: int
    num_accepted: int = 0

    def token_bitmask(self) -> np.ndarray:
        return np.array([self.name, self.num_accepted], dtype=np.int32)

    def accept_token(self, token: int) -> None:
        self.num_accepted += 1


@dataclass(eq=False)
class InFlightBatch:
    """A launched scheduler output, and its unread tokens.

    Attributes:
        finished_at: when it has been computed.
        rows: of the step whose tokens are sampled by the next output, with tried and accepted drafts.
    """

    tokens: list[tuple[SimulatedRequest, int, int, float]]
    work: float = 0.0
    seconds: float = 0.0
    finished_at: float = 0.0
    rows: list[tuple[int, SimulatedRow, int]] | None = None


@dataclass(eq=False)
class SimulatedMove:
    """A move of stripes in flight, which reads and writes at once or, `is_late`, as its report is due.

    Attributes:
        left: number of schedules until then.
        failed: indices of stripes that get other content.
    """

    move: StripeMove
    left: int
    is_late: bool
    failed: tuple[int, ...]


@dataclass(eq=False)
class SimulatedRow:
    """A row of the batch on the ranks."""

    served: SimulatedRequest
    admission: NewRequest
    table: list[int]
    chain: list[int]  # expected content of its cache
    length: int  # tokens in the cache
    drawn: int
    exact: float  # tokens from which on states and windows are exact
    computed: int  # tokens of the prompt that need no computation, or have been computed

    @property
    def guided(self) -> bool:
        return self.served.request.matcher is not None


def runner(
    sizes: EngineSizes,
    *,
    fetches: bool = False,
    keep_drawn: bool = True,
    sparse_from: int | None = None,
    lacking: float = 0.0,
    chunk_sizes: tuple[int, ...] = (),
    min_shared_pages: float = math.inf,
) -> ModelRunner:
    """Returns what a scheduler reads of a runner."""
    found = SimpleNamespace(
        sizes=sizes,
        cache=SimpleNamespace(remedy="raise kv.tokens", fetches=fetches),
        drafter=SimpleNamespace(may_lag=not keep_drawn),
        policy=SimpleNamespace(from_tokens=sparse_from),
        recomputed_tokens=lacking,
        chunk_sizes=chunk_sizes,
        min_shared_pages=min_shared_pages,
        min_sharing_rows=0.0,
        moves_slots=not sizes.drafts and not fetches,
    )
    return cast(ModelRunner, found)


class SimulatedEngine:
    """A scheduler and its ranks.

    Args:
        pages: of each rank.
        homes: ranks that own sequences, `max_batch` each.
        lookahead: scheduler outputs that are launched before the tokens of one are read.
        accepted_drafts: per step, in turn.
        snapshots: arguments of `StateSnapshots`.
        slabs, records: host memory and disk of prefixes; with one home.
        failing: share of the moved stripes that fail.
        own_pages: a drafter has as many pages as the cache, which sequences do not share.
        options: of the scheduler.
    """

    def __init__(
        self,
        pages: int,
        *,
        homes: int = 1,
        kvp: int = 2,
        append_block: int = 2,
        page_size: int = 2,
        lookahead: int = 1,
        caching: bool = True,
        max_batch: int = 4,
        prefill_chunk: int = 4096,
        step_s: float = STEP_S,
        accepted_drafts: Sequence[int] = (0,),
        drafts: int = 0,
        snapshots: tuple[int, int, int] = (0, 0, 0),
        slabs: int = 0,
        records: int = 0,
        failing: float = 0.0,
        own_pages: bool = False,
        **options: Any,
    ) -> None:
        self.layout = HelixLayout.create(kvp=kvp)
        self.stripes = Stripes(self.layout, append_block, page_size)
        self.times = PrefillTime(DOUBLING)
        self.times.observe(1.0, TOKEN_S)
        self.pools = [PagePool(pages) for _ in range(homes)]
        self.pool = self.pools[0]
        lacking = options.get("lacking", 0.0)
        snapshots, hybrid = snapshots if lacking and caching else (0, 0, 0), math.isinf(lacking)
        trees = [PrefixTree(pool, self.stripes, self.times.cost, 1, hybrid) for pool in self.pools]
        self.tables = [
            BlockTables(tree, caching, pages if own_pages else None, StateSnapshots(tree, self.times.work, *snapshots))
            for tree in trees
        ]
        self.own_pages = own_pages
        self.room = snapshots[:2]
        self.snapshots: dict[tuple[int, int], tuple[int, int]] = {}  # by home and index: tokens, and their state
        self.num_taken = 0
        plan = StepPlan(drafts, seconds=step_s)
        self.moves: PrefixMoves | None = None
        self.moving: list[SimulatedMove] = []
        # A stripe's tokens, and for a part of a snapshot its tokens, its state and the part's number.
        self.slabs = np.full((slabs, self.stripes.pages, kvp, page_size + 3), -3, dtype=np.int64)
        self.rng, self.failing = np.random.default_rng(slabs), failing
        if slabs and homes == 1:
            given = StripeStore(slabs, records), 1000, 1, b"", SNAPSHOT_SLABS
            self.moves = PrefixMoves(self.tables[0], self.times, *given)
            self.moves.start_s = 0.0
            if records:
                self.moves.collect([(0, (0, 0.0, []))], 0.0)  # empty files
        self.records: dict[int, tuple[StripeHeader, np.ndarray]] = {}
        names = "goal", "decode_share", "patience_s", "lookahead_tokens"
        given = {name: options.pop(name) for name in names if name in options}
        bounds = {"stall_s": "max_prefill_stall_ms", "run_s": "max_decode_run_ms"}
        given |= {key: 1e3 * options.pop(name) for name, key in bounds.items() if name in options}
        schedule = ScheduleConfig(**given)
        self.scheduler = Scheduler(
            self.tables,
            self.times,
            runner(EngineSizes(max_batch, 0, prefill_chunk, drafts, run_steps=options.pop("run_steps", 8)), **options),
            schedule,
            lambda rows, kv_tokens, without: plan,
            self.moves,
        )
        self.lacking = self.scheduler._runner.recomputed_tokens
        self.goal = SchedulePolicy(schedule)
        self.lookahead, self.step_s, self.drafts, self.accepted_drafts = lookahead, step_s, drafts, accepted_drafts
        self.prefill_chunk, self.max_batch = prefill_chunk, max_batch * homes
        self.memory = np.full((homes, pages, kvp, page_size), -1, dtype=np.int64)
        self.rows: dict[int, SimulatedRow] = {}
        self.served: dict[int, SimulatedRequest] = {}
        self.in_flight: deque[InFlightBatch] = deque()
        self.now = self.device_s = self.owed_s = self.paused_s = self.longest_s = 0.0
        self.steps = self.decisions = self.shared_reads = self.moved = 0

    # ---- the caller

    def submit(
        self,
        prompt: Sequence[int],
        new: int,
        stops: int | None = None,
        priority: int = 0,
        cache_salt: Hashable = None,
        guided: bool = False,
        last_message_start: int = 0,
    ) -> int:
        """Submits a request that reaches EOS after `stops` tokens, and must be accepted; returns its id."""
        name = len(self.served)
        grammar = CountingMatcher(name) if guided else None
        hint = {"last_message_start": last_message_start}
        request = Request(name, prompt, new, priority=priority, cache_salt=cache_salt, matcher=grammar, **hint)
        first = chain(prompt, cache_salt)[-1]
        reply = [(first + 7 * i) % 991 for i in range(min(new, stops or new))]
        self.served[name] = SimulatedRequest(request, reply, self.now)
        assert self.scheduler.submit(request, self.now) is None
        return name

    def abort(self, name: int) -> None:
        self.served[name].ended |= self.scheduler.end(name) is not None

    def advance(self) -> SchedulerOutput | None:
        """Executes the next scheduler output, and reads tokens that are due."""
        moving = bool(self.moving)
        self.report_moves()
        decision = self.scheduler.schedule(self.now)
        if decision is None:
            left = any(not s.ended for s in self.served.values())
            assert self.due or moving or not left, "nothing is done for a request"
        else:
            self.decisions += 1
            assert decision.number == self.decisions
            self.execute(decision)
            for move in decision.moves:
                failed = tuple(np.flatnonzero(self.rng.random(len(move.slabs)) < self.failing).tolist())
                late = bool(self.rng.integers(2))
                self.moving.append(SimulatedMove(move, int(self.rng.integers(6)), late, failed))
                if move.kind == "store" and not late:
                    self.copy(self.moving[-1])
        while self.due and (decision is None or len(self.in_flight) > self.lookahead):
            self.read_tokens()
        return decision

    def drain(self, max_turns: int = 100_000) -> None:
        for _ in range(max_turns):
            read = not self.in_flight and not self.moving
            if self.advance() is None and read:
                return
        raise AssertionError("requests do not end")

    def check_nothing_is_left(self) -> None:
        assert all(s.ended for s in self.served.values())
        if self.moves is not None:
            assert not self.moves.is_busy(self.now) and not self.moves._in_flight, "moves are left"
            store = self.moves.store
            assert not any(stripe.users for stripe in store._stripes.values()), "moves are left"
            assert all(stripe.is_ready == (stripe.slab >= 0) for stripe in store._stripes.values())
            in_slabs, in_records = ([*of.values()] for of in (store._in_slabs, store._in_records))
            assert sorted([*store._free, *(s.slab for s in in_slabs)]) == [*range(store.slabs)], "slabs are lost"
            records = sorted([*store._free_records, *(s.record for s in in_records)])
            assert records == [*range(store.records)], "records are lost"
            assert {*store._stripes.values()} == {*in_slabs, *in_records}
        assert not self.rows and not self.scheduler.running and not self.scheduler.waiting
        assert sorted(slot for free in self.scheduler._free_slots for slot in free) == list(range(self.max_batch)), (
            "slots are lost"
        )
        for tables in self.tables:
            pool = tables.pool
            assert pool.used == 0 and not pool._ref_counts.any(), "references are left"
            tables.tree.evict(pool.pages)
            assert pool.free == pool.pages and not pool._cached.any(), "pages are lost"
            snapshots = tables.snapshots
            indices = [s.index for s in snapshots._snapshots] + snapshots._free + snapshots._free_on_host
            assert sorted(indices) == list(range(sum(self.room))), "snapshots are lost"
            assert all(s.node is None for s in snapshots._snapshots), "a snapshot outlives its pages"

    @property
    def due(self) -> bool:
        """Whether tokens can be read."""
        return bool(self.in_flight) and (bool(self.in_flight[0].tokens) or self.in_flight[0].rows is None)

    def read_tokens(self) -> None:
        """Reads the sampled tokens of the first batch in flight."""
        batch = self.in_flight[0]
        self.now = max(self.now, batch.tokens[-1][-1] if batch.rows is not None else batch.finished_at)
        tokens, batch.tokens = batch.tokens, []
        for served, slot, token, came in tokens:
            noted = self.scheduler.record_token(slot, token)
            assert (noted is None) == served.ended
            if noted is None:
                continue
            assert noted.request is served.request and token == served.reply[len(served.drawn)]
            served.drawn.append(token)
            served.times.append(came)
            if len(served.drawn) == len(served.reply):
                served.ended = True
                self.scheduler.end(served.request.id)
        if batch.rows is not None:
            return
        self.in_flight.popleft()
        self.scheduler.finish_batch()
        if batch.work:
            self.times.observe(batch.work, batch.seconds)

    # ---- the ranks

    def copy(self, moving: SimulatedMove) -> None:
        move = moving.move
        for i, (slab, record, header) in enumerate(zip(move.slabs, move.records, move.headers, strict=False)):
            if move.kind == "write" and i in moving.failed:
                self.records.pop(record, None)
            elif move.kind == "write":
                self.records[record] = replace(header, tokens=NO_PAGES), self.slabs[slab].copy()
            elif i not in moving.failed:
                held, content = self.records[record]
                assert (held.key, held.generation) == (header.key, header.generation), "another stripe's record"
                self.slabs[slab] = content
            else:
                self.slabs[slab] = -6
        if move.snapshot >= 0:
            self.copy_snapshot(move, moving.failed)
            return
        for i, (slab, pages) in enumerate(zip(move.slabs, move.pages, strict=True)):
            if move.kind in ("write", "read"):
                break
            to, at, content = (
                (self.slabs[..., :-3], slab, self.memory[0, pages])
                if move.kind == "store"
                else (self.memory[0], pages, self.slabs[slab, ..., :-3])
            )
            to[at] = -4 if i in moving.failed else content

    def copy_snapshot(self, move: StripeMove, failed: Sequence[int]) -> None:
        assert len(move.slabs) == SNAPSHOT_SLABS
        if move.kind == "store":
            for i, slab in enumerate(move.slabs):
                self.slabs[slab] = -7
                self.slabs[slab, 0, 0, -3:] = (-4, -4, i) if i in failed else (*self.snapshots[0, move.snapshot], i)
            return
        parts = [self.slabs[slab, 0, 0, -3:].tolist() for slab in move.slabs]
        whole = [tuple(part[:2]) for part in parts if part[2] == parts.index(part)]
        assert failed or whole == [whole[0]] * SNAPSHOT_SLABS, "parts of several snapshots"
        self.snapshots[0, move.snapshot] = (-5, -5) if failed else whole[0]

    def report_moves(self) -> None:
        """Ends moves that are due; loads and stores are independent of each other."""
        if self.moves is not None:
            self.moves.collect([], self.now)
        for moving in [*self.moving]:
            moving.left -= 1
            if moving.left < 0:
                self.moving.remove(moving)
                if moving.is_late or moving.move.kind != "store":
                    self.copy(moving)
                assert self.moves is not None
                self.moves.collect([(0, (moving.move.number, 1e-6, moving.failed))], self.now)
            elif not self.in_flight:
                self.now += 1e-4

    def execute(self, decision: SchedulerOutput) -> None:
        self.sample_held(decision.token_bitmasks)
        before = [row for slot, row in self.rows.items() if slot not in decision.released_slots and row.drawn]
        decoding = [row for row in before if row.length < row.admission.limit]
        for slot in decision.released_slots:
            self.check(self.rows.pop(slot))
        for old, new in decision.slot_moves:
            assert new not in self.rows and self.home(old) == self.home(new), "a slot that is taken, or of other pages"
            self.rows[new] = row = self.rows.pop(old)
            row.admission = replace(row.admission, slot=new)
        self.moved += len(decision.slot_moves)
        for write in decision.table_updates:
            table = self.rows[write.slot].table
            assert 0 <= write.column <= len(table), "columns without pages"
            table[write.column : write.column + len(write.pages)] = write.pages.tolist()
        for admission in decision.new_requests:
            self.admit(admission)
        own = Counter[int]()
        for slot, row in self.rows.items():
            own[self.home(slot)] += len(row.table)
        assert not self.own_pages or max(own.values(), default=0) <= self.pool.pages, "a drafter has no more pages"
        for moving in self.moving:  # a load may have begun to write
            if moving.move.kind == "load":
                self.memory[0, moving.move.pages] = -5
                self.snapshots[0, moving.move.snapshot] = (-5, -5)
        self.in_flight.append(batch := InFlightBatch([]))
        work = sum(self.times.work(s.begin, s.end) for s in decision.prefill_chunks)
        seconds = work * TOKEN_S
        self.check_chunk(decision, seconds, bool(decoding))
        self.device_s = max(self.device_s, self.now) + seconds
        self.prefill(decision, batch.tokens)
        for _ in range(decision.decode_steps):
            self.device_s += self.step_s
            rows = self.step(decision)
            if decision.defers_sampling:
                assert decision.decode_steps == 1 and batch.rows is None
                batch.rows = rows
            else:
                assert not any(row.guided for _, row, _ in rows), "drawn without its mask"
                self.take(rows, batch.tokens)
        batch.work, batch.seconds, batch.finished_at = work, seconds, self.device_s

    def sample_held(self, masks: Mapping[int, np.ndarray]) -> None:
        """Samples the last step's tokens that were left to this scheduler output."""
        rows = (self.in_flight[-1].rows or []) if self.in_flight else []
        guided = {slot: row for slot, row, _ in rows if row.guided}
        assert masks.keys() <= guided.keys()
        for slot, row in guided.items():
            drawn = row.admission.num_output_tokens + row.drawn
            assert row.served.ended or masks[slot].tolist() == [row.served.request.id, drawn], "another draw's mask"
        if self.in_flight:
            self.take(rows, self.in_flight[-1].tokens)
            self.in_flight[-1].rows = None

    def admit(self, a: NewRequest) -> None:
        served = self.served[int(a.id)]
        assert not served.ended and a.slot not in self.rows and a.slot < self.max_batch
        text = [*served.request.prompt.tolist(), *served.drawn]
        assert a.length == len(text) and a.num_output_tokens == len(served.drawn), "it goes on where it was cut"
        grammar = served.request.matcher
        assert a.token_ids.tolist() == (text if self.drafts else []), "who looks back has all of it, others nothing"
        assert (None if a.token_bitmask is None else a.token_bitmask.tolist()) == (
            grammar and [a.id, a.num_output_tokens]
        ), "another draw's mask"
        assert a.num_cached_tokens < a.length, "what follows the last token is drawn from its logits"
        for source, to in zip(a.copy_from, a.copy_to, strict=True):
            memory = self.memory[self.home(a.slot)]
            memory[to] = memory[source]
        served.admissions.append(a)
        state = self.scheduler.running[a.slot]
        state.record_admission(a, ())
        assert state.cached_tokens == served.admissions[0].num_computed_tokens, "its own chunks are no hits"
        numbers = chain(text, served.request.cache_salt)
        exact = a.num_computed_tokens + self.lacking if a.num_computed_tokens else 0
        if a.snapshot_index >= 0:
            exact = a.num_computed_tokens
            held = self.snapshots[self.home(a.slot), a.snapshot_index]
            assert held == (exact, numbers[exact - 1]) and exact < a.length, "the state of other tokens"
        self.rows[a.slot] = row = SimulatedRow(
            served, a, a.pages.tolist(), numbers, a.num_cached_tokens, 0, exact, a.num_computed_tokens
        )
        self.check(row)

    def prefill(self, decision: SchedulerOutput, tokens: list[tuple[SimulatedRequest, int, int, float]]) -> None:
        for s in decision.prefill_chunks:
            row = self.rows[s.slot]
            assert s.end > s.begin and s.last == (s.end == row.admission.length)
            assert s.tokens.tolist() == [*row.served.request.prompt.tolist(), *row.served.drawn][s.begin : s.end]
            # Either it takes over what others have computed meanwhile, or all known tokens were a copy.
            assert row.computed <= s.begin and not row.drawn
            if row.computed < s.begin:
                row.exact = s.begin + self.lacking
            assert row.exact <= max(s.begin, s.num_cached_tokens), "new keys of windows that lack tokens"
            for at in range(max(s.begin, s.num_cached_tokens), s.end):
                self.write(row, at, row.chain[at])
            row.served.computed += s.end - s.begin
            row.computed, row.length = s.end, max(s.end, s.num_cached_tokens)
            if s.snapshot_index >= 0:
                home = self.home(s.slot)
                assert s.end >= row.exact and s.end % self.stripes.tokens == 0, "a snapshot of windows that lack tokens"
                if s.evict_to >= 0:
                    self.snapshots[home, s.evict_to] = self.snapshots[home, s.snapshot_index]
                self.snapshots[home, s.snapshot_index] = s.end, row.chain[s.end - 1]
                self.num_taken += 1
        for s in decision.prefill_chunks:
            self.check(self.rows[s.slot])
            if s.last:
                self.sample(s.slot, self.rows[s.slot], 1, tokens)

    def step(self, decision: SchedulerOutput) -> list[tuple[int, SimulatedRow, int]]:
        """Runs a step up to its logits; returns its rows, with accepted drafts."""
        self.steps += 1
        self.check_shared_prefixes(decision)
        rows = []
        for slot, row in self.rows.items():
            left = row.admission.limit - row.length
            if not row.drawn or left <= 0:
                continue
            homes = len(self.tables)
            max_turns = self.max_batch // homes
            assert slot // homes < decision.kind.rows, "every row takes part"
            sizes = {min(1 << i, max_turns) for i in range(max_turns.bit_length() + 1)}
            smallest = min(size for size in sizes if size > max(self.rows) // homes)
            assert decision.kind.rows == smallest, "a size of few"
            tried = min(decision.kind.drafts, left - 1)
            accepted_drafts = min(self.accepted_drafts[self.steps % len(self.accepted_drafts)], tried)
            for at in range(row.length, row.length + 1 + tried):
                self.write(row, at, row.chain[at] if at <= row.length + accepted_drafts and at < len(row.chain) else -2)
            rows.append((slot, row, accepted_drafts))
        return rows

    def take(
        self, rows: list[tuple[int, SimulatedRow, int]], tokens: list[tuple[SimulatedRequest, int, int, float]]
    ) -> None:
        for slot, row, accepted_drafts in rows:
            row.length += 1 + accepted_drafts
            self.sample(slot, row, 1 + accepted_drafts, tokens)
            for at in range(row.length - accepted_drafts, row.length):  # accepted drafts
                self.write(row, at, row.chain[at])

    def sample(
        self, slot: int, row: SimulatedRow, count: int, tokens: list[tuple[SimulatedRequest, int, int, float]]
    ) -> None:
        for _ in range(count):
            at = row.admission.num_output_tokens + row.drawn
            reply = row.served.reply
            token = reply[at] if at < len(reply) else 0  # it runs on past EOS
            row.drawn += 1
            row.chain.append((row.chain[-1] * 1_000_003 + token + 1) % (1 << 61))
            tokens.append((row.served, slot, token, self.device_s))

    # ---- invariants

    def home(self, slot: int) -> int:
        return slot % len(self.tables)

    def locate(self, row: SimulatedRow, at: int) -> tuple[int, int, int, int]:
        slot = self.layout.token_slot(at, self.stripes.append_block)
        rank = self.layout.token_owner(at, self.stripes.append_block, row.admission.start)
        assert slot // self.stripes.page_size < len(row.table), "a token without a page"
        page = row.table[slot // self.stripes.page_size]
        return self.home(row.admission.slot), page, rank, slot % self.stripes.page_size

    def write(self, row: SimulatedRow, at: int, number: int) -> None:
        self.memory[self.locate(row, at)] = number

    def check(self, row: SimulatedRow) -> None:
        """Checks the content of a row's pages."""
        if row.length:
            at = np.arange(row.length)
            slot = self.layout.token_slot(at, self.stripes.append_block)
            rank = self.layout.token_owner(at, self.stripes.append_block, row.admission.start)
            page = np.array(row.table)[slot // self.stripes.page_size]
            held = self.memory[self.home(row.admission.slot), page, rank, slot % self.stripes.page_size]
            assert held.tolist() == row.chain[: row.length], "keys of other tokens"

    def check_shared_prefixes(self, decision: SchedulerOutput) -> None:
        """Checks the keys that a step reads once, in the first slot's pages, for each sequence that shares them."""
        ends: dict[int, int] = {}
        of_rank = [0] * len(self.tables)
        for prefix in decision.shared_prefixes:
            reader = self.rows[prefix.slots[0]]
            of_rank[self.home(prefix.slots[0])] += 1
            assert len({self.home(slot) for slot in prefix.slots}) == 1 < len(prefix.slots), "another rank's pages"
            columns = np.arange(prefix.begin, prefix.end)
            for slot in prefix.slots:
                row = self.rows[slot]
                assert row.drawn and row.admission.start == reader.admission.start
                assert ends.get(slot, 0) == prefix.begin < prefix.end, "a gap, or keys that are read twice"
                ends[slot] = prefix.end
                at = np.arange(self.stripes.tokens_in(len(columns))) + self.stripes.tokens_in(prefix.begin)
                assert at[-1] < row.length, "keys of the future"
                slots = self.layout.token_slot(at, self.stripes.append_block)
                rank = self.layout.token_owner(at, self.stripes.append_block, row.admission.start)
                column = slots // self.stripes.page_size
                assert (column >= prefix.begin).all() and (column < prefix.end).all(), "parts of stripes"
                held = self.memory[
                    self.home(slot), np.array(reader.table)[column], rank, slots % self.stripes.page_size
                ]
                assert held.tolist() == row.chain[at[0] : at[-1] + 1], "keys of other tokens are shared"
        assert decision.kind.shared_prefixes == next(n for n in SHARED_PREFIXES if n >= max(of_rank))
        self.shared_reads += sum(len(p.slots) - 1 for p in decision.shared_prefixes)

    @property
    def waiting_s(self) -> float:
        """Returns the time of all unfinished prompts, without the oldest running one."""
        rows = {int(row.admission.id): row for row in self.rows.values()}
        waiting = [s for name, s in self.served.items() if not s.ended and name not in rows]
        works = [self.times.work(0, len(s.request.prompt) + len(s.drawn)) for s in waiting]
        running = sorted(rows.values(), key=lambda row: (row.served.arrived_at, row.served.request.id))
        unfinished = [r for r in running if r.computed < r.admission.length and not r.drawn and not r.served.ended]
        works += [self.times.work(row.computed, row.admission.length) for row in unfinished[1:]]
        return sum(works) * TOKEN_S

    def check_chunk(self, decision: SchedulerOutput, seconds: float, decoding: bool) -> None:
        """Checks the limits of chunks while others decode, and the oldest prompt's half."""
        size = sum(s.end - s.begin for s in decision.prefill_chunks)
        assert size <= self.prefill_chunk
        assert seconds <= MAX_CHUNK_S * 1.001 or size <= MIN_CHUNK, "an abort waits for the chunk"
        if decoding and size:
            assert self.owed_s <= 1e-9, "decode steps have had less than their share"
            bound = self.goal.max_prefill_stall_s(self.waiting_s)
            self.paused_s += seconds
            assert self.paused_s <= bound * 1.001 or size <= MIN_CHUNK, "chunks stall those that decode"
            self.longest_s, self.owed_s = max(self.longest_s, self.paused_s), self.goal.decode_debt_s(seconds, bound)
        if not decoding:
            self.owed_s = self.paused_s = 0.0
        self.owed_s -= decision.decode_steps * self.step_s
        if decision.decode_steps:
            self.paused_s = 0.0
        if size:
            unfinished = [row for row in self.rows.values() if row.length < row.admission.length and not row.drawn]
            oldest = min(unfinished, key=lambda row: (row.served.arrived_at, row.served.request.id))
            part = [s for s in decision.prefill_chunks if self.rows[s.slot] is oldest]
            assert part, "the oldest prompt waits"
            own_work = self.times.work(part[0].begin, part[0].end)
            if not part[0].last and part[0].end not in self.scheduler.running[part[0].slot].snapshot_ends:
                assert size - (part[0].end - part[0].begin) <= (size + 1) // 2 or own_work * TOKEN_S * 2.1 >= seconds
