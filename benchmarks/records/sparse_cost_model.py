"""Cost model of a decode step, fitted to recorded ones: bytes, overhead, and block selection.

A dense step takes `overhead + bytes / bandwidth`: both are fitted to dense steps only. A block-sparse step reads fewer
bytes and pays for selection: a constant, a cost per sequence, and bounds that it reads at less than the bandwidth.
These are fitted to block-sparse steps. The planner's cost model counts the bytes, on the rank that reads most.
Source: gather-decode (BRL-2026-07), sections 2 and 9, where the cost of selection is one number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks import constants
from benchmarks.records.columns import Cells
from benchmarks.records.recorded_steps import RECORDED, RESULTS, Cell, read_cells
from benchmarks.records.rows import Row
from helix.planner.hardware import Hardware
from helix.planner.points import Sparse
from helix.planner.step import predict
from launch.inputs.break_even import crossover
from launch.inputs.hardware import load_hardware

TARGETS = (0.03, 0.06)  # median and maximum error of held-out steps
RECORDS = "helix bench sparse-steps"


@dataclass(frozen=True)
class StepReads:
    """What the rank that reads most reads in a step: all bytes, the bounds among them, the number of sequences."""

    size: float
    bounds: float
    sequences: int
    sparse: bool


@dataclass(frozen=True)
class SparseCostModel:
    """Constants of a step's cost.

    Attributes:
        selection_s: seconds of a block-sparse step beyond bytes and overhead, over all layers.
        sequence_s: further seconds per sequence.
        bounds_share: share of the bandwidth at which bounds are read.
    """

    bytes_per_s: float
    overhead_s: float
    selection_s: float
    sequence_s: float = 0.0
    bounds_share: float = 1.0

    def selection_time(self, read: StepReads) -> float:
        if not read.sparse:
            return 0.0
        slower = read.bounds / self.bytes_per_s * (1 / self.bounds_share - 1)
        return self.selection_s + read.sequences * self.sequence_s + slower

    def seconds(self, read: StepReads) -> float:
        return self.overhead_s + read.size / self.bytes_per_s + self.selection_time(read)


@dataclass(frozen=True)
class CostFit:
    """Dense steps of a model, device and layout, block-sparse steps of one budget, and the costs fitted to both.

    Attributes:
        errors: |predicted / measured - 1| of the steps of one batch and of the longest length, by costs fitted on the
            others; empty if there are too few.
    """

    dense_cells: list[Cell]
    sparse_cells: list[Cell]
    costs: SparseCostModel
    errors: list[float]

    @property
    def sparse(self) -> Sparse:
        sparse = self.sparse_cells[0].sparse
        assert sparse is not None
        return sparse

    @property
    def machine(self) -> str:
        first = self.dense_cells[0]
        where = first.layout.partition(" ->")[0] if first.ranks > 1 else f"one {first.device}"
        return f"{first.model}, {where}" + (f", emulated on {first.emulated_by}" if first.emulated_by else "")

    @property
    def budget(self) -> str:
        block = f" of {self.sparse.block}" if self.sparse.block != Sparse().block else ""
        return f"k={self.sparse.topk}{block}"

    @property
    def held_out(self) -> str | None:
        """Median and maximum error of held-out steps; None if there are too few."""
        of = self.errors
        return f"{median(of):.1%}, {max(of):.1%} of {len(of)}" if of else None

    @property
    def measured(self) -> dict[tuple[int, int], float]:
        """Measured speed-up of block-sparse over dense steps, by batch and length."""
        dense = {(cell.batch, cell.length): cell.ttl_us for cell in self.dense_cells}
        points = {(cell.batch, cell.length): cell.ttl_us for cell in self.sparse_cells}
        return {point: dense[point] / us for point, us in points.items() if point in dense}

    def predicted(self, batch: int, length: int, cost_model: SparseCostModel | None = None) -> float:
        """Returns the predicted speed-up at any point, by its own costs unless others are given."""
        cost_model, first = cost_model or self.costs, self.dense_cells[0]
        dense = cost_model.seconds(reads(first, batch, length, None))
        return dense / cost_model.seconds(reads(first, batch, length, self.sparse))

    def r2(self, cost_model: SparseCostModel | None = None) -> float:
        """Returns the share of the variance of `measured` that costs explain; below 0 if worse than the mean."""
        real = np.array(list(self.measured.values()))
        off = real - np.array([self.predicted(*point, cost_model) for point in self.measured])
        return float(1 - (off**2).sum() / ((real - real.mean()) ** 2).sum())

    @property
    def without_selection(self) -> SparseCostModel:
        """The source's two-term costs, which failed there."""
        return SparseCostModel(self.costs.bytes_per_s, self.costs.overhead_s, 0.0)

    @property
    def with_constant_selection(self) -> SparseCostModel:
        """The source's amended three-term costs: a constant cost of selection."""
        plain, took = self.without_selection, np.array([cell.ttl_us / 1e6 for cell in self.sparse_cells])
        over = took - np.array([plain.seconds(read) for read in _reads(self.sparse_cells)])
        return replace(plain, selection_s=float((over / took**2).sum() / (1 / took**2).sum()))

    @property
    def without_overhead(self) -> SparseCostModel:
        """A projection: a runtime whose steps cost only bytes and selection."""
        return replace(self.costs, overhead_s=0.0)

    def pays_from(self, batch: int) -> int | None:
        """Returns the length from which block-sparse steps take no longer, as predicted; None: not in the context."""
        return crossover(lambda n: self.predicted(batch, n) - 1, self.dense_cells[0].spec.max_positions)

    @property
    def batches(self) -> list[int]:
        return sorted({cell.batch for cell in self.dense_cells})


