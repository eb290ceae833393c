"""Figures that compare drafters in one engine."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.records.acceptance_figures import POLICIES
from benchmarks.records.draft_gains import DEMO, TASKS, best, gained
from benchmarks.records.draft_tables import PHASES, one_commit, timed
from benchmarks.records.rows import Row, grouped, kv
from benchmarks.records.style import BLACK, COLORS, Style, curves, facets, legend, panels

DRAFTERS: dict[str, Style] = {**POLICIES, "ngram": {"label": "ngram", "color": BLACK, "marker": "P"}}
BROKEN_DOWN = (112 << 10, 4)  # KV length and number of drafts
SHOWN_BATCHES = (1, 4, 20)


def gains(rows: list[Row]) -> Figure:
    """Gains with measured acceptance by sequence length; one panel per task and batch.

    Source: Vegas (arXiv:2602.07223), figures 9 and 11.
    """
    first = rows[0]["model"]
    found = best([r for r in timed() if r["model"] == first and r["batch"] in SHOWN_BATCHES])
    points = [
        {**r, "task": task, "gain": gain}
        for same in grouped(found, "batch").values()
        for r in one_commit(same)
        for task in TASKS
        if (gain := gained(r, DEMO, task)) is not None
    ]

    def draw(panel: Axes, same: list[Row]) -> None:
        curves(panel, same, "length", "gain", drafter=DRAFTERS)

    return facets(
        grouped(points, "batch", "task"), draw,
        [style for name, style in DRAFTERS.items() if any(r["drafter"] == name for r in points)],
        lambda batch, task: f"{first}, batch {batch}: {task}", "tokens of a sequence",
        "tokens/s over plain\n(higher is better)", level="plain decoding", base=2,
        across=lambda count: (len(TASKS), count // len(TASKS)), sharex=True, sharey=True,
    )  # fmt: skip


def breakdown(rows: list[Row]) -> Figure:
    """Phases of an iteration at the longest length; one panel per batch, one bar per drafter.

    Source: Vegas (arXiv:2602.07223), figures 3 and 10b.
    """
    first, (length, drafts) = rows[0]["model"], BROKEN_DOWN
    found = [r for r in rows if (r["model"], r["length"], r["gamma"]) == (first, length, drafts) and r.get("phase_us")]
    by_batch = {at: one_commit(same) for at, same in grouped([{**r, "kv": kv(r)} for r in found], "kv").items()}
    figure, axes = panels(max(1, len(by_batch)))
    styles = {phase: {"label": phase, "color": color} for phase, color in zip(PHASES, COLORS, strict=False)}
    for panel, ((where,), same) in zip(axes.flat, by_batch.items(), strict=True):
        names, below = [r["drafter"] for r in same], [0.0] * len(same)
        for phase, style in styles.items():
            phase_ms = [r["phase_us"].get(phase, 0.0) / 1e3 for r in same]
            panel.barh(names, phase_ms, left=below, color=style["color"])
            below = [x + y for x, y in zip(below, phase_ms, strict=True)]
        panel.set(title=f"{first}, {where}, {drafts} drafts", xlabel="ms (less is better)")
    legend(figure, [{**style, "marker": "s", "linestyle": ""} for style in styles.values()])
    return figure
