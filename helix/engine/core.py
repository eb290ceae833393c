"""Engine: serves requests on all ranks and reports their tokens.

Rank 0 schedules. It broadcasts each `SchedulerOutput`, a chunk of prompts and a run of decode steps, on the CPU, and
every rank launches it. Rank 0 schedules and launches the next batch while the current one still runs, so the device
never idles in between. It therefore only knows an upper bound of the tokens in flight, and discards tokens sampled
after the end of a sequence. No cost grows with the context.
"""

from __future__ import annotations

import math
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
from helix.engine.prefix_moves import PrefixMoves
from helix.engine.request import EMPTY_PROMPT, Logprobs, PromptLogprobs, Request, RequestUpdate, outside_vocabulary
from helix.engine.request_state import RequestState
from helix.engine.scheduler import Scheduler
from helix.engine.scheduler_output import SchedulerOutput
from helix.engine.snapshots import StateSnapshots
from helix.engine.stripe_store import StripeStore
from helix.engine.timings import Timings
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.model_runner import ModelRunner
from helix.worker.step_tokens import StepTokens
from helix.worker.warmup import Mark, warmup

LEAD_S = 0.004  # time before the predicted end of a batch to schedule the next one; scheduling takes less
PAUSE_S = 0.5  # idle time after which a prefill graph is captured: a request that arrives meanwhile waits for it
POLL_S = 0.001  # for runs that end sooner than predicted
MOVE_POLL_S = 0.001  # for moves of prefixes, while nothing else is left to do
HEARTBEATS = 4  # messages that an idle rank 0 sends per `timeout_s`


