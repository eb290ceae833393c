"""The engine: serves requests on all ranks, and reports their tokens.

One control plane: rank 0 decides, and broadcasts each decision on the CPU before any rank launches it. A decision
covers a chunk of prompts and a run of decode steps. The next one is made and launched before it has ended, so that the
device never idles between two. So a decision knows only an upper bound of the unread tokens, and tokens that a sequence
draws after its end are discarded. No cost grows with the context.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from time import perf_counter

import numpy as np
import torch

from helix.config import MAX_QUERIES, ScheduleConfig
from helix.engine.block_tables import BlockTables
from helix.engine.decision import Decision
from helix.engine.draft_policy import Acceptance, DraftOutcome, DraftPolicy, draft_sizes
from helix.engine.inbox import Abort, Inbox
from helix.engine.pages import PagePool
from helix.engine.prefill_time import PrefillTime, doubling_depth
from helix.engine.prefix import PrefixTree
from helix.engine.request import Logprobs, PromptLogprobs, Request, RequestUpdate
from helix.engine.scheduled import Scheduled
from helix.engine.scheduler import Scheduler
from helix.engine.snapshots import StateSnapshots
from helix.engine.timings import Timings
from helix.worker.graph_keys import StepKind
from helix.worker.model_runner import ModelRunner
from helix.worker.step_tokens import StepTokens
from helix.worker.warm_up import Mark, warm_up

AHEAD_S = 0.004  # time before the predicted end of a run at which the next decision is made; more than one takes
PAUSE_S = 0.5  # time without requests after which a size of chunks is captured: the next request waits for that
LOOK_S = 0.001  # polling interval for runs that end sooner than predicted
BEATS = 4  # messages of an idle rank 0 within the time after which other ranks give up


@dataclass
class Run:
    """A launched decision whose tokens are not all read.

    Attributes:
        rows: requests by slot.
        steps: steps whose tokens are not read yet; that of the prompt chunk, if any, comes first.
        limits: most drafts verified per slot, if limited.
        begin: time of its launch.
        holds_draw: its step is held: the tokens come with the next decision.
        in_chunk: the tokens of its prompt chunk are not read yet.
    """

    decision: Decision
    rows: dict[int, Scheduled]
    steps: deque[StepTokens]
    limits: tuple[int, ...]
    begin: float
    holds_draw: bool
    in_chunk: bool
    seconds: list[float] = field(default_factory=list)
    outcomes: list[DraftOutcome] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Number of steps still to be read."""
        return len(self.steps) + self.holds_draw


