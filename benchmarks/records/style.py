"""The style of all figures: as wide as a README on GitHub, and with text that stays legible there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # before pyplot, as there may be no display
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator, PercentFormatter

from benchmarks.records.rows import Row, grouped

Style = dict[str, Any]
WIDTH = 830 / 96  # inches: a README on GitHub is 830 pixels wide, at 96 per inch
TEXT = 9  # points; the smallest text
DPI = 150  # more than 96, for high-density screens
# Okabe and Ito's palette, which color-blind readers can tell apart.
BLUE, ORANGE, GREEN, PURPLE, RED, SKY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9"
BLACK, GRAY = "#000000", "#666666"
COLORS = [BLUE, ORANGE, GREEN, PURPLE, RED, SKY, BLACK]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
DASHES = ["-", "--", ":", "-."]
LEVEL: Style = {"color": BLACK, "linewidth": 1.0, "linestyle": ":"}  # a reference line: an ideal, a target

mpl.rcParams.update(
    {
        "font.size": TEXT,
        "axes.titlesize": TEXT + 1,
        "axes.labelsize": TEXT,
        "xtick.labelsize": TEXT,
        "ytick.labelsize": TEXT,
        "legend.fontsize": TEXT,
        "legend.frameon": False,
        "legend.columnspacing": 1.4,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.alpha": 0.3,
        "lines.markersize": 4.5,
        "lines.linewidth": 1.3,
        "savefig.dpi": DPI,
    }
)


def panels(columns: int, rows: int = 1, height: float = 2.6, **shared: Any) -> tuple[Figure, Any]:
    """Makes a figure of `rows` x `columns` panels, each `height` inches high."""
    size = (WIDTH, height * rows + 0.8)
    return plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **shared)


def in_a_row(count: int) -> tuple[int, int]:
    """Returns columns and rows of `count` panels side by side."""
    return count, 1


def square(count: int) -> tuple[int, int]:
    """Returns columns and rows of `count` panels: two columns, or three for three."""
    columns = count if count in (1, 3) else 2
    return columns, math.ceil(count / columns)


def plain_ticks(axis: Axis) -> None:
    """Sets plain numbers on a logarithmic axis."""
    axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def sizes(panel: Axes, base: int = 2) -> None:
    """Sets a logarithmic x axis of tokens or bytes, with ticks at powers of `base`, a power of two."""
    panel.set_xscale("log", base=base)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    panel.xaxis.set_minor_locator(NullLocator())


def short(number: float) -> str:
    """Formats tokens or bytes: 65536 is 64K."""
    for unit, size in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if number >= size:
            return f"{number / size:g}{unit}"
    return f"{number:g}"


def line(panel: Axes, rows: Iterable[Row], x: str, y: str, style: Style) -> None:
    """Draws a line through two fields of rows."""
    points = sorted((row[x], row[y]) for row in rows if row.get(y) is not None)
    panel.plot([p[0] for p in points], [p[1] for p in points], **style)


def curves(
    panel: Axes, rows: Iterable[Row], x: str, y: str, over: Style | None = None, **styles: Mapping[Any, Style]
) -> None:
    """Draws a line per group of rows by the fields of `styles`, in their order; skips groups without a style."""
    groups = grouped(rows, *styles)
    for values in (values for values in product(*styles.values()) if values in groups):
        looks = [styles[field][value] for field, value in zip(styles, values, strict=True)]
        line(panel, groups[values], x, y, {key: value for look in (*looks, over or {}) for key, value in look.items()})


def facets(
    groups: Mapping[tuple[Any, ...], list[Row]], draw: Callable[[Axes, list[Row]], None], keys: Iterable[Style],
    title: Callable[..., str], x: str, y: str | None = None, *, level: str | None = None, base: int | None = None,
    percent: bool = False, across: Callable[[int], tuple[int, int]] = in_a_row, height: float = 2.6, **shared: Any,
) -> Figure:  # fmt: skip
    """Makes a panel for each group of rows, and one legend of `keys`.

    Args:
        title: returns a panel's title, from the values that identify its group.
        x, y: axis labels, on the outer panels; None: as drawn.
        level: label of a reference line at 1; an empty one is not in the legend.
        base: base of a logarithmic x axis, see `sizes`.
        percent: whether y is a share.
        across: returns columns and rows, from the number of panels.
        shared: axes that panels share, as for `panels`.
    """
    figure, axes = panels(*across(max(len(groups), 1)), height, **shared)
    for panel, (values, rows) in zip(axes.flat, groups.items(), strict=False):
        draw(panel, rows)
        if level is not None:
            panel.axhline(1, **LEVEL)
        if base is not None:
            sizes(panel, base)
        if percent:
            panel.yaxis.set_major_formatter(PercentFormatter(1))
        place = panel.get_subplotspec()
        panel.set(title=title(*values), xlabel=x * place.is_last_row())
        if y is not None:
            panel.set_ylabel(y * place.is_first_col())
        if shared:
            panel.label_outer()
    legend(figure, [*keys, *([{**LEVEL, "label": level}] if level else [])])
    return figure


def legend(figure: Figure, styles: Iterable[Style]) -> None:
    """Adds a one-line legend above the panels."""
    handles = [Line2D([], [], **{"color": GRAY, **style}) for style in styles]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))


def save(figure: Figure, path: Path, footer: str) -> None:
    """Writes a PNG with its provenance below, a line for each machine if one is too short, and closes the figure."""
    label = figure.supxlabel(footer, fontsize=TEXT, color=GRAY)
    if label.get_window_extent().width > figure.bbox.width:
        label.set_text(footer.replace("; ", ";\n"))
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without matplotlib's version, so that the same figure gives the same file.
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)
