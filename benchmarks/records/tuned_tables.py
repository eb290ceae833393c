"""Compares tuned drafts with the best of a whole grid, and maps the grid, from records."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.ranks.tuning_steps import Measurement, TuningGrid, TuningResult, run
from benchmarks.records.rows import Row, check_commit, grouped, results
from benchmarks.records.tuned import heat_map

KEY = ("model", "batch", "length", "drafter", "gamma", "sparsity")


def found(rows: list[Row]) -> tuple[list[Measurement], TuningResult, Measurement]:
    """Returns a model's measurements, the search's result on them, and the fastest of the grid.

    With a fixed acceptance rate fewer keys are always better: the grid then has one sparsity.
    """
    check_commit(*rows)
    measured = [Measurement.of(r) for r in rows]
    sparse_rows = [m for m in measured if m.source.sparsity is not None]
    sparsities, gammas = (
        sorted({m.source.sparsity for m in sparse_rows if m.source.sparsity}),
        sorted({m.source.gamma for m in sparse_rows}),
    )
    forced = None if rows[0]["acceptance"] is None else sparse_rows[0].source.sparsity
    grid = TuningGrid(tuple(sparsities), tuple(gammas), rows[0]["most"], forced)
    tuned = run(grid, {m.source: m for m in measured}.__getitem__)
    best = max((m for m in sparse_rows if forced in (None, m.source.sparsity)), key=lambda m: m.rate)
    return measured, tuned, best


def rows() -> list[Row]:
    """Returns the first row of each model, with the drafts that the search finds and the best of the grid."""
    found_of = []
    for same in grouped(results("tune", *KEY), "model", "batch", "length").values():
        _, tuned, best = found(same)
        found_of.append({**same[0], "tuned": tuned, "best": best})
    return found_of


def worst() -> str:
    """Returns how much slower the search's result is than the best of a grid, at most."""
    groups = grouped(results("tune", *KEY), "model", "batch", "length").values()
    losses = [1 - tuned.sparse.rate / best.rate for _, tuned, best in map(found, groups)]
    return f"{len(losses)} models, at most {max(losses):.1%} behind the best of a grid" if losses else "not recorded"


def figure_of(rows: list[Row]) -> Figure:
    """Maps gamma against sparsity for the first model.

    Source: Vegas (arXiv:2602.07223), figure 13.
    """
    measured, tuned, _ = found([r for r in rows if r["model"] == rows[0]["model"]])
    return heat_map(measured, tuned)
