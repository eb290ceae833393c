"""Tables of rows by columns, each a name and what it shows of a row: for a page and for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from benchmarks.records.rows import Row

Columns = dict[str, Callable[[Row], str]]


def lines(columns: Columns, rows: Sequence[Row]) -> list[str]:
    """A page's lines; none where there are no rows."""
    if not rows:
        return []
    head = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return [*head, *(f"| {' | '.join(cell(r) for cell in columns.values())} |" for r in rows)]


def terminal_table(title: str, columns: Columns, rows: Sequence[Row]) -> Table:
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    return table
