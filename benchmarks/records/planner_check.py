"""Compares the planner's first choices with measurements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from benchmarks.records.recorded_steps import RESULTS, Cell, compare, halves, read_cells
from benchmarks.records.rows import Row
from helix.planner.hardware import Hardware
from launch.inputs.hardware import hardware_of, load_hardware

WITHIN = 0.05  # relative to the best measured TTL: what counts as a good choice


def _short(layout: str) -> str:
    """Drops the FFN grid of a layout unless it has expert parallelism."""
    attention, _, ffn = layout.partition(" -> ")
    ep = ffn.partition("ep=")[2]
    return attention if ep in ("", "1") else f"{attention} ep={ep}"


def regrets(cells: Sequence[Cell], describe: Callable[[str], Hardware] = hardware_of) -> list[Row]:
    """Compares, for every workload measured in several layouts, the planner's choice with the best.

    Args:
        describe: returns the hardware to predict a device's steps with.

    Raises:
        ValueError: a device has no hardware description.
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
        selected = min(predicted, key=lambda row: row["predicted_us"])
        best = min(predicted, key=lambda row: row["measured_us"])
        rows.append(
            {
                "device": device, "ranks": ranks, "model": model, "batch": batch, "length": length,
                "layouts": len(same), "selected": _short(selected["layout"]),
                "best": _short(best["layout"]), "selected_us": selected["measured_us"],
                "best_us": best["measured_us"], "regret": selected["measured_us"] / best["measured_us"] - 1,
                "measured_us": {_short(row["layout"]): row["measured_us"] for row in predicted},
            }
        )  # fmt: skip
    return rows


def drafted_errors(cells: Sequence[Cell], describe: Callable[[str], Hardware] = hardware_of) -> str | None:
    """Returns the prediction error of self-drafting steps; None if none are recorded.

    Raises:
        ValueError: a device has no hardware description.
    """
    drafted = [cell for cell in cells if cell.drafts is not None and cell.drafts.sparsity is not None]
    if not drafted:
        return None
    off = [abs(compare(cell, describe(cell.device))["error"]) for cell in drafted]
    median, p90 = np.percentile(off, (50, 90))
    return f"{len(off)} steps with drafts of the model itself: off by {median:.1%} (median), {p90:.1%} (p90)"


def summary(rows: Sequence[Row]) -> str:
    """Returns how many choices were good, and how many would be with one fixed layout."""

    def good(regrets: Sequence[float]) -> str:
        near = sum(regret <= WITHIN for regret in regrets)
        return f"{near} of {len(regrets)} within {WITHIN:.0%} of the best measured, the worst {max(regrets):.1%} off"

    if not rows:
        return "no workload was recorded in more than one layout"
    lines = [f"first choices: {good([row['regret'] for row in rows])}"]
    # A fixed layout counts only where it was measured.
    for layout, count in Counter(layout for row in rows for layout in row["measured_us"]).most_common():
        if 2 * count > len(rows):
            of = [row["measured_us"][layout] / row["best_us"] - 1 for row in rows if layout in row["measured_us"]]
            lines.append(f"always {layout}: {good(of)}")
    return "\n".join(lines)


def page_of(records: str) -> list[str]:
    """Returns the sentences below the table of first choices."""
    return [f"- {line}" for line in summary(recorded(records)).splitlines()]


@cache
def recorded(records: str) -> list[Row]:
    """Returns the planner's first choice among recorded layouts, with the shipped description of an H200."""
    hardware = load_hardware("h200")
    cells = read_cells([RESULTS / f"{name}.jsonl" for name in records.split()])
    return regrets([cell for cell in cells if cell.device == hardware.name], lambda device: hardware)


def errors() -> list[Row]:
    """Returns the errors on recorded steps that the shipped H200 description was not fitted on."""
    hardware, rows = load_hardware("h200"), []
    for where, suffix in (("over eight GPUs", ""), ("emulated on two GPUs", ".emulated-8")):
        cells = read_cells([RESULTS / f"{name}{suffix}.jsonl" for name in ("step", "baselines")])
        dense = [cell for cell in cells if cell.is_dense]
        rest = [cell for cell in cells if not cell.is_dense]
        for what, some in (
            ("dense" if suffix else "dense, the half that was not fitted on", dense if suffix else halves(dense)[1]),
            ("with experts or latents", rest),
        ):
            rows.append({"steps": f"{where}: {what}", "off": [abs(compare(cell, hardware)["error"]) for cell in some]})
    return rows
