"""Sweeps: what is found before any point runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.sweep import Point, check
from tests.unit.test_config import composed


def points(tmp_path: Path, *overrides: str) -> list[Point]:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt_ids": [1, 2, 3]}\n')
    return [Point(i, [o], composed(f"decode.prompts={prompts}", *o.split())) for i, o in enumerate(overrides)]


def test_a_mistake_of_all_points_ends_the_sweep(tmp_path: Path) -> None:
    found = points(tmp_path, "decode.top_p=3", "layout.kvp=2 decode.top_p=3", "layout.tpa=3")
    with pytest.raises(ValueError, match=r"^decode: sampling parameter top_p = 3"):
        check(found)
    found = points(tmp_path, "kv.tokens=0", "kv.tokens=0", "layout.tpa=3", "layout.kvp=2")
    check(found)
    assert [point.status for point in found] == ["failed", "failed", "skipped", "waiting"]
    assert found[0].reason == "kv.tokens=0 must be positive" and found[3].reason == ""
    check(found := points(tmp_path, "layout.tpa=3"))
    assert found[0].status == "skipped"
