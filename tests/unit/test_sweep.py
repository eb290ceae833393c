"""Sweeps: what is found before any point runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.program import PROGRAM
from launch.inputs import compose
from launch.inputs.front import Line
from launch.inputs.points import Point
from launch.job import spawn
from launch.job.sweep import check, run
from tests.laboratory import composed


def points(tmp_path: Path, *overrides: str) -> list[Point]:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt_ids": [1, 2, 3]}\n')
    configs = [composed(f"decode.prompts={prompts}", *o.split()) for o in overrides]
    return [Point(i, [o], c, PROGRAM.work(c)) for i, (o, c) in enumerate(zip(overrides, configs, strict=True))]


def test_a_mistake_of_all_points_ends_the_sweep(tmp_path: Path) -> None:
    found = points(tmp_path, "decode.top_p=3", "layout.kvp=2 decode.top_p=3", "layout.tpa=3")
    with pytest.raises(ValueError, match=r"^decode: sampling parameter top_p = 3"):
        check(found)
    found = points(tmp_path, "kv.ahead=true", "kv.ahead=true", "layout.tpa=3", "layout.kvp=2")
    check(found)
    assert [point.status for point in found] == ["failed", "failed", "skipped", "waiting"]
    assert found[0].reason.startswith("kv.ahead=true is for kv.tier=host") and found[3].reason == ""
    check(found := points(tmp_path, "layout.kvp=1000000000", "layout.kvp=2"))
    assert found[0].status == "skipped" and "1000000000 ranks, and this host runs" in found[0].reason
    check(found := points(tmp_path, "layout.tpa=3"))
    assert found[0].status == "skipped"


@pytest.mark.parametrize("code, status, ttls", [(0, "ok", [5.0, None]), (1, "failed", [None])])
def test_figures_are_of_each_timed_point_and_of_this_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, status: str, ttls: list[float | None]
) -> None:
    [point] = points(tmp_path, "bench=decode")
    point.config.record = str(tmp_path / "0.json")
    timed = {"batch": 1, "length": 64, "gamma": 0, "ttl_p50_us": 5.0, "kv_bytes_per_rank": [3, 4]}
    record = {"points": [timed, {"batch": 9, "length": 64, "gamma": 0, "failed": "no room"}]}
    (tmp_path / "0.json").write_text(json.dumps(record))  # where the job fails, an earlier sweep's
    monkeypatch.setattr(spawn, "run", lambda overrides: code)
    assert run(point) == code and point.status == status
    rows = point.rows()
    assert [row["ttl_p50_us"] for row in rows] == ttls
    if not code:
        assert [row["reason"] for row in rows] == ["", "no room"]
        assert [(row["batch"], row["kv_bytes_per_rank_max"]) for row in rows] == [(1, 4), (9, None)]


@pytest.mark.parametrize("text", ["layout.kvp=range(1,1)", "layout.tpa=range(5,1)"])
def test_a_range_without_values_is_a_mistake(text: str) -> None:
    with pytest.raises(ValueError, match="there is no point: a sweep has no values"):
        compose.points(Line([text]))
    with pytest.raises(ValueError, match="Invalid range values"):
        compose.points(Line(["decode.temperature=range(0,1,0.0)"]))
