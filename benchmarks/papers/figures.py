"""The Helix paper's figures, drawn from the simulator's record."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.papers.rows import Row, figure_1, figure_3
from benchmarks.papers.simulated import SHORT, Paper
from benchmarks.records.rows import grouped
from benchmarks.records.style import (
    BLACK,
    BLUE,
    COLORS,
    GREEN,
    LEVEL,
    ORANGE,
    Style,
    curves,
    facets,
    legend,
    line,
    panels,
    plain_ticks,
    save,
    short,
)

PARETO = {5: "deepseek-r1", 6: "llama-3.1-405b"}  # figure number of each model's front


def figures(paper: Paper) -> dict[str, tuple[Figure, str]]:
    """Returns the figures, with the kind of numbers each shows."""
    reads, kind = figure_1(), paper.headlines["deepseek-r1"]["provenance"]
    found = {
        "figure-1": (_figure_1(reads), f"{reads[0]['provenance']}: B=8, Q=128, K=8, Hsz=128, F=65536, FP4, 8 TB/s"),
        "figure-3": (_figure_3(figure_3()), "the paper's example"),
        "figure-7": (_figure_7(paper.hopb), kind),
        "gain": (_gain(paper.curves), kind),
    }
    for number, model in PARETO.items():
        found[f"figure-{number}"] = _pareto(model, paper.fronts[model]), kind
    return {name: (figure, f"simulated, {kind}") for name, (figure, kind) in found.items()}


def write_figures(paper: Paper, folder: Path) -> None:
    """Draws the figures into a folder."""
    for name, (figure, footer) in figures(paper).items():
        save(figure, folder / f"simulate-{name}.png", footer)


def _styles(names: Iterable[str], **strong: Style) -> dict[str, Style]:
    look = {"marker": "o", "markersize": 3.5}
    return {
        name: {**look, "color": COLORS[i % len(COLORS)], "label": name, **strong.get(name, {})}
        for i, name in enumerate(dict.fromkeys(names))
    }


def _log(panel: Axes, rows: list[Row], x: str, y: str, names: dict[str, Style]) -> None:
    curves(panel, rows, x, y, name=names)
    panel.set_yscale("log")
    plain_ticks(panel.yaxis)


def _figure_1(rows: list[Row]) -> Figure:
    found = {name: [*same] for name, same in groupby(rows, itemgetter("panel"))}
    figure, axes = panels(len(found), sharey=True)
    reads = {
        "kv_us": {"label": "KV cache", "color": BLUE, "marker": "o"},
        "weights_us": {"label": "weights", "color": ORANGE, "marker": "s"},
    }
    for panel, (name, same) in zip(axes[0], found.items(), strict=True):
        for key, style in reads.items():
            line(panel, same, "x", key, style)
        panel.set(xlabel=name, yscale="log")
        panel.set_xscale("log", base=2)
        ticks = [r["x"] for r in same][:: 1 + len(same) // 5]
        panel.set_xticks(ticks, [short(x) for x in ticks])
    plain_ticks(axes[0, 0].yaxis)
    axes[0, 0].set_ylabel("time to read, us a layer\n(lower is better)")
    legend(figure, reads.values())
    return figure


def _figure_3(rows: list[Row]) -> Figure:
    found = grouped(rows, "hopb")
    figure, axes = panels(1, len(found), height=1.4, sharex=True)
    for panel, ((on,), same) in zip(axes[:, 0], found.items(), strict=True):
        for phase, color, y in (("attention", BLUE, 1), ("exchange", ORANGE, 0)):
            spans = [(r["start"], r["end"] - r["start"]) for r in same if r["phase"] == phase]
            panel.broken_barh(spans, (y - 0.4, 0.8), color=color, edgecolor="white")
        end = max(r["end"] for r in same)
        panel.axvline(end, color=BLACK, linestyle="--", linewidth=0.8)
        panel.set_yticks([0, 1], ["exchange", "attention"])
        panel.set_title(f"HOP-B {on}: {end:g} units", loc="left")
    panel.set_xlim(0, None)
    panel.set_xlabel("units of time (shorter is better); 8 requests: 2 of attention, 1.2 of exchange each")
    return figure


def _pareto(model: str, fronts: list[Row]) -> Figure:
    figure, axes = panels(1, height=4)
    panel, users, gpus = axes[0, 0], "tokens_per_s_user", "tokens_per_s_gpu"
    (base,) = (row for row in fronts if row["series"] == "Baseline")
    rows = [
        r | {users: r[users] / max(base[users]), gpus: r[gpus] / max(base[gpus])} for r in _points(fronts, "series")
    ]
    strong = {"Baseline": {"color": BLACK, "linewidth": 2.2}, "Helix": {"color": GREEN, "linewidth": 2.2}}
    faint = {r["name"]: {"linestyle": "--"} for r in rows}
    _log(panel, rows, users, gpus, _styles(faint, **faint | strong))
    panel.set_title(f"{SHORT[model]}, 1M tokens, GB200 NVL72, FP4")
    panel.set_xlabel("tokens/s/user, baseline's largest = 1 (higher is better)")
    panel.set_ylabel("tokens/s/GPU, baseline's largest = 1\n(higher is better)")
    panel.legend()
    return figure


def _figure_7(models: dict[str, list[Row]]) -> Figure:
    rows = [{**r, "model": model} for model, fronts in models.items() for r in _points(fronts, "series", "exchange")]
    names = _styles(r["name"] for r in rows)
    draw = partial(_log, x="tokens_per_s_user", y="tokens_per_s_gpu", names=names)
    axes = "tokens/s/user (higher is better)", "tokens/s/GPU (higher is better)"
    return facets(grouped(rows, "model"), draw, names.values(), SHORT.__getitem__, *axes, height=3)


def _gain(models: dict[str, list[Row]]) -> Figure:
    rows = [{**r, "name": SHORT[model]} for model, found in models.items() for r in found]
    names = _styles(r["name"] for r in rows)
    figure, axes = panels(2)
    for panel, key, label in zip(axes[0], ("gpu_gain", "batch_gain"), ("tokens/s/GPU", "batch"), strict=True):
        _log(panel, rows, "fraction", key, names)
        panel.axhline(1, **LEVEL)
        panel.set_xlabel("tokens/s/user, baseline's largest = 1")
        panel.set_ylabel(f"{label}, Helix / baseline\n(higher is better)")
    legend(figure, names.values())
    return figure


def _points(rows: Iterable[Row], *names: str) -> list[Row]:
    """Lists the points of fronts, each with its `name`."""
    users, gpus = "tokens_per_s_user", "tokens_per_s_gpu"
    return [
        {"name": ", ".join(row[key] for key in names), users: user, gpus: gpu}
        for row in rows
        for user, gpu in zip(row[users], row[gpus], strict=True)
    ]
