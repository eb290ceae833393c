"""Runs one of the other processes of a server: `python -m launch.serve_process` and three file descriptors."""

from __future__ import annotations

import sys

from launch.job import lifeline
from launch.serving.processes import run

if __name__ == "__main__":
    lifeline.begin(serves=True)
    sys.exit(run(*map(int, sys.argv[1:])))
