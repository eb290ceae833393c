"""Draws the figures of `benchmarks/results/*.jsonl` into `benchmarks/figures/`: `python -m benchmarks.plot [NAME ...]`.

results=DIR names where the results are, figures=DIR where the figures go. Without a NAME all are drawn.

Results are appended, so a file may hold a point several times: the last line of a point is the one drawn.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks.records import acceptance_figures
from benchmarks.records.acceptance_tables import KEY as ACCEPTANCE
from benchmarks.records.fidelity_tables import KEY as FIDELITY
from benchmarks.records.recorded_steps import cell_of
from benchmarks.records.rows import WORKLOAD, Row, newest
from benchmarks.records.sparse_bill import Account, accounts
from benchmarks.records.style import (
    BLACK,
    BLUE,
    COLOURS,
    DASHES,
    GREEN,
    GREY,
    LEVEL,
    MARKERS,
    ORANGE,
    PURPLE,
    Style,
    legend,
    panels,
    plain_ticks,
    save,
    short,
    sizes,
    square,
)
from launch.inputs.arguments import helped, need_checkout, parse, unknown
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
OPERATIONS = {"exchange": "exchange", "all_reduce_norm": "all-reduce and norm", "all_gather": "all-gather"}
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
WORKLOADS: Style = {"linestyle": "", "label": "sequences x tokens:"}
BACKENDS = {"symm_mem": "our exchange", "nccl": "NCCL's exchange"}
RATES = ("tokens_per_s_user", "tokens_per_s_gpu")
SCORED = {"bounds": "bounds", "mean": "mean", "mean_std": "mean and deviation"}
HAYSTACKS = {"code": "code", "loop": "looped paragraph"}
MOST_MODELS = 4  # in the figure of baselines: those measured at most points


def _natural(values: tuple[Any, ...]) -> list[list[tuple[int, str]]]:
    """Sorts 8/1 before 28/4, and 128K before 1M."""
    parts = (re.findall(r"(\d+)([KMG]?)|(\D+)", str(value)) for value in values)
    return [[(int(number or 0) * UNITS[unit], text) for number, unit, text in part] for part in parts]


def _groups(rows: list[Row], *fields: str) -> dict[tuple[Any, ...], list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[field] for field in fields), []).append(row)
    return {key: found[key] for key in sorted(found, key=_natural)}


def _styles(rows: list[Row], field: str, label: str, **cycles: list[str]) -> dict[Any, Style]:
    """A style and its label for each value of a field."""
    return {
        value: {
            **{name: cycle[i % len(cycle)] for name, cycle in cycles.items()},
            "label": label.format(short(value) if isinstance(value, int) else value),
        }
        for i, (value,) in enumerate(_groups(rows, field))
    }


def _line(panel: Axes, rows: list[Row], x: str, y: str, style: Style) -> None:
    points = sorted((row[x], row[y]) for row in rows if row.get(y) is not None)
    panel.plot([p[0] for p in points], [p[1] for p in points], **style)


def _workload(row: Row) -> str:
    return f"{row['batch']} x {short(row['length'])}"


def kernels(rows: list[Row]) -> Figure:
    """Decode attention on one GPU beside the fastest of cuDNN, FlashAttention and FlashInfer."""
    found = _groups([row for row in rows if row["best_peer_over_ours"] is not None], "heads")
    batches = _styles(rows, "batch", "batch {}", color=COLOURS, marker=MARKERS)
    figure, axes = panels(len(found), sharey=True)
    for panel, ((heads,), same) in zip(axes[0], found.items(), strict=True):
        for (batch,), line in _groups(same, "batch").items():
            _line(panel, line, "length", "best_peer_over_ours", batches[batch])
        panel.axhline(1, **LEVEL)
        sizes(panel, base=4)
        panel.set(title=f"{heads} query/KV heads", xlabel="tokens of KV in each sequence")
    axes[0, 0].set_ylabel("time of the fastest peer / ours\n(higher is better)")
    legend(figure, [*batches.values(), {**LEVEL, "label": "as fast as the fastest peer"}])
    return figure


def comm(rows: list[Row]) -> Figure:
    """Collectives over symmetric memory beside NCCL's."""
    lines: dict[str, Style] = {
        "symm_us": {"label": "ours", "color": BLUE, "marker": "o"},
        "nccl_us": {"label": "NCCL", "color": ORANGE, "marker": "s"},
        "bar_us": {**LEVEL, "linestyle": "-", "label": "target"},
    }
    ranks = _styles(rows, "ranks", "{} GPUs", linestyle=DASHES)
    found = _groups(rows, "op")
    figure, axes = panels(len(found), sharey=True)
    for panel, ((op,), same) in zip(axes[0], found.items(), strict=True):
        for (count,), line in _groups(same, "ranks").items():
            for field, style in lines.items():
                _line(panel, line, "message_bytes", field, {**ranks[count], **style})
        sizes(panel, base=4)
        panel.set(title=OPERATIONS[op], xlabel="message (bytes)")
    axes[0, 0].set(ylabel="time (us; lower is better)", ylim=(0, None))
    legend(figure, [*lines.values(), *ranks.values()])
    return figure


