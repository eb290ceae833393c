"""The collectives of a decode step over 2, 4, 8 GPUs: `helix bench comm`."""

from __future__ import annotations

from benchmarks import jobs
from benchmarks.runner import BenchContext, Row
from comm.emulated import is_emulated


def measure(width: int, *overrides: str) -> list[Row]:
    """Runs a job over `width` ranks; raises like `jobs.measure`."""
    rows: list[Row] = jobs.measure(width, ["bench=comm", f"layout.kvp={width}", *overrides])["collectives"]
    return rows


def widths(ranks: int) -> list[int]:
    """Returns 2, 4, 8 as far as there are GPUs, or the number of emulated ranks."""
    return [ranks] if is_emulated(ranks) else [width for width in (2, 4, 8) if width <= ranks]


def cases(ctx: BenchContext) -> list[tuple[int]]:
    """Returns the widths as cases."""
    return [(width,) for width in widths(ctx.ranks)]


def timed(ctx: BenchContext, width: int) -> list[Row]:
    """Measures the collectives over `width` ranks."""
    return measure(width)
