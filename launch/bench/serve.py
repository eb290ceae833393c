"""Serves requests by the clock, inside a job: time between tokens, first tokens, and what is left behind.

`python -m launch.bench serve`; Qwen2.5-7B's shape with random weights over all GPUs (`bench=serve`). Contexts are
random numbers in the cache that rank 0 takes for those of some tokens; what comes behind them is computed. One trace
alone: `bench=serve bench.traces=[streams]`; `launch/measure/serving.py` has them all.
"""

from __future__ import annotations

from launch.bench.runner import Benchmark, Given, Part, Row
from launch.job import spawn

COLUMNS = {
    "decisions": "running waiting length decide_p50_us decide_p99_us",
    "streams": "batch length arrivals step_ms gap_ms over_step",
    "first_tokens": "trace batch length first_p50_ms first_p99_ms",
    "beside_prefill": "batch length prefill_s over_alone gap_p99_ms first_p99_ms",
    "poisson": "share requests_per_s tokens_per_s gap_p99_ms gap_max_ms first_p50_ms",
    "churn": "requests aborted seconds pages_left slots_left never_ended decide_us",
}


def measure(given: Given, trace: str) -> list[Row]:
    """A trace in a job of its own."""
    model, ranks = "qwen2.5-7b" if given.gpu else "demo", given.ranks
    overrides = [f"model={model}", f"layout.kvp={ranks}", "bench=serve", f"bench.traces=[{trace}]"]
    overrides += ["decode.max_batch=64", "decode.prefill_chunk=8192"]
    done = spawn.measure(ranks, overrides)
    return [{"model": model, "layout": f"helix kvp={ranks}", **point} for point in done["points"]]


def part(trace: str) -> Part:
    return Part(lambda given: [(trace,)], measure, COLUMNS[trace], title=trace.replace("_", " "))


BENCHMARK = Benchmark(
    "an engine that serves: requests come and go by the clock",
    __doc__,
    tuple(map(part, COLUMNS)),
)
