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
from helix.engine.draft_policy import Acceptance, DraftOutcome, DraftPolicy, draft_sizes
from helix.engine.inbox import Abort, Inbox
from helix.engine.pages import PagePool
from helix.engine.prefill_time import PrefillTime, doubling_depth
from helix.engine.prefix import PrefixTree
from helix.engine.request import Logprobs, PromptLogprobs, Request, RequestUpdate
from helix.engine.request_state import RequestState
from helix.engine.scheduler import Scheduler
from helix.engine.scheduler_output import SchedulerOutput
from helix.engine.snapshots import StateSnapshots
from helix.engine.timings import Timings
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.model_runner import ModelRunner
from helix.worker.step_tokens import StepTokens
from helix.worker.warmup import Mark, warmup

LEAD_S = 0.004  # time before the predicted end of a run at which the next decision is made; more than one takes
PAUSE_S = 0.5  # time without requests after which a size of chunks is captured: the next request waits for that
POLL_S = 0.001  # polling interval for runs that end sooner than predicted
HEARTBEATS = 4  # messages of an idle rank 0 within the time after which other ranks give up


@dataclass
class InFlightBatch:
    """A launched decision whose tokens are not all read.

    Attributes:
        rows: requests by slot.
        steps: steps whose tokens are not read yet; that of the prompt chunk, if any, comes first.
        limits: most drafts verified per slot, if limited.
        begin: time of its launch.
        defers_sampling: its step is held: the tokens come with the next decision.
        prefill_unread: the tokens of its prompt chunk are not read yet.
    """

    scheduler_output: SchedulerOutput
    rows: dict[int, RequestState]
    steps: deque[StepTokens]
    draft_limits: tuple[int, ...]
    begin: float
    defers_sampling: bool
    prefill_unread: bool
    seconds: list[float] = field(default_factory=list)
    outcomes: list[DraftOutcome] = field(default_factory=list)

    @property
    def num_unread(self) -> int:
        """Number of steps still to be read."""
        return len(self.steps) + self.defers_sampling


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
        self._serving = False
        self._slots_in_use: set[int] = set()  # slots in use on all ranks
        self._times = PrefillTime(doubling_depth(runner.model.spec))
        # On a GPU, of decisions with a prompt chunk: it admits requests, and may be launched kernel by kernel.
        self._chunk_launch_s = 0.0
        self._reset()

    def _reset(self) -> None:
        """Drops all requests and the prefix cache; makes allocators, draft policy and scheduler anew."""
        self.tables = [self._empty_tables() for _ in range(self.runner.layout.dp)]
        self._policy = DraftPolicy(self.draft_sizes, self.runner.step_seconds)
        self._scheduler = Scheduler(self.tables, self._times, self.runner, self.schedule, self._policy.plan_steps)
        self._batches: deque[InFlightBatch] = deque()
        self._draft_limits: tuple[int, ...] = ()
        self._read_at = 0.0  # time at which the last tokens that were read were there

    def _empty_tables(self) -> BlockTables:
        runner, times, stripes = self.runner, self._times, self.runner.placement.stripes
        pages = runner.sizes.pages
        # A draft model's windows would lack what lies before a snapshot.
        caches_states = self._prefix_cache and not runner.drafter.recomputed_tokens
        snapshot_counts = (runner.cache.snapshots, runner.cache.host_snapshots) if caches_states else (0, 0)
        tree = PrefixTree(PagePool(pages), stripes, times.cost)
        states = StateSnapshots(*snapshot_counts, stripes.tokens, times.work)
        return BlockTables(tree, self._prefix_cache, pages if runner.drafter.has_own_pages else None, states)

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
                self._worker_loop()
                return
            assert inbox is not None, "rank 0 serves an inbox"
            updates: list[RequestUpdate] = []
            while True:
                updates += self._admit(inbox)
                begin = perf_counter()
                scheduler_output = self._schedule(begin)
                if scheduler_output is not None:
                    updates += self._launch(scheduler_output, begin)
                if updates:
                    yield updates
                updates = []
                if scheduler_output is not None:
                    while len(self._batches) > 1 or self._is_early(inbox):
                        yield self._read()
                elif self._batches:
                    updates = self._read()  # reported once the next decision is launched
                elif inbox.ended:
                    return
                elif not inbox.wait(
                    PAUSE_S if (capture_graph := self.runner.eager_size is not None) else self._heartbeat_s
                ):
                    self._send(SchedulerOutput.empty(capture_graph=capture_graph))

    def refusal(self, request: Request) -> str | None:
        """Returns the reason why this engine can never serve a request; None if it can."""
        spec, limit = self.runner.model.spec, self.runner.sizes.length
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
        if length > limit:
            return (
                f"prompt of {len(request.prompt)} tokens and {request.max_tokens} new ones are {length} tokens of "
                f"KV, and a sequence may have max_length={limit} ({self.runner.cache.remedy})"
            )
        return None

    def warmup(
        self, kinds: Iterable[DecodeGraphKey], later: Iterable[DecodeGraphKey] = (), mark: Mark = lambda phase: None,
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
        for tokens, seconds in warmup(runner, now, then, mark, chunks=chunks):
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
        for item in inbox.drain():
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

    def _schedule(self, now: float) -> SchedulerOutput | None:
        self._forget(self._scheduler.running)
        scheduler_output = self._scheduler.schedule(now)
        self.timings.preemptions = self._scheduler.preemptions
        if scheduler_output is not None:
            self.timings.decide_s += perf_counter() - now
            self.timings.decisions += 1
        return scheduler_output

    def _launch(self, scheduler_output: SchedulerOutput, since: float) -> list[RequestUpdate]:
        """Launches a decision, on which work began then; returns updates of the requests that it admits."""
        rows = dict(self._scheduler.running)
        for admission in scheduler_output.new_requests:
            rows[admission.slot].record_admission(admission, self.runner.model.spec.eos)
        self._draft_limits = scheduler_output.draft_limits or self._draft_limits
        self._predict_chunk_s(scheduler_output)  # before the launch, which on a CPU takes as long as the chunk
        begin = perf_counter()
        steps = deque(self._send(scheduler_output))
        if self._batches and self._batches[-1].defers_sampling:
            self._batches[-1].steps.append(steps.popleft())
            self._batches[-1].defers_sampling = False
        chunk = bool(scheduler_output.prefill_chunks)
        self._batches.append(
            InFlightBatch(
                scheduler_output, rows, steps, self._draft_limits, begin, scheduler_output.defers_sampling, chunk
            )
        )
        if chunk and self.runner.device.type == "cuda":
            self._chunk_launch_s += (perf_counter() - since - self._chunk_launch_s) / 2
        return [rows[admission.slot].update() for admission in scheduler_output.new_requests]

    def _is_early(self, inbox: Inbox) -> bool:
        """Returns whether the next decision can wait for the current run; sleeps until the time to make it."""
        if not self._batches or inbox.pending:
            return False
        batch = self._batches[0]
        now, plan = perf_counter(), batch.scheduler_output
        left_s = self._chunk_s(plan) if batch.prefill_unread else 0.0
        steps_s = (batch.num_unread - batch.prefill_unread) * (
            self._policy.seconds(plan.kind.rows, plan.kind.drafts) or 0.0
        )
        left_s += steps_s - (now - max(batch.begin, self._read_at))
        lead_s = LEAD_S + (self._chunk_launch_s if self._scheduler.expects_chunk else 0.0)
        # Who waited for a chunk would come too late if the steps behind it take less than the next launch.
        if batch.num_unread > 1 and (batch.defers_sampling or not batch.prefill_unread or steps_s > lead_s):
            return left_s > lead_s
        until = now + left_s - lead_s
        while batch.num_unread and perf_counter() < until:
            if self.runner.is_computed if batch.defers_sampling else batch.steps[0].ready:
                return batch.num_unread > 1  # what it took tells when the steps behind it end
            time.sleep(min(POLL_S, max(until - perf_counter(), 0.0)))
        return not batch.num_unread  # a run without steps has nothing to read

    def _read(self) -> list[RequestUpdate]:
        """Reads the next step's tokens; returns the updates that follow from them."""
        batch = self._batches[0]
        updates = self._read_step(batch) if batch.steps else []
        if not batch.num_unread:
            self._batches.popleft()
            self._scheduler.finish_batch()
            kind, kv_tokens = batch.scheduler_output.kind, sum(s.num_kv_tokens for s in batch.rows.values())
            self._policy.observe(kind.rows, kv_tokens, kind.drafts, batch.seconds, batch.outcomes)
            self._forget(batch.rows)
            self.timings.record_kv(self._scheduler.running)
        return updates

    def _read_step(self, batch: InFlightBatch) -> list[RequestUpdate]:
        prefill_unread, step = batch.prefill_unread, batch.steps.popleft()
        batch.prefill_unread = False
        tokens: dict[int, list[int]] = {}
        for slot, token in step.read():
            tokens.setdefault(slot, []).append(token)
        # A launch may have kept this host from reading them at once.
        self._read_at = min(step.read_at, max(batch.begin, self._read_at) + step.seconds)
        updates = self._after_chunk(batch, step) if prefill_unread else []
        outcomes = []
        for slot, new_tokens in tokens.items():
            sequence = batch.rows[slot]
            if sequence.ended:
                continue  # computed after its end, discarded
            verified = min(self._num_verified(batch, slot), sequence.remaining - 1)
            outcomes.append(DraftOutcome(slot, verified, len(new_tokens) - 1))
            wanted = sequence.request.sampling.logprobs
            logprobs = () if wanted is None else (step.logprobs(slot, wanted),)
            updates.append(self._record(sequence, slot, new_tokens, logprobs))
        if not prefill_unread:
            batch.seconds.append(step.busy_seconds)  # without a grammar's time, which would delay later decisions
            kind = batch.scheduler_output.kind
            self.timings.step(step.seconds, kind.drafts, outcomes)
            self.timings.queries[kind.rows * (1 + kind.drafts)] += 1
            batch.outcomes += outcomes
        return updates

    def _after_chunk(self, batch: InFlightBatch, step: StepTokens) -> list[RequestUpdate]:
        """Returns the updates after a prompt chunk: log-probabilities of prompts, and prefill progress."""
        updates, prefill = [], batch.scheduler_output.prefill_chunks
        for slot, found in step.prompt_logprobs(prefill):
            sequence = batch.rows[slot]
            top = sequence.request.sampling.prompt_logprobs
            if not sequence.ended and top is not None:
                part = PromptLogprobs(found.begin, found.ids[:, : 1 + top], found.values[:, : 1 + top])
                updates.append(replace(sequence.update(), prompt_logprobs=part))
        if not any(len(chunk.logprob_token_ids) for chunk in prefill):  # which take longer than those of others
            self._times.observe(self._work(batch.scheduler_output), step.seconds)
        self._predict_chunk_s()
        self.timings.prefill_s += step.seconds
        self.timings.prefill_tokens += sum(s.end - s.begin for s in prefill)
        for chunk in prefill:
            sequence = batch.rows[chunk.slot]
            if not sequence.output_token_ids and not sequence.ended:
                sequence.num_confirmed_tokens = chunk.end
                if not chunk.last:  # else its first token says so
                    updates.append(sequence.update())
        return updates

    def _record(
        self, s: RequestState, slot: int, new_tokens: list[int], logprobs: tuple[Logprobs, ...]
    ) -> RequestUpdate:
        """Records a sequence's tokens up to its end; returns the update."""
        new, reason = list[int](), None
        for token in new_tokens:
            self._scheduler.record_token(slot, token)
            new.append(token)
            reason = "stop" if token in s.ends else "length" if not s.remaining else None
            if reason is not None:
                self._scheduler.end(s.request.id)
                break
        return s.update(tuple(new), reason, logprobs)

    def _forget(self, rows: dict[int, RequestState]) -> None:
        """Resets draft statistics of slots whose request ended."""
        for slot, sequence in rows.items():
            if sequence.ended:
                self._policy.forget(slot)

    def _num_verified(self, batch: InFlightBatch, slot: int) -> int:
        """Returns the number of drafts that each step of a run verifies for a slot."""
        drafts = batch.scheduler_output.kind.drafts
        return min(drafts, batch.draft_limits[slot]) if slot < len(batch.draft_limits) else drafts

    def _work(self, scheduler_output: SchedulerOutput) -> float:
        """Returns the work of a decision's prompt chunk."""
        return sum(self._times.work(s.begin, s.end) for s in scheduler_output.prefill_chunks)

    def _chunk_s(self, scheduler_output: SchedulerOutput) -> float:
        """Predicts the seconds of a decision's prompt chunk; 0 if it has none or no chunk has run."""
        return self._times.seconds(self._work(scheduler_output)) if scheduler_output.prefill_chunks else 0.0

    def _predict_chunk_s(self, *launched: SchedulerOutput) -> None:
        """Updates the predicted time of the chunks under way: so long the engine may be silent and not hang."""
        unread = (batch.scheduler_output for batch in self._batches if batch.prefill_unread)
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
        if self._serving:
            raise RuntimeError("a call is under way on this engine: iterate it to its end, or close() it")
        self._serving = True
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
            self._serving = False
            self.timings.count_kv(self.runner.placement)

    def _release(self) -> None:
        """Frees every slot on every rank and ends their loops; does nothing if the engine is broken."""
        if self._broken is not None or self.comm.rank > 0:
            return
        with self._collective():
            if slots := tuple(self._slots_in_use):
                limits = (MAX_QUERIES,) * self.runner.sizes.slots if self.runner.sizes.drafts else ()
                self._send(replace(SchedulerOutput.empty(slots), draft_limits=limits))
                self.runner.check()
            self.comm.broadcast_object(None)

    def _send(self, scheduler_output: SchedulerOutput) -> list[StepTokens]:
        """Sends a decision to all ranks, and launches rank 0's share of it."""
        with self._collective():
            self._slots_in_use = (self._slots_in_use - {*scheduler_output.released_slots}) | {
                admission.slot for admission in scheduler_output.new_requests
            }
            self.comm.broadcast_object(scheduler_output)
            return self._execute(scheduler_output)

    def _execute(self, scheduler_output: SchedulerOutput) -> list[StepTokens]:
        layout = self.runner.layout
        return self.runner.execute(scheduler_output.for_dp_rank(layout.dp_rank(self.comm.rank), layout.dp))

    def _worker_loop(self) -> None:
        """Executes rank 0's decisions until it sends None; waits up to `timeout_s` for each."""
        scheduler_output: SchedulerOutput | None = None
        before: torch.cuda.Event | None = None
        with self._collective():
            self.comm.set_control_timeout(self.timeout_s)
            while (scheduler_output := self.comm.broadcast_object(scheduler_output)) is not None:
                self._execute(scheduler_output)
                if before is not None:
                    before.synchronize()  # launches no further ahead than rank 0
                if self.comm.device.type == "cuda":
                    (before := torch.cuda.Event()).record()
                self.runner.check(wait=False)
            self.runner.check()
            self.comm.set_control_timeout(None)

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Marks the engine broken if a collective section raises: the other ranks wait in it and cannot go on."""
        try:
            yield
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise

    @property
    def _heartbeat_s(self) -> float:
        return self.timeout_s / HEARTBEATS


__all__ = ["Engine", "Request"]
