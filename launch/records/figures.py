"""Draws the figures of `benchmarks/results/*.jsonl` into `benchmarks/figures/`: `python -m launch.plot [NAME ...]`.

Results are appended, so a file may hold a point several times: the last line of a point is the one drawn.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl

mpl.use("Agg")  # before pyplot: there may be no display
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

Row = dict[str, Any]
Style = dict[str, Any]
READ_CEILING = 4.69e12  # bytes/s; `launch.bench.attention` has it too, but needs Triton
# Okabe and Ito's palette, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, PURPLE, RED, SKY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9"
BLACK, GREY = "#000000", "#BBBBBB"
COLOURS = [BLUE, ORANGE, GREEN, PURPLE, RED, SKY, BLACK]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
DASHES = ["-", "--", ":", "-."]
OURS: Style = {"label": "ours", "color": BLUE, "zorder": 3}
PEERS: dict[str, Style] = {
    "cudnn": {"label": "cuDNN", "color": ORANGE},
    "flash": {"label": "FlashAttention (torch)", "color": GREEN},
    "flashinfer": {"label": "FlashInfer", "color": PURPLE},
}


def load(path: Path, key: Sequence[str]) -> list[Row]:
    """The newest line of each point.

    Args:
        path: JSON lines, oldest first.
        key: the fields that name a point.
    """
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return list({tuple(row.get(field) for field in key): row for row in rows}.values())


def _natural(values: tuple[Any, ...]) -> list[list[str | int]]:
    """Sorts 8/1 before 28/4."""
    return [[int(p) if p.isdigit() else p for p in re.split(r"(\d+)", str(value))] for value in values]


FLOOR: Style = {"color": BLACK, "linewidth": 0.8, "linestyle": ":", "label": "floor"}


def _groups(rows: list[Row], *fields: str) -> dict[tuple[Any, ...], list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[field] for field in fields), []).append(row)
    return {key: found[key] for key in sorted(found, key=_natural)}


def _short(number: float, _: object = None) -> str:
    """65536 is 64K: tokens and bytes come in powers of two."""
    for unit, size in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if number >= size:
            return f"{number / size:g}{unit}"
    return f"{number:g}"


def _styles(rows: list[Row], field: str, label: str, **cycles: list[str]) -> dict[Any, Style]:
    """A style and its label for each value of a field."""
    return {
        value: {
            **{name: cycle[i % len(cycle)] for name, cycle in cycles.items()},
            "label": label.format(_short(value) if isinstance(value, int) else value),
        }
        for i, (value,) in enumerate(_groups(rows, field))
    }


def _panels(columns: int, rows: int = 1) -> tuple[Figure, Any]:
    size = (4.2 * columns + 2, 3.4 * rows + 0.4)
    return plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)


def _label(panel: Axes, x: str, y: str, x_base: int, y_log: bool = True) -> None:
    """Labels, and logarithmic axes with plain numbers on them."""
    panel.set(xlabel=x, ylabel=y)
    panel.set_xscale("log", base=x_base)
    if y_log:
        panel.set_yscale("log")
    for axis in [panel.xaxis] * (x_base == 10) + [panel.yaxis] * y_log:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    if x_base == 2:
        panel.xaxis.set_major_formatter(FuncFormatter(_short))


def _line(panel: Axes, rows: list[Row], x: str, y: str, style: Style) -> None:
    points = sorted((row[x], row[y]) for row in rows if row.get(y) is not None)
    panel.plot([p[0] for p in points], [p[1] for p in points], **{"markersize": 4.5, "linewidth": 1.3, **style})


def _legend(figure: Figure, styles: Iterable[Style]) -> None:
    handles = [Line2D([], [], **{"color": GREY, **style}) for style in styles]
    figure.legend(handles=handles, loc="outside right upper", fontsize=8, frameon=False)


def _compare(
    rows: list[Row], over: str, x: str, lines: dict[str, Style], by: str, marks: dict[Any, Style], *extra: Style
) -> Figure:
    """A panel for each value of `over`, with lines of all the fields that were measured, split by `by`."""
    lines = {field: style for field, style in lines.items() if any(row.get(field) is not None for row in rows)}
    panels = _groups(rows, over)
    figure, axes = _panels(len(panels))
    for panel, ((title,), found) in zip(axes[0], panels.items(), strict=True):
        panel.set_title(f"{title} query/KV heads" if over == "heads" else title)
        for field, style in lines.items():
            for (value,), same in _groups(found, by).items():
                _line(panel, same, x, field, {**marks[value], **style})
    _legend(figure, [*lines.values(), *extra, *marks.values()])
    return figure


def kernels(rows: list[Row]) -> Figure:
    """Decode attention on one GPU beside its peers and the time that reading the KV takes."""
    rows = [{**row, "read_us": row["kv_bytes"] / READ_CEILING * 1e6} for row in rows]
    read = {"label": f"KV at {READ_CEILING / 1e12} TB/s", "color": BLACK, "marker": "", "linewidth": 0.8}
    lines = {"us": OURS, **{f"{peer}_us": style for peer, style in PEERS.items()}, "read_us": read}
    figure = _compare(rows, "heads", "kv_bytes", lines, "batch", _styles(rows, "batch", "batch {}", marker=MARKERS))
    for panel in figure.axes:
        _label(panel, "KV read (bytes, M = 2^20)", "time (us)", 2)
    return figure


def comm(rows: list[Row]) -> Figure:
    """Collectives over symmetric memory beside NCCL's."""
    nccl, target = {"label": "NCCL", "color": ORANGE, "marker": "o"}, {"label": "target", "color": BLACK}
    lines = {"symm_us": {**OURS, "marker": "o"}, "nccl_us": nccl, "bar_us": target}
    figure = _compare(rows, "op", "message_bytes", lines, "ranks", _styles(rows, "ranks", "{} ranks", linestyle=DASHES))
    for panel in figure.axes:
        _label(panel, "message (bytes, K = 2^10)", "time (us)", 2)
    return figure


