"""Fits hardware constants to recorded decode steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.models.search import joined
from benchmarks.records.recorded_steps import RECORDED, Cell
from helix.models import DecoderSpec
from helix.planner.hardware import MEASURED, Array, Constant, Hardware
from helix.planner.points import Points
from helix.planner.step import predict
from kernels.dense.linear_sm90 import MAX_ROWS, MIN_ROWS

MAX_CHANGE, MIN_CHANGE = (
    0.32,
    0.0025,
)  # relative changes of a constant to try, each half the previous
PRODUCT_ROWS = (1, MIN_ROWS, MAX_ROWS)  # two constants, for two kernels


@dataclass(frozen=True)
class _Steps:
    """Points of one model and length, predicted as a batch, with the measured seconds [n] of their steps."""

    spec: DecoderSpec
    points: Points
    length: int
    ttl_s: Array

    def errors(self, hardware: Hardware) -> Array:
        return np.log(predict(self.spec, hardware, self.points, self.length, RECORDED).ttl_s / self.ttl_s)


def _together(cells: Iterable[Cell]) -> list[_Steps]:
    groups: dict[tuple[str, int | None, int], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.model, cell.layers, cell.length), []).append(cell)
    return [
        _Steps(same[0].spec, joined([c.points for c in same]), length, np.array([c.ttl_us for c in same]) / 1e6)
        for (_, _, length), same in groups.items()
    ]


def _errors(hardware: Hardware, steps: Sequence[_Steps]) -> Array:
    return np.concatenate([same.errors(hardware) for same in steps])


def errors(hardware: Hardware, cells: Iterable[Cell]) -> Array:
    """Returns log(predicted / measured) of all cells."""
    return _errors(hardware, _together(cells))


def fit(hardware: Hardware, cells: Iterable[Cell], source: str) -> Hardware:
    """Fits the constants that no single kernel shows, by minimizing the mean |log error|.

    These are the read rate, a kernel's time beyond its bytes, and a projection's, for one row and for several;
    cuBLAS's time, for more rows, is unchanged. Deterministic coordinate descent with shrinking steps.
    """
    steps = _together(cells)

    def loss(hardware: Hardware) -> float:
        return float(np.abs(_errors(hardware, steps)).mean())

    product_s = hardware.product_s or {1: hardware.kernel_s}
    one, several = (product_s[min(product_s, key=lambda other: abs(other - rows))] for rows in (1, MAX_ROWS))
    fixed = {rows: one if rows < MIN_ROWS else several for rows in PRODUCT_ROWS}
    library = {rows: constant for rows, constant in hardware.product_s.items() if rows > MAX_ROWS}
    best = replace(hardware, product_s=fixed | library)
    moves = [_read_rate, _kernel, _products(range(1, MIN_ROWS)), _products(range(MIN_ROWS, MAX_ROWS + 1))]
    best_loss, change = loss(best), MAX_CHANGE
    while change >= MIN_CHANGE:
        moved = False
        for move in moves:
            for factor in (1 + change, 1 / (1 + change)):
                tried = move(best, factor)
                if (found := loss(tried)) < best_loss * (1 - 1e-9):
                    best, best_loss, moved = tried, found, True
        change = change if moved else change / 2

    def named(constant: Constant) -> Constant:
        return Constant(float(f"{constant.value:.3g}"), MEASURED, source)

    return replace(
        best,
        read_bytes_per_s=named(best.read_bytes_per_s),
        kernel_s=named(best.kernel_s),
        product_s={rows: named(best.product_s[rows]) for rows in PRODUCT_ROWS} | library,
    )


def _read_rate(hardware: Hardware, factor: float) -> Hardware:
    return replace(hardware, read_bytes_per_s=hardware.read_bytes_per_s.times(factor))


def _kernel(hardware: Hardware, factor: float) -> Hardware:
    return replace(hardware, kernel_s=hardware.kernel_s.times(factor))


def _products(row_range: range) -> Callable[[Hardware, float], Hardware]:
    def move(hardware: Hardware, factor: float) -> Hardware:
        product_s = hardware.product_s.items()
        return replace(hardware, product_s={rows: c.times(factor) if rows in row_range else c for rows, c in product_s})

    return move


def quantiles(sizes: Iterable[float]) -> tuple[float, float]:
    """Returns the median and p90 of |predicted / measured - 1| from the results of `errors`."""
    relative = np.abs(np.expm1(np.array(list(sizes))))
    return float(np.median(relative)), float(np.quantile(relative, 0.9))
