"""Measures offline throughput with `schedule.goal` balance and throughput: `helix bench throughput`.

Shapes with random weights over all GPUs, in the layout that `layout=auto` selects. A load is a number of requests of
one length that arrive at once (benchmarks/ranks/offline.py); its seconds are until the last one ends. Rows of the
record with `engine` vllm have vLLM's seconds for the same loads, from its `LLM.generate`.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import jobs
from benchmarks.models.workloads import named
from benchmarks.runner import BenchContext, Row

MODELS = ("qwen2.5-7b", "llama-3.1-8b", "gpt-oss-20b")
GOALS = ("balance", "throughput")


def cases(ctx: BenchContext) -> list[tuple[str, str]]:
    """Returns one job per model and goal; on a CPU the demo model's."""
    models = (ctx.models or MODELS) if ctx.gpu else ["demo"]
    return [(model, goal) for model in models for goal in (GOALS if ctx.gpu else GOALS[:1])]


def measure(ctx: BenchContext, model: str, goal: str) -> Iterator[Row]:
    """Yields one row per load."""
    layout = ["layout=auto"] if ctx.gpu else [f"layout.kvp={ctx.ranks}"]
    for row in jobs.rows([*named(model), *layout, f"schedule.goal={goal}", "bench=serve", "bench.traces=[offline]"]):
        columns = {key: value for key, value in row.items() if key != "trace"}
        yield {"model": model, "engine": "helix", "gpus": ctx.ranks, **columns}
