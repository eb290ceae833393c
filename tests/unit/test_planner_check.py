"""First choices of the planner, and its constants, against steps that were recorded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.records import fit as fitting
from benchmarks.records.planner_check import regrets, summary
from benchmarks.records.recorded_steps import Cell, compare, read_cells
from helix.planner.hardware import Hardware
from launch.inputs.hardware import load_hardware

M = 1 << 20
H200 = load_hardware("h200")
# The shipped descriptions alone: one that was calibrated on this machine would come before them.
SHIPPED = {hardware.name: hardware for hardware in (H200, load_hardware("h100"))}.__getitem__


def test_first_choices_among_recorded_layouts() -> None:
    """Three of four are within 5% of the best; docs/planner.md has them all."""
    rows = regrets(read_cells(), SHIPPED)
    assert len(rows) >= 12
    assert sum(row["regret"] <= 0.05 for row in rows) >= 0.75 * len(rows)
    assert np.median([row["regret"] for row in rows]) <= 0.01


def test_regret_is_measured_time_lost() -> None:
    cells = [
        Cell("qwen2.5-7b", None, layout, 1, M, H200.name, "-", us)
        for layout, us in (("helix kvp=2 tpa=2", 110.0), ("tp kvp=1 tpa=4", 100.0), ("medha kvp=4 tpa=1", 105.0))
    ]
    best = min(cells, key=lambda cell: compare(cell, H200)["predicted_us"])
    (row,) = regrets(cells, SHIPPED)
    assert row["selected"] == best.layout and row["best"] == "tp kvp=1 tpa=4"
    assert row["regret"] == pytest.approx(best.ttl_us / 100 - 1)
    report = summary([row, row | {"measured_us": {"tp kvp=1 tpa=4": 106.0, "helix kvp=2 tpa=2": 104.0}}])
    assert "always helix kvp=2 tpa=2: 1 of 2 within 5% of the best measured, the worst 10.0% off" in report
    assert "always tp kvp=1 tpa=4: 1 of 2 within 5% of the best measured, the worst 6.0% off" in report
    assert "medha" not in report  # not measured everywhere
    spread = [
        replace(cells[0], model="qwen3-30b-a3b", layout=f"helix kvp=2 tpa=2 -> tpf={4 // ep} ep={ep}") for ep in (1, 4)
    ]
    assert set(regrets(spread, SHIPPED)[0]["measured_us"]) == {"helix kvp=2 tpa=2", "helix kvp=2 tpa=2 ep=4"}
    assert regrets(cells[:1], SHIPPED) == [] and "no workload" in summary([])  # nothing to choose from


def test_fitting_finds_planted_constants() -> None:
    """Steps that the model itself made with other constants are fitted to below the last step of the search, 0.25%."""

    def planted(constant: float) -> Hardware:
        fixed = {rows: replace(H200.kernel_s, value=us * 1e-6) for rows, us in ((1, 2.0), (2, 9.0), (32, 9.0))}
        rate = replace(H200.read_bytes_per_s, value=constant)
        return replace(H200, read_bytes_per_s=rate, kernel_s=replace(H200.kernel_s, value=7e-6), product_s=fixed)

    truth = planted(3.1e12)
    cells = [cell for cell in read_cells() if cell.model == "qwen2.5-7b"]
    cells = [replace(cell, ttl_us=compare(cell, truth)["predicted_us"]) for cell in cells]
    found = fitting.fit(H200, cells, "test")
    assert np.abs(fitting.errors(found, cells)).mean() < 0.0025
    assert found.read_bytes_per_s.value == pytest.approx(3.1e12, rel=0.01)
    # A layer has as many projections as other kernels, whatever the batch: in part, each can stand for the other.
    assert found.product_s[2].value - found.product_s[1].value == pytest.approx(7e-6, rel=0.25)
    assert found.product_s[2].source == "test" and found.product_s[33] == H200.product_s[33]
    assert fitting.quantiles(np.log([1.1, 0.9, 1.0])) == pytest.approx((0.1, 0.1))
