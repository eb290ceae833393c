"""Helix Parallelism (Bhatia et al., NVIDIA, 2025): its items compared with records and the simulator."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.papers.items import NOT_RECORDED, Item, Table, filled_items, span
from benchmarks.papers.rows import CLAIMS, figure_1, figure_3
from benchmarks.papers.simulated import HALF, SHORT
from benchmarks.papers.simulated import paper as simulated
from benchmarks.records.columns import page
from benchmarks.records.hopb_tables import timed
from benchmarks.records.rows import WORKLOAD, Row, grouped, kv, results
from benchmarks.records.step_tables import best_step, over_helix
from benchmarks.records.tables import TABLES
from launch.inputs.shapes import load_spec

PARETO, MULTI_NODE = "helix bench pareto", "helix bench multi-node"
M = 1 << 20
NEAR = 0.8  # of the fastest speed: where a sweep over constants comes near the paper's losses
# Reprinted tables, and the command of their records.
RECORDED = {
    "best-steps": "helix bench step",
    "baselines.emulated-8": "helix bench baselines ranks=8",
    "budgets.emulated-8": "helix bench baselines ranks=8",
    "pareto": PARETO,
    "pareto-budgets": PARETO,
    "multi-node": MULTI_NODE,
    "fp8-steps": "python -m benchmarks.entry",
    "long-steps": "python -m benchmarks.layout_steps",
    "hopb": "helix bench hopb",
    "hopb.emulated-8": "helix bench hopb ranks=8",
}


def _over(mode: str, model: str, batch: int, length: int) -> str:
    """Speed-up of the best Helix layout over a mode, at a point of eight emulated ranks."""
    rows = [
        r
        for r in results("baselines.emulated-8", *WORKLOAD)
        if (r["model"], r["batch"], r["length"]) == (model, batch, length)
    ]
    return f"{over_helix(rows, mode)} x"


def _modes(mode: str) -> str:
    models = ("qwen2.5-7b", "llama-3.1-8b", "deepseek-v2-lite")
    return "time over Helix's, 1 x 1M, emulated on two GPUs: " + ", ".join(
        f"{model} {_over(mode, model, 1, M)}" for model in models
    )


def _hopb(name: str) -> str:
    """Range of the change in step time with the best number of chunks, by link, kvp and commit."""
    best: dict[tuple[str, ...], dict[tuple[str, ...], float]] = {}
    for r in timed(name):
        (kvp,) = re.findall(r"kvp=\d+", r["layout"])
        group, point = (r["link"], kvp, r["commit"][:7]), (r["backend"], r["model"], kv(r))
        changes = best.setdefault(group, {})
        changes[point] = min(changes.get(point, math.inf), r["on_us"] / r["off_us"] - 1)
    return "; ".join(f"{', '.join(group)}: {span([*of.values()], '+.1%')}" for group, of in best.items())


def _grids() -> str:
    """Timed expert grids of each attention grid, for MoE models on eight emulated ranks."""
    found: dict[str, dict[str, None]] = {}
    for r in results("step.emulated-8", *WORKLOAD):
        attention, ffn = r["layout"].removeprefix("helix ").split(" -> ")
        if load_spec(r["model"]).experts is not None:
            found.setdefault(f"{r['model']} {attention}", {})[ffn.split("ep=")[1]] = None
    grids: dict[str, list[str]] = {}
    for name, eps in found.items():
        grids.setdefault("ep=" + ", ".join(sorted(eps)), []).append(name)
    return "emulated on two GPUs: " + "; ".join(f"{eps} of {', '.join(names)}" for eps, names in grids.items())


def _dp() -> str:
    """Times of data-parallel attention and of Helix: DeepSeek-R1 in FP8 over eight GPUs."""
    rows = results("fp8-steps", *WORKLOAD, model="deepseek-r1", batch=8, length=M >> 3)
    found = {mode: r for mode in ("dp", "helix") if (r := best_step(rows, mode))}
    parts = (f"{mode} {r['ttl_p50_us'] / 1e3:.2f} ms ({r['commit'][:7]})" for mode, r in found.items())
    return f"eight GPUs, deepseek-r1, 8 x 128K: {', '.join(parts)}" if found else NOT_RECORDED


def _measured(model: str) -> str:
    """How many points of a front were measured, in which modes, on which GPUs."""
    rows = [r for r in results("pareto", *WORKLOAD, "device", model=model) if "failed" not in r]
    modes = " and ".join(dict.fromkeys(r["layout"].split()[0] for r in rows))
    gpus = ", ".join(dict.fromkeys(f"{r['emulated_by']} {r['device'].removeprefix('NVIDIA ')}" for r in rows))
    return f"{len(rows)} points of {modes} on {gpus} that emulates a rank" if rows else "none measured"


def _timeline() -> str:
    rows = results("hopb", "backend", kind="delay")
    return f"{rows[0]['off_units']:.1f} to {rows[0]['on_units']:.1f} units" if rows else NOT_RECORDED


def _correct() -> str:
    """Answers equal to one rank's by dtype, over GPUs (NCCL) and over loopback ranks (threads, no link)."""
    equal = [r for r in results("correctness", "name", "over") if r["name"].endswith("-equal")]
    parts = []
    for (over,), rows in grouped(equal, "over").items():
        counts = ", ".join(f"{r['as_one_rank']} of {r['needles']} in {r['name'].split('-')[2]}" for r in rows)
        parts.append(f"over {over} {counts}")
    return f"same tokens as one rank: {'; '.join(parts)}" if parts else NOT_RECORDED


