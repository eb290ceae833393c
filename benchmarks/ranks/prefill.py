"""Times whole prompts, and short chunks at their end, inside a job (`bench=prefill`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.ranks.points import at_each, engine_at, limit, used
from benchmarks.ranks.synthetic import vocab_held
from benchmarks.ranks.traces import trace
from helix.engine.core import Engine
from helix.engine.inbox import Inbox
from helix.engine.request import Request
from helix.kv_placement import PromptChunk
from helix.worker.clock import time_each
from helix.worker.warmup import fill
from launch.job.task import JobResult, Task

FOLLOW_UP = 100  # tokens of a follow-up message in a conversation
LONG_S = 2.0  # a chunk that takes longer is timed once
SHORT = 256  # a chunk that stalls decoding only briefly


def run(task: Task) -> JobResult:
    """Times each of `bench.points` from prompt to first token on rank 0, and the prompt's last tokens separately.

    The last tokens: a follow-up message, a short chunk, the longest chunk and its kernels, and the rate of the short
    chunk relative to the longest.

    Raises:
        ConfigError: the only point exceeds the model's context, or its cache does not fit.
    """
    plan, comm = task.plan, task.comm
    limit(plan.config, comm.device)
    model, _ = task.load()
    generator = torch.Generator().manual_seed(plan.config.seed)

    def measure(batch: int, length: int) -> list[dict[str, Any]]:
        engine, _ = engine_at(plan, comm, model, batch, length, 1)
        ids = torch.randint(0, vocab_held(engine.runner), (batch, length), generator=generator)
        short = [Request("warm-up", tuple(ids[0, : min(length, 2 * engine.runner.sizes.chunk)].tolist()), 1)]
        _serve(engine, short)  # compile kernels, open connections
        _capture(engine, ids[0])
        requests = [Request(i, tuple(row), 1) for i, row in enumerate(ids.tolist())]
        with task.console.progress(f"prefill {batch} x {length:,}", batch * length) as advance:
            comm.barrier()
            begin = time.perf_counter()
            _serve(engine, requests, advance)
            seconds = time.perf_counter() - begin
        found: dict[str, Any] = {"batch": batch, "length": length, "prefill_s": seconds}
        found |= {"tokens_per_s": batch * length / seconds, "prefill_chunk": engine.runner.sizes.chunk}
        follow_up, few, many = (min(n, length) for n in (FOLLOW_UP, SHORT, engine.runner.sizes.chunk))
        (turn_s, _), (few_s, _) = (_last(engine, ids[:1], n) for n in (follow_up, few))
        several = ids[: engine.runner.sizes.chunk // many]
        many_s, traced = _last(engine, several, many)
        found["used_bytes_per_gpu"] = comm.all_gather_object(used(comm.device))
        found |= {"turn_ms": 1e3 * turn_s, "short_ms": 1e3 * few_s, "long_ms": 1e3 * many_s}
        engine.close()
        many *= len(several)
        found |= {"long_tokens": many, "short_of_long": few / few_s / (many / many_s)}
        return [found | traced]

    return {"points": at_each(plan, comm, measure)}, 0


@torch.inference_mode()
def _capture(engine: Engine, ids: Tensor) -> None:
    runner, each = engine.runner, engine.runner.sizes.chunk
    if not runner.pads_chunks or runner.graphs is None:
        return
    chunks = [PromptChunk(0, begin, ids[begin : begin + each]) for begin in range(0, len(ids), each)]
    fill(runner, 1, len(ids))
    for size in dict.fromkeys(runner.chunk_size([c]) for c in chunks):
        if size.captured:
            runner.capture_chunk(size, num_cached_tokens=1)
    fill(runner, 0, 0)


@torch.inference_mode()
def _last(engine: Engine, ids: Tensor, tokens: int) -> tuple[float, dict[str, Any]]:
    """Times the last tokens of prompts [B, L] in one chunk, on the slowest rank, with a breakdown.

    The chunk is captured as a server's would be.
    """
    runner, (batch, length) = engine.runner, ids.shape
    fill(runner, batch, length)
    last = [PromptChunk(i, length - tokens, row[length - tokens :]) for i, row in enumerate(ids)]

    def run() -> None:
        runner.prompt_states(last)

    run()  # compile, if no chunk of this length has run yet
    while (size := runner.eager_size) is not None:
        runner.capture_chunk(size, num_cached_tokens=1)
    seconds = 0.0
    for times in (1, 3):
        if seconds < LONG_S:
            engine.comm.barrier()
            seconds = max(engine.comm.all_gather_object(median(time_each(run, times, runner.device))))
    traced = trace(run, len(runner.model.spec.layers), engine.comm)
    fill(runner, 0, 0)
    return seconds, traced


def _serve(engine: Engine, requests: list[Request], advance: Callable[[int], None] = lambda tokens: None) -> None:
    """Serves requests; raises RuntimeError if one is refused, as its time would mean nothing."""
    prefilled: dict[str | int, int] = {}
    for update in chain.from_iterable(engine.serve(Inbox.of(requests))):
        if update.finish_reason == "error":
            raise RuntimeError(f"a timed prompt was refused: {update.reason}")
        prefilled[update.id] = update.num_computed_tokens
        advance(sum(prefilled.values()))
