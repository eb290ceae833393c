"""Draws the figures of `benchmarks/results/*.jsonl` into `benchmarks/figures/`: `helix plot [NAME ...]`.

results=DIR names where the results are, figures=DIR where the figures go. Without a NAME all are drawn.

Results are appended, so a file may hold a point several times: the last line of a point is the one drawn.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks.ranks.hopb import PEER_MEMORY
from benchmarks.records import acceptance_figures, draft_figures, fronts, tuned_tables
from benchmarks.records.acceptance_tables import KEY as ACCEPTANCE
from benchmarks.records.draft_tables import KEY as DRAFTERS
from benchmarks.records.fidelity_tables import KEY as FIDELITY
from benchmarks.records.hopb_tables import POINT as HOPB
from benchmarks.records.recorded_steps import cell_of
from benchmarks.records.rows import WORKLOAD, Row, grouped, newest
from benchmarks.records.sparse_bill import Account, accounts
from benchmarks.records.step_tables import ideal_us
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
from helix.schema import unknown
from launch.inputs.arguments import helped, need_checkout, parse
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
WORKLOADS: Style = {"linestyle": "", "label": "sequences x tokens:"}
BACKENDS = {"symm_mem": "our exchange", "nccl": "NCCL's exchange"}
RATES = ("tokens_per_s_user", "tokens_per_s_gpu")
SCORED = {"bounds": "bounds", "mean": "mean", "mean_std": "mean and deviation"}
HAYSTACKS = {"code": "code", "loop": "looped paragraph"}
MOST_MODELS = 4  # in the figure of baselines: those measured at most points


def _styles(rows: list[Row], field: str, label: str, **cycles: list[str]) -> dict[Any, Style]:
    """A style and its label for each value of a field."""
    return {
        value: {
            **{name: cycle[i % len(cycle)] for name, cycle in cycles.items()},
            "label": label.format(short(value) if isinstance(value, int) else value),
        }
        for i, (value,) in enumerate(grouped(rows, field))
    }


def _workload(row: Row) -> str:
    return f"{row['batch']} x {short(row['length'])}"


def kernels(rows: list[Row]) -> Figure:
    """Decode attention on one GPU beside the fastest of cuDNN, FlashAttention and FlashInfer."""
    batches = _styles(rows, "batch", "batch {}", color=COLOURS, marker=MARKERS)
    return facets(
        grouped([row for row in rows if row["best_peer_over_ours"] is not None], "heads"),
        partial(curves, x="length", y="best_peer_over_ours", batch=batches), batches.values(),
        "{} query/KV heads".format, "tokens of KV in each sequence",
        "time of the fastest peer / ours\n(higher is better)", level="as fast as the fastest peer", base=4, sharey=True,
    )  # fmt: skip


STEP = 2 << 20  # bytes of a decode step's longest message: beside a prompt's the others could not be told apart


def comm(rows: list[Row]) -> Figure:
    """Collectives of decode steps over symmetric memory beside NCCL's."""
    rows = [row for row in rows if row["message_bytes"] <= STEP]
    lines: dict[str, Style] = {
        "symm_us": {"label": "ours", "color": BLUE, "marker": "o"},
        "nccl_us": {"label": "NCCL", "color": ORANGE, "marker": "s"},
        "bar_us": {**LEVEL, "linestyle": "-", "label": "target"},
    }
    ranks = _styles(rows, "ranks", "{} GPUs", linestyle=DASHES)

    def draw(panel: Axes, same: list[Row]) -> None:
        for field, style in lines.items():
            curves(panel, same, "message_bytes", field, style, ranks=ranks)

    keys = [*lines.values(), *ranks.values()]
    axes = "message (bytes)", "time (us; lower is better)"
    figure = facets(grouped(rows, "op"), draw, keys, OPERATIONS.__getitem__, *axes, base=4, sharey=True)
    figure.axes[0].set_ylim(0, None)
    return figure


def moe(rows: list[Row]) -> Figure:
    """A rank's experts in 16 bits on each grid in decode steps, beside the time of reading the touched ones."""
    rows = [row for row in rows if row["tokens"] <= 64 and "fp8" not in row["model"]]
    rows = [{**row, "grid": f"{row['tpf']} x {row['ep']}", "ratio": row["us"] / row["bar_us"]} for row in rows]
    grids = _styles(rows, "grid", "tpf x ep = {}", color=COLOURS, marker=MARKERS)
    return facets(
        grouped(rows, "model"), partial(curves, x="tokens", y="ratio", grid=grids), grids.values(), str,
        "tokens of a step", "time / target (lower is better)", level="target", base=2, across=square, sharex=True,
        sharey=True,
    )  # fmt: skip