def moe(rows: list[Row]) -> Figure:
    """A rank's experts on each grid: what a narrower share of more experts costs against a wider one of fewer."""
    rows = [{**row, "grid": f"{row['tpf']} x {row['ep']}"} for row in rows]
    grids = _styles(rows, "grid", "tpf x ep = {}", color=COLOURS, marker=MARKERS)
    lines: dict[str, Style] = {"us": {}, "bar_us": {"linestyle": ":", "marker": "", "linewidth": 0.8}}
    ideal: Style = {"linestyle": ":", "label": "touched experts / 4.2 TB/s + 8 us"}
    panels = _groups(rows, "model")
    figure, axes = _panels(len(panels))
    for panel, ((model,), found) in zip(axes[0], panels.items(), strict=True):
        panel.set_title(model)
        for field, style in lines.items():
            for (grid,), same in _groups(found, "grid").items():
                _line(panel, same, "tokens", field, {**grids[grid], **style})
        _label(panel, "tokens of the step", "experts of one rank of eight (us)", 2)
    _legend(figure, [*grids.values(), ideal])
    return figure


def prefill(rows: list[Row]) -> Figure:
    """Prefill attention as a share of what the matrix units can do."""
    lines = {"tflops": OURS, **{f"{peer}_tflops": style for peer, style in PEERS.items()}}
    rows = [{**row, **{f: row[f] / row["matrix_tflops"] for f in lines if row.get(f) is not None}} for row in rows]
    share: Style = {"color": BLACK, "linewidth": 0.8, "linestyle": "--", "label": "60%"}
    marks = _styles(rows, "q_tokens", "{} queries", marker=MARKERS)
    figure = _compare(rows, "heads", "length", lines, "q_tokens", marks, share)
    for panel in figure.axes:
        panel.axhline(0.6, **share)
        _label(panel, "KV length (tokens)", "share of the matrix rate", 2, y_log=False)
        panel.set_ylim(0, 1)
        panel.yaxis.set_major_formatter(PercentFormatter(1))
    return figure


def _kvp(layout: str) -> int:
    found = re.search(r"kvp=(\d+)", layout)
    assert found, f"no kvp in the layout {layout!r}"
    return int(found[1])


def step(rows: list[Row]) -> Figure:
    """TTL of whole models in floors: the best split of the KV, all others, and none beside it."""
    models = _groups(rows, "model")
    lines = {model: len(_groups(same, "batch", "length")) + len(same) for model, same in models.items()}
    columns: list[list[tuple[Any, ...]]] = [[] for _ in range(min(3, len(models)))]
    for model in sorted(models, key=lambda model: -lines[model]):  # the tallest first, each where there is most room
        min(columns, key=lambda column: sum(lines[other] + 5 for other in column)).append(model)
    height = max(sum(lines[model] for model in column) + 5 * len(column) for column in columns)
    figure = plt.figure(figsize=(6 * len(columns), 0.16 * height + 0.6), layout="constrained")
    outer = figure.add_gridspec(1, len(columns))
    for place, column in zip(outer, columns, strict=True):
        inner = place.subgridspec(len(column), 1, height_ratios=[lines[model] + 5 for model in column])
        for at, model in zip(inner, column, strict=True):
            panel = figure.add_subplot(at, title=model[0])
            _step_of_model(panel, models[model])
    names = {"best with kvp >= 2": BLUE, "others with kvp >= 2": GREY, "kvp = 1": ORANGE}
    handles = [Line2D([], [], color=colour, linewidth=6, label=name) for name, colour in names.items()]
    handles += [Line2D([], [], color=BLACK, linewidth=2, label="target for the best"), Line2D([], [], **FLOOR)]
    if any("superseded" in row for row in rows):
        handles.append(Line2D([], [], linestyle="", label="†: older kernels"))
    figure.legend(handles=handles, loc="outside upper center", ncols=3, fontsize=7, frameon=False)
    return figure


