"""Runs a benchmark: loops over its cases, prints a table, appends the records."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from comm.emulated import emulating_processes, is_emulated
from launch.job.report import provenance

Row = dict[str, Any]


@dataclass(frozen=True)
class BenchContext:
    """What a benchmark runs with.

    Attributes:
        ranks: ranks of its jobs; more than there are GPUs when one or two GPUs emulate them.
        models: models to measure; None: all.
    """

    device: torch.device
    ranks: int
    models: list[str] | None = None

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def emulated(self) -> bool:
        return is_emulated(self.ranks)


@dataclass(frozen=True)
class Part:
    """Cases of one kind.

    Attributes:
        cases: the arguments of `measure` for each case; only the smallest without a GPU.
        measure: checks the result, then times it; yields rows as they are measured.
        columns: row keys that the table shows, and quotients `KEY/KEY`.
    """

    cases: Callable[[BenchContext], Iterable[tuple[Any, ...]]]
    measure: Callable[..., Iterable[Row]]
    columns: str
    title: str | None = None


@dataclass(frozen=True)
class Benchmark:
    """A benchmark of `helix bench`.

    Attributes:
        about: one sentence for the list of benchmarks.
        text: what `--help` adds to it.
        models: choices of `models=`.
        emulated: whether it can run over more ranks than there are GPUs.
        counted: whether it times nothing, so that its figures are the same without a GPU.
        summary: makes a last row from all others.
    """

    about: str
    text: str
    parts: tuple[Part, ...]
    models: tuple[str, ...] = ()
    emulated: bool = False
    counted: bool = False
    summary: Callable[[list[Row]], Row] | None = None


def run(benchmark: Benchmark, ctx: BenchContext) -> Iterator[Row]:
    """Yields rows as they are measured, and prints each part's table after its last row."""
    every = []
    for part in benchmark.parts:
        rows = []
        for case in part.cases(ctx):
            if ctx.gpu:
                torch.cuda.empty_cache()  # the next case, or the job it starts, needs the memory
            for row in part.measure(ctx, *case):
                rows.append(row)
                yield row
            print(".", end="", flush=True)
        print()
        show(part, rows)
        every += rows
    if benchmark.summary is not None:
        row = benchmark.summary(every)
        for name, value in row.items():
            print(f"{name}: {value}")
        yield row


def show(part: Part, rows: list[Row]) -> None:
    """Prints a table of the rows that have at least one of the part's columns."""
    columns = [*part.columns.split(), *["failed"] * any("failed" in row for row in rows)]
    heads = [re.sub(r"\bbar\b", "target", column.replace("_", " ")) for column in columns]
    table = Table(*heads, title=part.title)
    for row in rows:
        cells = [_cell(row, column) for column in columns]
        if set(cells) != {"-"}:
            table.add_row(*cells)
    if table.rows:
        Console(width=140).print(table)


def _cell(row: Row, column: str) -> str:
    value, _, other = (row.get(key) if key else None for key in column.partition("/"))
    if value is None or ("/" in column and other is None):
        return "-"
    if other is not None:
        value /= other
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def record(name: str, rows: Iterable[Row], ctx: BenchContext, output: Path | None) -> None:
    """Appends one JSON line per row to `output` as it is measured, so a later failure loses nothing."""
    count, facts = 0, provenance(ctx.device)
    if ctx.emulated:
        facts |= {"emulated_by": emulating_processes()}
    try:
        with output.open("a", encoding="utf-8") if output is not None else nullcontext() as file:
            for row in rows:
                if file is not None:
                    file.write(json.dumps({"name": name, **facts, **row}) + "\n")
                    file.flush()
                    count += 1
    finally:
        if output is not None:
            print(f"appended {count} lines to {output}")
