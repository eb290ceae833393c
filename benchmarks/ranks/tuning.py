"""Measures draft sources (`bench=tune`): one job, one model, one prefill, then one drafter after the other.

Prompts are continued by decode steps as in the engine; after the last token of a continuation, the next draft source
rewinds to the end of the prompt. With a fixed acceptance rate (`bench.acceptance`), steps over random keys
are timed instead. If there are more prompts than slots they run in batches, each of which starts with its prefill.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.ranks.points import engine_at
from benchmarks.ranks.request_allocator import RequestAllocator
from benchmarks.ranks.steps import WARM_UP, fill, rewind
from benchmarks.ranks.synthetic import synthesize_acceptance, vocab_held
from benchmarks.ranks.tuning_file import MeasuredFile
from benchmarks.ranks.tuning_steps import DraftSource, Measurement, TuningGrid
from benchmarks.ranks.tuning_steps import run as search
from benchmarks.schema import LabConfig, bench_points, lab
from comm.base import Communicator
from helix.config import Config
from helix.engine.core import Engine
from helix.engine.draft_policy import Acceptance, DraftOutcome
from helix.engine.request import Request
from helix.engine.scheduler_output import NewRequest, PrefillChunk, SchedulerOutput
from helix.engine.timings import Timings
from helix.errors import ConfigError, RankError
from helix.models.decoder import Decoder
from helix.planner.points import Speculation
from helix.setup.buffers import max_slots
from helix.setup.engine import build_engine, make_drafter
from helix.speculation import NoDrafts
from helix.worker.clock import TimedEvent, time_each
from helix.worker.cuda_graphs import StepGraphs
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.step_tokens import StepTokens
from helix.worker.warmup import choose_chunks
from launch.client.chat_tokenizer import ChatTokenizer
from launch.client.sampling import make_sampling_params
from launch.inputs.preflight import CheckedRun
from launch.inputs.prompt_files import PromptLine, make_body
from launch.job.report import provenance
from launch.job.task import JobResult, Task

LOG = logging.getLogger(f"helix.{__name__}")


def candidates(config: LabConfig) -> TuningGrid:
    """Returns the search space of a config."""
    bench, speculation = config.bench, config.speculation
    forced = None if bench.acceptance is None else speculation.sparsity
    return TuningGrid(tuple(bench.sparsities), tuple(bench.gammas), speculation.gamma, forced, bench.grid)


def run(task: Task) -> JobResult:
    """Measures what the search asks for and `bench.output` does not have yet; rank 0 appends it there.

    Raises:
        ConfigError: the prompts, or the point, do not fit.
    """
    plan, comm = task.plan, task.comm
    file, problem = None, None
    if comm.rank == 0:
        try:
            file = MeasuredFile(lab(plan.config), plan.prompts, provenance(comm.device))
        except (ValueError, OSError) as error:
            problem = str(error)
    rows, problem = comm.broadcast_object((file.rows if file else [], problem))
    if problem is not None:
        raise ConfigError(problem)
    measurements = {found.source: found for found in map(Measurement.of, rows)}
    sample = PromptSample(task) if plan.config.decode.prompts is not None else RandomSample(task)

    def measure(source: DraftSource) -> Measurement:
        if source not in measurements:
            found, more = sample.measure(source)
            rows.append(found.row() | more)
            if file is not None:
                try:
                    file.add(rows[-1])
                except OSError as error:
                    raise RankError(
                        f"bench.output={lab(plan.config).bench.output} cannot be written: {error}"
                    ) from error
            if comm.rank == 0:
                LOG.info("%s: %.2f tokens an iteration of %.2f ms", source, found.mean, 1e3 * found.seconds)
            measurements[source] = found
        return measurements[source]

    search(candidates(lab(plan.config)), measure)
    sample.engine.close()
    if file is not None:
        file.close()
    return {"points": rows}, 0


class _TuningSample:
    """Sequences that are decoded with one draft source after the other.

    Args:
        engine: has room for the largest sparsity and gamma.
    """

    def __init__(self, plan: CheckedRun, comm: Communicator, model: Decoder, engine: Engine) -> None:
        self.config, self.comm, self.model, self.engine = lab(plan.config), comm, model, engine
        self.runner = engine.runner
        self._drafts_with: tuple[str, float | None] = ("", None)

    def draft_with(self, source: DraftSource) -> None:
        kind = source.drafter, source.sparsity
        if source.drafter == "none" or kind == self._drafts_with:
            return
        self._drafts_with = kind
        runner = self.runner
        runner.close()
        runner.drafter, runner.graphs = NoDrafts(), None
        if self.comm.device.type == "cuda":
            gc.collect()  # frees the previous drafter's scores and tables
            torch.cuda.empty_cache()
        runner.drafter = make_drafter(
            source.over(self.config.speculation), None, self.model, runner.cache, runner.sizes
        )
        synthesize_acceptance(runner.drafter, self.config.bench.acceptance, self.config.seed, vocab_held(runner))
        for new_request in runner.requests.values():
            runner.drafter.admit(new_request)
        runner.graphs = StepGraphs() if self.comm.capturable else None

    def slowest(self, seconds: list[float]) -> list[float]:
        """Returns the slowest rank's time of each step."""
        self.comm.check()
        return [max(step) for step in zip(*self.comm.all_gather_object(seconds), strict=True)]


