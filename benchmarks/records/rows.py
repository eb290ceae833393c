"""Reads rows of `benchmarks/results/*.jsonl` for tables and figures."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from launch.inputs.compose import ROOT
from launch.inputs.shapes import load_spec

Row = dict[str, Any]
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# Words, flags and integers are settings, which say how a line was measured, except for these results of a run and
# fields with a unit in their names.
YIELDED = frozenset(
    {
        "as_plain",
        "captured",
        "commit",
        "decisions",
        "dropped",
        "failed",
        "gaps",
        "late",
        "printed",
        "rows_lost",
        "rows_lost_graph",
        "steps",
        "superseded",
        "variant",
    }
)
UNIT = re.compile(r"_(?:us|ms|s|bytes|tokens|steps|per_rank|per_gpu)$")
FRACTIONS = frozenset({"alpha", "repeat", "sparsity", "temperature"})  # fractional settings
UNSAID = {"kv": "auto"}  # values of settings in lines that are older than the setting
WORKLOAD = ("model", "batch", "length", "layout")  # fields that identify a point of a decode benchmark


def newest(path: Path, *key: str, free: Collection[str] = (), **only: object) -> list[Row]:
    """Returns the newest line of each point, in the order of first lines; empty if the file does not exist.

    Args:
        path: JSON lines, oldest first.
        key: fields that identify a point.
        free: settings in which lines of a point may differ, so that a later line replaces an earlier one.
        only: required values of fields.

    Raises:
        ValueError: two lines of a point differ in a setting, so that one would replace the other.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found: dict[tuple[Any, ...], Row] = {}
    settings: dict[tuple[Any, ...], Row] = {}
    for row in (json.loads(line) for line in text.splitlines() if line.strip()):
        if any(row.get(field) != value for field, value in only.items()):
            continue
        point = tuple(row.get(field) for field in key)
        other_settings = {field: value for field, value in _settings(row).items() if field not in {*key, *free}}
        before = {} if "superseded" in found.get(point, {}) else settings.get(point, {})
        for field in other_settings.keys() & before.keys():
            if other_settings[field] != before[field]:
                where = ", ".join(
                    f"{name}={value}" for name, value in zip(key, point, strict=True) if value is not None
                )
                raise ValueError(
                    f"{path.name}: lines of {where} have {field}={before[field]} and {field}={other_settings[field]}; "
                    f"add {field} to the key, or to YIELDED if a run yields it"
                )
        found[point], settings[point] = row, before | other_settings
    return list(found.values())


def _settings(row: Row) -> Row:
    """The fields of a line that say how it was measured; a missing one matches any value, unless `UNSAID` has it."""
    fields = {**UNSAID, **row}
    return {
        field: value
        for field, value in fields.items()
        if field in FRACTIONS or (isinstance(value, str | int) and field not in YIELDED and not UNIT.search(field))
    }


def _natural(values: tuple[Any, ...]) -> list[list[tuple[int, str]]]:
    """Sort key that puts 8/1 before 28/4, and 128K before 1M."""
    parts = (re.findall(r"(\d+)([KMG]?)|(\D+)", str(value)) for value in values)
    return [[(int(number or 0) * UNITS[unit], text) for number, unit, text in part] for part in parts]


def grouped(rows: Iterable[Row], *fields: str) -> dict[tuple[Any, ...], list[Row]]:
    """Groups rows by the values of fields, in natural order."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[field] for field in fields), []).append(row)
    return {key: found[key] for key in sorted(found, key=_natural)}


def check_commit(*rows: Row) -> None:
    """Checks that rows whose times are compared are of one commit.

    Raises:
        ValueError: they are of several, so that a code change would look like a difference between rows.
    """
    commits = dict.fromkeys(row.get("commit", "") for row in rows)
    if len(commits) > 1:
        raise ValueError(f"{shape(rows[0])}, {kv(rows[0])}: times of commits {', '.join(commits)} are compared")


def append(path: Path, rows: Sequence[Row]) -> None:
    """Appends JSON lines to a file."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def results(name: str, *key: str, free: Collection[str] = (), **only: object) -> list[Row]:
    """Returns the newest line of each point of `benchmarks/results/NAME.jsonl`, see `newest`."""
    return newest(ROOT / "benchmarks" / "results" / f"{name}.jsonl", *key, free=free, **only)


def tokens(count: int) -> str:
    """Formats a multiple of 1,024 in K or M, other numbers in full."""
    if count % (1 << 10):
        return f"{count:,}"
    return f"{count >> 20}M" if count >= 1 << 20 else f"{count >> 10}K"


def kv(r: Row) -> str:
    """Formats sequences and their length."""
    return f"{r['batch']} x {tokens(r['length'])}"


def shape(r: Row) -> str:
    """Returns a row's model, with the number of layers if it was cut."""
    if "layers" in r and r["layers"] < (layers := len(load_spec(r["model"]).layers)):
        return f"{r['model']}, {r['layers']} of {layers} layers"
    return str(r["model"])
