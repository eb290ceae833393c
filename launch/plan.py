"""`helix plan`: the best layout of a model on a number of GPUs, with a prediction (docs/planner.md)."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from launch.inputs import command_parser
from launch.inputs.files import check_plot_path, check_writable, write_atomically
from launch.inputs.planner_commands import PLAN


def main(arguments: Sequence[str] | None = None) -> None:
    """Answers one planner query; exits with an error message if a value is wrong or nothing fits."""
    arguments = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        line = command_parser.read(arguments, PLAN)
        if "--help" in line.options:
            print(command_parser.parser(PLAN).format_help(), end="")
            return
        if (path := line.flag_values.get("--json", "-")) != "-":
            check_writable("--json", Path(path))
        if (picture := line.flag_values.get("--plot")) is not None:
            check_plot_path(Path(picture))
        answer(line)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def answer(line: command_parser.CommandLine) -> None:
    """Prints the answer to a query and writes its files; raises ValueError if a value is wrong, or nothing fits."""
    compose, planner = import_module("launch.inputs.compose"), import_module("helix.planner.plan")
    planning, rankings, tables = (import_module(f"launch.inputs.{n}") for n in ("planning", "rankings", "tables"))
    if (text := compose.info_text(line, PLAN)) is not None:
        print(text, end="")
        return
    if "--multirun" in line.options:
        raise ValueError("-m: a plan already compares layouts; plan one workload at a time")
    checked = planning.check_query(line.overrides, line.settings)
    width, file = tables.terminal_width(), line.flag_values.get("--json")
    try:
        ranking = planner.plan(checked.query)
    except planner.NoLayoutFits as error:
        raise ValueError(rankings.nothing_fits(error, checked, width)) from error
    if (picture := line.flag_values.get("--plot")) is not None:
        import_module("launch.inputs.plots").draw_ranking(ranking, checked.model, Path(picture))
    if file is not None:
        text = json.dumps(rankings.as_json(ranking, checked), indent=1)
        if file == "-":
            print(text)
            return
        write_atomically(Path(file), text + "\n")
    print(rankings.as_text(ranking, checked, width))


if __name__ == "__main__":
    gc.disable()  # an answer takes a second, a quarter of which would be garbage collection
    main()
    gc.freeze()  # skips the collection at exit
