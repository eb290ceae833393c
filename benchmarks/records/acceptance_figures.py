"""Figures of acceptance rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter

from benchmarks.records.acceptance_tables import TASKS, is_usual, widest
from benchmarks.records.rows import Row, grouped
from benchmarks.records.style import BLACK, BLUE, GRAY, GREEN, ORANGE, PURPLE, RED, SKY, Style, curves, facets, short

POLICIES: dict[str, Style] = {
    "any": {"label": "any", "color": BLUE, "marker": "h"},
    "all": {"label": "all", "color": SKY, "marker": "o"},
    "c2q": {"label": "c2q", "color": ORANGE, "marker": "s"},
    "last": {"label": "last", "color": RED, "marker": "v"},
    "accepted": {"label": "accepted", "color": PURPLE, "marker": "D"},
    "window": {"label": "window", "color": GRAY, "marker": "X"},
    "quest": {"label": "quest", "color": GREEN, "marker": "^"},
    "weights": {"label": "weights", "color": SKY, "marker": "P"},
    "oracle": {"label": "oracle", "color": BLACK, "marker": "*"},
}
# By reach and recent: Helix's default, the paper's.
SPREADS: dict[tuple[int, float], Style] = {
    (8, 0.5): {"linestyle": "-", "label": "half recent, reach 8"},
    (0, 0.0): {"linestyle": "--", "label": "by score alone"},
}


def _drawn(rows: Sequence[Row]) -> list[Row]:
    """Selects the rows to draw: longest texts, most prompts, fewest drafts, known policies and spreads.

    Blocks and shared selections are left out. A policy without reach and recent gets Helix's defaults.
    """
    length = max((r["length"] for r in rows), default=0)
    rows = widest([r for r in rows if r["length"] == length])
    gamma = min((r["gamma"] for r in rows), default=0)
    usual = next(iter(SPREADS))
    found = []
    for r in rows:
        spread = tuple(
            value if value is not None else other for value, other in zip((r["reach"], r["recent"]), usual, strict=True)
        )
        each = r["block"] in (None, 1) and r["heads"] in (None, "each")
        if each and r["gamma"] == gamma and r["policy"] in POLICIES and spread in SPREADS:
            found.append({**r, "spread": spread})
    return found


def _figure(rows: list[Row], draw: Callable[[Axes, list[Row]], None], x: str, y: str, percent: bool = False) -> Figure:
    keys = [style for policy, style in POLICIES.items() if any(r["policy"] == policy for r in rows)]
    several = any(r["spread"] != next(iter(SPREADS)) for r in rows)
    return facets(
        grouped(rows, "task", "length"), draw, [*keys, *SPREADS.values()] if several else keys,
        lambda task, length: f"{TASKS[task]}, {short(length)} tokens", x, y, percent=percent, sharey=True,
    )  # fmt: skip


def by_position(rows: list[Row]) -> Figure:
    """Conditional acceptance rate by draft position, with intervals; one panel per task.

    Source: Vegas (arXiv:2602.07223), figure 4.
    """
    rows = _drawn([r for r in rows if is_usual(r)])
    first = {(r["task"], r["policy"], r["spread"]): r for r in reversed(rows)}
    points = [
        {**r, "position": position, "share": share, "off": [[share - low], [high - share]]}
        for r in first.values()
        for position, (share, (low, high)) in enumerate(zip(r["accepted_share"], r["accepted_range"], strict=True), 1)
        if share is not None
    ]

    def draw(panel: Axes, same: list[Row]) -> None:
        curves(panel, same, "position", "share", policy=POLICIES, spread=SPREADS)
        for r in same:
            color = POLICIES[r["policy"]]["color"]
            panel.errorbar(r["position"], r["share"], r["off"], fmt="none", ecolor=color, alpha=0.3)
        panel.set_ylim(0, 1.02)

    return _figure(
        points, draw, "position of a draft", "acceptance rate after accepted drafts\n(higher is better)", percent=True
    )


def rejected(rows: list[Row]) -> Figure:
    """Shares of rejected drafts by their probability under full attention; one panel per task.

    Source: Vegas (arXiv:2602.07223), figure 5.
    """
    rows = _drawn([r for r in rows if r["kvp"] == 1 and r["temperature"] == 0 and r.get("rejected")])
    points = [
        {**r, "probability": (tenth + 0.5) / 10, "share": count / r["rejected"]}
        for r in rows
        for tenth, count in enumerate(r["rejected_tenths"])
    ]

    def draw(panel: Axes, same: list[Row]) -> None:
        curves(panel, same, "probability", "share", policy=POLICIES, spread=SPREADS)

    return _figure(
        points, draw, "probability of a rejected token", "of all rejected tokens\n(left is better)", percent=True
    )


def sparsities(rows: list[Row]) -> Figure:
    """Tokens per iteration by the share of keys that drafts read, at the length with most rows; one panel per task.

    Source: Vegas (arXiv:2602.07223), figure 8.
    """
    lengths = [r["length"] for r in rows]

    def draw(panel: Axes, same: list[Row]) -> None:
        curves(panel, same, "sparsity", "tokens", policy=POLICIES, spread=SPREADS)
        panel.set_xscale("log")
        shares = sorted({r["sparsity"] for r in same})
        panel.set_xticks(shares[:: 1 + len(shares) // 5])
        panel.xaxis.set_major_formatter(ScalarFormatter())
        panel.xaxis.set_minor_locator(NullLocator())

    rows = _drawn([r for r in rows if r["length"] == max(lengths, key=lengths.count)])
    return _figure(rows, draw, "share of keys that drafts read", "tokens an iteration\n(higher is better)")
