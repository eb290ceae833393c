"""`helix simulate`: predicts one decode step of a model, phase by phase (docs/simulator.md).

helix simulate point llama-3.1-70b hardware=h200 layout.kvp=2 layout.tpa=4 batch=2 context=1M
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from helix.schema import unknown_message
from launch.inputs import command_parser
from launch.inputs.arguments import handle_help
from launch.inputs.files import check_plot_path
from launch.inputs.planner_commands import POINT

PREDICTED = {"model", "layout", "hopb", "pp", "batch", "context", "dtype", "hardware"}


def print_point(arguments: Sequence[str]) -> None:
    """Prints one decode step, phase by phase.

    Raises:
        ValueError: a value is wrong; or, after printing, the batch does not fit into memory.
    """
    line = command_parser.read(arguments or ["--help"], POINT)
    if "--help" in line.options:
        print(command_parser.parser(POINT).format_help(), end="")
        return
    picture = None if (path := line.flag_values.get("--plot")) is None else Path(path)
    if picture is not None:
        check_plot_path(picture)
    compose = import_module("launch.inputs.compose")
    if (text := compose.info_text(line, POINT)) is not None:
        print(text, end="")
        return
    given = dict(text.partition("=")[::2] for text in line.overrides)
    model = given.get("model.path", given.get("model"))
    if missing := [key for key, value in (("model", model), ("hardware", given.get("hardware"))) if value is None]:
        raise ValueError(f"{' and '.join(missing)} missing, as in {POINT.examples[0]}")
    config = compose.compose_config(line.overrides, line.settings)
    for text in line.overrides:
        key = text.lstrip("+~").partition("=")[0]
        if key.partition(".")[0] not in PREDICTED or key in ("model.weights", "model.dtype"):
            raise ValueError(
                f"{text}: simulate point predicts plain steps with dense attention, with weights and cache in dtype, "
                "and ignores this: leave it out, or use `helix plan`"
            )
    import_module("launch.inputs.simulation").print_point(config, model, picture)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a subcommand; exits with an error message if a value is wrong."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if handle_help(arguments[:1] or ["--help"], command_parser.parser(POINT).format_help()):
        return
    name, *rest = arguments
    try:
        if name != "point":
            raise ValueError(unknown_message(name, ["point"]))
        print_point(rest)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
