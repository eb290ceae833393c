"""Starts an agent for benchmark ranks, as `launch/agent.sh` does for runs: `python -m benchmarks.agent`."""

from __future__ import annotations

import os
import sys

from benchmarks.program import PROGRAM
from helix import log
from launch.agent import main

if __name__ == "__main__":
    log.configure()
    sys.exit(main(sys.argv[1:], os.environ, PROGRAM))