def prefill(rows: list[Row]) -> Figure:
    """Prefill attention as a share of what the matrix units can do."""
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
    """Time per token of whole models over the ideal, in the best layout that splits the KV."""
    models = grouped([row for row in rows if _kvp(row["layout"]) > 1], "model")
    columns, lines = square(len(models))
    most = max(len(grouped(same, "batch", "length")) for same in models.values())
    figure, axes = panels(columns, lines, height=0.2 * most + 0.75, sharex=True)
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
            panel.text(1.1, y, "does not fit", va="center", color=GREY)
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
    """Time per token of models with experts over `tpf x ep`, behind the same attention."""
    found = []
    for row in rows:
        widths = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", row["layout"])}
        if "failed" not in row:
            found.append({**row, **widths, "workload": _workload(row)})
    attention = "model", "kvp", "tpa"
    models = {key: same for key, same in grouped(found, *attention).items() if any(row["ep"] > 1 for row in same)}
    for same in (same for of_model in models.values() for same in grouped(of_model, "workload").values()):
        least = min(row["ep"] for row in same)
        whole = min(row["ttl_p50_us"] for row in same if row["ep"] == least)
        for row in same:
            row["times"] = row["ttl_p50_us"] / whole
    shown = [row for same in models.values() for row in same]
    workloads = _styles(shown, "workload", "{}", color=COLOURS, marker=MARKERS)
    return facets(
        models, partial(curves, x="ep", y="times", workload=workloads), [WORKLOADS, *workloads.values()],
        "{}, kvp={} tpa={}".format, "ep; tpf is 8 / ep", "time per token / that of ep = 1\n(lower is better)", base=2,
        across=square, sharey=True,
    )  # fmt: skip


def baselines(rows: list[Row]) -> Figure:
    """What one user sees and what one GPU yields, a curve over the batch for each way to divide the model."""
    ran = [{**row, "mode": row["layout"].split()[0]} for row in rows if "failed" not in row]
    by_model = grouped(ran, "model")
    models = sorted(by_model, key=lambda model: -len(by_model[model]))[:MOST_MODELS]
    found = grouped([row for row in ran if (row["model"],) in models], "model", "length")

    def draw(panel: Axes, same: list[Row]) -> None:
        fastest = [max(way, key=_user) for way in grouped(same, "mode", "batch").values()]
        curves(panel, fastest, *RATES, mode=MODES)
        for (batch,), of_batch in grouped(fastest, "batch").items():
            top = max(of_batch, key=_user)
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


