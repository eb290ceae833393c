"""Compares measured Pareto fronts (`helix bench pareto`) with the simulator's for the same hardware."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.models.pareto import FP8, RANKS, TIMED, front
from benchmarks.records.columns import Cells
from benchmarks.records.rows import WORKLOAD, Row, grouped, results, tokens
from benchmarks.records.step_tables import points_of
from benchmarks.records.style import BLUE, GREEN, ORANGE, Style, curves, facets, plain_ticks, square
from helix.planner.step import predict
from launch.inputs.hardware import hardware_of
from launch.inputs.shapes import load_spec

KEY = (*WORKLOAD, "device")
RATES = "tokens_per_s_user", "tokens_per_s_gpu"
BUDGETS_MS = 10, 20, 50  # of TTL
STYLES: dict[str, Style] = {
    "helix, measured": {"label": "Helix, measured", "color": BLUE, "marker": "o", "linestyle": ""},
    "helix, simulated": {"label": "Helix, simulated", "color": BLUE},
    "tp, measured": {"label": "TP, measured", "color": ORANGE, "marker": "s", "linestyle": ""},
    "tp, simulated": {"label": "TP, simulated", "color": ORANGE, "linestyle": "--"},
    "dp, measured": {"label": "DP, measured", "color": GREEN, "marker": "^", "linestyle": ""},
    "dp, simulated": {"label": "DP, simulated", "color": GREEN, "linestyle": ":"},
}


def predicted_us(row: Row) -> float:
    """Predicts the TTL in us of a recorded point, with the hardware it was measured on."""
    hardware = replace(hardware_of(row["device"]), gpus=max(RANKS))
    return 1e6 * float(predict(load_spec(row["model"]), hardware, points_of(row), row["length"], FP8).ttl_s[0])


@cache
def simulated(model: str, device: str, length: int, mode: str) -> list[Row]:
    """Returns the simulator's front of a mode, as rows; empty if nothing fits."""
    step = front(load_spec(model), hardware_of(device), length, mode)
    if step is None:
        return []
    ttl, user, gpu = 1e6 * step.ttl_s, step.tokens_per_s_user, step.tokens_per_s_gpu
    return [
        {"batch": int(step.points.batch[i]), "ttl_p50_us": ttl[i], **dict(zip(RATES, (user[i], gpu[i]), strict=True))}
        for i in range(len(step.points))
    ]


def on_gpus(r: Row) -> str:
    """Returns how many GPUs of which kind emulated a row's ranks; one alone has no link."""
    return f"{r['emulated_by']} {r['device'].removeprefix('NVIDIA ').split()[0]}"


def budgets() -> Cells:
    """Tabulates the largest measured batch within a TTL over any layout of a mode, and the simulated front's."""
    table = [
        ("shape", "length", "emulated on", "mode", *(f"<= {budget} ms: measured (simulated)" for budget in BUDGETS_MS))
    ]
    measured = [r for r in results("pareto", *KEY) if "failed" not in r]
    for (model, length, device), same in grouped(measured, "model", "length", "device").items():
        for mode in TIMED:
            cells = []
            for budget in BUDGETS_MS:
                mode_rows = [r for r in same if r["layout"].startswith(mode)]
                both = (
                    max((r["batch"] for r in rows if r["ttl_p50_us"] <= 1e3 * budget), default="-")
                    for rows in (mode_rows, simulated(model, device, length, mode))
                )
                cells.append("{} ({})".format(*both))
            table.append((model, tokens(length), ", ".join(dict.fromkeys(map(on_gpus, same))), mode, *cells))
    return table


def figure(rows: list[Row]) -> Figure:
    """Draws one model's measured points and the simulated fronts, one panel per length and device."""
    points = [{**r, "name": f"{r['layout'].split()[0]}, measured"} for r in rows if "failed" not in r]
    for model, length, device in grouped(points, "model", "length", "device"):
        for mode in TIMED:
            shared = {"model": model, "length": length, "device": device, "name": f"{mode}, simulated"}
            points += [{**shared, **r} for r in simulated(model, device, length, mode)]

    def draw(panel: Axes, same: list[Row]) -> None:
        curves(panel, same, *RATES, name=STYLES)
        for axis, scale in ((panel.xaxis, panel.set_xscale), (panel.yaxis, panel.set_yscale)):
            scale("log")
            plain_ticks(axis)

    def title(length: int, device: str) -> str:
        return f"{tokens(length)} tokens, {device.removeprefix('NVIDIA ').split()[0]}"

    axes = "tokens/s/user (higher is better)", "tokens/s/GPU (higher is better)"
    shown = [style for name, style in STYLES.items() if name in {r["name"] for r in points}]
    return facets(grouped(points, "length", "device"), draw, shown, title, *axes, across=square, height=3)
