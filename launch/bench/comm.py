"""The collectives of a decode step over 2, 4, 8 GPUs: `python -m launch.bench comm`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console as Terminal
from rich.table import Table

from launch.inputs import parts
from launch.job import spawn


def measure(width: int, *overrides: str) -> list[dict[str, Any]]:
    """A job over so many ranks; raises as `jobs.measure`."""
    rows: list[dict[str, Any]] = spawn.measure(width, ["bench=comm", f"layout.kvp={width}", *overrides])["collectives"]
    return rows


def widths(ranks: int) -> list[int]:
    """2, 4, 8 as far as there are GPUs, or ranks that they emulate."""
    return [ranks] if parts.is_emulated(ranks) else [width for width in (2, 4, 8) if width <= ranks]


def run(ranks: int) -> Iterator[dict[str, Any]]:
    """Rows of a job over 2, 4, .. ranks each, as it ends, and a table."""
    rows = []
    for width in widths(ranks):
        found = measure(width)
        yield from found
        rows += found
    table = Table("collective", "ranks", "bytes", "ours us (p90)", "torch.distributed us (p90)", "bare us", "target us")
    for r in rows:
        theirs = "-", "-"
        if r["nccl_us"] is not None:
            theirs = f"{r['nccl_us']:.1f} ({r['nccl_p90_us']:.1f})", f"{r['nccl_bare_us']:.1f}"
        table.add_row(
            r["op"], str(r["ranks"]), f"{r['message_bytes']:,}", f"{r['symm_us']:.1f} ({r['symm_p90_us']:.1f})",
            *theirs, str(r["bar_us"] or "-"),
        )  # fmt: skip
    Terminal(width=120).print(table)
