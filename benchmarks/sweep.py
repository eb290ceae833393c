"""Sweeps over benchmarks, as `launch.sweep` over runs: `python -m benchmarks.sweep -m bench=decode layout.kvp=1,2`."""

from __future__ import annotations

import sys

from benchmarks.program import PROGRAM
from launch.sweep import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], PROGRAM))
