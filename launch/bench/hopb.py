"""What HOP-B hides of the exchange, a job for each backend and model: `python -m launch.bench hopb`."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console as Terminal
from rich.table import Table

from launch.inputs import parts
from launch.job import spawn
from launch.measure.hopb import EXPECTED_UNITS, STEPS

K = 1024
# One sequence has nothing to be cut into.
POINTS = [*(f"{batch}x{length}" for length in (8 * K, 128 * K) for batch in (4, 16, 64)), f"4x{K * K}"]
ON_CPU = ["4x64"]


def run(ranks: int, models: list[str] | None = None) -> list[dict[str, Any]]:
    """A job for each backend and model (on a CPU a tiny one), and tables."""
    gpus = torch.cuda.is_available()
    if ranks < 2:
        raise SystemExit("error: one GPU has nobody to exchange with: use two or more")
    backends = ("emulated",) if parts.is_emulated(ranks) else ("symm_mem", "nccl") if gpus else ("gloo",)
    rows: list[dict[str, Any]] = []
    for model in (models or ["qwen2.5-7b"]) if gpus else ["demo"]:
        for backend in backends:
            found = _job(model, backend, ranks, POINTS if gpus else ON_CPU)
            # What does not depend on a model or a backend counts once.
            rows += [row | {"model": model} for row in found if row["kind"] in ("ttl", "failed")]
            seen = {(row["kind"], row.get("backend")) for row in rows}
            rows += [row for row in found if row["kind"] == "mla" and ("mla", backend) not in seen]
            rows += [row for row in found if row["kind"] in ("delay", "timeline") and (row["kind"], None) not in seen]
    _show(rows)
    return rows


def _job(model: str, backend: str, ranks: int, points: list[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = spawn.measure(
        ranks,
        [
            f"model={model}", "bench=hopb", f"layout.kvp={ranks}", f"bench.points=[{','.join(points)}]",
            f"bench.steps={STEPS if torch.cuda.is_available() else 3}",
            *([] if parts.is_emulated(ranks) else [f"comm.backend={backend}"]),
        ],
    )["hopb"]  # fmt: skip
    return rows


def _show(rows: list[dict[str, Any]]) -> None:
    heads = "what", "backend", "batch", "length", "chunks", "off us", "on us", "no exchange us", "hidden", "auto us"
    table = Table(*heads)
    for r in rows:
        if r["kind"] in ("ttl", "mla"):
            auto = f"{r['auto_us']:.0f} ({r['auto_chunks']})" if r["kind"] == "ttl" else "-"
            table.add_row(
                r.get("model", "MLA messages, busy kernel"), r["backend"], str(r["batch"]), f"{r.get('length', 0):,}",
                str(r["chunks"]), f"{r['off_us']:.0f}", f"{r['on_us']:.0f}", f"{r['without_us']:.0f}",
                "-" if r["hidden"] is None else f"{r['hidden']:.0%}", auto,
            )  # fmt: skip
        elif r["kind"] == "failed":
            table.add_row(r["model"], r["backend"], str(r["batch"]), f"{r['length']:,}", "does not fit")
    terminal = Terminal(width=130)
    terminal.print(table)
    for r in rows:
        if r["kind"] == "delay":
            of = ", ".join(f"{k} {r[f'{k}_units']:.2f} units of {r[f'expected_{k}_units']}" for k in EXPECTED_UNITS)
            terminal.print(f"the paper's example (figure 3) with delays: {of}")
