"""Runs a job for each combination of values: `helix sweep DIR prompts.jsonl layout.kvp=1,2,4 layout.tpa=1,2`.

The same as `helix run -m`. All points are checked first: a point that is not a layout of the model is skipped with the
reason, and an error that all others share ends the sweep. The rest run one after the other as separate jobs; a failed
one does not end the sweep. At the end the sweep writes one table, one CSV and one plot; records and results are in
`sweeps/TIME/POINT/` (or `hydra.sweep.dir=DIR`).
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
