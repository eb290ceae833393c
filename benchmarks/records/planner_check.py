"""The planner's first choices beside what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.records.columns import Cells, page
from benchmarks.records.recorded_steps import RESULTS, Cell, compare, halves, read_cells
from helix.planner.hardware import Hardware
from launch.inputs.hardware import hardware_of, load_hardware

WITHIN = 0.05  # of the best measured TTL: what counts as a good choice


def _short(layout: str) -> str:
    """A layout without what the GPUs say anyway: experts' grid where they are spread."""
    attention, _, ffn = layout.partition(" -> ")
    ep = ffn.partition("ep=")[2]
    return attention if ep in ("", "1") else f"{attention} ep={ep}"


def regrets(cells: Sequence[Cell], describe: Callable[[str], Hardware] = hardware_of) -> list[dict[str, Any]]:
    """For every workload that was measured in several layouts: the planner's choice of them against the best.

    Args:
        describe: the hardware that a device's steps are predicted with.

    Raises:
        ValueError: nobody has described the device of a cell.
    """
    works: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        works.setdefault((cell.device, cell.ranks, *cell.workload, cell.sparse, cell.drafts), []).append(cell)
    rows = []
    for (device, ranks, model, batch, length, *_), same in works.items():
        if len(same) < 2:
            continue
        hardware = describe(device)
        predicted = [compare(cell, hardware) for cell in same]
        chosen = min(predicted, key=lambda row: row["predicted_us"])
        best = min(predicted, key=lambda row: row["measured_us"])
        rows.append(
            {
                "device": device, "ranks": ranks, "model": model, "batch": batch, "length": length,
                "layouts": len(same), "chosen": _short(chosen["layout"]),
                "best": _short(best["layout"]), "chosen_us": chosen["measured_us"],
                "best_us": best["measured_us"], "regret": chosen["measured_us"] / best["measured_us"] - 1,
                "measured_us": {_short(row["layout"]): row["measured_us"] for row in predicted},
            }
        )  # fmt: skip
    return rows


def drafted_errors(cells: Sequence[Cell], describe: Callable[[str], Hardware] = hardware_of) -> str | None:
    """How far predictions of steps are off in which the model drafted for itself; None where none was recorded.

    Raises:
        ValueError: nobody has described the device of a cell.
    """
    drafted = [cell for cell in cells if cell.drafts is not None and cell.drafts.sparsity is not None]
    if not drafted:
        return None
    off = [abs(compare(cell, describe(cell.device))["error"]) for cell in drafted]
    median, most = np.percentile(off, (50, 90))
    return f"{len(off)} steps with drafts of the model itself: off by {median:.1%} (median), {most:.1%} (p90)"


def errors_table(steps: Mapping[str, Sequence[Cell]], hardware: Hardware) -> Cells:
    """Cells of a table of how far predictions are off, its head first.

    Args:
        steps: by what they are called.
    """
    table: list[Sequence[str]] = [("steps", "cells", "median", "90th percentile")]
    for name, cells in steps.items():
        median, most = np.percentile([abs(compare(cell, hardware)["error"]) for cell in cells], (50, 90))
        table.append((name, str(len(cells)), f"{median:.1%}", f"{most:.1%}"))
    return table


def check_table(rows: Sequence[dict[str, Any]]) -> Cells:
    """Cells of the table of `regrets`, its head first."""
    table: list[Sequence[str]] = [("model", "KV", "GPUs", "layouts", "chosen", "best", "measured", "regret")]
    for r in rows:
        times = f"{r['chosen_us'] / 1e3:.2f}, best {r['best_us'] / 1e3:.2f} ms"
        kv = f"{r['batch']} x {r['length'] >> 10}K"
        table.append(
            (r["model"], kv, str(r["ranks"]), str(r["layouts"]), r["chosen"], r["best"], times, f"{r['regret']:.1%}")
        )
    return table


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """How many choices were good, and how many would have been if one and the same layout had always been taken."""

    def good(regrets: Sequence[float]) -> str:
        near = sum(regret <= WITHIN for regret in regrets)
        return f"{near} of {len(regrets)} within {WITHIN:.0%} of the best measured, the worst {max(regrets):.1%} off"

    if not rows:
        return "no workload was recorded in more than one layout"
    said = [f"first choices: {good([row['regret'] for row in rows])}"]
    # A yardstick counts only where its layout was measured: it has no choice to get wrong elsewhere.
    for layout, count in Counter(layout for row in rows for layout in row["measured_us"]).most_common():
        if 2 * count > len(rows):
            of = [row["measured_us"][layout] / row["best_us"] - 1 for row in rows if layout in row["measured_us"]]
            said.append(f"always {layout}: {good(of)}")
    return "\n".join(said)


def page_of(records: str) -> list[str]:
    """The planner's first choice among recorded layouts, with the shipped description of an H200."""
    hardware = load_hardware("h200")
    cells = read_cells([RESULTS / f"{name}.jsonl" for name in records.split()])
    rows = regrets([cell for cell in cells if cell.device == hardware.name], lambda device: hardware)
    return [*page(check_table(rows)), "", *(f"- {line}" for line in summary(rows).splitlines())]


def errors() -> Cells:
    """Errors of recorded steps that the shipped description of an H200 was not fitted on, dense ones and others."""
    steps: dict[str, list[Cell]] = {}
    for where, suffix in (("over eight GPUs", ""), ("emulated on two GPUs", ".emulated-8")):
        cells = read_cells([RESULTS / f"{name}{suffix}.jsonl" for name in ("step", "baselines")])
        dense = [cell for cell in cells if cell.is_dense]
        name = f"{where}: dense" + ("" if suffix else ", the half that was not fitted on")
        steps[name] = dense if suffix else halves(dense)[1]
        steps[f"{where}: with experts or latents"] = [cell for cell in cells if not cell.is_dense]
    return errors_table(steps, load_hardware("h200"))
