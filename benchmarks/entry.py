"""Ranks of a benchmark: `torchrun --nproc-per-node=N -m benchmarks.entry bench=decode KEY=VALUE ...`.

Without torchrun, `python -m benchmarks.entry bench=decode KEY=VALUE ...` starts the ranks that the layout asks for by
itself. It takes the keys of `torchrun_entry.py`, and `bench.*` beside: `python -m benchmarks.entry --help`.
"""

from __future__ import annotations

import sys

from torchrun_entry import entry  # isort: split

# After it, which looks whose packages these are, and sees to it that ranks end with their launcher.
from benchmarks.program import PROGRAM

if __name__ == "__main__":
    sys.exit(entry(sys.argv[1:], PROGRAM))
