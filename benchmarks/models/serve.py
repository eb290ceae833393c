"""Serves requests by the clock inside one job: time between tokens, and time to first token.

`helix bench serve`; Qwen2.5-7B's shape with random weights over all GPUs (`bench=serve`). Contexts are random KV
that rank 0 treats as computed tokens; everything after them is computed. Each row is written as soon as it is measured.
For one trace alone use `bench=serve bench.traces=[streams]`, with the names in `benchmarks/ranks/serving.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import jobs
from benchmarks.models.workloads import named
from benchmarks.runner import BenchContext, Row


def measure(ctx: BenchContext) -> Iterator[Row]:
    """Yields the rows of all traces in one job."""
    model = "qwen2.5-7b" if ctx.gpu else "demo"
    overrides = [*named(model), f"layout.kvp={ctx.ranks}", "bench=serve"]
    for row in jobs.rows(overrides):
        yield {"model": model, "layout": f"helix kvp={ctx.ranks}", **row}
