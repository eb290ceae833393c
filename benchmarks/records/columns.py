"""Formats cells of a table, headings first, for a page and for a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rich.table import Table

Cells = Sequence[Sequence[str]]


def page(table: Cells) -> list[str]:
    """Returns a table as Markdown lines."""
    head, *body = ("".join(f"| {cell} " if cell else "| " for cell in line) + "|" for line in table)
    return [head, "|---" * len(table[0]) + "|", *body]


def terminal(table: Cells, title: str | None = None) -> Table:
    """Returns a table for the terminal."""
    head, *body = table
    shown = Table(*head, title=title)
    for line in body:
        shown.add_row(*line)
    return shown


def fill_tables(text: str, lines_of: Callable[[str], Sequence[str]]) -> str:
    """Replaces each table of a page between `<!-- table NAME -->` and `<!-- end -->`."""

    def table(found: re.Match[str]) -> str:
        return "\n".join([f"<!-- table {found[1]} -->", *lines_of(found[1]), "<!-- end -->"])

    return re.sub(r"<!-- table (\S+) -->.*?<!-- end -->", table, text, flags=re.DOTALL)
