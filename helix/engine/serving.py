"""Rank 0's serving loop: reads requests, makes decisions, yields updates of requests.

The next decision is made and launched before the previous one has ended, so that the device never idles between two.
So a decision knows only an upper bound on the unread tokens, and tokens that a sequence draws after its end are
discarded. No cost grows with the context.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from time import perf_counter

from helix.engine.decision import Decision
from helix.engine.draft_policy import DraftOutcome, DraftPolicy
from helix.engine.inbox import Abort, Inbox
from helix.engine.prefill_time import PrefillTime
from helix.engine.request import Logprobs, PromptLogprobs, Request, RequestUpdate
from helix.engine.scheduled import Scheduled
from helix.engine.scheduler import Scheduler
from helix.engine.timings import Timings
from helix.worker.model_runner import ModelRunner
from helix.worker.step_tokens import StepTokens

AHEAD_S = 0.004  # time before the predicted end of a run at which the next decision is made; more than one takes
PAUSE_S = 0.5  # time without requests after which a size of chunks is captured: the next request waits for that
LOOK_S = 0.001  # polling interval for runs that end sooner than predicted


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


@dataclass
class RequestProgress:
    """Progress of a request that waits or runs; attributes as in `RequestUpdate`."""

    prompt_tokens: int
    ends: Collection[int]  # tokens that end it
    cached_tokens: int = 0
    prefilled: int = 0

    def update(
        self,
        name: str | int,
        new_ids: tuple[int, ...] = (),
        finish_reason: str | None = None,
        reason: str | None = None,
        logprobs: tuple[Logprobs, ...] = (),
    ) -> RequestUpdate:
        done = self.prompt_tokens, self.cached_tokens, self.prefilled
        return RequestUpdate(name, *done, new_ids, finish_reason, reason, logprobs)


class Serving:
    """State of one call of `Engine.serve`.

    Args:
        refusal: returns the reason why a request cannot be served; None if it can.
        launch: sends a decision to all ranks and launches it here.
        beat_s: most seconds between messages to the other ranks while idle.
        on_yielded: see `Engine`.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        times: PrefillTime,
        policy: DraftPolicy,
        timings: Timings,
        *,
        refusal: Callable[[Request], str | None],
        launch: Callable[[Decision], list[StepTokens]],
        beat_s: float,
        on_yielded: Callable[[], None],
    ) -> None:
        self._runner, self._scheduler, self._times = runner, scheduler, times
        self._policy, self._timings = policy, timings
        self._refusal, self._launch, self._beat_s = refusal, launch, beat_s
        self._on_yielded = on_yielded
        self._eos = runner.model.spec.eos
        self._open: dict[str | int, RequestProgress] = {}
        self._runs: deque[Run] = deque()
        self._limits: tuple[int, ...] = ()
        self._came = 0.0  # time at which the last tokens that were read were there
        # On a GPU, of decisions with a prompt chunk: it admits requests, and may be launched kernel by kernel.
        self._chunk_launch_s = 0.0
        self._most_held = 0

    def outputs(self, inbox: Inbox) -> Iterator[RequestUpdate]:
        """Yields updates of all requests, until the inbox is closed and all requests have ended."""
        known: list[RequestUpdate] = []  # yielded once the next decision is launched
        while True:
            known += self._take(inbox)
            self._forget(self._scheduler.running)
            begin = perf_counter()
            decision = self._scheduler.decide(begin)
            self._timings.preemptions = self._scheduler.preemptions
            if decision is not None:
                self._timings.decide_s += perf_counter() - begin
                self._timings.decisions += 1
                known += self._begin(decision, begin)
            yield from known
            self._on_yielded()
            known = []
            if decision is not None:
                while len(self._runs) > 1 or self._is_early(inbox):
                    yield from self._read()
                    self._on_yielded()
            elif self._runs:
                known = [*self._read()]
            elif inbox.ended:
                assert not self._open, f"{len(self._open)} requests were left behind"
                return
            elif not inbox.wait(PAUSE_S if (captures := self._runner.eager_size is not None) else self._beat_s):
                self._launch(Decision.nothing(captures=captures))

    def _take(self, inbox: Inbox) -> Iterator[RequestUpdate]:
        for item in inbox.take():
            if isinstance(item, Abort):
                if self._scheduler.end(item.id):
                    yield self._open.pop(item.id).update(item.id, finish_reason="abort")
                continue
            progress = RequestProgress(len(item.prompt), item.sampling.ends(self._eos))
            try:
                reason = self._refusal(item) or self._scheduler.submit(item, perf_counter())
            except Exception as error:  # no other rank knows the request yet, so the call goes on
                reason = f"it could not be read: {type(error).__name__}: {error}"
            if reason:
                yield progress.update(item.id, finish_reason="error", reason=reason)
            else:
                self._open[item.id] = progress

    def _begin(self, decision: Decision, since: float) -> list[RequestUpdate]:
        """Launches a decision, on which work began then; returns updates of the requests that it admits."""
        for admission in decision.admit:
            if not admission.drawn:
                progress = self._open[admission.id]
                progress.cached_tokens = progress.prefilled = admission.resumes
        self._limits = decision.draft_limits or self._limits
        self._announce(decision)  # before the launch, which on a CPU takes as long as the chunk
        rows, begin = dict(self._scheduler.running), perf_counter()
        steps = deque(self._launch(decision))
        if self._runs and self._runs[-1].holds_draw:
            self._runs[-1].steps.append(steps.popleft())
            self._runs[-1].holds_draw = False
        chunk = bool(decision.prefill)
        self._runs.append(Run(decision, rows, steps, self._limits, begin, decision.holds_draw, chunk))
        if decision.prefill and self._runner.device.type == "cuda":
            self._chunk_launch_s += (perf_counter() - since - self._chunk_launch_s) / 2
        return [self._open[admission.id].update(admission.id) for admission in decision.admit]

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
            if self._runner.is_computed if run.holds_draw else run.steps[0].there:
                return run.left > 1  # what it took tells when the steps behind it end
            time.sleep(min(LOOK_S, max(until - perf_counter(), 0.0)))
        return not run.left  # a run without steps has nothing to read

    def _read(self) -> Iterator[RequestUpdate]:
        """Reads the next step's tokens; yields the updates that follow from them."""
        run = self._runs[0]
        if run.steps:
            in_chunk, step = run.in_chunk, run.steps.popleft()
            run.in_chunk = False
            tokens: dict[int, list[int]] = {}
            for slot, token in step.read():
                tokens.setdefault(slot, []).append(token)
            seconds = step.seconds
            # A launch may have kept this host from reading them at once.
            self._came = min(step.came, max(run.begin, self._came) + seconds)
            if in_chunk:
                yield from self._scored(run, step)
                yield from self._after_chunk(run, seconds)
            else:
                run.seconds.append(step.busy_seconds)  # without a grammar's time, which would delay later decisions
            outcomes = []
            for slot, drawn in tokens.items():
                sequence = run.rows[slot]
                if sequence.ended:
                    continue  # computed after its end, discarded
                tried = min(self._tried(run, slot), sequence.remaining - 1)
                outcomes.append(DraftOutcome(slot, tried, len(drawn) - 1))
                wanted = sequence.request.sampling.logprobs
                logprobs = () if wanted is None else (step.logprobs(slot, wanted),)
                yield self._record(sequence, slot, drawn, logprobs)
            if not in_chunk:
                self._timings.step(seconds, run.decision.kind.drafts, outcomes)
                run.outcomes += outcomes
        if not run.left:
            self._runs.popleft()
            self._scheduler.landed()
            kind, kv_tokens = run.decision.kind, sum(s.cached for s in run.rows.values())
            self._policy.observe(kind.rows, kv_tokens, kind.drafts, run.seconds, run.outcomes)
            self._forget(run.rows)
            self._note_kv()

    def _work(self, decision: Decision) -> float:
        """Returns the work of a decision's prompt chunk."""
        return sum(self._times.work(s.begin, s.end) for s in decision.prefill)

    def _chunk_s(self, decision: Decision) -> float:
        """Predicts the seconds of a decision's prompt chunk; 0 if it has none or no chunk has run."""
        return self._times.seconds(self._work(decision)) if decision.prefill else 0.0

    def _announce(self, *launched: Decision) -> None:
        """Updates the predicted time of the chunks under way: so long the engine may be silent and not hang."""
        unread = (run.decision for run in self._runs if run.in_chunk)
        self._timings.chunk_s = max(map(self._chunk_s, (*unread, *launched)), default=0.0)

    def _forget(self, rows: dict[int, Scheduled]) -> None:
        """Resets draft statistics of slots whose request ended."""
        for slot, sequence in rows.items():
            if sequence.ended:
                self._policy.forget(slot)

    def _tried(self, run: Run, slot: int) -> int:
        """Returns the number of drafts that each step of a run verifies for a slot."""
        drafts = run.decision.kind.drafts
        return min(drafts, run.limits[slot]) if slot < len(run.limits) else drafts

    def _scored(self, run: Run, step: StepTokens) -> Iterator[RequestUpdate]:
        for slot, found in step.scored(run.decision.prefill):
            request, most = run.rows[slot].request, run.rows[slot].request.sampling.prompt_logprobs
            if not run.rows[slot].ended and most is not None:
                part = PromptLogprobs(found.begin, found.ids[:, : 1 + most], found.values[:, : 1 + most])
                yield replace(self._open[request.id].update(request.id), scored=part)

    def _after_chunk(self, run: Run, seconds: float) -> Iterator[RequestUpdate]:
        timings, prefill = self._timings, run.decision.prefill
        if not any(len(segment.scored) for segment in prefill):  # which take longer than those of others
            self._times.observe(self._work(run.decision), seconds)
        self._announce()
        timings.prefill_s += seconds
        timings.prefill_tokens += sum(s.end - s.begin for s in prefill)
        for segment in prefill:
            sequence = run.rows[segment.slot]
            if not sequence.drawn and not sequence.ended:
                progress = self._open[sequence.request.id]
                progress.prefilled = segment.end
                if not segment.last:  # else its first token says so
                    yield progress.update(sequence.request.id)

    def _record(
        self, sequence: Scheduled, slot: int, drawn: list[int], logprobs: tuple[Logprobs, ...]
    ) -> RequestUpdate:
        """Records a sequence's tokens up to its end; returns the update."""
        request = sequence.request
        progress = self._open[request.id]
        new: list[int] = []
        reason = None
        for token in drawn:
            self._scheduler.record_token(slot, token)
            new.append(token)
            reason = "stop" if token in progress.ends else "length" if not sequence.remaining else None
            if reason is not None:
                self._scheduler.end(request.id)
                del self._open[request.id]
                break
        return progress.update(request.id, tuple(new), reason, logprobs=logprobs)

    def _note_kv(self) -> None:
        """Updates the highest number of tokens in the cache."""
        running = self._scheduler.running.items()
        held = [(slot, s.cached, s.held.start) for slot, s in running if s.held is not None]
        if (total := sum(cached for _, cached, _ in held)) > self._most_held:
            self._most_held, self._timings.held = total, held


__all__ = ["Serving"]
