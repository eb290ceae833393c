"""Rows of `benchmarks/results/*.jsonl`, as tables and figures read them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from launch.inputs.compose import ROOT
from launch.inputs.shapes import load_spec

Row = dict[str, Any]
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
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


def _natural(values: tuple[Any, ...]) -> list[list[tuple[int, str]]]:
    """Sorts 8/1 before 28/4, and 128K before 1M."""
    parts = (re.findall(r"(\d+)([KMG]?)|(\D+)", str(value)) for value in values)
    return [[(int(number or 0) * UNITS[unit], text) for number, unit, text in part] for part in parts]


def grouped(rows: Iterable[Row], *fields: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by the values of some fields, in natural order of these."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[field] for field in fields), []).append(row)
    return {key: found[key] for key in sorted(found, key=_natural)}


def append(path: Path, rows: Sequence[Row]) -> None:
    """Adds JSON lines to a file."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def results(name: str, *key: str) -> list[Row]:
    """The newest line of each point of `benchmarks/results/NAME.jsonl`."""
    return newest(ROOT / "benchmarks" / "results" / f"{name}.jsonl", *key)


def tokens(count: int) -> str:
    """A power of two in K or M, if it is that large."""
    if count < 1 << 10:
        return str(count)
    return f"{count >> 20}M" if count >= 1 << 20 else f"{count >> 10}K"


def kv(r: Row) -> str:
    """Sequences of a row, and tokens of each."""
    return f"{r['batch']} x {tokens(r['length'])}"


def shape(r: Row) -> str:
    """The model of a row; with its layers where it was cut."""
    if "layers" in r and r["layers"] < (layers := len(load_spec(r["model"]).layers)):
        return f"{r['model']}, {r['layers']} of {layers} layers"
    return str(r["model"])
