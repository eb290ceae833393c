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
from benchmarks.runner import BenchContext, Row


def measure(ctx: BenchContext) -> Iterator[Row]:
    """All traces in a job."""
    model = "qwen2.5-7b" if ctx.gpu else "demo"
    overrides = [*named(model), f"layout.kvp={ctx.ranks}", "bench=serve"]
    for row in jobs.rows(overrides):
        yield {"model": model, "layout": f"helix kvp={ctx.ranks}", **row}
