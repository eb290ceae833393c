"""Jobs that somebody measures: what is made of their last words."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from launch.job.spawn import cause, heard


def test_what_jobs_say_is_heard_and_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with heard() as lines:
        subprocess.run([sys.executable, "-c", "import sys; print('error: no room', file=sys.stderr)"], check=True)
        os.write(2, b"rank 1 failed:\n")
    os.write(2, b"afterwards\n")
    assert lines == ["error: no room", "rank 1 failed:"]
    assert capfd.readouterr().err == "error: no room\nrank 1 failed:\nafterwards\n"


def test_listening_leaves_no_file_open() -> None:
    for _ in range(2):
        before = len(os.listdir("/proc/self/fd"))
        with heard():
            os.write(2, b"a word\n")
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_surest_cause_is_named() -> None:
    trace = ["rank 0 failed:", "Traceback (most recent call last):", 'File "x.py", line 3', "RuntimeError: NaN", ""]
    assert cause(trace) == "RuntimeError: NaN"
    assert cause([*trace, "error: no room"]) == "no room" and cause(["error on rank 1: x"]) == "error on rank 1: x"
    assert cause([*trace, "rank 3 was killed by signal 9"]) == "rank 3 was killed by signal 9"
    assert cause(["a warning"]) == ""