def moe(rows: list[Row]) -> Figure:
    """A rank's experts on each grid, beside the time that reading the touched ones should take."""
    rows = [{**row, "grid": f"{row['tpf']} x {row['ep']}", "ratio": row["us"] / row["bar_us"]} for row in rows]
    grids = _styles(rows, "grid", "tpf x ep = {}", color=COLOURS, marker=MARKERS)
    found = _groups(rows, "model")
    figure, axes = panels(*square(len(found)), sharex=True, sharey=True)
    for panel, ((model,), same) in zip(axes.flat, found.items(), strict=False):
        for (grid,), line in _groups(same, "grid").items():
            _line(panel, line, "tokens", "ratio", grids[grid])
        panel.axhline(1, **LEVEL)
        sizes(panel)
        panel.set(title=model, xlabel="tokens of a step", ylabel="time / target (lower is better)")
        panel.label_outer()
    legend(figure, [*grids.values(), {**LEVEL, "label": "target"}])
    return figure


def prefill(rows: list[Row]) -> Figure:
    """Prefill attention as a share of what the matrix units can do."""
    figure, axes = panels(1, height=0.55 * len(rows))
    panel, cases = axes[0, 0], sorted(rows, key=lambda row: (_natural((row["heads"],)), row["length"]))
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
    """Time per token of whole models over the ideal, in the best layout that splits the KV."""
    models = _groups([row for row in rows if _kvp(row["layout"]) > 1], "model")
    columns, lines = square(len(models))
    most = max(len(_groups(same, "batch", "length")) for same in models.values())
    figure, axes = panels(columns, lines, height=0.2 * most + 0.75, sharex=True)
    for panel in axes.flat[len(models) :]:
        panel.remove()
    for panel, ((model,), same) in zip(axes.flat, models.items(), strict=False):
        _step_of_model(panel, _groups(same, "batch", "length"))
        panel.set_title(model)
    figure.supylabel("sequences x tokens in each", fontsize="medium")
    for panel in axes[-1]:
        panel.set_xlabel("time per token / ideal (lower is better)")
    panel.set_xlim(0, panel.get_xlim()[1] * 1.3)  # room for the layouts' names
    handles: list[Style] = [{"color": BLUE, "linewidth": 6, "label": "best layout with kvp >= 2"}]
    handles += [{"color": BLACK, "linewidth": 2, "label": "target"}]
    legend(figure, [*handles, {**LEVEL, "label": "ideal: weights and KV read once"}])
    return figure


