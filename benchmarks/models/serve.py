"""Serves requests by the clock, inside one job: time between tokens, and first tokens.

`helix bench serve`; Qwen2.5-7B's shape with random weights over all GPUs (`bench=serve`). Contexts are
random numbers in the cache that rank 0 takes for those of some tokens; what comes behind them is computed. Each row is
kept as it is measured. One trace alone: `bench=serve bench.traces=[streams]`, of those in
`benchmarks/ranks/serving.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import jobs
from benchmarks.models.workloads import named
from benchmarks.runner import Benchmark, Given, Part, Row

COLUMNS = "trace batch length over_step first_p99_ms over_alone gap_p99_ms gap_max_ms tokens_per_s"


def measure(given: Given, ranks: int) -> Iterator[Row]:
    """All traces in a job."""
    model = "qwen2.5-7b" if given.gpu else "demo"
    overrides = [*named(model), f"layout.kvp={ranks}", "bench=serve"]
    for row in jobs.rows(overrides):
        yield {"model": model, "layout": f"helix kvp={ranks}", **row}


BENCHMARK = Benchmark(
    "an engine that serves: requests come and go by the clock",
    __doc__,
    (Part(lambda given: [(given.ranks,)], measure, COLUMNS),),
)