def _step_of_model(panel: Axes, rows: list[Row]) -> None:
    labels: list[str] = []
    for (batch, length), found in _groups(rows, "batch", "length").items():
        top = len(labels)
        labels.append(f"batch {batch}, {_short(length)} tokens")
        floors = {row["layout"]: row["ttl_p50_us"] / row["floor_us"] for row in found if "failed" not in row}
        best = min((floors[layout] for layout in floors if _kvp(layout) > 1), default=None)
        for row in sorted(found, key=lambda row: (_kvp(row["layout"]), row["layout"])):
            value, y = floors.get(row["layout"]), len(labels)
            labels.append(row["layout"])
            if value is None:
                panel.text(0, y, f" failed: {row['failed'][:40]}", va="center", fontsize=6, color=RED)
                continue
            colour = ORANGE if _kvp(row["layout"]) == 1 else BLUE if value == best else GREY
            panel.barh(y, value, height=0.8, color=colour)
            ink = "white" if colour == BLUE else BLACK
            older = " †" if "superseded" in row else ""
            panel.text(0, y, f" {value:.2f}{older}", va="center", fontsize=6, color=ink)
        if found[-1]["bar"] is not None:
            panel.vlines(found[-1]["bar"], top + 0.5, len(labels) - 0.5, color=BLACK, linewidth=2)
    panel.axvline(1, **FLOOR)
    panel.set_yticks(range(len(labels)), labels, fontsize=6)
    for label in panel.get_yticklabels():
        label.set_fontweight("normal" if "kvp=" in label.get_text() else "bold")
    panel.set_ylim(len(labels) - 0.5, -0.5)
    panel.set(xlabel="TTL p50, in floors: all weights and KV read once", ylabel="workload and layout")


def grids(rows: list[Row]) -> Figure:
    """TTL of models with experts over `tpf x ep`, behind the same attention: what experts on fewer GPUs cost."""
    found = []
    for row in rows:
        widths = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", row["layout"])}
        workload = f"{row['batch']} x {_short(row['length'])}"
        if "failed" not in row:
            found.append({**row, **widths, "workload": workload, "attention": (widths["kvp"], widths["tpa"])})
    panels = {}
    for (model,), of_model in _groups(found, "model").items():
        for attention in {row["attention"] for row in of_model if row["ep"] > 1}:
            panels[model] = [row for row in of_model if row["attention"] == attention]
    figure, axes = _panels(max(len(panels), 1))
    workloads = _styles(
        [row for same in panels.values() for row in same], "workload", "{}", color=COLOURS, marker=MARKERS
    )
    for panel, (model, of_model) in zip(axes[0], panels.items(), strict=True):
        panel.set_title(f"{model}, kvp={of_model[0]['kvp']} tpa={of_model[0]['tpa']}")
        for (workload,), same in _groups(of_model, "workload").items():
            whole = min(row["ttl_p50_us"] for row in same if row["ep"] == min(r["ep"] for r in same))
            _line(panel, [{**r, "times": r["ttl_p50_us"] / whole} for r in same], "ep", "times", workloads[workload])
        _label(panel, "ep (tpf is the GPUs / ep)", "TTL, in that of ep = 1", 2, y_log=False)
    _legend(figure, workloads.values())
    return figure


