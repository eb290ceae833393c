"""Jobs of benchmarks: each is started anew, and says what its ranks measured."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from comm.emulated import is_emulated
from launch.job import spawn

COMMAND = ("-m", "benchmarks.entry")


class JobError(RuntimeError):
    """A job failed; the message is the line that says why."""


def measure(ranks: int, overrides: Sequence[str]) -> dict[str, Any]:
    """The record of a job; where there are fewer GPUs than ranks, one or two of them emulate it.

    Raises:
        JobError: it failed.
        KeyboardInterrupt: it was interrupted, and no other shall start.
    """
    emulated = is_emulated(ranks)
    with tempfile.TemporaryDirectory() as directory:
        record = Path(directory) / "record.json"
        backend = ["comm.backend=emulated"] if emulated else []
        with spawn.heard() as lines:
            code = spawn.run([*COMMAND, *backend, *overrides, f"record={record}"])
        if code == spawn.INTERRUPTED:
            raise KeyboardInterrupt
        if code:
            raise JobError(spawn.cause(lines) or f"exit code {code}")
        written: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    return written


def rows(overrides: Sequence[str], command: Sequence[str] = COMMAND, **variables: str) -> Iterator[dict[str, Any]]:
    """Yields what a job measures, as it comes: lines of JSON that it prints; the terminal shows the others.

    Args:
        variables: of its environment.

    Raises:
        JobError: it failed.
    """
    with spawn.heard() as lines, spawn.started([*command, *overrides], subprocess.PIPE, **variables) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if line.startswith("{"):
                yield json.loads(line)
            else:
                print(line, end="", flush=True)
        job.wait()
    if job.returncode:
        raise JobError(spawn.cause(lines) or f"exit code {job.returncode}")
