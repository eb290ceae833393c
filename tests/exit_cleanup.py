"""Clean-up when this process exits, but not its forks."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path


def at_exit(work: Callable[[], object]) -> None:
    """Runs `work` when this process exits, but not in forks (`os.fork`), which inherit its handlers."""
    atexit.register(_in, os.getpid(), work)


def _in(process: int, work: Callable[[], object]) -> None:
    if os.getpid() == process:
        work()


def folder(prefix: str) -> Path:
    """Makes an empty folder that is deleted when this process exits."""
    made = Path(tempfile.mkdtemp(prefix=prefix))
    at_exit(partial(shutil.rmtree, made, ignore_errors=True))
    return made
