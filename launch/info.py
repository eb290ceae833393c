"""Shows this machine and what Helix uses on it: `helix info`.

GPUs and their links, versions, collectives and kernels, and the hardware description that the planner uses
(`layout=auto`). `helix info json=-` prints the same as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Literal

from launch.inputs.arguments import handle_help, parse


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the facts as tables or JSON."""
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