@cache
def _any_hardware() -> Hardware:
    """Any hardware: bytes do not depend on it."""
    return load_hardware("h200")


@cache
def reads(like: Cell, batch: int, length: int, sparse: Sparse | None) -> StepReads:
    """Returns what a step of a cell's model and layout reads at another point."""
    points, options = replace(like.points, batch=np.array([batch])), replace(RECORDED, sparse=sparse)
    phases = predict(like.spec, _any_hardware(), points, length, options).phases
    bounds = sum(float(phase.bytes[0]) for phase in phases if phase.name == "find blocks")
    return StepReads(sum(float(phase.bytes[0]) for phase in phases), bounds, batch, sparse is not None)


def _reads(cells: Iterable[Cell]) -> list[StepReads]:
    return [reads(cell, cell.batch, cell.length, cell.sparse) for cell in cells]


def fit(dense: Sequence[Cell], sparse_cells: Sequence[Cell]) -> SparseCostModel:
    """Fits costs by least squares of the relative error: dense steps first, then block-sparse ones."""
    took = [cell.ttl_us / 1e6 for cell in dense]
    overhead_s, bytes_per_s = constants.line([read.size for read in _reads(dense)], took)
    plain, found = SparseCostModel(bytes_per_s, overhead_s, 0.0), _reads(sparse_cells)
    took = [cell.ttl_us / 1e6 for cell in sparse_cells]
    over = [seconds - plain.seconds(read) for seconds, read in zip(took, found, strict=True)]
    columns = [1.0] * len(found), [read.sequences for read in found], [read.bounds / bytes_per_s for read in found]
    once, each, again = constants.fit_costs(columns, over, took)
    return SparseCostModel(bytes_per_s, overhead_s, max(once, constants.MIN_S), each, 1 / (1 + again))


def account(dense: list[Cell], sparse_cells: list[Cell]) -> CostFit:
    """Fits on all steps; `errors` come from a fit without the second largest batch and the longest length."""
    batches, longest = sorted({cell.batch for cell in dense}), max(cell.length for cell in dense)
    held_out = {cell for cell in (*dense, *sparse_cells) if cell.batch in batches[-2:-1] or cell.length == longest}
    fitted = [[cell for cell in cells if cell not in held_out] for cells in (dense, sparse_cells)]
    errors = []
    if len(fitted[0]) > 1 and fitted[1]:
        cost_model = fit(*fitted)
        for cell, read in zip(held_out, _reads(held_out), strict=True):
            errors.append(abs(1e6 * cost_model.seconds(read) / cell.ttl_us - 1))
    return CostFit(dense, sparse_cells, fit(dense, sparse_cells), errors)