class Engine:
    """Server of requests on all ranks of a layout; every rank builds one and calls `serve` alike.

    Args:
        runner: executes decisions on this rank.
        schedule: how requests share the ranks.
        adaptive: whether rank 0 chooses the drafts of each step, up to the drafter's limit; else all have the limit.
        prefix_cache: whether pages are kept for prompts with the same prefix.
        timeout_s: time that the other ranks wait for a message of rank 0.

    Attributes:
        draft_sizes: numbers of drafts that a step may have.
        timings: statistics of the last call, on rank 0.
        tables: allocators of pages, on rank 0: one, or in mode dp one for each rank.
    """

    def __init__(
        self,
        runner: ModelRunner,
        schedule: ScheduleConfig | None = None,
        *,
        adaptive: bool = True,
        prefix_cache: bool = True,
        timeout_s: float = 300.0,
    ) -> None:
        self.runner, self.comm, self.schedule = runner, runner.comm, schedule or ScheduleConfig()
        self.draft_sizes = draft_sizes(runner.sizes.drafts, adaptive)
        self.timeout_s = timeout_s
        self.timings = Timings()
        self._prefix_cache = prefix_cache
        self._broken: str | None = None  # the error that broke it
        self._calling = False
        self._held: set[int] = set()  # slots in use on all ranks
        self._times = PrefillTime(doubling_depth(runner.model.spec))
        # On a GPU, of decisions with a prompt chunk: it admits requests, and may be launched kernel by kernel.
        self._chunk_launch_s = 0.0
        self._reset()

    def _reset(self) -> None:
        """Drops all requests and the prefix cache; makes allocators, draft policy and scheduler anew."""
        self.tables = [self._empty_tables() for _ in range(self.runner.layout.dp)]
        self._policy = DraftPolicy(self.draft_sizes, self.runner.step_seconds)
        self._scheduler = Scheduler(self.tables, self._times, self.runner, self.schedule, self._policy.pace)
        self._runs: deque[Run] = deque()
        self._limits: tuple[int, ...] = ()
        self._came = 0.0  # time at which the last tokens that were read were there

    def _empty_tables(self) -> BlockTables:
        runner, times, stripes = self.runner, self._times, self.runner.placement.stripes
        pages = runner.sizes.pages
        # A draft model's windows would lack what lies before a snapshot.
        keeps = self._prefix_cache and not runner.drafter.lacking
        places = (runner.cache.snapshots, runner.cache.host_snapshots) if keeps else (0, 0)
        tree = PrefixTree(PagePool(pages), stripes, times.cost)
        states = StateSnapshots(*places, stripes.tokens, times.work)
        return BlockTables(tree, self._prefix_cache, pages if runner.drafter.own_pages else None, states)

    @torch.inference_mode()  # around each resumption: the caller's code between two updates is not in it
    def serve(self, inbox: Inbox | None) -> Iterator[list[RequestUpdate]]:
        """Serves an inbox until it is closed and all requests have ended; a collective call.

        The caller on rank 0 must iterate without delay: no further run is launched before it has taken the updates.
        The other ranks give up after `timeout_s` without a message of rank 0.

        An error on rank 0 between steps, or a stop by the caller, ends the call on all ranks and frees all slots. An
        error of any rank in a step, as `observer` may raise, breaks the engine on all of them, since others are waiting
        in that step: new communicators and a new engine are needed.

        Args:
            inbox: that of rank 0 is served, other ranks' are ignored.

        Yields:
            On rank 0, updates of requests, a step's together: new tokens, prefill progress, or the end. On the other
            ranks nothing, but they must iterate as well.

        Raises:
            RuntimeError: the model gave NaN, a rank failed, the engine is broken, or another call is under way.
        """
        with self._call():
            if self.comm.rank > 0:
                self._follow()
                return
            assert inbox is not None, "rank 0 serves an inbox"
            updates: list[RequestUpdate] = []
            while True:
                updates += self._admit(inbox)
                begin = perf_counter()
                decision = self._decide(begin)
                if decision is not None:
                    updates += self._launch(decision, begin)
                if updates:
                    yield updates
                updates = []
                if decision is not None:
                    while len(self._runs) > 1 or self._is_early(inbox):
                        yield self._read()
                elif self._runs:
                    updates = self._read()  # reported once the next decision is launched
                elif inbox.ended:
                    return
                elif not inbox.wait(PAUSE_S if (captures := self.runner.eager_size is not None) else self._beat_s):
                    self._send(Decision.nothing(captures=captures))

    def refusal(self, request: Request) -> str | None:
        """Returns the reason why this engine can never serve a request; None if it can."""
        spec, most = self.runner.model.spec, self.runner.sizes.length
        if len(request.prompt) == 0:
            return "the prompt is empty"
        ids = np.asarray(request.prompt)
        outside = ids[(ids < 0) | (ids >= spec.vocab)]
        if len(outside):
            return f"prompt token id {outside[0]} is outside the vocabulary [0, {spec.vocab})"
        if (token := max(request.sampling.logit_bias, default=0)) >= spec.vocab:
            return f"logit_bias token {token} is outside the vocabulary [0, {spec.vocab})"
        if request.max_tokens < 1:
            return f"max_tokens={request.max_tokens} must be at least 1"
        length = len(request.prompt) + request.max_tokens
        if length > spec.max_positions:
            return (
                f"prompt of {len(request.prompt)} tokens and {request.max_tokens} new ones exceed the model's "
                f"{spec.context}"
            )
        if length > most:
            return (
                f"prompt of {len(request.prompt)} tokens and {request.max_tokens} new ones are {length} tokens of "
                f"KV, and a sequence may have max_length={most} ({self.runner.cache.remedy})"
            )
        return None

    def warm_up(
        self, kinds: Iterable[StepKind], later: Iterable[StepKind] = (), mark: Mark = lambda phase: None,
        *, chunks: bool = False,
    ) -> None:  # fmt: skip
        """Compiles kernels and captures the steps of every batch size, so that no request waits for that; a collective.

        Args:
            kinds: kinds of sampling to capture; the same on every rank.
            later: kinds of sampling whose kernels are compiled now; their steps are captured when they run for the
                second time, which delays that step by about two launches.
            mark: called at the end of each phase, with its name.
            chunks: whether the common sizes of prompt chunks are captured, too.
        """
        runner, first = self.runner, self.runner.policy.from_tokens
        sparse = [False] if first is None else [True] if first == 0 else [False, True]
        now, then = (
            [replace(kind, drafts=n, sparse=s) for kind, n, s in product(sorted(set(of)), self.draft_sizes, sparse)]
            for of in (kinds, later)
        )
        self._times = PrefillTime(doubling_depth(runner.model.spec))
        # Else the first requests would come in chunks of few tokens, as if these took long. The shallowest is last.
        for tokens, seconds in warm_up(runner, now, then, mark, chunks=chunks):
            self._times.observe(self._times.work(0, tokens), seconds)
        self._reset()

    def close(self) -> None:
        """Frees captured steps and host memory; to be called before the communicator is closed."""
        self.runner.close()
        self.runner.cache.close()

    # ---- the loop of rank 0

    def _admit(self, inbox: Inbox) -> list[RequestUpdate]:
        """Submits new requests and aborts to the scheduler; returns an update for each that is aborted or refused."""
        updates = []
        for item in inbox.take():
            if isinstance(item, Abort):
                if (ended := self._scheduler.end(item.id)) is not None:
                    updates.append(ended.update(finish_reason="abort"))
                continue
            try:
                reason = self.refusal(item) or self._scheduler.submit(item, perf_counter())
            except Exception as error:  # no other rank knows the request yet, so the call goes on
                reason = f"it could not be read: {type(error).__name__}: {error}"
            if reason:
                updates.append(RequestUpdate(item.id, len(item.prompt), finish_reason="error", reason=reason))
        return updates

    def _decide(self, now: float) -> Decision | None:
        self._forget(self._scheduler.running)
        decision = self._scheduler.decide(now)
        self.timings.preemptions = self._scheduler.preemptions
        if decision is not None:
            self.timings.decide_s += perf_counter() - now
            self.timings.decisions += 1
        return decision

    def _launch(self, decision: Decision, since: float) -> list[RequestUpdate]:
        """Launches a decision, on which work began then; returns updates of the requests that it admits."""
        rows = dict(self._scheduler.running)
        for admission in decision.admit:
            rows[admission.slot].admitted(admission, self.runner.model.spec.eos)
        self._limits = decision.draft_limits or self._limits
        self._announce(decision)  # before the launch, which on a CPU takes as long as the chunk
        begin = perf_counter()
        steps = deque(self._send(decision))
        if self._runs and self._runs[-1].holds_draw:
            self._runs[-1].steps.append(steps.popleft())
            self._runs[-1].holds_draw = False
        chunk = bool(decision.prefill)
        self._runs.append(Run(decision, rows, steps, self._limits, begin, decision.holds_draw, chunk))
        if chunk and self.runner.device.type == "cuda":
            self._chunk_launch_s += (perf_counter() - since - self._chunk_launch_s) / 2
        return [rows[admission.slot].update() for admission in decision.admit]

    def _is_early(self, inbox: Inbox) -> bool:
        """Returns whether the next decision can wait for the current run; sleeps until the time to make it."""
        if not self._runs or inbox.pending:
            return False
        run = self._runs[0]
        now, plan = perf_counter(), run.decision
        left_s = self._chunk_s(plan) if run.in_chunk else 0.0
        steps_s = (run.left - run.in_chunk) * (self._policy.seconds(plan.kind.rows, plan.kind.drafts) or 0.0)
        left_s += steps_s - (now - max(run.begin, self._came))
        ahead_s = AHEAD_S + (self._chunk_launch_s if self._scheduler.expects_chunk else 0.0)
        # Who waited for a chunk would come too late if the steps behind it take less than the next launch.
        if run.left > 1 and (run.holds_draw or not run.in_chunk or steps_s > ahead_s):
            return left_s > ahead_s
        until = now + left_s - ahead_s
        while run.left and perf_counter() < until:
            if self.runner.is_computed if run.holds_draw else run.steps[0].there:
                return run.left > 1  # what it took tells when the steps behind it end
            time.sleep(min(LOOK_S, max(until - perf_counter(), 0.0)))
        return not run.left  # a run without steps has nothing to read

    def _read(self) -> list[RequestUpdate]:
        """Reads the next step's tokens; returns the updates that follow from them."""
        run = self._runs[0]
        updates = self._read_step(run) if run.steps else []
        if not run.left:
            self._runs.popleft()
            self._scheduler.landed()
            kind, kv_tokens = run.decision.kind, sum(s.cached for s in run.rows.values())
            self._policy.observe(kind.rows, kv_tokens, kind.drafts, run.seconds, run.outcomes)
            self._forget(run.rows)
            self.timings.note_kv(self._scheduler.running)
        return updates

    def _read_step(self, run: Run) -> list[RequestUpdate]:
        in_chunk, step = run.in_chunk, run.steps.popleft()
        run.in_chunk = False
        tokens: dict[int, list[int]] = {}
        for slot, token in step.read():
            tokens.setdefault(slot, []).append(token)
        # A launch may have kept this host from reading them at once.
        self._came = min(step.came, max(run.begin, self._came) + step.seconds)
        updates = self._after_chunk(run, step) if in_chunk else []
        outcomes = []
        for slot, drawn in tokens.items():
            sequence = run.rows[slot]
            if sequence.ended:
                continue  # computed after its end, discarded
            tried = min(self._tried(run, slot), sequence.remaining - 1)
            outcomes.append(DraftOutcome(slot, tried, len(drawn) - 1))
            wanted = sequence.request.sampling.logprobs
            logprobs = () if wanted is None else (step.logprobs(slot, wanted),)
            updates.append(self._record(sequence, slot, drawn, logprobs))
        if not in_chunk:
            run.seconds.append(step.busy_seconds)  # without a grammar's time, which would delay later decisions
            kind = run.decision.kind
            self.timings.step(step.seconds, kind.drafts, outcomes)
            self.timings.queries[kind.rows * (1 + kind.drafts)] += 1
            run.outcomes += outcomes
        return updates

    def _after_chunk(self, run: Run, step: StepTokens) -> list[RequestUpdate]:
        """Returns the updates after a prompt chunk: log-probabilities of prompts, and prefill progress."""
        updates, prefill = [], run.decision.prefill
        for slot, found in step.scored(prefill):
            sequence = run.rows[slot]
            most = sequence.request.sampling.prompt_logprobs
            if not sequence.ended and most is not None:
                part = PromptLogprobs(found.begin, found.ids[:, : 1 + most], found.values[:, : 1 + most])
                updates.append(replace(sequence.update(), scored=part))
        if not any(len(segment.scored) for segment in prefill):  # which take longer than those of others
            self._times.observe(self._work(run.decision), step.seconds)
        self._announce()
        self.timings.prefill_s += step.seconds
        self.timings.prefill_tokens += sum(s.end - s.begin for s in prefill)
        for segment in prefill:
            sequence = run.rows[segment.slot]
            if not sequence.drawn and not sequence.ended:
                sequence.computed = segment.end
                if not segment.last:  # else its first token says so
                    updates.append(sequence.update())
        return updates

    def _record(self, s: Scheduled, slot: int, drawn: list[int], logprobs: tuple[Logprobs, ...]) -> RequestUpdate:
        """Records a sequence's tokens up to its end; returns the update."""
        new, reason = list[int](), None
        for token in drawn:
            self._scheduler.record_token(slot, token)
            new.append(token)
            reason = "stop" if token in s.ends else "length" if not s.remaining else None
            if reason is not None:
                self._scheduler.end(s.request.id)
                break
        return s.update(tuple(new), reason, logprobs)

    def _forget(self, rows: dict[int, Scheduled]) -> None:
        """Resets draft statistics of slots whose request ended."""
        for slot, sequence in rows.items():
            if sequence.ended:
                self._policy.forget(slot)

    def _tried(self, run: Run, slot: int) -> int:
        """Returns the number of drafts that each step of a run verifies for a slot."""
        drafts = run.decision.kind.drafts
        return min(drafts, run.limits[slot]) if slot < len(run.limits) else drafts

    def _work(self, decision: Decision) -> float:
        """Returns the work of a decision's prompt chunk."""
        return sum(self._times.work(s.begin, s.end) for s in decision.prefill)

    def _chunk_s(self, decision: Decision) -> float:
        """Predicts the seconds of a decision's prompt chunk; 0 if it has none or no chunk has run."""
        return self._times.seconds(self._work(decision)) if decision.prefill else 0.0

    def _announce(self, *launched: Decision) -> None:
        """Updates the predicted time of the chunks under way: so long the engine may be silent and not hang."""
        unread = (run.decision for run in self._runs if run.in_chunk)
        self.timings.chunk_s = max(map(self._chunk_s, (*unread, *launched)), default=0.0)

    # ---- all ranks

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Opens a call of `serve`; at its end rank 0 tells the other ranks to stop."""
        if self._broken is not None:
            self.comm.abort(self._broken)  # others may be waiting for this rank
            raise RuntimeError(
                f"this engine is broken, make a new one over new communicators: it failed with {self._broken}"
            )
        if self._calling:
            raise RuntimeError("a call is under way on this engine: iterate it to its end, or close() it")
        self._calling = True
        self.timings, self._scheduler.preemptions = Timings(acceptance=Acceptance(self.runner.sizes.drafts)), 0
        try:
            yield
            self._release()
        except BaseException as error:
            self._reset()  # pages of unread decisions have unknown content
            try:
                self._release()
            except Exception as failed:
                if isinstance(error, GeneratorExit):  # its notes would be lost
                    raise
                error.add_note(f"then the other ranks could not be told to end: {type(failed).__name__}: {failed}")
            raise
        finally:
            self._calling = False
            self.timings.count_kv(self.runner.placement)

    def _release(self) -> None:
        """Frees every slot on every rank and ends their loops; does nothing if the engine is broken."""
        if self._broken is not None or self.comm.rank > 0:
            return
        with self._together():
            if held := tuple(self._held):
                limits = (MAX_QUERIES,) * self.runner.sizes.slots if self.runner.sizes.drafts else ()
                self._send(replace(Decision.nothing(held), draft_limits=limits))
                self.runner.check()
            self.comm.broadcast_object(None)

    def _send(self, decision: Decision) -> list[StepTokens]:
        """Sends a decision to all ranks, and launches rank 0's share of it."""
        with self._together():
            self._held = (self._held - {*decision.retire}) | {admission.slot for admission in decision.admit}
            self.comm.broadcast_object(decision)
            return self._execute(decision)

    def _execute(self, decision: Decision) -> list[StepTokens]:
        layout = self.runner.layout
        return self.runner.execute(decision.share(layout.dp_rank(self.comm.rank), layout.dp))

    def _follow(self) -> None:
        """Executes rank 0's decisions until it sends None; waits up to `timeout_s` for each."""
        decision: Decision | None = None
        before: torch.cuda.Event | None = None
        with self._together():
            self.comm.limit_waits(self.timeout_s)
            while (decision := self.comm.broadcast_object(decision)) is not None:
                self._execute(decision)
                if before is not None:
                    before.synchronize()  # launches no further ahead than rank 0
                if self.comm.device.type == "cuda":
                    (before := torch.cuda.Event()).record()
                self.runner.check(wait=False)
            self.runner.check()
            self.comm.limit_waits(None)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Marks the engine broken if a collective section raises: the other ranks wait in it and cannot go on."""
        try:
            yield
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise

    @property
    def _beat_s(self) -> float:
        return self.timeout_s / BEATS


__all__ = ["Engine", "Request"]