def baselines(rows: list[Row]) -> Figure:
    """What one user sees and what one GPU yields, a curve over the batch for each layout."""
    styles = _styles(rows, "layout", "{}", color=COLOURS, marker=MARKERS)
    models, lengths, measured = _groups(rows, "model"), _groups(rows, "length"), _groups(rows, "model", "length")
    figure, axes = _panels(len(lengths), len(models))
    for panel, (model, length) in zip(axes.flat, ((*m, *n) for m in models for n in lengths), strict=True):
        if (model, length) not in measured:
            panel.remove()
            continue
        ran = [row for row in measured[model, length] if "failed" not in row]
        for (layout,), found in _groups(ran, "layout").items():
            points = [(r["tokens_per_s_user"], r["tokens_per_s_gpu"]) for r in sorted(found, key=lambda r: r["batch"])]
            panel.plot(*zip(*points, strict=True), markersize=4.5, linewidth=1.3, **styles[layout])
        for row in ran:
            point = (row["tokens_per_s_user"], row["tokens_per_s_gpu"])
            panel.annotate(row["batch"], point, textcoords="offset points", xytext=(4, 3), fontsize=6)
        panel.set_title(f"{model}, {_short(length)} tokens")
        _label(panel, "tokens/s/user", "tokens/s/GPU", 10)
        if not ran:
            panel.text(0.5, 0.5, "no layout ran", ha="center", transform=panel.transAxes)
    _legend(figure, [*styles.values(), {"linestyle": "", "label": "numbers: batch"}])
    return figure


def hopb(rows: list[Row]) -> Figure:
    """TTL with HOP-B over TTL without, and the share of the exchange that it hides."""
    rows = [{**row, "ratio": row["on_us"] / row["off_us"]} for row in rows]
    columns = _groups(rows, "model", "backend")
    fields = {"ratio": "TTL on / off (ratio)", "hidden": "exchange hidden (share)"}
    colours = _styles(rows, "length", "{} tokens", color=COLOURS)
    dashes = _styles(rows, "chunks", "{} chunks", linestyle=DASHES)
    figure, axes = _panels(len(columns), 2)
    for panels, ((model, backend), found) in zip(axes.T, columns.items(), strict=True):
        panels[0].set_title(f"{model}, {backend}")
        for panel, (field, label) in zip(panels, fields.items(), strict=True):
            for (length, chunks), same in _groups(found, "length", "chunks").items():
                _line(panel, same, "batch", field, {**colours[length], **dashes[chunks], "marker": "o"})
            panel.axhline(1, color=BLACK, linewidth=0.8, linestyle=":")
            _label(panel, "batch (sequences)", label, 2, y_log=False)
        panels[1].axhline(0, color=BLACK, linewidth=0.8, linestyle=":")
        panels[1].yaxis.set_major_formatter(PercentFormatter(1))
    _legend(figure, [*colours.values(), *dashes.values()])
    return figure


def timeline(rows: list[Row]) -> Figure:
    """When each chunk is attended to and exchanged, the slowest regime above and what the others save of it.

    Source: Helix Parallelism, figure 3.
    """
    looks = {"exchange": (ORANGE, BLACK), "attention": (BLUE, "white")}  # from the lower row up
    starts = [min(span["start_us"] for span in row["spans"]) for row in rows]
    ends = [max(s["end_us"] for s in row["spans"]) - start for row, start in zip(rows, starts, strict=True)]
    longest = max(ends)
    size = (10, 1.3 * len(rows) + 0.9)
    figure, axes = plt.subplots(len(rows), figsize=size, sharex=True, squeeze=False, layout="constrained")
    slowest_first = sorted(zip(ends, starts, rows, strict=True), key=lambda regime: -regime[0])
    for panel, (end, start, row) in zip(axes[:, 0], slowest_first, strict=True):
        for span in row["spans"]:
            left, width = span["start_us"] - start, span["end_us"] - span["start_us"]
            y, (colour, ink) = list(looks).index(span["stream"]), looks[span["stream"]]
            panel.barh(y, width, 0.8, left, color=colour, edgecolor="white")
            if width > longest / 60:
                panel.text(left + width / 2, y, span["chunk"], ha="center", va="center", fontsize=8, color=ink)
        panel.axvline(end, color=BLACK, linewidth=0.8, linestyle="--")
        panel.text(end, 1.5, f"{end:.1f} us", ha="right", va="bottom", fontsize=8)
        if end < longest:
            panel.annotate("", (end, 0.5), (longest, 0.5), arrowprops={"arrowstyle": "->"})
            panel.text((end + longest) / 2, 0.6, f"saves {longest - end:.1f} us", ha="center", fontsize=8)
        panel.set_title(f"HOP-B: {row['regime']}", fontsize=10, loc="left")
        panel.set(yticks=range(2), yticklabels=list(looks), ylim=(-0.5, 1.5), ylabel="stream")
    panel.set(xlabel="time (us); the number in a box is its chunk", xlim=(0, longest * 1.01))
    return figure


