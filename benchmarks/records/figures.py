"""Draws the figures of `benchmarks/results/*.jsonl` into `benchmarks/figures/`: `helix plot [NAME ...]`.

results=DIR names where the results are, figures=DIR where the figures go. Without a NAME all are drawn.

Results are appended, so a file may hold a point several times: the last line of a point counts.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks.records import acceptance_figures, draft_figures, pareto, tuned_tables
from benchmarks.records import style as palette
from benchmarks.records.declared import LenientScope, Scope, render_cell, value
from benchmarks.records.recorded_steps import cell_of
from benchmarks.records.rows import Row, grouped, newest
from benchmarks.records.sparse_cost_model import CostFit, accounts
from benchmarks.records.step_tables import ideal_us
from benchmarks.records.style import (
    BLACK,
    BLUE,
    COLORS,
    GRAY,
    GREEN,
    LEVEL,
    MARKERS,
    ORANGE,
    PURPLE,
    RED,
    Style,
    curves,
    facets,
    legend,
    panels,
    plain_ticks,
    save,
    short,
    square,
)
from helix.schema import unknown_message
from launch.inputs.arguments import handle_help, need_checkout, parse
from launch.inputs.compose import ROOT

PEERS: dict[str, Style] = {
    "": {"label": "ours", "color": BLUE},
    "cudnn_": {"label": "cuDNN", "color": ORANGE},
    "flash_": {"label": "FlashAttention (torch)", "color": GREEN},
}
MODES: dict[str, Style] = {
    "helix": {"label": "Helix, best layout", "color": BLUE, "marker": "o"},
    "tp": {"label": "plain tensor parallelism", "color": ORANGE, "marker": "s"},
    "medha": {"label": "Medha's layout, best", "color": PURPLE, "marker": "^"},
}
WORKLOADS: Style = {"linestyle": "", "label": "sequences x tokens:"}
RATES = ("tokens_per_s_user", "tokens_per_s_gpu")
SCORED = {"bounds": "bounds", "mean": "mean", "mean_std": "mean and deviation"}
HAYSTACKS = {"code": "code", "loop": "looped paragraph"}
MAX_MODELS = 4  # in the figure of baselines: those with the most points


def _styles(rows: list[Row], field: str, label: str, **cycles: list[str]) -> dict[Any, Style]:
    return {
        value: {
            **{name: cycle[i % len(cycle)] for name, cycle in cycles.items()},
            "label": label.format(short(value) if isinstance(value, int) else value),
        }
        for i, (value,) in enumerate(grouped(rows, field))
    }


def _workload(row: Row) -> str:
    return f"{row['batch']} x {short(row['length'])}"


def prefill(rows: list[Row]) -> Figure:
    """Draws prefill attention as a share of peak FLOP/s."""
    figure, axes = panels(1, height=0.55 * len(rows))
    panel, cases = axes[0, 0], [row for same in grouped(rows, "heads", "length").values() for row in same]
    for i, row in enumerate(cases):
        for k, (peer, style) in enumerate(PEERS.items()):
            if row.get(f"{peer}tflops") is not None:
                share, y = row[f"{peer}tflops"] / row["matrix_tflops"], i + 0.27 * (k - 1)
                panel.barh(y, share, 0.25, color=style["color"])
                panel.text(share, y, f" {share:.0%}", va="center")
    names = [f"{r['heads']} query/KV heads\n{short(r['q_tokens'])} queries, {short(r['length'])} keys" for r in cases]
    panel.set_yticks(range(len(cases)), names)
    panel.axvline(0.6, **LEVEL)
    panel.set(xlabel="share of the GPU's matrix rate (higher is better)", ylim=(len(cases) - 0.5, -0.5), xlim=(0, 1))
    panel.xaxis.set_major_formatter(PercentFormatter(1))
    thick: Style = {"linewidth": 6}
    legend(figure, [*({**style, **thick} for style in PEERS.values()), {**LEVEL, "label": "target"}])
    return figure


def _kvp(layout: str) -> int:
    found = re.search(r"kvp=(\d+)", layout)
    assert found, f"no kvp in the layout {layout!r}"
    return int(found[1])


def step(rows: list[Row]) -> Figure:
    """Draws time per token over the ideal, in the best layout that splits the KV."""
    models = grouped([row for row in rows if _kvp(row["layout"]) > 1], "model")
    columns, lines = square(len(models))
    max_rows = max(len(grouped(same, "batch", "length")) for same in models.values())
    figure, axes = panels(columns, lines, height=0.2 * max_rows + 0.75, sharex=True)
    for panel in axes.flat[len(models) :]:
        panel.remove()
    for panel, ((model,), same) in zip(axes.flat, models.items(), strict=False):
        _step_of_model(panel, grouped(same, "batch", "length"))
        panel.set_title(model)
    figure.supylabel("sequences x tokens in each", fontsize="medium")
    for panel in axes[-1]:
        panel.set_xlabel("time per token / ideal (lower is better)")
    panel.set_xlim(0, panel.get_xlim()[1] * 1.3)  # room for the layouts' names
    handles: list[Style] = [{"color": BLUE, "linewidth": 6, "label": "best layout with kvp >= 2"}]
    handles += [{"color": BLACK, "linewidth": 2, "label": "target"}]
    legend(figure, [*handles, {**LEVEL, "label": "ideal: weights and KV read once, or multiplied"}])
    return figure


def _step_of_model(panel: Axes, workloads: dict[tuple[Any, ...], list[Row]]) -> None:
    panel.axvline(1, **LEVEL)
    for y, found in enumerate(workloads.values()):
        ran = [row for row in found if "failed" not in row]
        if not ran:
            panel.text(1.1, y, "does not fit", va="center", color=GRAY)
            continue
        best = min(ran, key=lambda row: row["ttl_p50_us"])
        value = best["ttl_p50_us"] / ideal_us(best)
        panel.barh(y, value, 0.75, color=BLUE)
        widths = " ".join(best["layout"].split()[1:3])
        panel.text(0.1, y, f"{value:.2f}", va="center", color="white")
        panel.text(max(value, best["bar"] or 0) + 0.1, y, widths, va="center")
        if best["bar"] is not None:
            panel.vlines(best["bar"], y - 0.42, y + 0.42, color=BLACK, linewidth=2)
    panel.set_yticks(range(len(workloads)), [_workload(found[0]) for found in workloads.values()])
    panel.set(ylim=(len(workloads) - 0.5, -0.5))


def grids(rows: list[Row]) -> Figure:
    """Draws time per token of MoE models by `tpf x ep`, with the same attention grid."""
    found = []
    for row in rows:
        widths = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", row["layout"])}
        if "failed" not in row:
            found.append({**row, **widths, "workload": _workload(row)})
    attention = "model", "kvp", "tpa"
    models = {key: same for key, same in grouped(found, *attention).items() if any(row["ep"] > 1 for row in same)}
    for same in (same for model_rows in models.values() for same in grouped(model_rows, "workload").values()):
        min_ep = min(row["ep"] for row in same)
        whole = min(row["ttl_p50_us"] for row in same if row["ep"] == min_ep)
        for row in same:
            row["times"] = row["ttl_p50_us"] / whole
    shown = [row for same in models.values() for row in same]
    workloads = _styles(shown, "workload", "{}", color=COLORS, marker=MARKERS)
    return facets(
        models, partial(curves, x="ep", y="times", workload=workloads), [WORKLOADS, *workloads.values()],
        "{}, kvp={} tpa={}".format, "ep; tpf is 8 / ep", "time per token / that of ep = 1\n(lower is better)", base=2,
        across=square, sharey=True,
    )  # fmt: skip


def baselines(rows: list[Row]) -> Figure:
    """Draws tokens/s per GPU against tokens/s per user, one curve over the batch per mode."""
    ran = [{**row, "mode": row["layout"].split()[0]} for row in rows if "failed" not in row]
    by_model = grouped(ran, "model")
    models = sorted(by_model, key=lambda model: -len(by_model[model]))[:MAX_MODELS]
    found = grouped([row for row in ran if (row["model"],) in models], "model", "length")

    def draw(panel: Axes, same: list[Row]) -> None:
        fastest = [max(group, key=_user) for group in grouped(same, "mode", "batch").values()]
        curves(panel, fastest, *RATES, mode=MODES)
        for (batch,), batch_rows in grouped(fastest, "batch").items():
            top = max(batch_rows, key=_user)
            panel.annotate(batch, (top[RATES[0]], top[RATES[1]]), textcoords="offset points", xytext=(4, 4))
        panel.set(xscale="log", yscale="log")
        panel.margins(0.12)
        plain_ticks(panel.xaxis)
        plain_ticks(panel.yaxis)

    return facets(
        found, draw, [*MODES.values(), {"linestyle": "", "label": "numbers: batch"}],
        lambda model, length: f"{model}, {short(length)} tokens",
        "tokens/s/user (higher is better)", "tokens/s/GPU\n(higher is better)",
        across=lambda count: (count // len(models), len(models)), height=2.3,
    )  # fmt: skip


def _user(row: Row) -> float:
    return row["tokens_per_s_user"]


def timeline(rows: list[Row]) -> Figure:
    """Draws when each chunk is attended and exchanged: the slowest regime on top, and what the others save.

    Source: Helix Parallelism, figure 3.
    """
    looks = {"exchange": (ORANGE, BLACK), "attention": (BLUE, "white")}  # from the bottom row up
    starts = [min(span["start_us"] for span in row["spans"]) for row in rows]
    ends = [max(s["end_us"] for s in row["spans"]) - start for row, start in zip(rows, starts, strict=True)]
    longest = max(ends)
    figure, axes = panels(1, len(rows), height=1.4, sharex=True)
    slowest_first = sorted(zip(ends, starts, rows, strict=True), key=lambda regime: -regime[0])
    for panel, (end, start, row) in zip(axes[:, 0], slowest_first, strict=True):
        for span in row["spans"]:
            left, width = span["start_us"] - start, span["end_us"] - span["start_us"]
            y, (color, ink) = list(looks).index(span["stream"]), looks[span["stream"]]
            panel.barh(y, width, 0.8, left, color=color, edgecolor="white")
            if width > longest / 60:
                panel.text(left + width / 2, y, span["chunk"], ha="center", va="center", color=ink)
        panel.axvline(end, color=BLACK, linewidth=0.8, linestyle="--")
        panel.text(end, 1.5, f"{end:.1f} us", ha="right", va="bottom")
        if end < longest:
            panel.annotate("", (end, 0.5), (longest, 0.5), arrowprops={"arrowstyle": "->"})
            panel.text((end + longest) / 2, 0.6, f"saves {longest - end:.1f} us", ha="center")
        panel.set_title(f"HOP-B: {row['regime']}", loc="left")
        panel.set(yticks=range(2), yticklabels=list(looks), ylim=(-0.5, 1.5))
    panel.set(xlabel="time (us; shorter is better); the number in a box is its chunk", xlim=(0, longest * 1.01))
    return figure


def speculate(rows: list[Row]) -> Figure:
    """Draws the gain of drafts and tokens/s per user, one line per batch and length."""
    rows = [{**r, "workload": _workload(r)} for r in rows if "failed" not in r]
    models = grouped(rows, "model")
    workloads = _styles(rows, "workload", "{}", color=COLORS, marker=MARKERS)
    figure, axes = panels(2, max(len(models), 1), height=3)
    for pair, ((model,), found) in zip(axes, models.items(), strict=True):
        rate = found[-1]["acceptance"]
        curves(pair[0], found, "gamma", "gain_at_rate", {"marker": ""}, workload=workloads)
        curves(pair[0], found, "gamma", "gain", {"linestyle": ""}, workload=workloads)
        curves(pair[1], found, "gamma", "tokens_per_s_user", workload=workloads)
        pair[0].axhline(1, **LEVEL)
        pair[0].set(
            ylabel="tokens/s/user / those without drafts\n(higher is better)",
            title=f"{model}: measured (marks) and expected (lines)",
        )
        pair[1].set(ylabel="tokens/s/user (higher is better)", title=f"{model}: measured")
        for panel in pair:
            panel.set(xlabel=f"drafts of a step, each accepted at {rate:.0%}")
            panel.set_xticks(sorted({row["gamma"] for row in found}))
    legend(figure, [WORKLOADS, *workloads.values()])
    return figure


def sparse_map(rows: list[Row]) -> Figure:
    """Draws the speed-up of block-sparse over dense steps by batch and length, also projected without overhead.

    Source: gather-decode (BRL-2026-07), figure 3.
    """
    machines: dict[str, list[CostFit]] = {}
    for account in accounts(cell_of(row) for row in rows if "failed" not in row):
        machines.setdefault(account.machine, []).append(account)
    lengths = sorted({row["length"] for row in rows})
    batches = sorted({row["batch"] for row in rows})
    max_rows = max((len(same) for same in machines.values()), default=1)
    figure, axes = panels(max_rows + 1, max(len(machines), 1), height=1.9, sharex=True, sharey=True)
    for across, (machine, same) in zip(axes, machines.items(), strict=False):
        for panel in across[len(same) : -1]:
            panel.remove()
        for panel, account in zip(across, same, strict=False):
            _map(panel, account.measured, batches, lengths)
            panel.set_title(f"{account.budget}, measured")
        last = same[-1]
        projected = {(b, n): last.predicted(b, n, last.without_overhead) for b in batches for n in lengths}
        _map(across[-1], projected, batches, lengths)
        across[-1].set_title(f"{last.budget}, projected\nwithout overhead")
        across[0].set_ylabel(machine.replace(", ", "\n") + "\nsequences")
    for panel in axes[-1]:
        panel.set_xlabel("tokens in each sequence\n(higher numbers are better)")
    legend(figure, [{"linestyle": "", "label": "numbers: time of a dense step / time of a block-sparse step"}])
    return figure


def _map(panel: Axes, ratios: dict[tuple[int, int], float], batches: list[int], lengths: list[int]) -> None:
    values = [[math.log2(ratios[b, n]) if (b, n) in ratios else math.nan for n in lengths] for b in batches]
    panel.imshow(values, cmap="PuOr", vmin=-3, vmax=3, aspect="auto", origin="lower")  # symmetric around 1
    for (batch, length), ratio in ratios.items():
        at, ink = (lengths.index(length), batches.index(batch)), "white" if abs(math.log2(ratio)) > 1.7 else BLACK
        panel.text(*at, f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}", ha="center", va="center", color=ink)
    panel.set_xticks(range(len(lengths)), [short(length) for length in lengths])
    panel.set_yticks(range(len(batches)), [str(batch) for batch in batches])
    panel.grid(visible=False)


def needles(rows: list[Row]) -> Figure:
    """Draws needles found outside of sink and window by keys read; one panel per haystack."""
    rows = [{**r, "share": r["distant_hits"] / r["distant"]} for r in rows if r["distant"] and r["kvp"] == 1]
    lines = _scored(SCORED) | {
        "quest-64": {"label": "pages of 16", "color": BLUE, "marker": "P", "linestyle": ""},
        "parts-128-of-256": {"label": "parts of 16", "color": RED, "marker": "*", "linestyle": ""},
        "window": {"label": "window", "color": BLACK, "marker": "X", "linestyle": ""},
    }
    for row in rows:
        row["line"] = row["policy"] if row["policy"] in lines else row["policy"].rpartition("-")[0]

    def draw(panel: Axes, same: list[Row]) -> None:
        curves(panel, same, "keys", "share", line=lines)
        panel.axhline(next(r["share"] for r in same if r["policy"] == "dense"), **LEVEL)
        panel.set_ylim(-0.05, 1.05)

    found = grouped(rows, "haystack", "length")
    return facets(
        found, draw, [*lines.values(), {**LEVEL, "label": "dense"}],
        lambda haystack, length: f"{HAYSTACKS[haystack]}, {short(length)} tokens",
        "keys that a step reads", "needles found\n(higher is better)", base=2, percent=True, sharex=True, sharey=True,
        across=lambda _: (len({length for _, length in found}), len({haystack for haystack, _ in found})),
    )  # fmt: skip


def recall(rows: list[Row]) -> Figure:
    """Draws the recall of the best blocks, and the attention weight kept, by budget and length."""
    labels = {"recall": "best blocks found", "mass": "weight kept"}
    rows = [
        {**r, "what": what, "budget": budget, "value": value}
        for what in labels
        for r in rows
        for budget, value in zip(r["budgets"], r[what], strict=True)
        if (what, r["score"]) != ("recall", "best")
    ]
    scores = _scored({**SCORED, "best": "the best"})
    pages: dict[int, Style] = {n: {"linestyle": dash, "label": f"pages of {n}"} for n, dash in ((128, "-"), (16, "--"))}

    def draw(panel: Axes, same: list[Row]) -> None:
        curves(panel, same, "budget", "value", page=pages, score=scores)
        panel.set_ylabel(f"{labels[same[0]['what']]}\n(higher is better)")

    found = grouped(rows, "what", "length")
    return facets(
        dict(sorted(found.items(), key=lambda group: [*labels].index(group[0][0]))), draw,
        [*scores.values(), *pages.values()], lambda what, length: f"{short(length)} tokens" * (what == "recall"),
        "keys that are chosen", base=2, percent=True, across=lambda count: (count // 2, 2), sharex=True, sharey="row",
    )  # fmt: skip


def _scored(labels: dict[str, str]) -> dict[str, Style]:
    return {
        score: {"label": label, "color": color, "marker": marker}
        for (score, label), color, marker in zip(labels.items(), COLORS, MARKERS, strict=False)
    }


DRAW: dict[str, Callable[[list[Row]], Figure]] = {
    **{
        made.__name__: made
        for made in (step, grids, baselines, timeline, prefill, sparse_map, needles, recall, speculate)
    },
    "pareto": pareto.figure,
    "acceptance_positions": acceptance_figures.by_position,
    "acceptance_sparsities": acceptance_figures.sparsities,
    "acceptance_rejected": acceptance_figures.rejected,
    "drafters_gains": draft_figures.gains,
    "drafters_breakdown": draft_figures.breakdown,
    "tuned": tuned_tables.figure_of,
}
DRAWINGS: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "benchmarks" / "figures.yaml").read_text("utf-8"))


def make_figure(name: str, rows: list[Row]) -> Figure:
    """Draws rows as declared in figures.yaml."""
    of = DRAWINGS[name]
    if "draw" in of:
        return DRAW[of["draw"]](rows)
    fields = of["panels"].split()
    rows = [row for row in rows if "where" not in of or value(of["where"], LenientScope(row))]
    derived = of.get("derive", {}).items()
    rows = [{**row, **{field: value(expression, Scope(row)) for field, expression in derived}} for row in rows]
    ys: dict[str, Style] = of["y"] if isinstance(of["y"], dict) else {of["y"]: {}}
    ys = {y: _named(style) for y, style in ys.items()}
    lines = {field: _styles(rows, field, **_named(look)) for field, look in of["lines"].items()}

    def draw(panel: Axes, same: list[Row]) -> None:
        for y, style in ys.items():
            curves(panel, same, of["x"], y, style, **lines)

    def title(*values: Any) -> str:
        return render_cell(of["title"], dict(zip(fields, values, strict=True))) or ""

    keys = [style for style in ys.values() if "label" in style]
    keys += [style for field_styles in lines.values() for style in field_styles.values()]
    across = {"across": square} if of.get("across") == "square" else {}
    shared = {**across, **of.get("share", {})}
    figure = facets(
        grouped(rows, *fields), draw, keys, title, *of["axes"], level=of.get("level"), base=of["base"], **shared
    )
    if "floor" in of:
        figure.axes[0].set_ylim(of["floor"], None)
    return figure


def _named(look: Style) -> Style:
    return {
        key: getattr(palette, word, word) if isinstance(word, str) and word.isupper() else word
        for key, word in look.items()
    }


def rows_of(name: str, results: Path) -> list[Row]:
    """Returns the rows of a figure; empty if nothing was recorded."""
    of = DRAWINGS[name]
    rows = newest(results / f"{of['record']}.jsonl", *of["key"].split(), **of.get("only", {}))
    return [row for row in rows if "needs" not in of or row.get(of["needs"])]


def draw(name: str, results: Path, figures: Path) -> None:
    """Draws one figure with its provenance at the bottom; prints a line if there are no results."""
    source, target = results / f"{DRAWINGS[name]['record']}.jsonl", figures / f"{name}.png"
    rows = rows_of(name, results)
    if not rows:
        print(f"skipped {target}: {source} {'has no lines for it' if source.exists() else 'does not exist'}")
        return
    save(make_figure(name, rows), target, footer(rows))
    print(f"wrote {target}")


def footer(rows: list[Row]) -> str:
    """Returns on which GPUs, and at which commits, rows were measured or emulated."""
    commits: dict[str, dict[str, None]] = {}
    for row in rows:
        emulated_by = row.get("emulated_by")
        where = f"emulated on {emulated_by} x {row['device']}" if emulated_by else f"measured on {row['device']}"
        commits.setdefault(where, {})[row["commit"]] = None
    return "; ".join(f"{where}, commit{'s' * (len(found) > 1)} {', '.join(found)}" for where, found in commits.items())


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws the figures named on the command line, or all."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if handle_help(arguments, f"{__doc__}\nfigures: {', '.join(DRAWINGS)}"):
        return
    need_checkout("helix plot")
    names = [text for text in arguments if "=" not in text]
    try:
        options = parse([text for text in arguments if "=" in text], {"results": Path, "figures": Path})
        for name in names:
            if name not in DRAWINGS:
                raise ValueError(unknown_message(name, DRAWINGS))
    except ValueError as error:
        sys.exit(f"error: {error}")
    benchmarks = ROOT / "benchmarks"
    for name in names or DRAWINGS:
        draw(name, options.get("results", benchmarks / "results"), options.get("figures", benchmarks / "figures"))
