"""Items of a paper (figures, tables, algorithms, claims), each beside what is here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.records.columns import page

NOT_RECORDED = "not recorded"


class Item(NamedTuple):
    """One item of a paper.

    Attributes:
        what: the item, with its place in the paper.
        here: `done`, `partly` or `out of reach`, and why.
        ours: our figure, the paper's before it where it has one.
        command: what makes or checks the figure.
    """

    what: str
    here: str
    ours: str
    command: str


class Table(NamedTuple):
    """A table that a paper's command reprints.

    Attributes:
        command: what makes the records that it shows.
        lines: computes its lines, in Markdown.
    """

    command: str
    lines: Callable[[], Sequence[str]]


def lines_of(items: Sequence[Item]) -> list[str]:
    """Formats items as the lines of a table."""
    rows = [(item.what, item.here, item.ours, f"`{item.command}`") for item in items]
    return page([("item", "here", "our figure", "command"), *rows])


def span(values: Sequence[float], form: str, unit: str = "") -> str:
    """Formats the least and the largest of some values, or says that none is recorded."""
    if not values:
        return NOT_RECORDED
    least, most = (format(value, form) for value in (min(values), max(values)))
    return (least if least == most else f"{least} to {most}") + (f" {unit}" if unit else "")
