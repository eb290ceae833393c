"""Times whole prompts, inside a job (`bench=prefill`)."""

from __future__ import annotations

import time
from typing import Any

import torch

from helix.engine import Engine
from helix.request import Request
from launch.job.task import Done, Task
from launch.measure.points import at_each, engine_at


def run(task: Task) -> Done:
    """Seconds from a prompt to its first token at each of `bench.points`, on rank 0.

    Raises:
        ConfigError: the only point is beyond the model's context, or its cache does not fit.
    """
    plan, comm = task.plan, task.comm
    model, _ = task.load()
    generator = torch.Generator().manual_seed(plan.config.seed)

    def measure(batch: int, length: int) -> list[dict[str, Any]]:
        engine, _ = engine_at(plan, comm, model, batch, length, 1)
        ids = torch.randint(0, model.spec.vocab, (batch, length), generator=generator)
        short = [Request("warm-up", tuple(ids[0, : min(length, 2 * engine.prefill_chunk)].tolist()), 1)]
        _serve(engine, short)  # compiles kernels, opens connections
        requests = [Request(i, tuple(row), 1) for i, row in enumerate(ids.tolist())]
        with task.console.progress(f"prefill {batch} x {length:,}", batch * length) as advance:
            engine.on_prefill = lambda done, _: advance(done)
            comm.barrier()
            begin = time.perf_counter()
            _serve(engine, requests)
            seconds = time.perf_counter() - begin
        engine.close()
        rate = {"prefill_s": seconds, "tokens_per_s": batch * length / seconds, "prefill_chunk": engine.prefill_chunk}
        return [{"batch": batch, "length": length, **rate}]

    return {"points": at_each(plan, comm, measure)}, 0


def _serve(engine: Engine, requests: list[Request]) -> None:
    """Raises RuntimeError where one is refused, whose time would count for nothing."""
    for output in engine.generate(requests):
        if output.finish_reason == "error":
            raise RuntimeError(f"a prompt that is timed was refused: {output.reason}")
