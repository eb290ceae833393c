"""The figures and tables of Helix Parallelism, as the simulator redraws them from conf/hardware/gb200.yaml.

helix paper results=DIR figures=DIR page=false

results   where the rows of numbers go (default benchmarks/results/simulate)
figures   where the figures go (default benchmarks/figures)
page      true (default): docs/simulator.md gets the tables; false: it stays as it is
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.papers.figures import PAGE, write_figures
from launch.inputs.arguments import boolean, helped, need_checkout, parse
from launch.inputs.compose import ROOT


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws them; a wrong value ends with what is known."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if helped(arguments, __doc__):
        return
    need_checkout("helix paper")
    try:
        given = parse(arguments, {"results": Path, "figures": Path, "page": boolean})
        results = given.get("results", ROOT / "benchmarks" / "results" / "simulate")
        figures = given.get("figures", ROOT / "benchmarks" / "figures")
        write_figures(results, figures, PAGE if given.get("page", True) else None)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
