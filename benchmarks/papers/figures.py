"""The Helix paper's figures and tables, reproduced with the simulator."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.papers import rows as paper_rows
from benchmarks.papers.rows import CLAIMS, Row, Setting
from benchmarks.records.columns import Cells, fill_tables
from benchmarks.records.columns import page as as_page
from benchmarks.records.fit import quantiles
from benchmarks.records.recorded_steps import compare, halves, read_cells
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
from launch.inputs.compose import ROOT
from launch.inputs.hardware import load_hardware
from launch.inputs.shapes import load_spec

PAGE = ROOT / "docs" / "simulator.md"
SHORT = {"deepseek-r1": "DeepSeek-R1", "llama-3.1-405b": "Llama-405B"}
PARETO = {5: "deepseek-r1", 6: "llama-3.1-405b"}  # figure number of each model's front

# ---- the paper


class Paper:
    """Everything that figures and tables show, computed once."""

    def __init__(self) -> None:
        self.setting = Setting(load_hardware("gb200"))
        self.searched = 0  # number of points searched, for the headlines
        self.headlines: dict[str, Row] = {}
        self.frontiers: dict[str, list[Row]] = {}
        self.curves: dict[str, list[Row]] = {}
        self.hopb: dict[str, list[Row]] = {}
        self.lost: list[Row] = []
        self.sensitivity: dict[str, list[Row]] = {}
        for model in CLAIMS:
            spec = load_spec(model)
            self.headlines[model], base, helix = paper_rows.headline(spec, self.setting)
            self.searched += len(base.points) + len(helix.points)
            series = {**paper_rows.components(base), "Baseline": base, "Helix": helix}
            self.frontiers[model] = [
                r for name, step in series.items() for r in paper_rows.frontier_rows(name, step, base)
            ]
            self.curves[model] = paper_rows.curve(base, helix)
            self.hopb[model] = []
            for exchange in ("batched", "serial"):
                rows, worst = paper_rows.hopb(spec, self.setting, exchange)
                self.hopb[model] += rows
                self.lost.append({"model": model, "paper": CLAIMS[model].hopb_off, **worst})
            self.sensitivity[model] = paper_rows.sensitivity(spec, self.setting)

    def csv(self) -> dict[str, list[Row]]:
        """Returns the rows of each file."""
        files = {"figure-1": paper_rows.figure_1(), "figure-3": paper_rows.figure_3()}
        for number, model in PARETO.items():
            files[f"figure-{number}"] = self.frontiers[model]
        files["figure-7"] = _named(self.hopb)
        files["gain"] = _named(self.curves)
        files["sensitivity"] = _named(self.sensitivity)
        files["hopb-lost"] = self.lost
        files["recorded"] = recorded()
        return files

    def figures(self) -> dict[str, tuple[Figure, str]]:
        """Returns the figures, with the kind of numbers each shows."""
        reads = paper_rows.figure_1()
        found = {
            "figure-1": (_figure_1(reads), f"{reads[0]['provenance']}: B=8, Q=128, K=8, Hsz=128, F=65536, FP4, 8 TB/s"),
            "figure-3": (_figure_3(paper_rows.figure_3()), "the paper's example"),
            "figure-7": (_figure_7(self.hopb), next(iter(self.hopb.values()))[0]["provenance"]),
            "gain": (_gain(self.curves), next(iter(self.curves.values()))[0]["provenance"]),
        }
        for number, model in PARETO.items():
            found[f"figure-{number}"] = _pareto(self, model), self.frontiers[model][0]["provenance"]
        return {name: (figure, f"simulated, {kind}") for name, (figure, kind) in found.items()}

    def tables(self) -> dict[str, list[Sequence[str]]]:
        """Returns the cells of each table, headings first."""
        ours: list[Sequence[str]] = [("model", "claim", "paper", "here", "operating point", "provenance")]
        for model, claim in CLAIMS.items():
            row, name = self.headlines[model], SHORT[model]
            best = f"{row['fastest_helix']} against {row['baseline']}"
            ours += [
                (name, "fastest for a user", f"{claim.user:g}x", f"{row['user_gain']:.2f}x", best, row["provenance"]),
                (name, "batch", f"{claim.batch:g}x", f"{row['batch_gain']:g}x",
                 f"at {row['tokens_per_s_user']:.0f} tokens/s/user, the baseline's fastest: "
                 f"{row['helix_users']} against {row['baseline_users']}", row["provenance"]),
                (name, "tokens/s/GPU", f"{claim.gpu:g}x", f"{row['gpu_gain']:.1f}x",
                 f"there: {row['helix']}", row["provenance"]),
                (name, "tokens/s/GPU", "-", f"{row['gpu_gain_95']:.1f}x", "at 95% of that speed", row["provenance"]),
            ]  # fmt: skip
            for lost in (x for x in self.lost if x["model"] == model):
                mode = f"exchange {lost['exchange']}; median {lost['fixed_median']:.1%}; most at {lost['at']}; "
                mode += f"{lost['fixed_all']:.1%} at any speed"
                cells = (f"up to {claim.hopb_off:.0%}", f"{lost['fixed']:.1%}")
                ours.append((name, "lost without HOP-B, at most", *cells, mode, lost["provenance"]))
        ends = [max(row["end"] for row in paper_rows.figure_3() if row["hopb"] == on) for on in ("off", "on")]
        timeline = f"{ends[0]:g} -> {ends[1]:g}"
        ours.append(("-", "figure 3, units of time", "25.6 -> 17", timeline, "8 requests, 2 and 1.2 units", "roofline"))
        curves: list[Sequence[str]] = [
            (
                "baseline's fastest x",
                *(f"{SHORT[m]}: {what}" for m in self.curves for what in ("tokens/s/GPU", "batch")),
            )
        ]
        for rows in zip(*self.curves.values(), strict=True):
            gains = [f"{r[key]:.2f}x" for r in rows for key in ("gpu_gain", "batch_gain")]
            curves.append((f"{rows[0]['fraction']:g}", *gains))
        heads = ("user", "batch", "GPU", "GPU at 95%")
        changes: list[Sequence[str]] = [("changed", *(f"{SHORT[m]}: {h}" for m in self.sensitivity for h in heads))]
        for rows in zip(*self.sensitivity.values(), strict=True):
            found = [f"{r[key]:.2f}" for r in rows for key in ("user_gain", "batch_gain", "gpu_gain", "gpu_gain_95")]
            changes.append((rows[0]["change"], *found))
        return {"paper": ours, "gain": curves, "sensitivity": changes, "recorded": _recorded_table(recorded())}


def _named(rows: dict[str, list[Row]]) -> list[Row]:
    return [{"model": model, **row} for model, found in rows.items() for row in found]


# ---- what was measured


@cache
def recorded() -> list[Row]:
    """Returns recorded decode steps of dense models on H200, with the model's predictions."""
    hardware = load_hardware("h200")
    cells = [cell for cell in read_cells() if cell.device == hardware.name and cell.is_dense]
    rows = []
    for half, found in zip(("fitted", "held out"), halves(cells), strict=True):
        rows += [{**compare(cell, hardware), "half": half} for cell in found]
    return rows


