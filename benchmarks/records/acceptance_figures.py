"""Figures of how many drafts hold."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter, ScalarFormatter

from benchmarks.records.acceptance_tables import TASKS, is_usual, widest
from benchmarks.records.rows import Row
from benchmarks.records.style import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, Style, legend, panels, short

POLICIES: dict[str, Style] = {
    "any": {"label": "any", "color": BLUE, "marker": "h"},
    "all": {"label": "all", "color": SKY, "marker": "o"},
    "c2q": {"label": "c2q", "color": ORANGE, "marker": "s"},
    "last": {"label": "last", "color": RED, "marker": "v"},
    "accepted": {"label": "accepted", "color": PURPLE, "marker": "D"},
    "window": {"label": "window", "color": GREY, "marker": "X"},
    "quest": {"label": "quest", "color": GREEN, "marker": "^"},
    "weights": {"label": "weights", "color": SKY, "marker": "P"},
    "oracle": {"label": "oracle", "color": BLACK, "marker": "*"},
}
SPREAD = (8, 0.5), (0, 0.0)  # reach and recent: the product's, the paper's
DASHES = {SPREAD[0]: "-", SPREAD[1]: "--"}


def _spread(row: Row) -> tuple[int, float]:
    """Reach and recent of a row; of a policy that does not read them, the product's."""
    reach = SPREAD[0][0] if row["reach"] is None else row["reach"]
    return reach, SPREAD[0][1] if row["recent"] is None else row["recent"]


def _lines(rows: Sequence[Row]) -> dict[tuple[str, tuple[int, float]], list[Row]]:
    """Rows of the known policies by policy, reach and recent; blocks and shared choices are not drawn."""
    found: dict[tuple[str, tuple[int, float]], list[Row]] = {}
    for row in rows:
        drawn = row["block"] in (None, 1) and row["heads"] in (None, "each")
        if drawn and row["policy"] in POLICIES and _spread(row) in DASHES:
            found.setdefault((row["policy"], _spread(row)), []).append(row)
    return {key: found[key] for key in sorted(found, key=lambda key: ([*POLICIES].index(key[0]), SPREAD.index(key[1])))}


def _longest(rows: Sequence[Row]) -> list[Row]:
    """Rows of the longest texts, the most prompts and the fewest drafts: one line for each policy."""
    length = max((r["length"] for r in rows), default=0)
    rows = widest([r for r in rows if r["length"] == length])
    gamma = min((r["gamma"] for r in rows), default=0)
    return [r for r in rows if r["gamma"] == gamma]


def _of_tasks(rows: Sequence[Row]) -> tuple[Figure, list[tuple[Axes, list[Row]]]]:
    tasks = [task for task in TASKS if any(r["task"] == task for r in rows)]
    figure, axes = panels(max(len(tasks), 1), sharey=True)
    found = [(panel, [r for r in rows if r["task"] == task]) for panel, task in zip(axes[0], tasks, strict=False)]
    for panel, same in found:
        panel.set_title(f"{TASKS[same[0]['task']]}, {short(same[0]['length'])} tokens")
    return figure, found


def _keys(figure: Figure, rows: Sequence[Row]) -> None:
    lines = _lines(rows)
    styles: list[Style] = [POLICIES[policy] for policy in dict.fromkeys(policy for policy, _ in lines)]
    if {spread for _, spread in lines} > {SPREAD[0]}:
        styles += [
            {"linestyle": DASHES[spread], "label": label}
            for spread, label in zip(SPREAD, ("half recent, reach 8", "by score alone"), strict=True)
        ]
    legend(figure, styles)


def places(rows: list[Row]) -> Figure:
    """Drafts that hold where all before them did, by place, with ranges; a panel for each task.

    Source: Vegas (arXiv:2602.07223), figure 4.
    """
    rows = _longest([r for r in rows if is_usual(r)])
    figure, found = _of_tasks(rows)
    for panel, same in found:
        for (policy, spread), (row, *_) in _lines(same).items():
            points = [(i + 1, s, e) for i, (s, e) in enumerate(zip(row["kept_share"], row["kept_range"], strict=True))]
            points = [(place, share, ends) for place, share, ends in points if share is not None]
            x, y = [p[0] for p in points], [p[1] for p in points]
            style = {**POLICIES[policy], "linestyle": DASHES[spread]}
            panel.plot(x, y, **style)
            low, high = ([abs(p[2][i] - p[1]) for p in points] for i in (0, 1))
            panel.errorbar(x, y, [low, high], fmt="none", ecolor=style["color"], alpha=0.3)
        panel.set(xlabel="place of a draft", ylim=(0, 1.02))
        panel.yaxis.set_major_formatter(PercentFormatter(1))
    if found:
        found[0][0].set_ylabel("held, where all before did\n(higher is better)")
    _keys(figure, rows)
    return figure


def sparsities(rows: list[Row]) -> Figure:
    """Tokens an iteration over the share of keys that drafts read, of the length that has most; a panel for each task.

    Source: Vegas (arXiv:2602.07223), figure 8.
    """
    lengths = [r["length"] for r in rows]
    rows = _longest([r for r in rows if r["length"] == max(lengths, key=lengths.count)])
    figure, found = _of_tasks(rows)
    for panel, same in found:
        for (policy, spread), line in _lines(same).items():
            points = sorted((r["sparsity"], r["tokens"]) for r in line)
            style = {**POLICIES[policy], "linestyle": DASHES[spread]}
            panel.plot([p[0] for p in points], [p[1] for p in points], **style)
        panel.set(xlabel="share of keys that drafts read", xscale="log")
        shares = sorted({r["sparsity"] for r in same})
        panel.set_xticks(shares[:: 1 + len(shares) // 5])
        panel.xaxis.set_major_formatter(ScalarFormatter())
        panel.xaxis.set_minor_locator(NullLocator())
    if found:
        found[0][0].set_ylabel("tokens an iteration\n(higher is better)")
    _keys(figure, rows)
    return figure