def _exchange() -> str:
    rows = [r["symm_us"] for r in results("comm", "op", "ranks", "message_bytes") if r["op"] == "exchange"]
    return span(rows, ".1f", "us, 2 KB to 256 KB, at any length")


def _long(length: int) -> str:
    steps = results("long-steps.emulated-8", *WORKLOAD, "shape")
    return " and ".join(f"{r['ttl_p50_us'] / 1e3:.1f} ms" for r in steps if r["length"] == length)


def _longest(model: str) -> str:
    found = results("pareto", *WORKLOAD, "device")
    rows: Sequence[Row] = [r for r in found if (r["model"], r["batch"], r["length"]) == (model, 1, M)]
    return span([r["ttl_p50_us"] / 1e3 for r in rows], ".1f", "ms")


def _claim(model: str, what: str) -> str:
    """The paper's claim about a model and the simulated value: user, batch or hopb."""
    paper, claim = simulated(), CLAIMS[model]
    row = paper.headlines[model]
    if what == "user":
        return f"paper {claim.user:g} x, here {row['user_gain']:.2f} x"
    if what == "batch":
        at_80 = paper.curves[model][3]["batch_gain"]
        here = f"{row['batch_gain']:g} x at the baseline's fastest, {at_80:.2f} x at 80% of it"
        return f"paper {claim.batch:g} x, here {here}"
    parts = []
    for speed in (HALF, NEAR):
        lost = " and ".join(f"{x['fixed']:.1%} ({x['exchange']})" for x in paper.lost_from(speed, model))
        parts.append(f"{lost} over speeds from {speed:.0%} of the fastest")
    return f"paper {claim.hopb_off:.0%}, here {', '.join(parts)}"


def _ends(hopb: str) -> str:
    return f"{max(row['end'] for row in figure_3() if row['hopb'] == hopb):g}"


def _searched() -> str:
    return f"{simulated().points:,}"


def _changes() -> str:
    return str(len(simulated().sensitivity["deepseek-r1"]) - 1)


def _roofline() -> str:
    return str(len(figure_1()))


def _pareto() -> str:
    return str(len(results("pareto", *WORKLOAD, "device")))


def _multi_node() -> str:
    rows = [r for r in results("multi-node", "model", "backend", "batch", "length") if "failed" not in r]
    return span([r["error"] for r in rows], "+.1%", "off")


FIGURES: dict[str, Callable[..., str]] = {
    "changes": _changes,
    "claim": _claim,
    "correct": _correct,
    "dp": _dp,
    "ends": _ends,
    "exchange": _exchange,
    "pareto": _pareto,
    "grids": _grids,
    "hopb": _hopb,
    "multi_node": _multi_node,
    "longest": _longest,
    "long": lambda: _long(4 * M),
    "measured": _measured,
    "modes": _modes,
    "over": _over,
    "roofline": _roofline,
    "searched": _searched,
    "timeline": _timeline,
}


def items() -> list[Item]:
    """Lists the paper's items in order."""
    return filled_items("helix", FIGURES)


def tabled() -> dict[str, Table]:
    """Lists the reprinted tables."""
    paper = simulated().tables()
    made = {
        f"{SHORT.get(name, name)}, simulated": Table("helix papers", partial(page, paper[name]))
        for name in ("paper", "gain", "sensitivity", "hopb-lost", "hopb-sweep")
    }
    return made | {name: Table(command, TABLES[name]) for name, command in RECORDED.items()}
