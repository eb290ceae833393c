"""Sweeps: `helix sweep DIR prompts.jsonl layout.kvp=1,2,4 layout.tpa=1,2`.

All points are checked first: those that are no layout of the model are skipped with the reason, and a mistake that all
the others have ends the sweep. The rest run one after the other, each as one job with ranks of its own; one that
fails does not end the sweep. At the end stand one table, one CSV and one plot, next to each point's record and
results in `sweeps/<time>/` (`hydra.sweep.dir=DIR` to choose).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module

from launch.inputs import compose, front
from launch.inputs.points import read
from launch.inputs.work import RUNTIME, Program


def main(arguments: Sequence[str], program: Program = RUNTIME) -> int:
    """Runs the sweep; returns 0 if a point ran and none failed, 130 after control-C, otherwise 1."""
    try:
        if "RANK" in os.environ:
            raise ValueError("a sweep starts the ranks of each point itself: run it without torchrun")
        typed = front.SWEEP if program is RUNTIME else program.typed
        line = front.read(arguments, typed)
        program = replace(program, settings=program.settings.of(line), command=(*program.command, *line.places))
        if (text := compose.told(line, typed, program.settings)) is not None:
            print(text, end="")
            return 0
        points = read(line, program)
        sweep = import_module("launch.job.sweep")  # takes seconds
        sweep.check(points)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return int(sweep.run_all(points, program))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
