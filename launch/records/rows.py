"""Rows of `benchmarks/results/*.jsonl`, as tables and figures read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
