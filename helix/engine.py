"""Requests in, tokens out.

One control plane: rank 0 schedules, and broadcasts each decision on the CPU before any rank launches what it says. A
decision covers a run of decode steps. Rank 0 has launched all of a decision before it hands a token out: no rank waits
in a step for what a caller does with a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from time import perf_counter
from typing import Any

import numpy as np
import torch

from helix.autotune import choose_chunks, fill, step_seconds
from helix.block_tables import BlockTables
from helix.model_runner import ModelRunner, StepTokens
from helix.pages import PagePool, Stripes
from helix.prefill_time import PrefillTime
from helix.prefix import PrefixTree
from helix.request import Output, Request
from helix.scheduler import Decision, Scheduled, Scheduler
from helix.speculation.adaptive import Acceptance, DraftPolicy, Outcome, draft_sizes
from helix.text import OutputStream
from helix.timings import Timings

DOUBLING = 32768.0  # depth at which a prompt's token takes twice as long as its first one


class Engine:
    """Serves requests on all ranks of a layout; every rank builds one and calls `generate` alike.

    Args:
        runner: this rank's part of all that a decision needs.
        token_budget: the most tokens that all sequences may reserve together.
        prefill_chunk: the most prompt tokens in one step.
        run_steps: the most decode steps between two decisions.
        adaptive: whether rank 0 chooses how many drafts a step has, up to the drafter's limit, or all have that many.
        tokenizer: for text and stop texts, on rank 0; without one, tokens alone.
        on_prefill: called on rank 0 with (prompt tokens done, prompt tokens of the requests admitted so far).

    Attributes:
        draft_sizes: how many drafts a step may have.
        step_seconds: (rows, drafts) -> seconds of a step, from `warm_up`.
        timings: of the last call of `generate`, on rank 0.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        token_budget: int,
        prefill_chunk: int = 1024,
        run_steps: int = 8,
        adaptive: bool = True,
        tokenizer: Any | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> None:
        self.runner = runner
        self.comm = runner.comm
        self.token_budget = token_budget
        self.prefill_chunk = prefill_chunk
        self.run_steps = run_steps
        self.draft_sizes = draft_sizes(runner.drafts, adaptive)
        self.step_seconds: dict[tuple[int, int], float] = {}
        self.tokenizer = tokenizer
        self.on_prefill = on_prefill
        self.timings = Timings()
        self._broken: str | None = None  # by what
        self._serving = False
        self._scheduler: Scheduler | None = None
        self.prefill_time = PrefillTime(DOUBLING)
        placement, pages = runner.placement, min(self.comm.all_gather_object(runner.cache.pages))
        stripes = Stripes(runner.layout, placement.append_block, placement.page_size)
        self.tables = BlockTables(PrefixTree(PagePool(pages), stripes, self.prefill_time.cost), caching=False)

    @torch.inference_mode()  # around each resumption: the caller's code between two outputs is not in it
    def generate(self, requests: Iterable[Request]) -> Iterator[Output]:
        """Serves requests; a collective call.

        What rank 0 raises between steps ends the call on all ranks and frees all slots: an error of `requests`, of the
        tokenizer, of `on_prefill` or of a stop by the caller. What any rank raises in a step, as `observer` may, breaks
        the engine on all of them, since others are waiting in that step: it needs new communicators and a new engine.

        Args:
            requests: rank 0's are served, the other ranks' argument is ignored.

        Yields:
            On rank 0, an output for each token of each request, and one for each request that is refused. On the
            other ranks nothing, but they have to iterate as well.

        Raises:
            RuntimeError: the model gave NaN, a rank failed, the engine is broken, or another call is under way.
        """
        if self._broken is not None:
            self.comm.abort(self._broken)  # others may be waiting for this rank
            raise RuntimeError(
                f"this engine is broken, make a new one over new communicators: it failed with {self._broken}"
            )
        if self._serving:
            raise RuntimeError("a call of generate is under way on this engine: iterate it to its end, or close() it")
        self._serving = True
        try:
            if self.comm.rank == 0:
                yield from self._lead(requests)
            else:
                self._follow()
        finally:
            self._serving = False

    @torch.inference_mode()
    def warm_up(self, variants: Iterable[tuple[bool, bool]]) -> None:
        """Compiles kernels and captures the steps of every batch size, so that no request waits for it; a collective.

        Args:
            variants: (stochastic, filtered) of the sampling to come; the same on every rank.
        """
        for _ in self.generate([Request("warm-up", (0, 0), 2)]):
            pass
        runner = self.runner
        if runner.graphs is None:
            return
        sizes = {min(1 << slot.bit_length(), runner.max_batch) for slot in range(runner.max_batch)}
        for rows in sorted(sizes):
            fill(runner, rows, max(1, min(runner.max_length, self.token_budget // rows)) - 1)
            choose_chunks(runner, rows)
            if len(self.draft_sizes) > 1:
                chunks = runner.chunks(rows)
                for drafts in self.draft_sizes:
                    self.step_seconds[rows, drafts] = step_seconds(runner, rows, drafts, chunks, kept=True)
            fill(runner, 0, 0)
            begin = runner.policy.from_tokens
            kinds = [False] if begin is None else [True] if begin == 0 else [False, True]
            for (stochastic, filtered), drafts, sparse in product(sorted(set(variants)), self.draft_sizes, kinds):
                for _ in range(2):  # once eagerly, once captured; no slot is active, so nothing changes
                    runner.decode(rows, drafts, stochastic, filtered, sparse)
        torch.cuda.synchronize()

    def close(self) -> None:
        """Gives captured steps up; to be called before the communicator is closed."""
        self.runner.close()

    # ---- rank 0

    def _lead(self, requests: Iterable[Request]) -> Iterator[Output]:
        try:
            yield from self._serve(requests)
            self._release_all()
        except BaseException as error:
            try:
                self._release_all()
            except Exception as failed:
                if isinstance(error, GeneratorExit):  # which nobody would see
                    raise
                error.add_note(f"then the other ranks could not be told to end: {type(failed).__name__}: {failed}")
            raise

    def _serve(self, requests: Iterable[Request]) -> Iterator[Output]:
        runner = self.runner
        self.timings = Timings(kv_tokens=[0] * runner.layout.kvp, acceptance=Acceptance(runner.drafts))
        policy = DraftPolicy(self.draft_sizes, self.step_seconds)
        self._scheduler = scheduler = Scheduler(
            self.tables,
            self.prefill_time,
            max_batch=runner.max_batch,
            prefill_chunk=self.prefill_chunk,
            run_steps=self.run_steps,
            lease=runner.max_length,
            drafts=runner.drafts,
            pace=policy.pace,
            sparse_from=runner.policy.from_tokens,
        )
        streams: dict[str | int, OutputStream] = {}
        prompt_tokens = 0
        for request in requests:
            reason = self.refusal(request) or scheduler.submit(request, perf_counter())
            if reason:
                yield Output(request.id, len(request.prompt), (), "", "", "error", reason)
            else:
                streams[request.id] = OutputStream(request, runner.model.spec.eos, self.tokenizer)
        while (decision := scheduler.decide(perf_counter())) is not None:
            prompt_tokens += sum(len(a.prompt) for a in decision.admit)
            for slot in decision.retire:
                policy.forget(slot)
            with self._together():
                self.comm.broadcast_object(decision)
                begin = perf_counter()
                drawn = runner.execute(decision)
            for step_tokens in self._timed(drawn, begin, decision, prompt_tokens, scheduler, policy):
                for slot, token in step_tokens:
                    sequence = scheduler.record_token(slot, token)
                    if sequence is None:
                        continue  # computed past its stop, thrown away
                    output = streams[sequence.request.id].push(token)
                    if output.finish_reason is not None:
                        scheduler.end(sequence.request.id)
                    yield output
            runner.check()
            scheduler.landed()
            self._note_kv(scheduler.running.values())

    def refusal(self, request: Request) -> str | None:
        """Why a request cannot be served by this engine, whatever else it serves; None where it can."""
        spec = self.runner.model.spec
        if len(request.prompt) == 0:
            return "the prompt is empty"
        ids = np.asarray(request.prompt)
        outside = ids[(ids < 0) | (ids >= spec.vocab)]
        if len(outside):
            return f"prompt token id {outside[0]} is outside the vocabulary [0, {spec.vocab})"
        if request.max_new_tokens < 1:
            return f"max_new_tokens={request.max_new_tokens} must be at least 1"
        length = len(request.prompt) + request.max_new_tokens
        if length > spec.max_positions:
            return (
                f"prompt of {len(request.prompt)} tokens and {request.max_new_tokens} new ones exceed the model's "
                f"{spec.context}"
            )
        if length > self.runner.max_length:
            return (
                f"prompt of {len(request.prompt)} tokens and {request.max_new_tokens} new ones are {length} tokens, "
                f"more than max_length={self.runner.max_length} (raise kv.tokens or kv.memory_fraction, or take "
                "a larger layout.kvp)"
            )
        if request.stop and self.tokenizer is None:
            return "stop texts need a tokenizer, and the model directory has none"
        return None

    def _timed(
        self,
        drawn: Sequence[StepTokens],
        begin: float,
        decision: Decision,
        prompt_tokens: int,
        scheduler: Scheduler,
        policy: DraftPolicy,
    ) -> Iterator[list[tuple[int, int]]]:
        """Passes a decision's tokens on and notes when they came, and which drafts were kept."""
        last, steps = begin, iter(drawn)
        if decision.prefill:
            prefill = next(steps)
            tokens = prefill.read()
            self.timings.prefill_s += prefill.came - last
            last = prefill.came
            self.timings.prefill_tokens += sum(s.end - s.begin for s in decision.prefill)
            work = sum(self.prefill_time.work(s.begin, s.end) for s in decision.prefill)
            self.prefill_time.observe(work, prefill.came - begin)
            if self.on_prefill:
                self.on_prefill(self.timings.prefill_tokens, prompt_tokens)
            yield tokens
        seconds: list[float] = []
        outcomes: list[Outcome] = []
        for step in steps:
            tokens = step.read()
            seconds.append(step.came - last)
            last = step.came
            of_step = [
                Outcome(
                    slot,
                    min(decision.drafts, policy.limit(slot), s.undrawn - 1),
                    taken - 1,
                )
                for slot, taken in Counter(slot for slot, _ in tokens).items()
                if not (s := scheduler.running[slot]).ended
            ]
            self.timings.step(seconds[-1], decision.drafts, of_step)
            outcomes += of_step
            yield tokens
        policy.observe(decision.rows, decision.drafts, seconds, outcomes)

    def _note_kv(self, running: Iterable[Scheduled]) -> None:
        held = [0] * self.runner.layout.kvp
        for s in running:
            for k in range(self.runner.layout.kvp):
                start = 0 if s.held is None else s.held.start
                held[k] += self.runner.layout.local_length(s.cached, k, self.runner.placement.append_block, start)
        self.timings.kv_tokens = [max(a, b) for a, b in zip(self.timings.kv_tokens, held, strict=True)]

    def _release_all(self) -> None:
        """Frees every slot on every rank and ends their loops; nothing where the engine is broken."""
        if self._broken is not None:
            return
        with self._together():
            if self._scheduler is not None:
                self._scheduler.end_all()
                if (decision := self._scheduler.decide(perf_counter())) is not None:
                    self.comm.broadcast_object(decision)
                    self.runner.execute(decision)
                self.runner.check()
            self.comm.broadcast_object(None)

    # ---- every rank

    def _follow(self) -> None:
        """Does what rank 0 decides until it says that this was all."""
        decision: Decision | None = None
        with self._together():
            while (decision := self.comm.broadcast_object(decision)) is not None:
                self.runner.execute(decision)
                self.runner.check()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Around what all ranks do alike: others wait for a rank that fails there, so that none of them can go on."""
        try:
            yield
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise


__all__ = ["Engine", "Output", "Request"]