def _widest(config: LabConfig) -> LabConfig:
    lacking_pages = max(*config.bench.sparsities, config.speculation.sparsity)
    return replace(config, speculation=replace(config.speculation, sparsity=lacking_pages))


class RandomSample(_TuningSample):
    """Random keys, and a fixed acceptance rate."""

    def __init__(self, task: Task) -> None:
        plan = replace(task.plan, config=_widest(lab(task.plan.config)))
        config = lab(plan.config)
        ((self.batch, self.length),) = bench_points(config.bench)
        model, _ = task.load()
        steps = WARM_UP + config.bench.steps + 1
        engine, reserved = engine_at(plan, task.comm, model, self.batch, self.length, steps)
        fill(engine.runner, self.batch, self.length, reserved, config.seed + task.comm.rank)
        choose_chunks(engine.runner, self.batch)
        super().__init__(task.plan, task.comm, model, engine)

    @torch.inference_mode()
    def measure(self, source: DraftSource) -> tuple[Measurement, dict[str, Any]]:
        self.draft_with(source)
        rewind(self.runner, self.batch, self.length)

        def step() -> None:
            self.runner.decode(DecodeGraphKey(self.batch, source.gamma))

        for _ in range(WARM_UP):
            step()
        self.comm.barrier()
        seconds = self.slowest(time_each(step, self.config.bench.steps, self.comm.device))
        # Over few steps the measured tokens would be noise.
        tokens = Speculation(source.gamma, self.config.bench.acceptance or 0.0).tokens
        return Measurement(source, (tokens,), median(seconds)), {"steps": len(seconds)}


