"""Times decode steps of whole models: `python -m launch.bench step | baselines`.

Every point is a job of its own (`bench=decode`): random weights of the real shape, a KV cache full of random data,
over all GPUs of this machine. TTL stands beside its floor: all weights that a step reads and all KV, each once, over
all GPUs at the measured read ceiling, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from helix.layout import HelixLayout
from launch.bench.workloads import BASELINES, WORKLOADS, K, Workload, fitting_layers, floor_s, layouts
from launch.inputs.compose import spec_of
from launch.job import spawn

STEPS = 32


BUDGETS_MS = (5, 10, 20, 50)  # of TTL
ON_CPU = Workload("demo", 1, K)


def measure(works: list[Workload], layout: HelixLayout, overrides: list[str]) -> list[dict[str, Any]]:
    """One job for workloads of one model; what it measured at each, or why it failed (for want of memory, mostly).

    Raises:
        KeyboardInterrupt: it was interrupted, and no other shall start.
    """
    points = ",".join(f"{w.batch}x{w.length}" for w in works)
    try:
        found = spawn.measure(
            layout.world_size,
            [
                f"model={works[0].model}", f"layout={layout.mode}", f"layout.kvp={layout.kvp}",
                f"layout.tpa={layout.tpa}", f"layout.ep={layout.ep}", "bench=decode", f"bench.points=[{points}]",
                "kv.page_size=64", *overrides, f"bench.steps={STEPS if torch.cuda.is_available() else 3}",
            ],
        )  # fmt: skip
    except spawn.JobError as error:
        found = {"points": [{"failed": str(error)}] * len(works)}
    shared = {k: found[k] for k in ("backend",) if k in found}
    return [
        {
            "model": w.model,
            "batch": w.batch,
            "length": w.length,
            "bar": w.target,
            "vllm_ms": w.vllm_ms,
            "layout": str(layout),
            **shared,
            **point,
        }
        for w, point in zip(works, found["points"], strict=True)
    ]


def run(ranks: int, baselines: bool, models: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """All workloads (on a CPU a tiny one), of `models` only if given, over all their layouts, and a table of them."""
    workloads = (BASELINES if baselines else WORKLOADS) if torch.cuda.is_available() else [ON_CPU]
    rows = []
    item = 2 if torch.cuda.is_available() else 4
    for model in dict.fromkeys(w.model for w in workloads if models is None or w.model in models):
        spec, overrides = spec_of(model), []
        if torch.cuda.is_available():
            layers = fitting_layers(spec, ranks, torch.cuda.get_device_properties(0).total_memory)
            if layers < spec.layers:
                overrides = [f"model.config.num_hidden_layers={layers}"]
                print(f"{model}: the first {layers} of {spec.layers} layers, which is what fits")
                spec = spec_of(model, *overrides)
        works = [w for w in workloads if w.model == model]
        for layout in layouts(spec, ranks, baselines):
            for row in measure(works, layout, overrides):
                floor_us = 1e6 * floor_s(spec, row["batch"], row["length"], ranks, item)
                rows.append(row | {"layers": spec.layers, "floor_us": floor_us})
                yield rows[-1]
    table = Table(
        "model",
        "batch",
        "length",
        "layout",
        "TTL p50",
        "floor",
        "x floor",
        "target",
        "vLLM on 8",
        "tok/s/user",
        "tok/s/rank",
    )
    for r in rows:
        cells = ["failed", *["-"] * 6]
        if "failed" not in r:
            times = r["ttl_p50_us"] / r["floor_us"]
            cells = [
                f"{r['ttl_p50_us'] / 1e3:.2f} ms", f"{r['floor_us'] / 1e3:.2f} ms", f"{times:.2f}",
                str(r["bar"] or "-"), f"{r['vllm_ms']:.2f} ms" if r["vllm_ms"] else "-",
                f"{r['tokens_per_s_user']:.1f}", f"{r['tokens_per_s_gpu']:.1f}",
            ]  # fmt: skip
        table.add_row(r["model"], str(r["batch"]), f"{r['length'] // K}K", r["layout"], *cells)
    Console(width=130).print(table)
    if baselines:
        Console(width=130).print(_within_budgets(rows))


def largest_batch(rows: list[dict[str, Any]], budget_us: float) -> int | None:
    """The largest batch among measured `rows` of one layout whose TTL is within the budget; None: not one of them."""
    return max((r["batch"] for r in rows if "failed" not in r and r["ttl_p50_us"] <= budget_us), default=None)


def _within_budgets(rows: list[dict[str, Any]]) -> Table:
    """The largest measured batch that each layout serves within a TTL."""
    table = Table(
        "model", "length", "layout", *(f"<= {ms} ms" for ms in BUDGETS_MS), title="largest batch within a TTL"
    )
    for model, length, layout in dict.fromkeys((r["model"], r["length"], r["layout"]) for r in rows):
        same = [r for r in rows if (r["model"], r["length"], r["layout"]) == (model, length, layout)]
        found = [largest_batch(same, 1e3 * ms) for ms in BUDGETS_MS]
        table.add_row(model, f"{length // K}K", layout, *(str(batch or "-") for batch in found))
    return table
