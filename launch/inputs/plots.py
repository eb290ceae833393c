"""Plots of predictions: times of layouts, Pareto fronts over batches, and phases of a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")  # before pyplot: there may be no display
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from helix.planner.plan import PlannedLayout, Ranking, curve
from helix.planner.step import StepCost

WIDTH = 830 / 96  # inches; the width of a README on GitHub
DPI = 150
# The palette of Okabe and Ito, for color-blind readers.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#999999")
MARKERS = "os^DvPX"
MAX_LAYOUTS = 40  # per plot
MAX_NAMED_PHASES = len(COLORS) - 1  # the longest phases get a color each
REST = "all others"

mpl.rcParams.update({"font.size": 9, "axes.titlesize": 10, "legend.frameon": False, "axes.axisbelow": True})


def draw_ranking(ranking: Ranking, model: str, path: Path) -> None:
    """Plots times of the layouts; if the query leaves the batch open, throughput per GPU over speed per user."""
    _save(times(ranking, model) if ranking.query.batch is not None else fronts(ranking, model), path)


def draw_step(step: StepCost, title: str, path: Path) -> None:
    """Plots the time of each phase of the first point of a prediction."""
    _save(phases(step, title), path)


def times(ranking: Ranking, model: str) -> Figure:
    """Plots the time per token of each layout by phase, the best on top."""
    q, choices = ranking.query, ranking.choices[:MAX_LAYOUTS]
    figure, axes = _panel(1.5 + 0.34 * len(choices))
    named = _longest(choices)
    total, left = np.array([1e3 * c.ttl_s for c in choices]), np.zeros(len(choices))
    for name, color in zip([*named, REST], [*COLORS[: len(named)], COLORS[-1]], strict=True):
        part = np.array([1e3 * c.phases.get(name, 0.0) for c in choices]) if name != REST else total - left
        if part.any():
            axes.barh([c.name for c in choices], part, left=left, color=color, label=name, height=0.7)
        left += part
    for y, choice in enumerate(choices):
        axes.annotate(f" {1e3 * choice.ttl_s:.2f}", (1e3 * choice.ttl_s, y), va="center")
    axes.invert_yaxis()
    axes.margins(x=0.08, y=0.02)
    if q.ttl_s is not None:
        axes.axvline(1e3 * q.ttl_s, color="black", linestyle=":", label=f"ttl_ms={1e3 * q.ttl_s:g}")
    axes.set(xlabel="time per token (ms)", title=f"{model}, {q.batch} x {_work(ranking)}")
    axes.set_xlim(left=0)
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def fronts(ranking: Ranking, model: str) -> Figure:
    """Plots throughput per GPU over speed per user, a line per layout over its batches."""
    q, choices = ranking.query, ranking.choices[:MAX_LAYOUTS]
    figure, axes = _panel(5.0)
    level: dict[tuple[float, ...], list[tuple[PlannedLayout, StepCost]]] = {}
    for choice in choices:
        step = curve(q, choice)
        level.setdefault(tuple(np.round(step.tokens_per_s_gpu, 6)), []).append((choice, step))
    for i, ((choice, step), *others) in enumerate(level.values()):
        name = choice.name + (f" (and {len(others)} equal)" if others else "")
        style: dict[str, Any] = {"color": COLORS[i % len(COLORS)], "zorder": 3 - i / 100}
        line, best = ((one.tokens_per_s_user, one.tokens_per_s_gpu) for one in (step, choice))
        axes.plot(*line, label=name, marker=MARKERS[i // len(COLORS)], markersize=3, **style)
        axes.plot(*best, marker="*", markersize=11, linestyle="none", **style)
    assert q.ttl_s is not None
    axes.axvline(1 / q.ttl_s, color="black", linestyle=":", label=f"ttl_ms={1e3 * q.ttl_s:g}")
    axes.plot([], [], marker="*", markersize=9, color="black", linestyle="none", label="best batch within it")
    axes.set(xscale="log", yscale="log", title=f"{model}, {_work(ranking)}")
    axes.set(xlabel="tokens/s of one user (larger batches to the left)", ylabel="tokens/s of one GPU")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def phases(step: StepCost, title: str) -> Figure:
    """Plots the time of each phase of the first point, in order."""
    spent = [(phase.name, 1e3 * float(phase.seconds[0])) for phase in step.phases if phase.seconds[0]]
    figure, axes = _panel(1.2 + 0.27 * len(spent))
    total = 1e3 * float(step.step_s[0])
    axes.barh([name for name, _ in spent], [ms for _, ms in spent], color=COLORS[0], height=0.7)
    for y, (_, ms) in enumerate(spent):
        axes.annotate(f" {ms:.2f}, {ms / total:.1%}", (ms, y), va="center")
    axes.invert_yaxis()
    axes.margins(x=0.14, y=0.02)
    axes.set(xlabel=f"time (ms), of {total:.2f} a step", title=title)
    axes.set_xlim(left=0)
    axes.grid(axis="x", alpha=0.3)
    return figure


def _work(ranking: Ranking) -> str:
    q, count = ranking.query, len(ranking.choices)
    best = f" (the best {MAX_LAYOUTS} of {count} layouts)" if count > MAX_LAYOUTS else ""
    return f"{q.context:,} tokens on {q.gpus} x {q.hardware.name}{best}"


def _longest(choices: Sequence[PlannedLayout]) -> list[str]:
    """Returns the phases that take longest over all layouts, in execution order."""
    names = dict.fromkeys(name for choice in choices for name in choice.phases)
    most = sorted(names, key=lambda name: -sum(choice.phases.get(name, 0.0) for choice in choices))[:MAX_NAMED_PHASES]
    return [name for name in names if name in most]


def _panel(height: float) -> tuple[Figure, Axes]:
    return plt.subplots(figsize=(WIDTH, height), layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
