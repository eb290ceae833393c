"""Starts benchmark jobs as new processes, and returns what their ranks measured."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from comm.emulated import is_emulated
from launch.client.supervisor import cause
from launch.job import spawn

COMMAND = ("-m", "benchmarks.entry")
POLL_S = 0.2


class JobError(RuntimeError):
    """A job failed; the message is its error line."""


def measure(ranks: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Runs a job and returns its record. With fewer GPUs than ranks, one or two GPUs emulate them.

    Raises:
        JobError: the job failed.
        KeyboardInterrupt: the job was interrupted; start no other.
    """
    emulated = is_emulated(ranks)
    with tempfile.TemporaryDirectory() as directory:
        record = Path(directory) / "record.json"
        backend = ["comm.backend=emulated"] if emulated else []
        with spawn.captured_stderr() as lines:
            code = spawn.run([*COMMAND, *backend, *overrides, f"record={record}"])
        if code == spawn.INTERRUPTED:
            raise KeyboardInterrupt
        if code:
            raise JobError(cause(lines) or f"exit code {code}")
        written: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    return written


def points(ranks: int, overrides: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the rows of each of `bench.points` as it ends; ranks are emulated as in `measure`.

    Raises:
        JobError: the job failed.
    """
    backend = ["comm.backend=emulated"] if is_emulated(ranks) else []
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "points.jsonl"
        output.touch()
        command = [*COMMAND, *backend, *overrides, f"bench.output={output}"]
        with spawn.captured_stderr() as lines, spawn.started(command) as job, output.open(encoding="utf-8") as file:
            ended = False
            while not ended:
                ended = job.poll() is not None  # what it wrote before it ended is read below
                yield from map(json.loads, _whole_lines(file))
                time.sleep(0 if ended else POLL_S)
        if job.returncode:
            raise JobError(cause(lines) or f"exit code {job.returncode}")


def _whole_lines(file: TextIO) -> Iterator[str]:
    """Yields complete lines only; leaves a partly written line for the next call."""
    begin = file.tell()
    while (line := file.readline()).endswith("\n"):
        yield line
        begin = file.tell()
    file.seek(begin)


def rows(overrides: Sequence[str], command: Sequence[str] = COMMAND, **variables: str) -> Iterator[dict[str, Any]]:
    """Yields the JSON lines that a job prints, as they come; other lines go to the terminal.

    Args:
        variables: environment variables of the job.

    Raises:
        JobError: the job failed.
    """
    with spawn.captured_stderr() as lines, spawn.started([*command, *overrides], subprocess.PIPE, **variables) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if line.startswith("{"):
                yield json.loads(line)
            else:
                print(line, end="", flush=True)
        job.wait()
    if job.returncode:
        raise JobError(cause(lines) or f"exit code {job.returncode}")