def _step_of_model(panel: Axes, workloads: dict[tuple[Any, ...], list[Row]]) -> None:
    panel.axvline(1, **LEVEL)
    for y, found in enumerate(workloads.values()):
        ran = [row for row in found if "failed" not in row]
        if not ran:
            panel.text(1.1, y, "does not fit", va="center", color=GREY)
            continue
        best = min(ran, key=lambda row: row["ttl_p50_us"])
        value = best["ttl_p50_us"] / best["floor_us"]
        panel.barh(y, value, 0.75, color=BLUE)
        widths = " ".join(best["layout"].split()[1:3])
        panel.text(0.1, y, f"{value:.2f}", va="center", color="white")
        panel.text(max(value, best["bar"] or 0) + 0.1, y, widths, va="center")
        if best["bar"] is not None:
            panel.vlines(best["bar"], y - 0.42, y + 0.42, color=BLACK, linewidth=2)
    panel.set_yticks(range(len(workloads)), [_workload(found[0]) for found in workloads.values()])
    panel.set(ylim=(len(workloads) - 0.5, -0.5))


def grids(rows: list[Row]) -> Figure:
    """Time per token of models with experts over `tpf x ep`, behind the same attention."""
    found = []
    for row in rows:
        widths = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", row["layout"])}
        if "failed" not in row:
            attention = (widths["kvp"], widths["tpa"])
            found.append({**row, **widths, "workload": _workload(row), "attention": attention})
    models = {}
    for (model,), of_model in _groups(found, "model").items():
        for attention in {row["attention"] for row in of_model if row["ep"] > 1}:
            models[model] = [row for row in of_model if row["attention"] == attention]
    shown = [row for same in models.values() for row in same]
    workloads = _styles(shown, "workload", "{}", color=COLOURS, marker=MARKERS)
    figure, axes = panels(*square(len(models)), sharey=True)
    for panel, (model, of_model) in zip(axes.flat, models.items(), strict=False):
        for (workload,), same in _groups(of_model, "workload").items():
            whole = min(row["ttl_p50_us"] for row in same if row["ep"] == min(r["ep"] for r in same))
            _line(panel, [{**r, "times": r["ttl_p50_us"] / whole} for r in same], "ep", "times", workloads[workload])
        sizes(panel)
        panel.set(title=f"{model}, kvp={of_model[0]['kvp']} tpa={of_model[0]['tpa']}")
        panel.set(xlabel="ep; tpf is 8 / ep", ylabel="time per token / that of ep = 1\n(lower is better)")
        panel.label_outer()
    legend(figure, [WORKLOADS, *workloads.values()])
    return figure


def baselines(rows: list[Row]) -> Figure:
    """What one user sees and what one GPU yields, a curve over the batch for each way to divide the model."""
    ran = [{**row, "mode": row["layout"].split()[0]} for row in rows if "failed" not in row]
    by_model = _groups(ran, "model")
    models = sorted(by_model, key=lambda model: -len(by_model[model]))[:MOST_MODELS]
    models, lengths = [model for model in by_model if model in models], _groups(ran, "length")
    figure, axes = panels(len(lengths), len(models), height=2.3)
    for panel, (model, length) in zip(axes.flat, ((m, n) for m in models for n in lengths), strict=True):
        same = [row for row in by_model[model] if (row["length"],) == length]
        fastest = {
            key: max(found, key=lambda row: row["tokens_per_s_user"])
            for key, found in _groups(same, "mode", "batch").items()
        }
        for mode, style in MODES.items():
            _line(panel, [row for key, row in fastest.items() if key[0] == mode], *RATES, style)
        for (batch,), found in _groups(list(fastest.values()), "batch").items():
            top = max(found, key=lambda row: row["tokens_per_s_user"])
            panel.annotate(batch, (top[RATES[0]], top[RATES[1]]), textcoords="offset points", xytext=(4, 4))
        panel.set(title=f"{model[0]}, {short(length[0])} tokens", xscale="log", yscale="log")
        panel.margins(0.12)
        plain_ticks(panel.xaxis)
        plain_ticks(panel.yaxis)
    for panel in axes[-1]:
        panel.set_xlabel("tokens/s/user (higher is better)")
    for panel in axes[:, 0]:
        panel.set_ylabel("tokens/s/GPU\n(higher is better)")
    legend(figure, [*MODES.values(), {"linestyle": "", "label": "numbers: batch"}])
    return figure


