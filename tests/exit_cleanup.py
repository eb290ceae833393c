"""Clean-up at a process's end, done by that process alone."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path


def at_exit(work: Callable[[], object]) -> None:
    """Runs `work` when this process ends, and not where a copy of it (`os.fork`) ends, which has its handlers too."""
    atexit.register(_in, os.getpid(), work)


def _in(process: int, work: Callable[[], object]) -> None:
    if os.getpid() == process:
        work()


def folder(prefix: str) -> Path:
    """An empty folder that is there until this process ends."""
    made = Path(tempfile.mkdtemp(prefix=prefix))
    at_exit(partial(shutil.rmtree, made, ignore_errors=True))
    return made
