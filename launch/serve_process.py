"""One of the further processes of `helix serve`; the first one starts it with file descriptors as arguments."""

from __future__ import annotations

import sys

from launch.job import lifeline
from launch.serving import processes

if __name__ == "__main__":
    lifeline.begin(serves=True)
    sys.exit(processes.main(*map(int, sys.argv[1:])))
