"""Formats tables and text to fit the terminal."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from textwrap import fill

UNLIMITED = 1 << 20  # for output to a file
GAP = "  "


def terminal_width() -> int:
    """Returns the width of the terminal, or the variable COLUMNS; UNLIMITED if there is neither."""
    return shutil.get_terminal_size((UNLIMITED, 0)).columns


def wrapped(text: str, width: int) -> str:
    """Wraps lines between words."""
    return "\n".join(fill(line, width, break_long_words=False, break_on_hyphens=False) for line in text.splitlines())


def command_line(words: Sequence[str], width: int) -> str:
    r"""Formats a command for pasting: indented, with \ at the end of lines that continue."""
    lines = [f"  {words[0]}"]
    for word in words[1:]:
        fits = len(lines[-1]) + len(word) + 3 <= width  # with a space before it and a \ after it
        lines[-1:] = [f"{lines[-1]} {word}"] if fits else [f"{lines[-1]} \\", f"    {word}"]
    return "\n".join(lines)


def table(columns: Mapping[str, Sequence[str]], width: int) -> str:
    """Formats a table as text of at most this width.

    Columns with the same value in every row go into a line above. Columns that do not fit go into further tables
    below, each of which repeats the first column.

    Args:
        columns: cells by column name; the name has its unit after a line break.
    """
    first, *others = columns
    same = [name for name in others if len(columns[name]) > 1 and len({*columns[name]}) == 1]
    others = [name for name in others if name not in same]
    most = _parts(columns, first, others, width)
    min_width = next(n for n in range(1, width + 1) if len(_parts(columns, first, others, n)) <= len(most))
    parts = _parts(columns, first, others, min_width)
    texts = [_table({name: columns[name] for name in (first, *part)}) for part in parts]
    units = (name.partition("\n") for name in same)
    above = ", ".join(f"{name} {columns[name + line + unit][0]} {unit}".rstrip() for name, line, unit in units)
    return "\n\n".join([*([wrapped(f"In every row: {above}.", width)] if same else []), *texts])


def _parts(columns: Mapping[str, Sequence[str]], first: str, others: Sequence[str], width: int) -> list[list[str]]:
    """Divides columns, in order, among as few tables of this width as possible."""
    parts: list[list[str]] = [[]]
    for name in others:
        if parts[-1] and sum(_column_width(n, columns[n]) for n in (first, *parts[-1], name)) - len(GAP) > width:
            parts.append([])
        parts[-1].append(name)
    return parts


def _column_width(name: str, cells: Sequence[str]) -> int:
    return max(len(text) for text in (*name.split("\n"), *cells)) + len(GAP)


def _table(columns: Mapping[str, Sequence[str]]) -> str:
    heads = [name.partition("\n")[::2] for name in columns]
    wide = [_column_width(name, cells) - len(GAP) for name, cells in columns.items()]
    texts = [not all(cell[:1].isdecimal() or cell == "-" for cell in cells) for cells in columns.values()]

    def line(cells: Sequence[str]) -> str:
        aligned = (c.ljust(n) if text else c.rjust(n) for c, n, text in zip(cells, wide, texts, strict=True))
        return GAP.join(aligned).rstrip()

    rows = [line(row) for row in zip(*columns.values(), strict=True)]
    head = [line(row) for row in zip(*heads, strict=True)]
    return "\n".join([*(row for row in head if row), "─" * (sum(wide) + len(GAP) * (len(wide) - 1)), *rows])