def hopb(rows: list[Row]) -> Figure:
    """Time per token with HOP-B over the time without, in grids without TPA."""
    rows = [
        {"link": PEER_MEMORY, **row, "ratio": row["on_us"] / row["off_us"]}
        for row in rows
        if "tpa=1 " in row.get("layout", "tpa=1 ")
    ]
    colours = _styles(rows, "length", "{} tokens", color=COLOURS)
    dashes = _styles(rows, "chunks", "{} chunks", linestyle=DASHES)
    return facets(
        grouped(rows, "model", "backend", "link"),
        partial(curves, x="batch", y="ratio", over={"marker": "o"}, length=colours, chunks=dashes),
        [*colours.values(), *dashes.values()],
        lambda model, backend, link: f"{model}, {BACKENDS.get(backend, backend)}" + f", {link}" * (link != PEER_MEMORY),
        "sequences", "time per token with HOP-B / without\n(lower is better)", level="", base=2, sharey=True,
    )  # fmt: skip


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
    models = grouped(rows, "model")
    workloads = _styles(rows, "workload", "{}", color=COLOURS, marker=MARKERS)
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
    """What choices find of the best blocks, and what of dense attention's weight is kept, over budget and length."""
    said = {"recall": "best blocks found", "kept": "weight kept"}
    rows = [
        {**r, "what": what, "budget": budget, "value": value}
        for what in said
        for r in rows
        for budget, value in zip(r["budgets"], r[what], strict=True)
        if (what, r["score"]) != ("recall", "best")
    ]
    scores = _scored({**SCORED, "best": "the best"})
    pages: dict[int, Style] = {n: {"linestyle": dash, "label": f"pages of {n}"} for n, dash in ((128, "-"), (16, "--"))}

    def draw(panel: Axes, same: list[Row]) -> None:
        curves(panel, same, "budget", "value", page=pages, score=scores)
        panel.set_ylabel(f"{said[same[0]['what']]}\n(higher is better)")

    found = grouped(rows, "what", "length")
    return facets(
        dict(sorted(found.items(), key=lambda group: [*said].index(group[0][0]))), draw,
        [*scores.values(), *pages.values()], lambda what, length: f"{short(length)} tokens" * (what == "recall"),
        "keys that are chosen", base=2, percent=True, across=lambda count: (count // 2, 2), sharex=True, sharey="row",
    )  # fmt: skip


def _scored(labels: dict[str, str]) -> dict[str, Style]:
    """A style for each score by which blocks are chosen."""
    return {
        score: {"label": label, "color": colour, "marker": marker}
        for (score, label), colour, marker in zip(labels.items(), COLOURS, MARKERS, strict=False)
    }


class Drawing(NamedTuple):
    """A figure: how it is drawn, from which results, what names a point there, and which kind of line if of several.

    Attributes:
        field: what tells kinds apart.
        needs: a field without which a line is not drawn: older ones lack it.
    """

    draw: Callable[[list[Row]], Figure]
    source: str
    key: tuple[str, ...]
    kind: str | None = None
    field: str = "kind"
    needs: str = ""


DRAWINGS = {
    "kernels": Drawing(kernels, "kernels", ("kind", "heads", "batch", "length", "queries"), "decode"),
    "moe": Drawing(moe, "moe", ("model", "tpf", "ep", "tokens"), "moe"),
    "comm": Drawing(comm, "comm", ("op", "ranks", "message_bytes")),
    "step": Drawing(step, "step", WORKLOAD),
    "step.emulated-8": Drawing(step, "step.emulated-8", WORKLOAD),
    "grids.emulated-8": Drawing(grids, "step.emulated-8", WORKLOAD),
    "baselines.emulated-8": Drawing(baselines, "baselines.emulated-8", WORKLOAD),
    "fronts-deepseek-r1": Drawing(fronts.figure, "fronts", fronts.KEY, "deepseek-r1", "model"),
    "fronts-llama-3.1-405b": Drawing(fronts.figure, "fronts", fronts.KEY, "llama-3.1-405b", "model"),
    "hopb": Drawing(hopb, "hopb", HOPB, "ttl"),
    "hopb-timeline": Drawing(timeline, "hopb", ("kind", "regime"), "timeline"),
    "prefill": Drawing(prefill, "prefill", ("kind", "heads", "q_tokens", "length"), "kernel"),
    "sparse-map": Drawing(sparse_map, "sparse-steps", (*WORKLOAD, "attention")),
    "sparse-map.emulated-8": Drawing(sparse_map, "sparse-steps.emulated-8", (*WORKLOAD, "attention")),
    "fidelity-needles": Drawing(needles, "fidelity", FIDELITY, "needles"),
    "fidelity-recall": Drawing(recall, "fidelity", FIDELITY, "recall"),
    "acceptance-places": Drawing(acceptance_figures.places, "acceptance", ACCEPTANCE, "acceptance"),
    "acceptance-sparsity": Drawing(acceptance_figures.sparsities, "acceptance", ACCEPTANCE, "sweep"),
    "acceptance-refused": Drawing(acceptance_figures.refused, "acceptance", ACCEPTANCE, "acceptance", needs="refused"),
    "drafters-gains": Drawing(draft_figures.gains, "drafters", DRAFTERS, "drafters"),
    "drafters-breakdown": Drawing(draft_figures.breakdown, "drafters", DRAFTERS, "drafters"),
    "tuned": Drawing(tuned_tables.drawn, "tune", tuned_tables.KEY),
    "speculate": Drawing(speculate, "speculate", ("kind", *WORKLOAD, "gamma"), "synthetic"),
}


def rows_of(name: str, results: Path) -> list[Row]:
    """The rows that a figure is drawn from; none where nothing was recorded."""
    drawing = DRAWINGS[name]
    only = {} if drawing.kind is None else {drawing.field: drawing.kind}
    rows = newest(results / f"{drawing.source}.jsonl", *drawing.key, **only)
    return [row for row in rows if row.get(drawing.needs, not drawing.needs)]


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