def speculate(rows: list[Row]) -> Figure:
    """What drafts gain and what one user sees, a line for each batch and length."""
    rows = [{**r, "workload": f"{r['batch']} x {_short(r['length'])}"} for r in rows if "failed" not in r]
    models = _groups(rows, "model")
    workloads = _styles(rows, "workload", "{}", color=COLOURS, marker=MARKERS)
    figure, axes = _panels(2, max(len(models), 1))
    for panels, ((model,), found) in zip(axes, models.items(), strict=True):
        rate = found[-1]["acceptance"]
        for (workload,), same in _groups(found, "workload").items():
            style = workloads[workload]
            _line(panels[0], same, "gamma", "gain_at_rate", {**style, "marker": ""})
            _line(panels[0], same, "gamma", "gain", {**style, "linestyle": ""})
            _line(panels[1], same, "gamma", "tokens_per_s_user", style)
        panels[0].axhline(1, color=BLACK, linewidth=0.8, linestyle=":")
        panels[0].set(ylabel="tokens/s/user, in those without drafts", title=f"{model}, drafts kept at {rate}")
        panels[1].set(ylabel="tokens/s/user, as they came", title=model)
        for panel in panels:
            panel.set(xlabel="drafts of a step", xticks=sorted({row["gamma"] for row in found}))
    came: Style = {"label": "as they came", "marker": "o", "linestyle": ""}
    _legend(figure, [*workloads.values(), {"label": "tokens expected of a step"}, came])
    return figure


class Drawing(NamedTuple):
    """A figure: how it is drawn, from which results, what names a point there, and which kind of line if of several."""

    draw: Callable[[list[Row]], Figure]
    source: str
    key: tuple[str, ...]
    kind: str | None = None


WORKLOAD = ("model", "batch", "length", "layout")
DRAWINGS = {
    "kernels": Drawing(kernels, "kernels", ("kind", "heads", "batch", "length", "queries"), "decode"),
    "moe": Drawing(moe, "moe", ("model", "tpf", "ep", "tokens"), "moe"),
    "comm": Drawing(comm, "comm", ("op", "ranks", "message_bytes")),
    "step": Drawing(step, "step", WORKLOAD),
    "step.emulated-8": Drawing(step, "step.emulated-8", WORKLOAD),
    "grids.emulated-8": Drawing(grids, "step.emulated-8", WORKLOAD),
    "baselines.emulated-8": Drawing(baselines, "baselines.emulated-8", WORKLOAD),
    "hopb": Drawing(hopb, "hopb", ("kind", "backend", "model", "batch", "length", "chunks"), "ttl"),
    "hopb-timeline": Drawing(timeline, "hopb", ("kind", "regime"), "timeline"),
    "prefill": Drawing(prefill, "prefill", ("kind", "heads", "q_tokens", "length"), "kernel"),
    "speculate": Drawing(speculate, "speculate", ("kind", *WORKLOAD, "gamma"), "synthetic"),
}


def draw(name: str, results: Path, figures: Path) -> None:
    """Draws one figure, with what was measured where in small print under it; says so where there are no results."""
    drawing = DRAWINGS[name]
    source, target = results / f"{drawing.source}.jsonl", figures / f"{name}.png"
    rows = load(source, drawing.key) if source.exists() else []
    rows = [row for row in rows if drawing.kind is None or row["kind"] == drawing.kind]
    if not rows:
        print(f"skipped {target}: {source} {'has no lines for it' if source.exists() else 'does not exist'}")
        return
    figure = drawing.draw(rows)
    measured = dict.fromkeys(f"{_where(row)}, commit {row['commit']}" for row in rows)
    figure.supxlabel("; ".join(measured), fontsize=6, color="#555555")
    for panel in figure.axes:
        panel.set_axisbelow(True)
        panel.grid(alpha=0.3)
    figures.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=150)
    plt.close(figure)
    print(f"wrote {target}")


def _where(row: Row) -> str:
    emulated_by = row.get("emulated_by")
    return f"{emulated_by} x {row['device']} that emulate all ranks" if emulated_by else row["device"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws the figures named on the command line, or all."""
    parser = argparse.ArgumentParser(description="Draws figures from the JSON lines that benchmarks left.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(DRAWINGS)}; default: all")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="default %(default)s")
    parser.add_argument("--figures", type=Path, default=Path("benchmarks/figures"), help="default %(default)s")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.names if name not in DRAWINGS]
    if unknown:
        parser.error(f"no figure is called {', '.join(unknown)}; choose from {', '.join(DRAWINGS)}")
    for name in given.names or DRAWINGS:
        draw(name, given.results, given.figures)
