"""Tables of rows by columns, each a name and what it shows of a row: for a page and for a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rich.table import Table

from benchmarks.records.rows import Row, kv, shape

Show = Callable[[Row], str]
Columns = dict[str, Show]
Cells = Sequence[Sequence[str]]  # a table's head, then its rows


def cells(columns: Columns, rows: Sequence[Row]) -> Cells:
    return [[*columns], *([cell(row) for cell in columns.values()] for row in rows)]


def page(table: Cells) -> list[str]:
    """A page's lines."""
    head, *body = ("".join(f"| {cell} " if cell else "| " for cell in line) + "|" for line in table)
    return [head, "|---" * len(table[0]) + "|", *body]


def lines(columns: Columns, rows: Sequence[Row]) -> list[str]:
    """A page's lines; none where there are no rows."""
    return page(cells(columns, rows)) if rows else []


def terminal(table: Cells, title: str | None = None) -> Table:
    head, *body = table
    shown = Table(*head, title=title)
    for line in body:
        shown.add_row(*line)
    return shown


def filled(text: str, lines_of: Callable[[str], Sequence[str]]) -> str:
    """A page's text, each table between `<!-- table NAME -->` and `<!-- end -->` anew."""

    def table(found: re.Match[str]) -> str:
        return "\n".join([f"<!-- table {found[1]} -->", *lines_of(found[1]), "<!-- end -->"])

    return re.sub(r"<!-- table (\S+) -->.*?<!-- end -->", table, text, flags=re.DOTALL)


# ---- cells


def at(name: str) -> Show:
    """A value as it stands."""
    return lambda r: str(r[name])


def of(name: str, unit: str = "", digits: int = 1, over: float = 1) -> Show:
    """A number in a unit; a dash where there is none."""
    return lambda r: "-" if r.get(name) is None else f"{r[name] / over:,.{digits}f} {unit}".strip()


def us(name: str, digits: int = 1) -> Show:
    return of(name, "us", digits)


def ms(name: str) -> Show:
    """Microseconds as milliseconds."""
    return of(name, "ms", 2, 1e3)


def share(name: str) -> Show:
    return lambda r: "-" if r[name] is None else f"{r[name]:.0%}"


def where_it_fits(cell: Show) -> Show:
    """A cell that is empty in rows of what failed."""
    return lambda r: "" if "failed" in r else cell(r)


def kilo(name: str) -> Show:
    """Tokens in units of 1,024."""
    return lambda r: f"{r[name] // 1024}K"


POINT: Columns = {"shape": shape, "KV": kv}