def hopb(rows: list[Row]) -> Figure:
    """Time per token with HOP-B over the time without."""
    rows = [{**row, "ratio": row["on_us"] / row["off_us"]} for row in rows]
    columns = _groups(rows, "model", "backend")
    colours = _styles(rows, "length", "{} tokens", color=COLOURS)
    dashes = _styles(rows, "chunks", "{} chunks", linestyle=DASHES)
    figure, axes = panels(len(columns), sharey=True)
    for panel, ((model, backend), found) in zip(axes[0], columns.items(), strict=True):
        for (length, chunks), same in _groups(found, "length", "chunks").items():
            _line(panel, same, "batch", "ratio", {**colours[length], **dashes[chunks], "marker": "o"})
        panel.axhline(1, **LEVEL)
        sizes(panel)
        panel.set(title=f"{model}, {BACKENDS.get(backend, backend)}", xlabel="sequences")
    axes[0, 0].set_ylabel("time per token with HOP-B / without\n(lower is better)")
    legend(figure, [*colours.values(), *dashes.values()])
    return figure


def timeline(rows: list[Row]) -> Figure:
    """When each chunk is attended to and exchanged, the slowest regime above and what the others save of it.

    Source: Helix Parallelism, figure 3.
    """
    looks = {"exchange": (ORANGE, BLACK), "attention": (BLUE, "white")}  # from the lower row up
    starts = [min(span["start_us"] for span in row["spans"]) for row in rows]
    ends = [max(s["end_us"] for s in row["spans"]) - start for row, start in zip(rows, starts, strict=True)]
    longest = max(ends)
    figure, axes = panels(1, len(rows), height=1.4, sharex=True)
    slowest_first = sorted(zip(ends, starts, rows, strict=True), key=lambda regime: -regime[0])
    for panel, (end, start, row) in zip(axes[:, 0], slowest_first, strict=True):
        for span in row["spans"]:
            left, width = span["start_us"] - start, span["end_us"] - span["start_us"]
            y, (colour, ink) = list(looks).index(span["stream"]), looks[span["stream"]]
            panel.barh(y, width, 0.8, left, color=colour, edgecolor="white")
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
    """What drafts gain and what one user sees, a line for each batch and length."""
    rows = [{**r, "workload": _workload(r)} for r in rows if "failed" not in r]
    models = _groups(rows, "model")
    workloads = _styles(rows, "workload", "{}", color=COLOURS, marker=MARKERS)
    figure, axes = panels(2, max(len(models), 1), height=3)
    for pair, ((model,), found) in zip(axes, models.items(), strict=True):
        rate = found[-1]["acceptance"]
        for (workload,), same in _groups(found, "workload").items():
            style = workloads[workload]
            _line(pair[0], same, "gamma", "gain_at_rate", {**style, "marker": ""})
            _line(pair[0], same, "gamma", "gain", {**style, "linestyle": ""})
            _line(pair[1], same, "gamma", "tokens_per_s_user", style)
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
    """Time of a dense step over that of a block-sparse one, by batch and length; projected without overhead as well.

    Source: gather-decode (BRL-2026-07), figure 3.
    """
    machines: dict[str, list[Account]] = {}
    for account in accounts(cell_of(row) for row in rows if "failed" not in row):
        machines.setdefault(account.machine, []).append(account)
    lengths = sorted({row["length"] for row in rows})
    batches = sorted({row["batch"] for row in rows})
    most = max((len(same) for same in machines.values()), default=1)
    figure, axes = panels(most + 1, max(len(machines), 1), height=1.9, sharex=True, sharey=True)
    for line, (machine, same) in zip(axes, machines.items(), strict=False):
        for panel in line[len(same) : -1]:
            panel.remove()
        for panel, account in zip(line, same, strict=False):
            _map(panel, account.measured, batches, lengths)
            panel.set_title(f"{account.budget}, measured")
        last = same[-1]
        projected = {(b, n): last.predicted(b, n, last.without_overhead) for b in batches for n in lengths}
        _map(line[-1], projected, batches, lengths)
        line[-1].set_title(f"{last.budget}, projected\nwithout overhead")
        line[0].set_ylabel(machine.replace(", ", "\n") + "\nsequences")
    for panel in axes[-1]:
        panel.set_xlabel("tokens in each sequence\n(higher numbers are better)")
    legend(figure, [{"linestyle": "", "label": "numbers: time of a dense step / time of a block-sparse step"}])
    return figure


