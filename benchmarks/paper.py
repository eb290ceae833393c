"""The figures and tables of the papers that the runtime follows.

helix paper results=DIR figures=DIR page=false
helix paper verification results=DIR figures=DIR

The first redraws Helix Parallelism with the simulator, from conf/hardware/gb200.yaml; the second draws the verification
kernels from what `helix bench verify` recorded, and prints the tables.

results   where the rows of numbers go (default benchmarks/results/simulate), or are (default benchmarks/results)
figures   where the figures go (default benchmarks/figures)
page      true (default): docs/simulator.md gets the tables; false: it stays as it is
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.papers.figures import PAGE, write_figures
from benchmarks.papers.verification_figures import write
from launch.inputs.arguments import boolean, helped, need_checkout, parse
from launch.inputs.compose import ROOT


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws them; a wrong value ends with what is known."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if helped(arguments, __doc__):
        return
    need_checkout("helix paper")
    verification = "verification" in arguments
    arguments = [text for text in arguments if text != "verification"]
    try:
        if verification:
            given = parse(arguments, {"results": Path, "figures": Path})
            benchmarks = ROOT / "benchmarks"
            write(given.get("results", benchmarks / "results"), given.get("figures", benchmarks / "figures"))
            return
        given = parse(arguments, {"results": Path, "figures": Path, "page": boolean})
        results = given.get("results", ROOT / "benchmarks" / "results" / "simulate")
        figures = given.get("figures", ROOT / "benchmarks" / "figures")
        write_figures(results, figures, PAGE if given.get("page", True) else None)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
