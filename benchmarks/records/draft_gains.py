"""Gains of drafts: iteration times from one record, tokens from the record of a trained model."""

from __future__ import annotations

import json
from functools import cache

from benchmarks.models.drafters import SPARSITY
from benchmarks.records.rows import Row, check_commit, kv, shape
from launch.inputs.compose import ROOT

K = 1 << 10
# The settings of `speculation=sparse`: rows with other experimental options are other drafters.
AS_SHIPPED = {"recent": 0.5, "reach": 8, "block": 1, "heads": "each", "kvp": 1, "temperature": 0.0}
DEMO, REAL = "demo-model", "smollm2-135m-instruct"
TASKS = ("code", "copy", "facts")


@cache
def accepted(policy: str, gamma: int) -> dict[str, float]:
    """Reads tokens per iteration by "model length task" from records with at least `gamma` drafts; the latest counts.

    A draft counts if all before it were accepted, so drafts beyond `gamma` change nothing.
    """
    found = {}
    for file in sorted((ROOT / "benchmarks" / "results").glob("acceptance*.jsonl")):
        for line in file.read_text("utf-8").splitlines():
            row = json.loads(line)
            shipped = AS_SHIPPED | {"sparsity": SPARSITY}
            same = all(row.get(key) in (None, value) for key, value in shipped.items())
            if row.get("policy") == policy and row.get("gamma", 0) >= gamma and "accepted" in row and same:
                name = f"{row['model']} {row['length'] // K}K {row['task']}"
                found[name] = 1 + sum(row["accepted"][:gamma]) / row["iterations"]
    return found


def gains(row: Row, points: list[Row]) -> Row:
    """Returns a row's time relative to a plain step, and its gains with each measured acceptance.

    Args:
        points: rows of the same job; without a plain step at the row's point, returns {}.

    Raises:
        ValueError: the plain step is of another commit.
    """
    at = (row["batch"], row["length"], 0)
    plain = next((p for p in points if (p["batch"], p["length"], p["gamma"]) == at and "failed" not in p), None)
    if "failed" in row or not row["gamma"] or plain is None:
        return {}
    check_commit(row, plain)
    over = row["ttl_p50_us"] / plain["ttl_p50_us"]
    gain = {name: count / over for name, count in accepted(row["drafter"], row["gamma"]).items()}
    return {"step_over_plain": over, "gain": gain}


def gained(r: Row, model: str = DEMO, task: str = "") -> float | None:
    """Returns the minimum gain of a row over a model's lengths and tasks; None: none is recorded."""
    found = [g for name, g in r.get("gain", {}).items() if name.startswith(model) and name.endswith(task)]
    return min(found, default=None)


def best(found: list[Row], model: str = DEMO) -> list[Row]:
    """Keeps, for each shape, drafter, point and commit, the gamma with the best gain on its worst task.

    A gamma is left out if acceptance is recorded for fewer tasks and lengths than for another gamma of the point.
    """
    points: dict[tuple[str, ...], list[Row]] = {}
    for r in found:
        if gained(r, model) is not None:
            points.setdefault((shape(r), kv(r), r["drafter"], r.get("commit", "")), []).append(r)
    most = {point: max(_num_gains(r, model) for r in rows) for point, rows in points.items()}
    return [
        max((r for r in rows if _num_gains(r, model) == most[point]), key=lambda r: gained(r, model) or 0.0)
        for point, rows in points.items()
    ]


def _num_gains(r: Row, model: str) -> int:
    return sum(name.startswith(model) for name in r["gain"])