class PromptSample(_TuningSample):
    """Prompts, and drafts that the model accepts or rejects."""

    def __init__(self, task: Task) -> None:
        plan, comm = task.plan, task.comm
        config = _widest(lab(plan.config))
        model, _ = task.load()
        requests = _requests(task)
        rows = min(max_slots(config, comm.device.type), len(requests))
        self.batches = [requests[i : i + rows] for i in range(0, len(requests), rows)]
        self.drafts = config.speculation.gamma
        wanted = max(sum(self._need(r) for r in batch) for batch in self.batches)
        engine = build_engine(plan.layout, model, config, rows, wanted)
        super().__init__(plan, comm, model, engine)
        for request in requests:
            if reason := engine.refusal(request):
                raise ConfigError(f"{config.decode.prompts}, prompt {request.id!r}: {reason}")
        free, stripes = engine.runner.cache.pages, engine.runner.placement.stripes
        lacking = max(sum(stripes.pages_for(self._need(r)) for r in batch) - free for batch in self.batches)
        if (lacking_pages := max(comm.all_gather_object(lacking))) > 0:
            raise ConfigError(
                f"decode.max_batch={config.decode.max_batch}: a batch of the longest prompts lacks {lacking_pages} "
                "pages of a rank's KV cache: lower decode.max_batch, shorten the prompts, or raise layout.kvp"
            )
        self.kind = DecodeGraphKey.of([r.sampling for r in requests])
        self.console = task.console
        self.current_batch = -1  # the one whose keys are in the cache
        self.begin: tuple[Tensor, ...] = ()

    def _need(self, request: Request) -> int:
        return len(request.prompt) + request.max_tokens + self.drafts

    @torch.inference_mode()
    def measure(self, source: DraftSource) -> tuple[Measurement, dict[str, Any]]:
        timings = Timings(acceptance=Acceptance(self.drafts))
        tokens: list[float] = []
        full: list[float] = []  # seconds of steps with a full batch
        self.draft_with(source)
        for batch, requests in enumerate(self.batches):
            self._enter(batch)
            for _ in range(WARM_UP):
                self._step(source.gamma, len(requests))
            self._rewind()
            seconds, sampled = self._continue(source.gamma, requests)
            tokens += self._note(timings, source.gamma, requests, seconds, sampled)
            if batch == 0:
                full = [step_s for step_s, slot_tokens in zip(seconds, sampled, strict=True) if all(slot_tokens)]
        if not tokens:
            raise ConfigError(
                f"{self.config.decode.prompts}: every answer ends with its first token, so there is nothing to "
                "draft: use other prompts"
            )
        by_position = zip(timings.acceptance.accepted, timings.acceptance.verified, strict=True)
        more: dict[str, Any] = {"steps": len(timings.ttl_s), "sequence_steps": timings.sequence_steps}
        more |= {
            "acceptance_by_position": [accepted / tried if tried else None for accepted, tried in by_position][
                : source.gamma
            ]
        }
        return Measurement(source, tuple(tokens), median(full)), more

    def _enter(self, batch: int) -> None:
        """Prefills a batch unless it is the one in the cache; restores the state after its prefill."""
        runner, requests = self.runner, self.batches[batch]
        if batch != self.current_batch:
            retire = tuple(runner.requests)
            allocator = RequestAllocator(runner)
            admit = tuple(self._new_request(allocator, slot, request) for slot, request in enumerate(requests))
            self._execute(retire=retire, admit=admit)
            chunk, done, total = self.engine.runner.sizes.chunk, 0, sum(len(r.prompt) for r in requests)
            with self.console.progress(f"prefill of {len(requests)} prompts", total) as advance:
                for slot, request in enumerate(requests):
                    tokens, length = np.asarray(request.prompt), len(request.prompt)
                    for begin in range(0, length, chunk):
                        end = min(begin + chunk, length)
                        self._execute(prefill=(PrefillChunk(slot, begin, end, end == length, tokens[begin:end]),))
                        done += end - begin
                        advance(done)
            self.begin = tuple(t.clone() for t in (runner.state.tokens, runner.state.lengths))
            if self.current_batch < 0:
                choose_chunks(runner, len(requests))
            self.current_batch = batch
        self._rewind()

    def _new_request(self, allocator: RequestAllocator, slot: int, request: Request) -> NewRequest:
        limit = len(request.prompt) + request.max_tokens - 1
        return allocator.new_request(
            slot, self._need(request), prompt=np.asarray(request.prompt), limit=limit, sampling=request.sampling
        )

    def _execute(
        self, retire: tuple[int, ...] = (), admit: tuple[NewRequest, ...] = (), prefill: tuple[PrefillChunk, ...] = ()
    ) -> None:
        scheduler_output = SchedulerOutput(0, retire, (), (), admit, prefill, 0, self.kind)
        for outputs in self.runner.execute(scheduler_output):
            outputs.read()
        self.runner.check()

    def _rewind(self) -> None:
        """Rewinds to the end of the prompts; later steps overwrite what was appended."""
        runner, state = self.runner, self.runner.state
        for tensor, value in zip((state.tokens, state.lengths), self.begin, strict=True):
            tensor.copy_(value)
        if runner.cache.bounds is not None:
            lengths = state.lengths
            runner.cache.fold(state.span(len(lengths), torch.zeros_like(lengths), lengths, int(lengths.max())))
        runner.drafter.catch_up(state)

    def _step(self, gamma: int, rows: int) -> Tensor:
        return self.runner.decode(replace(self.kind, rows=rows, drafts=gamma))

    def _continue(self, gamma: int, requests: Sequence[Request]) -> tuple[list[float], list[list[list[int]]]]:
        """Decodes until all sequences have their tokens; returns seconds and accepted tokens of each step."""
        seconds: list[float] = []
        sampled: list[list[list[int]]] = []
        runner, rows = self.runner, len(requests)
        left, run = max(r.max_tokens for r in requests) - 1, self.runner.sizes.run_steps
        while left > 0:
            outputs: list[Tensor] = []
            read: list[StepTokens] = []

            def step(outputs: list[Tensor] = outputs) -> None:
                outputs.append(self._step(gamma, rows))

            def read_back(outputs: list[Tensor] = outputs, read: list[StepTokens] = read) -> None:
                read.append(StepTokens(outputs[-1], None, runner.check, TimedEvent(runner.device)))

            seconds += self.slowest(time_each(step, min(run, left), runner.device, read_back))
            for tokens in read:
                slot_tokens: list[list[int]] = [[] for _ in requests]
                for slot, token in tokens.read():
                    slot_tokens[slot].append(token)
                sampled.append(slot_tokens)
            ended = [sum(len(step[slot]) for step in sampled) for slot in range(rows)]
            left = max(r.max_tokens - 1 - count for r, count in zip(requests, ended, strict=True))
        return seconds, sampled

    def _note(
        self,
        timings: Timings,
        gamma: int,
        requests: Sequence[Request],
        seconds: Sequence[float],
        sampled: Sequence[list[list[int]]],
    ) -> list[float]:
        """Records steps as the engine does, up to each sequence's end; returns each sequence's tokens per iteration."""
        eos = set(self.model.spec.eos)
        first = self.begin[0][: len(requests)].tolist()
        left = [0 if token in eos else r.max_tokens - 1 for token, r in zip(first, requests, strict=True)]
        tokens, iterations = [0] * len(requests), [0] * len(requests)
        for step_s, slot_tokens in zip(seconds, sampled, strict=True):
            outcomes = []
            for slot, new in enumerate(slot_tokens):
                if not new or left[slot] <= 0:
                    continue
                outcomes.append(DraftOutcome(slot, min(gamma, left[slot] - 1), len(new) - 1))
                tokens[slot] += len(new)
                iterations[slot] += 1
                left[slot] = 0 if eos & set(new) else left[slot] - len(new)
            timings.step(step_s, gamma, outcomes)
        return [count / steps for count, steps in zip(tokens, iterations, strict=True) if steps]


def to_request(prompt: PromptLine, config: Config, tokens: ChatTokenizer) -> Request:
    """Makes a request from a prompt line; raises ValueError if its parameters are out of range."""
    body = make_body(prompt, config.decode)
    ids = prompt.ids if prompt.ids is not None else tokens.encode(prompt.text or "", sys.maxsize)
    return Request(prompt.id, ids, body.max_tokens or 1, make_sampling_params(body, {}, sys.maxsize, 0))


def _requests(task: Task) -> list[Request]:
    """Returns the prompts, on every rank.

    Raises:
        ConfigError: one cannot be continued.
    """
    requests, problem, config = [], "", task.plan.config
    if task.comm.rank == 0 and len(task.plan.prompts):
        tokens = ChatTokenizer(config.model.path)
        for prompt in task.plan.prompts:
            try:
                requests.append(to_request(prompt, config, tokens))
            except ValueError as error:
                problem = f"{config.decode.prompts}, prompt {prompt.id!r}: {error}"
    requests, problem = task.comm.broadcast_object((requests, problem))
    if problem:
        raise ConfigError(problem)
    return list(requests)