def _map(panel: Axes, ratios: dict[tuple[int, int], float], batches: list[int], lengths: list[int]) -> None:
    values = [[math.log2(ratios[b, n]) if (b, n) in ratios else math.nan for n in lengths] for b in batches]
    panel.imshow(values, cmap="PuOr", vmin=-3, vmax=3, aspect="auto", origin="lower")  # the same either side of 1
    for (batch, length), ratio in ratios.items():
        at, ink = (lengths.index(length), batches.index(batch)), "white" if abs(math.log2(ratio)) > 1.7 else BLACK
        panel.text(*at, f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}", ha="center", va="center", color=ink)
    panel.set_xticks(range(len(lengths)), [short(length) for length in lengths])
    panel.set_yticks(range(len(batches)), [str(batch) for batch in batches])
    panel.grid(visible=False)


def needles(rows: list[Row]) -> Figure:
    """Needles that are found outside of sink and window, over the keys that a step reads; a panel for each text."""
    rows = [{**r, "share": r["distant_hits"] / r["distant"]} for r in rows if r["distant"] and r["kvp"] == 1]
    lines = _scored(SCORED)
    others: dict[str, Style] = {
        "quest-64": {"label": "bounds, pages of 16", "color": BLUE, "marker": "P", "linestyle": ""},
        "window": {"label": "window", "color": BLACK, "marker": "X", "linestyle": ""},
    }
    found = _groups(rows, "haystack", "length")
    figure, axes = panels(len({key[1] for key in found}), len({key[0] for key in found}), sharex=True, sharey=True)
    for panel, ((haystack, length), same) in zip(axes.flat, found.items(), strict=False):
        for score, style in lines.items():
            _line(panel, [r for r in same if r["policy"].rpartition("-")[0] == score], "keys", "share", style)
        for name, style in others.items():
            _line(panel, [r for r in same if r["policy"].startswith(name)], "keys", "share", style)
        dense = [r["share"] for r in same if r["policy"] == "dense"]
        panel.axhline(dense[0], **LEVEL)
        sizes(panel)
        panel.set(title=f"{HAYSTACKS[haystack]}, {short(length)} tokens", ylim=(-0.05, 1.05))
        panel.set(xlabel="keys that a step reads", ylabel="needles found\n(higher is better)")
        panel.yaxis.set_major_formatter(PercentFormatter(1))
        panel.label_outer()
    legend(figure, [*lines.values(), *others.values(), {**LEVEL, "label": "dense"}])
    return figure


def recall(rows: list[Row]) -> Figure:
    """What choices find of the best blocks, and what of dense attention's weight is kept, over budget and length."""
    rows = [
        {**r, "budget": budget, "found": found, "kept": kept}
        for r in rows
        for budget, found, kept in zip(r["budgets"], r["recall"], r["kept"], strict=True)
    ]
    lines = _scored({**SCORED, "best": "the best"})
    dashes: dict[int, Style] = {page: {"linestyle": dash} for page, dash in ((128, "-"), (16, "--"))}
    found = _groups(rows, "length")
    figure, axes = panels(len(found), 2, sharex=True, sharey="row")
    for column, ((length,), same) in zip(axes.T, found.items(), strict=True):
        for page, dash in dashes.items():
            for score, style in lines.items():
                of_line = [r for r in same if r["page"] == page and r["score"] == score]
                if score != "best":
                    _line(column[0], of_line, "budget", "found", {**style, **dash})
                _line(column[1], of_line, "budget", "kept", {**style, **dash})
        column[0].set(title=f"{short(length)} tokens", ylabel="best blocks found\n(higher is better)")
        column[1].set(xlabel="keys that are chosen", ylabel="weight kept\n(higher is better)")
        for panel in column:
            sizes(panel)
            panel.yaxis.set_major_formatter(PercentFormatter(1))
            panel.label_outer()
    pages = [{**dash, "label": f"pages of {page}"} for page, dash in dashes.items()]
    legend(figure, [*lines.values(), *pages])
    return figure


