"""Jobs that somebody measures: ranks of their own, the record they leave, and the line that says why one failed."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

from launch import local

# Lines of a failed job that say why, the surest first: who killed a rank, what the runtime said, what was raised.
CAUSES = (r"rank \d+ was killed", r"error\b", r"[\w.]+(Error|Exception): ")


class JobError(RuntimeError):
    """A job failed; the message is the line that says why."""


def measure(ranks: int, overrides: Sequence[str]) -> dict[str, Any]:
    """The record of a job, of which one or two GPUs play some of the ranks where there are not so many.

    Raises:
        JobError: it failed.
        KeyboardInterrupt: it was interrupted, and no other shall start.
    """
    played = local.played(ranks)
    with tempfile.TemporaryDirectory() as directory:
        record = Path(directory) / "record.json"
        stand_in = ["comm.backend=stand_in"] if played else []
        with heard() as lines:
            code = local.launch(local.processes() if played else ranks, [*stand_in, *overrides, f"record={record}"])
        if code == local.INTERRUPTED:
            raise KeyboardInterrupt
        if code:
            raise JobError(cause(lines) or f"exit code {code}")
        found: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    return found


@contextmanager
def heard() -> Iterator[list[str]]:
    """Lines that this process and those that it starts write to stderr meanwhile; the terminal shows them as well."""
    lines: list[str] = []
    terminal = os.dup(2)
    read, write = os.pipe()
    os.dup2(write, 2)
    os.close(write)

    def listen() -> None:
        with os.fdopen(read, errors="replace") as pipe:
            for line in pipe:
                os.write(terminal, line.encode())
                lines.append(line.strip())
        os.close(terminal)  # nobody else writes to it: the pipe ends after stderr is the terminal again

    thread = Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield lines
    finally:
        os.dup2(terminal, 2)
        thread.join(1.0)  # a process that somebody left behind may hold the other end for longer


def cause(lines: Sequence[str]) -> str:
    """The line that says why a job failed; empty where none does."""
    found = (line for pattern in CAUSES for line in lines if re.match(pattern, line))
    return next(found, "").removeprefix("error: ")
