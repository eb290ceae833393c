"""Sweeps: what is found before any point runs, and what is made of a job's last words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.sweep import Point, cause, check, heard
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


def test_what_jobs_say_is_heard_and_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with heard() as lines:
        subprocess.run([sys.executable, "-c", "import sys; print('error: no room', file=sys.stderr)"], check=True)
        os.write(2, b"rank 1 failed:\n")
    os.write(2, b"afterwards\n")
    assert lines == ["error: no room", "rank 1 failed:"]
    assert capfd.readouterr().err == "error: no room\nrank 1 failed:\nafterwards\n"


def test_the_surest_cause_is_named() -> None:
    trace = ["rank 0 failed:", "Traceback (most recent call last):", 'File "x.py", line 3', "RuntimeError: NaN", ""]
    assert cause(trace) == "RuntimeError: NaN"
    assert cause([*trace, "error: no room"]) == "no room" and cause(["error on rank 1: x"]) == "error on rank 1: x"
    assert cause([*trace, "rank 3 was killed by signal 9"]) == "rank 3 was killed by signal 9"
    assert cause(["a warning"]) == ""