def _scored(labels: dict[str, str]) -> dict[str, Style]:
    """A style for each score by which blocks are chosen."""
    return {
        score: {"label": label, "color": colour, "marker": marker}
        for (score, label), colour, marker in zip(labels.items(), COLOURS, MARKERS, strict=False)
    }


class Drawing(NamedTuple):
    """A figure: how it is drawn, from which results, what names a point there, and which kind of line if of several."""

    draw: Callable[[list[Row]], Figure]
    source: str
    key: tuple[str, ...]
    kind: str | None = None


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
    "sparse-map": Drawing(sparse_map, "sparse-steps", (*WORKLOAD, "attention")),
    "sparse-map.emulated-8": Drawing(sparse_map, "sparse-steps.emulated-8", (*WORKLOAD, "attention")),
    "fidelity-needles": Drawing(needles, "fidelity", FIDELITY, "needles"),
    "fidelity-recall": Drawing(recall, "fidelity", FIDELITY, "recall"),
    "acceptance-places": Drawing(acceptance_figures.places, "acceptance", ACCEPTANCE, "acceptance"),
    "acceptance-sparsity": Drawing(acceptance_figures.sparsities, "acceptance", ACCEPTANCE, "sweep"),
    "speculate": Drawing(speculate, "speculate", ("kind", *WORKLOAD, "gamma"), "synthetic"),
}


def rows_of(name: str, results: Path) -> list[Row]:
    """The rows that a figure is drawn from; none where nothing was recorded."""
    drawing = DRAWINGS[name]
    rows = newest(results / f"{drawing.source}.jsonl", *drawing.key)
    return [row for row in rows if drawing.kind is None or row["kind"] == drawing.kind]


def draw(name: str, results: Path, figures: Path) -> None:
    """Draws one figure, at its foot what was measured where; says so where there are no results."""
    source, target = results / f"{DRAWINGS[name].source}.jsonl", figures / f"{name}.png"
    rows = rows_of(name, results)
    if not rows:
        print(f"skipped {target}: {source} {'has no lines for it' if source.exists() else 'does not exist'}")
        return
    save(DRAWINGS[name].draw(rows), target, footer(rows))
    print(f"wrote {target}")


def footer(rows: list[Row]) -> str:
    """Which GPUs rows were measured or emulated on, and at which commits."""
    commits: dict[str, dict[str, None]] = {}
    for row in rows:
        emulated_by = row.get("emulated_by")
        where = f"emulated on {emulated_by} x {row['device']}" if emulated_by else f"measured on {row['device']}"
        commits.setdefault(where, {})[row["commit"]] = None
    return "; ".join(f"{where}, commit{'s' * (len(found) > 1)} {', '.join(found)}" for where, found in commits.items())


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws the figures named on the command line, or all."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if helped(arguments, f"{__doc__}\nfigures: {', '.join(DRAWINGS)}"):
        return
    need_checkout("helix plot")
    names = [text for text in arguments if "=" not in text]
    try:
        given = parse([text for text in arguments if "=" in text], {"results": Path, "figures": Path})
        for name in names:
            if name not in DRAWINGS:
                raise ValueError(unknown(name, DRAWINGS))
    except ValueError as error:
        sys.exit(f"error: {error}")
    benchmarks = ROOT / "benchmarks"
    for name in names or DRAWINGS:
        draw(name, given.get("results", benchmarks / "results"), given.get("figures", benchmarks / "figures"))
