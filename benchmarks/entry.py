"""Ranks of a benchmark: `torchrun --nproc-per-node=N -m benchmarks.entry bench=decode KEY=VALUE ...`.

Without torchrun, `python -m benchmarks.entry bench=decode KEY=VALUE ...` starts the ranks that the layout asks for by
itself. It takes the keys of `torchrun_entry.py`, and `bench.*` beside: `python -m benchmarks.entry --help`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from torchrun_entry import entry  # isort: split

# After it, which looks whose packages these are, and sees to it that ranks end with their launcher.
from benchmarks.program import PROGRAM

WAITS_S = 1800.0


def wait_for(gate: Path) -> None:
    """Waits, with all imports done, until a file says that the GPUs are this job's (`benchmarks.queue`).

    Raises:
        SystemExit: it never did.
    """
    end = time.monotonic() + WAITS_S
    while not gate.exists():
        if time.monotonic() > end:
            sys.exit(f"error: START_AFTER={gate} has not come in {WAITS_S:.0f} s: the GPUs are still another job's")
        time.sleep(0.05)


if __name__ == "__main__":
    if "START_AFTER" in os.environ:
        wait_for(Path(os.environ["START_AFTER"]))
    sys.exit(entry(sys.argv[1:], PROGRAM))
