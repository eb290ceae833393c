"""Writes the tables of README.md and docs/ from `benchmarks/results/`, or prints whole ones.

  helix tables              all pages; long tables of results are sampled to eight rows
  helix tables NAME ...     these tables, with all rows

Tables are between `<!-- table NAME -->` and `<!-- end -->`; if a point was measured more than once, the newest
line counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.records.columns import fill_tables
from benchmarks.records.declared import declared, table_of
from helix.schema import unknown_message
from launch.inputs.arguments import handle_help, need_checkout
from launch.inputs.compose import ROOT

ROWS, MAX_ROWS = 8, 12  # rows to keep of a long table of results, and its maximum length
OF_PAPERS = ("docs/simulator.md",)  # `helix papers` writes these, like benchmarks/papers/README.md
TABLES: dict[str, Callable[[], list[str]]] = {name: partial(table_of, name) for name in declared()}
PAGES = [
    "README.md",
    *sorted(
        name
        for path in (ROOT / "docs").rglob("*.md")
        if "<!-- table" in path.read_text("utf-8") and (name := str(path.relative_to(ROOT))) not in OF_PAPERS
    ),
]


def shorten_table(name: str, table: Sequence[str]) -> list[str]:
    """Samples eight rows of a table of more than twelve: the first, the last, and evenly between."""
    head, rows = list(table[:2]), [line for line in table[2:] if line.startswith("|")]
    if len(rows) <= MAX_ROWS:
        return list(table)
    sample = [rows[round(i * (len(rows) - 1) / (ROWS - 1))] for i in range(ROWS)]
    rest = list(table[2 + len(rows) :])
    return [*head, *sample, "", f"{ROWS} of {len(rows)} rows; all: `helix tables {name}`", *rest]


def with_tables(name: str) -> str:
    """Returns a page's text with its tables filled from the results."""
    whole = not name.startswith("docs/results/")
    return fill_tables(
        (ROOT / name).read_text(), lambda table: TABLES[table]() if whole else shorten_table(table, TABLES[table]())
    )


def main() -> None:
    """Writes the tables of all pages, or prints the named ones."""
    if handle_help(names := sys.argv[1:], f"{__doc__}\ntables: {', '.join(TABLES)}"):
        return
    need_checkout("helix tables")
    if wrong := [name for name in names if name not in TABLES]:
        sys.exit(f"error: {unknown_message(wrong[0], TABLES)}")
    for name in names:
        print("\n".join(TABLES[name]()))
    for name in [] if names else PAGES:
        (ROOT / name).write_text(with_tables(name))
