"""Items of a paper (figures, tables, algorithms, claims), each with our counterpart."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.records.columns import page
from helix.schema import parse_value

NOT_RECORDED = "not recorded"
TEXT = Path(__file__).with_name("items.md")


class Item(NamedTuple):
    """One item of a paper.

    Attributes:
        what: the item, with its place in the paper.
        here: `done`, `partly` or `out of reach`, and why.
        ours: our figure, after the paper's if it has one.
        command: makes or checks the figure.
    """

    what: str
    here: str
    ours: str
    command: str


class Table(NamedTuple):
    """A table that a paper's command reprints.

    Attributes:
        command: makes the records that it shows.
        lines: returns its lines in Markdown.
    """

    command: str
    lines: Callable[[], Sequence[str]]


def filled_items(paper: str, figures: Mapping[str, Callable[..., str]]) -> list[Item]:
    """Reads a paper's items in order, with their figures filled in."""

    def figure(match: re.Match[str]) -> str:
        return figures[match[1]](*(parse_value(match[0], text, int | str) for text in match[2].split()))

    table = TEXT.read_text(encoding="utf-8").partition(f"\n## {paper}\n")[2].partition("\n## ")[0]
    assert {*re.findall(r"{(\w+)", table)} == figures.keys(), f"figures that the items of {paper} do not name"
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    filled = [[re.sub(r"{(\w+)([^}]*)}", figure, cell) for cell in row] for row in rows[1:]]
    return [Item(what, here, ours, command.strip("`")) for what, here, ours, command in filled]


def lines_of(items: Sequence[Item]) -> list[str]:
    """Formats items as table lines."""
    rows = [(item.what, item.here, item.ours, f"`{item.command}`") for item in items]
    return page([("item", "here", "our figure", "command"), *rows])


def span(values: Sequence[float], form: str, unit: str = "") -> str:
    """Formats the range of values, or says that none is recorded."""
    if not values:
        return NOT_RECORDED
    low, high = (format(value, form) for value in (min(values), max(values)))
    return (low if low == high else f"{low} to {high}") + (f" {unit}" if unit else "")
