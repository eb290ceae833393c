"""The kernels against textbooks in float64: all rows of the tables, and the mistakes that have to show in them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import dispatch
from tests.kernels.suite import Op, Row

TABLES = [import_module(f"tests.kernels.{file.stem}") for file in sorted(Path(__file__).parent.glob("cases_*.py"))]
OPS: list[Op] = [op for table in TABLES for op in table.OPS]


def rows_of(table: str) -> Any:
    """`parametrize` by an op, and the shape and the change of each of its entries in a table."""
    return pytest.mark.parametrize(
        "op, shape, change",
        [
            pytest.param(op, shape, change, id=f"{op.name}-{name}", marks=[pytest.mark.gpu] * op.gpu)
            for op in OPS
            for name, (shape, change) in getattr(op, table).items()
        ],
    )


def on_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@pytest.mark.parametrize("row", [row for table in TABLES for row in table.ROWS])
def test_row(row: Row, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in row.mode.settings.items():
        monkeypatch.setattr(name, value)
    if row.which == "reference":
        monkeypatch.setattr(dispatch, "on_gpu", lambda t: False)
    case = row.make(device)
    on_gpu = device.type == "cuda"
    if row.op.needs_hopper and not on_hopper():
        pytest.skip("needs a GPU of Hopper's")
    assert row.hopper is None or not on_hopper() or row.hopper(case)
    found = row.run(case)
    case.check(*found)
    for _ in range(row.repeats if on_gpu and row.which == "kernel" else 0):
        for first, again in zip(found, row.run(case), strict=True):
            torch.testing.assert_close(again.double(), first.double(), rtol=0, atol=0, equal_nan=True)


@rows_of("mistakes")
def test_mistakes_show(op: Op, shape: dict[str, Any], change: Callable[[Any], None], device: torch.device) -> None:
    case = op.make(**shape, device=device)
    case.check(*case.run(op.function))
    change(case)
    with pytest.raises(AssertionError):
        case.check(*case.run(op.function))


@rows_of("nan")
def test_nan_that_is_read_comes_out(
    op: Op, shape: dict[str, Any], change: Callable[[Any], None], device: torch.device
) -> None:
    case = op.make(**shape, device=device)
    assert not any(found.isnan().any() for found in case.run(op.function))
    change(case)
    assert case.run(op.function)[0].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("row", [row for table in TABLES for row in getattr(table, "GRAPHS", [])])
def test_one_graph_serves_all_inputs(row: Row, device: torch.device) -> None:
    case = row.make(device)
    assert row.hopper is None or not on_hopper() or row.hopper(case)
    row.run(case)  # compiled before capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = row.run(case)
    assert row.op.replays is not None
    for _ in row.op.replays(case):
        graph.replay()
        case.check(*found)
