"""Entry point of benchmark ranks: `torchrun --nproc-per-node=N -m benchmarks.entry bench=decode KEY=VALUE ...`.

Without torchrun, `python -m benchmarks.entry bench=decode KEY=VALUE ...` starts the ranks that the layout needs. It
takes the keys of `torchrun_entry.py` and `bench.*`: `python -m benchmarks.entry --help`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from torchrun_entry import entry  # isort: split

# Import it first: it checks which packages are in use, and makes ranks exit with their launcher.
from benchmarks.program import PROGRAM

WAITS_S = 1800.0


def wait_for(gate: Path) -> None:
    """Waits, with all imports done, for the file that hands the GPUs to this job (`benchmarks.queue`).

    Raises:
        SystemExit: it did not appear in time.
    """
    end = time.monotonic() + WAITS_S
    while not gate.exists():
        if time.monotonic() > end:
            sys.exit(
                f"error: START_AFTER={gate} did not appear within {WAITS_S:.0f} s: another job still holds the GPUs"
            )
        time.sleep(0.05)


if __name__ == "__main__":
    if "START_AFTER" in os.environ:
        wait_for(Path(os.environ["START_AFTER"]))
    sys.exit(entry(sys.argv[1:], PROGRAM))
