"""Rows of `benchmarks/results/*.jsonl`, as tables and figures read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.inputs.compose import ROOT
from launch.inputs.shapes import load_spec

Row = dict[str, Any]
WORKLOAD = ("model", "batch", "length", "layout")  # what names a point of a benchmark of decode steps


def newest(path: Path, *key: str) -> list[Row]:
    """The newest line of each point, points in the order of their first lines; none where there is no such file.

    Args:
        path: JSON lines, oldest first.
        key: the fields that name a point.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.strip()]
    return list({tuple(row.get(field) for field in key): row for row in rows}.values())


def append(path: Path, rows: Sequence[Row]) -> None:
    """Adds JSON lines to a file."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def results(name: str, *key: str) -> list[Row]:
    """The newest line of each point of `benchmarks/results/NAME.jsonl`."""
    return newest(ROOT / "benchmarks" / "results" / f"{name}.jsonl", *key)


def tokens(count: int) -> str:
    """A power of two in K or M."""
    return f"{count >> 20}M" if count >= 1 << 20 else f"{count >> 10}K"


def kv(r: Row) -> str:
    """Sequences of a row, and tokens of each."""
    return f"{r['batch']} x {tokens(r['length'])}"


def shape(r: Row) -> str:
    """The model of a row; with its layers where it was cut."""
    if "layers" in r and r["layers"] < (layers := len(load_spec(r["model"]).layers)):
        return f"{r['model']}, {r['layers']} of {layers} layers"
    return str(r["model"])
