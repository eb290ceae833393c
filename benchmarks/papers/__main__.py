"""Compares the papers behind the runtime with our results, item by item, with tables and figures: `helix papers`.

  helix papers               write benchmarks/papers/README.md and docs/simulator.md, and draw the figures of all papers
  helix papers verification  print one paper's items and tables, each with the command that makes it
  helix papers --count       print how many items of the papers are as described, partly, and not

Papers: helix, verification, vegas, gather. All is read from benchmarks/results/. helix first simulates its search over
333,661 configurations of GB200 (conf/hardware/gb200.yaml), and its changes, into simulate.jsonl there: a minute.
figures=DIR also draws the paper's figures there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from benchmarks.papers import count, gather_items, helix_items, simulated, vegas_items, verification_items
from benchmarks.papers.figures import write_figures
from benchmarks.papers.items import lines_of
from benchmarks.papers.verification_figures import CAPTIONS, drawable
from benchmarks.papers.verification_figures import draw as draw_verification
from benchmarks.records import figures as recorded
from benchmarks.records.columns import fill_tables
from benchmarks.records.tables import TABLES
from helix.schema import unknown_message
from launch.inputs.arguments import handle_help, need_checkout, parse
from launch.inputs.compose import ROOT

PAGE = ROOT / "benchmarks" / "papers" / "README.md"
BENCHMARKS = ROOT / "benchmarks"
PAPERS: dict[str, ModuleType] = {
    "helix": helix_items,
    "verification": verification_items,
    "vegas": vegas_items,
    "gather": gather_items,
}
DRAWN = {  # by `helix plot`
    "helix": ("pareto-deepseek-r1", "pareto-llama-3.1-405b"),
    "vegas": (
        "acceptance-positions",
        "acceptance-sparsity",
        "acceptance-rejected",
        "drafters-gains",
        "drafters-breakdown",
        "tuned",
    ),
    "gather": ("sparse-map", "sparse-map.emulated-8", "fidelity-needles", "fidelity-recall"),
}


def with_items(text: str) -> str:
    """Returns a page's text with tables and figures filled."""

    def lines(name: str) -> list[str]:
        if name in PAPERS:
            return lines_of(PAPERS[name].items())
        return SHOWN[name]() if name in SHOWN else TABLES[name]()

    return fill_tables(text, lines)


def _verification() -> list[str]:
    names = drawable(verification_items.records())
    return [_image(CAPTIONS[name], f"verify-{name}") for name in names]


def _pareto() -> list[str]:
    names = [name for name in DRAWN["helix"] if recorded.rows_of(name, BENCHMARKS / "results")]
    return [_image("Measured and simulated fronts", name) for name in names]


def _image(caption: str, name: str) -> str:
    return f"![{caption}](../figures/{name}.png)"


SHOWN = {"verification-figures": _verification, "pareto-figures": _pareto, "count": count.lines}


def show(name: str) -> None:
    """Prints a paper's items, then its tables, each with the command that makes it."""
    print(f"{PAPERS[name].__doc__}\n", *lines_of(PAPERS[name].items()), sep="\n")
    for title, table in PAPERS[name].tabled().items():
        print(f"\n{title}: `{table.command}`\n", *table.lines(), sep="\n")


def draw(name: str, figures: Path) -> None:
    """Draws a paper's figures."""
    if name == "helix":
        write_figures(simulated.paper(), figures)
    elif name == "verification":
        draw_verification(verification_items.records(), figures)
    for drawing in DRAWN.get(name, ()):
        recorded.draw(drawing, BENCHMARKS / "results", figures)


def write() -> None:
    """Writes the pages and draws all figures."""
    write_figures(simulated.paper(), BENCHMARKS / "figures")
    draw_verification(verification_items.records(), BENCHMARKS / "figures")
    for name in (name for names in DRAWN.values() for name in names):
        recorded.draw(name, BENCHMARKS / "results", BENCHMARKS / "figures")
    for page, filled in ((PAGE, with_items), (simulated.PAGE, simulated.with_tables)):
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a paper, or writes all; exits with a one-line error for a wrong name."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if handle_help(arguments, __doc__):
        return
    need_checkout("helix papers")
    if [*arguments] == ["--count"]:
        print(*count.lines(), sep="\n")
        return
    names = [text for text in arguments if "=" not in text]
    try:
        options = parse([text for text in arguments if "=" in text], {"figures": Path})
        for name in names:
            if name not in PAPERS:
                raise ValueError(unknown_message(name, PAPERS))
        if options and not names:
            raise ValueError(f"figures={options['figures']} needs a paper: {', '.join(PAPERS)}")
    except ValueError as error:
        sys.exit(f"error: {error}")
    for name in names:
        if name == "helix":
            simulated.write_record()
        show(name)
        if options:
            draw(name, options["figures"])
    if not names:
        write()


if __name__ == "__main__":
    main()