def accounts(cells: Iterable[Cell]) -> list[CostFit]:
    """Returns a fit for each model, device, layout and budget with block-sparse steps and at least two dense ones."""
    machines: dict[tuple[object, ...], dict[Sparse | None, list[Cell]]] = {}
    for cell in cells:
        machine = machines.setdefault((cell.device, cell.emulated_by, cell.model, cell.layers, cell.layout), {})
        machine.setdefault(cell.sparse, []).append(cell)
    return [
        account(by_budget[None], sparse_cells)
        for by_budget in machines.values()
        for sparse, sparse_cells in by_budget.items()
        if sparse is not None and len(by_budget.get(None, [])) > 1
    ]


def recorded() -> list[CostFit]:
    """Returns the fits of `benchmarks/results/`; empty if nothing was recorded."""
    return _accounts_of_files(*sorted(RESULTS.glob("sparse-steps*.jsonl")))


@cache
def _accounts_of_files(*files: Path) -> list[CostFit]:
    return accounts(read_cells(files))


def _point(batch: int, length: int) -> str:
    return f"{batch} x {length >> 10}K"


def rows(found: Sequence[CostFit]) -> list[Row]:
    """Returns fits as table rows."""
    return [{"a": account} for account in found]


def breakdowns() -> list[Row]:
    """Returns the rows of recorded fits."""
    return rows(recorded())


def rows_by_batch(found: Sequence[CostFit]) -> list[Row]:
    """Returns a row for each fit and each batch of any fit."""
    batches = sorted({batch for a in found for batch in a.batches})
    return [{"a": a, "batch": batch} for a in found for batch in batches]


def crossovers() -> list[Row]:
    """Returns the rows of recorded fits, by batch."""
    return rows_by_batch(recorded())


PAPER = (  # machine, blocks, bandwidth, overhead, selection, R²: sections 8 and 9
    ("the paper, one H100", "k=8", "3.05 TB/s", "3.2 ms", "1.7 ms", "0.998"),
    ("the paper, one H100", "k=32", "3.05 TB/s", "3.2 ms", "3.3 ms", "-"),
    ("the paper, one H200", "k=32", "4.5 TB/s", "-", "4.1 ms", "-"),
)


def three_terms() -> Cells:
    """Tabulates the source's three-term fit, ours with as many terms, and the R² of our five terms."""
    table: list[Sequence[str]] = [
        ("cost model of three terms", "blocks", "bandwidth", "overhead", "finding", "R²", "R² of five terms")
    ]
    table += [(*row, "-") for row in PAPER]
    for a in recorded():
        cost_model = a.with_constant_selection
        rate, overhead = f"{cost_model.bytes_per_s / 1e12:.2f} TB/s", f"{1e3 * cost_model.overhead_s:.2f} ms"
        finding = f"{1e3 * cost_model.selection_s:.2f} ms"
        table.append((a.machine, a.budget, rate, overhead, finding, f"{a.r2(cost_model):.3f}", f"{a.r2():.3f}"))
    return table


def summary(found: Sequence[CostFit]) -> str:
    """Returns the cost per layer, as in `finding_s`, whether targets are met, and the gain of a faster runtime."""
    if not found:
        return f"nothing to fit: it takes block-sparse steps, and two dense ones of the same layout (`{RECORDS}`)"
    lines = []
    for a in found:
        layers = len(a.dense_cells[0].spec.full)
        line = (
            f"{a.machine}, {a.budget}: finding takes {1e6 * a.costs.selection_s / layers:.1f} us a layer (finding_s), "
            f"{1e6 * a.costs.sequence_s / layers:.2f} a sequence (finding_sequence_s), and goes through bounds at "
            f"{a.costs.bounds_share:.2f} of the bandwidth (bounds_share)"
        )
        if a.errors:
            met = median(a.errors) <= TARGETS[0] and max(a.errors) <= TARGETS[1]
            line += (
                f"; held out: {'within' if met else 'BEYOND'} {TARGETS[0]:.0%} (median) and {TARGETS[1]:.0%} (worst)"
            )
        if a.measured:
            (batch, length), best = max(a.measured.items(), key=lambda point: point[1])
            projected = a.predicted(batch, length, a.without_overhead)
            line += f"; {best:.2f} times as fast at {_point(batch, length)}, projected without overhead {projected:.2f}"
        lines.append(line)
    return "\n".join(lines)
