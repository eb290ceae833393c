"""The machine, and what a run takes of it: `helix info`.

GPUs and their links, versions, the collectives and kernels that will be used, and the hardware description by which the
planner predicts (`layout=auto`). `helix info json=-` prints the same as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Literal

from launch.inputs.arguments import handle_help, parse


def main(arguments: Sequence[str] | None = None) -> None:
    """Shows what this machine has."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if handle_help(arguments, __doc__):
        return
    try:
        given = parse(arguments, {"json": Literal["-"]})
    except ValueError as error:
        sys.exit(f"error: {error}")
    machine = import_module("launch.inputs.machine")
    found = machine.facts()
    if given:
        print(json.dumps(found, indent=1))
    else:
        machine.show(found)


if __name__ == "__main__":
    main()
