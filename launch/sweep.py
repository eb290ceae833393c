"""Sweeps: `helix sweep DIR prompts.jsonl layout.kvp=1,2,4 layout.tpa=1,2`, which is `helix run -m`.

All points are checked first: those that are no layout of the model are skipped with the reason, and a mistake that all
the others have ends the sweep. The rest run one after the other, each as one job with ranks of its own; one that
fails does not end the sweep. At the end stand one table, one CSV and one plot; each point's record and results lie in
`sweeps/TIME/POINT/` (`hydra.sweep.dir=DIR` to choose).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from launch import run
from launch.inputs.commands import SWEEP
from launch.inputs.job_kinds import RUNTIME


def main(arguments: Sequence[str]) -> int:
    """Runs the sweep; returns 0 if a point ran and none failed, 130 after control-C, otherwise 1."""
    return run.main([*arguments, "--multirun"], replace(RUNTIME, cli_command=SWEEP))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