def _recorded_table(rows: list[Row]) -> list[Sequence[str]]:
    table: list[Sequence[str]] = [("steps", "cells", "median error", "p90 error")]
    held_out = [row for row in rows if row["half"] == "held out"]
    for model in dict.fromkeys(row["model"] for row in held_out):
        table.append(_errors([row for row in held_out if row["model"] == model], f"held out: {model}"))
    table.append(_errors(held_out, "held out: all"))
    return [*table, _errors([row for row in rows if row["half"] == "fitted"], "fitted")]


def _errors(rows: list[Row], name: str) -> tuple[str, ...]:
    median, p90 = quantiles(np.log1p([row["error"] for row in rows]))
    return name, str(len(rows)), f"{median:.1%}", f"{p90:.1%}"


# ---- drawing


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


def _pareto(paper: Paper, model: str) -> Figure:
    figure, axes = panels(1, height=4)
    panel, rows = axes[0, 0], [{**r, "name": r["series"]} for r in paper.frontiers[model]]
    strong = {"Baseline": {"color": BLACK, "linewidth": 2.2}, "Helix": {"color": GREEN, "linewidth": 2.2}}
    faint = {r["name"]: {"linestyle": "--"} for r in rows}
    _log(panel, rows, "user_normalized", "gpu_normalized", _styles(faint, **faint | strong))
    panel.set_title(f"{SHORT[model]}, 1M tokens, {paper.setting.hardware.name}, FP4")
    panel.set_xlabel("tokens/s/user, baseline's largest = 1 (higher is better)")
    panel.set_ylabel("tokens/s/GPU, baseline's largest = 1\n(higher is better)")
    panel.legend()
    return figure


def _figure_7(models: dict[str, list[Row]]) -> Figure:
    rows = [{**r, "name": f"HOP-B {r['series'].split()[-1]}, {r['exchange']}"} for r in _named(models)]
    names = _styles(r["name"] for r in rows)
    draw = partial(_log, x="tokens_per_s_user", y="tokens_per_s_gpu", names=names)
    axes = "tokens/s/user (higher is better)", "tokens/s/GPU (higher is better)"
    return facets(grouped(rows, "model"), draw, names.values(), SHORT.__getitem__, *axes, height=3)


def _gain(models: dict[str, list[Row]]) -> Figure:
    rows = [{**r, "name": SHORT[r["model"]]} for r in _named(models)]
    names = _styles(r["name"] for r in rows)
    figure, axes = panels(2)
    for panel, key, label in zip(axes[0], ("gpu_gain", "batch_gain"), ("tokens/s/GPU", "batch"), strict=True):
        _log(panel, rows, "fraction", key, names)
        panel.axhline(1, **LEVEL)
        panel.set_xlabel("tokens/s/user, baseline's largest = 1")
        panel.set_ylabel(f"{label}, Helix / baseline\n(higher is better)")
    legend(figure, names.values())
    return figure


# ---- writing


def with_tables(text: str, tables: Mapping[str, Cells]) -> str:
    """Returns the page with its tables filled."""
    return fill_tables(text, lambda name: as_page(tables[name]))


def write_figures(results: Path, figures: Path, page: Path | None) -> None:
    """Writes CSVs and PNGs, and fills the page's tables."""
    paper = Paper()
    results.mkdir(parents=True, exist_ok=True)
    for name, rows in paper.csv().items():
        with (results / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows({key: _number(value) for key, value in row.items()} for row in rows)
    for name, (figure, footer) in paper.figures().items():
        save(figure, figures / f"simulate-{name}.png", footer)
    if page is not None:
        page.write_text(with_tables(page.read_text(encoding="utf-8"), paper.tables()), encoding="utf-8")


def _number(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value