@dataclass
class InFlightBatch:
    """A launched batch with tokens that rank 0 has not read yet.

    Attributes:
        steps: unread steps in order; the prefill step, if any, comes first.
        draft_limits: maximum drafts to verify by slot; empty: no limit.
        defers_sampling: the tokens of its decode step come with the next batch.
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
        return len(self.steps) + self.defers_sampling


class Engine:
    """Serves requests on all ranks of a layout; every rank creates one and calls `serve`.

    Args:
        adaptive: rank 0 chooses the number of drafts of each step, up to the drafter's limit; otherwise always the
            limit.
        snapshot_every: distance of snapshots in a prompt, in tokens; 0: see `StateSnapshots`.
        timeout_s: how long other ranks wait for a message of rank 0.

    Attributes:
        timings: statistics of the last `serve` call, on rank 0.
        tables: page allocators, on rank 0: one, or one per DP rank.
    """

    def __init__(
        self,
        runner: ModelRunner,
        schedule: ScheduleConfig | None = None,
        *,
        adaptive: bool = True,
        prefix_cache: bool = True,
        snapshot_every: int = 0,
        timeout_s: float = 300.0,
    ) -> None:
        self.runner, self.comm, self.schedule = runner, runner.comm, schedule or ScheduleConfig()
        self.draft_sizes = draft_sizes(runner.sizes.drafts, adaptive)
        self.timeout_s = timeout_s
        self.timings = Timings()
        self._prefix_cache, self._snapshot_every = prefix_cache, snapshot_every
        self._broken: str | None = None  # the error that broke the engine
        self._serving = False
        self._slots_in_use: set[int] = set()
        self._times = PrefillTime(doubling_depth(runner.model.spec))
        # Measured on GPUs for batches with a prefill chunk: these admit requests and may launch kernel by kernel.
        self._chunk_launch_s = 0.0
        self._moves: PrefixMoves | None = None
        self._sent_at = 0.0  # `perf_counter` of the last message to the other ranks
        self._reset()

    def _reset(self) -> None:
        self.tables = [self._empty_tables() for _ in range(self.runner.layout.dp)]
        self._policy = DraftPolicy(self.draft_sizes, self.runner.step_seconds)
        self._scheduler = Scheduler(
            self.tables, self._times, self.runner, self.schedule, self._policy.plan_steps, self._reset_moves()
        )
        self._batches: deque[InFlightBatch] = deque()
        self._draft_limits: tuple[int, ...] = ()
        self._read_at = 0.0  # `perf_counter` when the last tokens arrived

    def _reset_moves(self) -> PrefixMoves | None:
        slabs = self.runner.slabs
        if slabs is None:
            return None
        if self._moves is None:
            store = StripeStore(len(slabs.slabs), slabs.num_records)
            processes = self.comm.num_processes
            of_slabs = slabs.max_bytes, processes, slabs.identity, slabs.snapshot_slabs
            self._moves = PrefixMoves(self.tables[0], self._times, store, *of_slabs)
        else:  # what is in host memory and on disk stays valid
            self._moves.reset(self.tables[0], self._times)
        return self._moves

    def _empty_tables(self) -> BlockTables:
        runner, times, stripes = self.runner, self._times, self.runner.placement.stripes
        pages = runner.sizes.pages
        caches_states = self._prefix_cache and runner.drafter.resumes_from_snapshots
        snapshot_counts = (runner.cache.snapshots, runner.cache.host_snapshots) if caches_states else (0, 0)
        tree = PrefixTree(PagePool(pages), stripes, times.cost, needs_snapshots=math.isinf(runner.recomputed_tokens))
        snapshots = StateSnapshots(tree, times.work, *snapshot_counts, self._snapshot_every)
        return BlockTables(tree, self._prefix_cache, pages if runner.drafter.has_own_pages else None, snapshots)

    @torch.inference_mode()  # entered at each resumption: the caller's code between two updates runs outside
    def serve(self, inbox: Inbox | None) -> Iterator[list[RequestUpdate]]:
        """Serves an inbox until it is closed and all requests have ended; a collective call.

        The caller on rank 0 must iterate without delay: the next batch is launched only after it has taken the updates.
        Other ranks give up after `timeout_s` without a message of rank 0.

        If rank 0 fails between steps, or the caller stops iterating, the call ends on all ranks and all slots are
        freed. If a rank fails in a step, for example in `logits_hook`, other ranks wait in that step, so the engine is
        broken on all of them: create new communicators and a new engine.

        Args:
            inbox: used on rank 0 only.

        Yields:
            Lists of updates on rank 0, one per step. Other ranks yield nothing, but must iterate too.

        Raises:
            RuntimeError: the logits are NaN, a rank failed, the engine is broken, or it is already serving.
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
                    updates = self._read()  # reported after the next batch is launched
                elif (moves := self.moves) is not None and moves.is_busy(begin):
                    if not inbox.wait(MOVE_POLL_S) and begin > self._sent_at + self._heartbeat_s:
                        self._send(SchedulerOutput.empty())
                elif inbox.ended:
                    return
                elif not inbox.wait(
                    PAUSE_S if (capture_graph := self.runner.eager_size is not None) else self._heartbeat_s
                ):
                    self._send(SchedulerOutput.empty(capture_graph=capture_graph))

    @property
    def moves(self) -> PrefixMoves | None:
        """Moves of prefixes to and from host memory and disk, on rank 0."""
        return self._scheduler.moves

    def refusal(self, request: Request) -> str | None:
        """Returns why this engine can never serve a request, or None if it can."""
        spec, limit = self.runner.model.spec, self.runner.sizes.length
        if len(request.prompt) == 0:
            return EMPTY_PROMPT
        ids = np.asarray(request.prompt)
        outside = ids[(ids < 0) | (ids >= spec.vocab)]
        if len(outside):
            return outside_vocabulary("prompt", outside[0], spec.vocab)
        if (token := max(request.sampling.logit_bias, default=0)) >= spec.vocab:
            return outside_vocabulary("logit_bias", token, spec.vocab)
        if request.max_tokens < 1:
            return f"max_tokens={request.max_tokens} must be at least 1"
        length = len(request.prompt) + request.max_tokens
        if length > spec.max_positions:
            return (
                f"prompt of {len(request.prompt)} tokens plus max_tokens={request.max_tokens} exceeds the model's "
                f"{spec.context}: shorten the prompt or lower max_tokens{spec.stretched(length)}"
            )
        if length > limit:
            return (
                f"prompt of {len(request.prompt)} tokens plus max_tokens={request.max_tokens} needs {length} tokens of "
                f"KV, but a sequence has at most {limit} here: {self.runner.cache.remedy}"
            )
        return None

    def warmup(
        self, kinds: Iterable[DecodeGraphKey], later: Iterable[DecodeGraphKey] = (), mark: Mark = lambda phase: None,
        *, chunks: bool = False, grammars: bool = False,
    ) -> None:  # fmt: skip
        """Compiles kernels and captures decode steps of every batch size before the first request; a collective.

        Args:
            kinds: decode steps to capture; the same on every rank.
            later: decode steps to compile only. They are captured when they run for the second time, which delays that
                step by about two launches.
            mark: called with the name of each phase when it ends.
            chunks: also capture the common sizes of prefill chunks.
            grammars: also capture steps of `later` as they run for requests with a grammar, whose first tokens would
                otherwise wait for captures.
        """
        runner, first = self.runner, self.runner.policy.from_tokens
        sparse = [False] if first is None else [True] if first == 0 else [False, True]
        now, then = (
            [replace(kind, drafts=n, sparse=s) for kind, n, s in product(sorted(set(of)), self.draft_sizes, sparse)]
            for of in (kinds, later)
        )
        self._times = PrefillTime(doubling_depth(runner.model.spec))
        # Without these times, the first prompts would be prefilled in needlessly small chunks.
        deferred = [kind for kind in then if grammars and kind.drafts == self.draft_sizes[0]]  # they take no drafts
        for tokens, seconds in warmup(runner, now, then, mark, chunks=chunks, deferred=deferred):
            self._times.observe(self._times.work(0, tokens), seconds)
        self._reset()

    def close(self) -> None:
        """Frees captured graphs and host memory; call it before closing the communicator."""
        self.runner.close()
        self.runner.cache.close()

    # ---- the loop of rank 0

    def _admit(self, inbox: Inbox) -> list[RequestUpdate]:
        updates = []
        for item in inbox.drain():
            if isinstance(item, Abort):
                if (ended := self._scheduler.end(item.id)) is not None:
                    updates.append(ended.update(finish_reason="abort"))
                continue
            try:
                reason = self.refusal(item) or self._scheduler.submit(item, perf_counter())
            except Exception as error:  # no other rank knows the request yet, so serving goes on
                reason = f"could not read the request: {type(error).__name__}: {error}"
            if reason:
                updates.append(RequestUpdate(item.id, len(item.prompt), finish_reason="error", reason=reason))
        return updates

    def _schedule(self, now: float) -> SchedulerOutput | None:
        rows = dict(self._scheduler.running)
        self._forget(rows)
        if self.moves is not None:
            self.moves.collect(self.comm.reports(), now)
        scheduler_output = self._scheduler.schedule(now)
        self._forget(rows)  # those it preempted
        self.timings.preemptions = self._scheduler.preemptions
        if scheduler_output is not None:
            self.timings.decide_s += perf_counter() - now
            self.timings.decisions += 1
        return scheduler_output

    def _launch(self, scheduler_output: SchedulerOutput, since: float) -> list[RequestUpdate]:
        """Launches a batch whose scheduling began at `since`; returns updates of the requests that it admits."""
        rows = dict(self._scheduler.running)
        for admission in scheduler_output.new_requests:
            s = rows[admission.slot]
            if s.record_admission(admission, self.runner.model.spec.eos):
                self.timings.record_admission(s)
        self._draft_limits = scheduler_output.draft_limits or self._draft_limits
        self._predict_chunk_s(scheduler_output)  # before the launch, which on a CPU runs the whole chunk
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
        """Returns whether to read the current batch before scheduling the next; sleeps until it is time to schedule."""
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
        # Blocking on the prefill step is safe only if the decode steps after it outlast the next launch.
        if batch.num_unread > 1 and (batch.defers_sampling or not batch.prefill_unread or steps_s > lead_s):
            return left_s > lead_s
        until = now + left_s - lead_s
        while batch.num_unread and perf_counter() < until:
            if self.runner.is_computed if batch.defers_sampling else batch.steps[0].ready:
                return batch.num_unread > 1  # read it: its duration predicts when the remaining steps end
            time.sleep(min(POLL_S, max(until - perf_counter(), 0.0)))
        return not batch.num_unread

    def _read(self) -> list[RequestUpdate]:
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
        # A launch may have kept this host from reading them at once, so bound the time by the step's duration.
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
            batch.seconds.append(step.busy_seconds)  # without waits for a grammar: the next run may have none
            kind = batch.scheduler_output.kind
            self.timings.step(step.seconds, kind.drafts, outcomes)
            self.timings.queries[kind.rows * (1 + kind.drafts)] += 1
            batch.outcomes += outcomes
        return updates

    def _after_chunk(self, batch: InFlightBatch, step: StepTokens) -> list[RequestUpdate]:
        updates, prefill = [], batch.scheduler_output.prefill_chunks
        for slot, found in step.prompt_logprobs(prefill):
            sequence = batch.rows[slot]
            top = sequence.request.sampling.prompt_logprobs
            if not sequence.ended and top is not None:
                part = PromptLogprobs(found.begin, found.ids[:, : 1 + top], found.values[:, : 1 + top])
                updates.append(replace(sequence.update(), prompt_logprobs=part))
        if not any(len(chunk.logprob_token_ids) for chunk in prefill):  # log-probabilities take extra time
            self._times.observe(self._work(batch.scheduler_output), step.seconds)
        self._predict_chunk_s()
        self.timings.prefill_s += step.seconds
        self.timings.prefill_tokens += sum(s.end - s.begin for s in prefill)
        for chunk in prefill:
            sequence = batch.rows[chunk.slot]
            if not sequence.output_token_ids and not sequence.ended:
                sequence.num_confirmed_tokens = chunk.end
                if not chunk.last:  # else the update of its first token reports the progress
                    updates.append(sequence.update())
        return updates

    def _record(
        self, s: RequestState, slot: int, new_tokens: list[int], logprobs: tuple[Logprobs, ...]
    ) -> RequestUpdate:
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
        for slot, sequence in rows.items():
            if sequence.ended or sequence.slot != slot:
                self._policy.forget(slot)

    def _num_verified(self, batch: InFlightBatch, slot: int) -> int:
        drafts = batch.scheduler_output.kind.drafts
        return min(drafts, batch.draft_limits[slot]) if slot < len(batch.draft_limits) else drafts

    def _work(self, scheduler_output: SchedulerOutput) -> float:
        return sum(self._times.work(s.begin, s.end) for s in scheduler_output.prefill_chunks)

    def _chunk_s(self, scheduler_output: SchedulerOutput) -> float:
        return self._times.seconds(self._work(scheduler_output)) if scheduler_output.prefill_chunks else 0.0

    def _predict_chunk_s(self, *launched: SchedulerOutput) -> None:
        """Updates `timings.chunk_s`: a watchdog must tolerate that much silence."""
        unread = (batch.scheduler_output for batch in self._batches if batch.prefill_unread)
        self.timings.chunk_s = max(map(self._chunk_s, (*unread, *launched)), default=0.0)

    # ---- all ranks

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Guards a `serve` call; when it ends, rank 0 stops the other ranks."""
        if self._broken is not None:
            self.comm.abort(self._broken)  # others may be waiting for this rank
            raise RuntimeError(f"this engine is broken ({self._broken}): create new communicators and a new engine")
        if self._serving:
            raise RuntimeError("this engine is already serving: iterate that serve() to its end, or close() it")
        self._serving = True
        self.timings, self._scheduler.preemptions = Timings(acceptance=Acceptance(self.runner.sizes.drafts)), 0
        try:
            yield
            self._release()
        except BaseException as error:
            self._reset()  # the pages of batches in flight have unknown content
            try:
                self._release(drains_moves=True)
            except Exception as failed:
                if isinstance(error, GeneratorExit):  # its notes would not be shown
                    raise
                error.add_note(f"stopping the other ranks failed, too: {type(failed).__name__}: {failed}")
            raise
        finally:
            self._serving = False
            self.timings.count_kv(self.runner.placement)

    def _release(self, drains_moves: bool = False) -> None:
        """Frees every slot on every rank and ends their loops; does nothing if the engine is broken.

        Args:
            drains_moves: whether pages and slabs of moves in flight are free, too.
        """
        if self._broken is not None or self.comm.rank > 0:
            return
        with self._collective():
            slots, drains_moves = tuple(self._slots_in_use), drains_moves and self.runner.slabs is not None
            if slots or drains_moves:
                limits = (MAX_QUERIES,) * self.runner.sizes.slots if self.runner.sizes.drafts else ()
                self._send(replace(SchedulerOutput.empty(slots), draft_limits=limits, drains_moves=drains_moves))
                self.runner.check()
            self.comm.broadcast_object(None)

    def _send(self, scheduler_output: SchedulerOutput) -> list[StepTokens]:
        with self._collective():
            moved = dict(scheduler_output.slot_moves)
            left = self._slots_in_use - {*scheduler_output.released_slots}
            admitted = {admission.slot for admission in scheduler_output.new_requests}
            self._slots_in_use = {moved.get(slot, slot) for slot in left} | admitted
            self._sent_at = perf_counter()
            self.comm.broadcast_object(scheduler_output)
            return self._execute(scheduler_output)

    def _execute(self, scheduler_output: SchedulerOutput) -> list[StepTokens]:
        layout = self.runner.layout
        return self.runner.execute(scheduler_output.for_dp_rank(layout.dp_rank(self.comm.rank), layout.dp))

    def _worker_loop(self) -> None:
        """Executes rank 0's batches until it sends None; waits up to `timeout_s` for each."""
        scheduler_output: SchedulerOutput | None = None
        before: torch.cuda.Event | None = None
        with self._collective():
            self.comm.set_control_timeout(self.timeout_s)
            while (scheduler_output := self.comm.broadcast_object(scheduler_output)) is not None:
                self._execute(scheduler_output)
                if before is not None:
                    before.synchronize()  # run no further ahead than rank 0
                if self.comm.device.type == "cuda":
                    (before := torch.cuda.Event()).record()
                self.runner.check(wait=False)
            self.runner.check()
            self.comm.set_control_timeout(None)

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Marks the engine broken if a collective section raises: other ranks wait in it and cannot go on."""
        try:
            yield
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise

    @property
    def _heartbeat_s(self) -> float:
        return self.timeout_s / HEARTBEATS


__all__ = ["Engine", "Request"]
