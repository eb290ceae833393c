"""Shows this machine, or a model: `helix info [MODEL]`.

Without MODEL: GPUs and their links, versions, collectives and kernels, and the hardware description that the planner
uses (`layout=auto`).

MODEL is a checkpoint directory, ORG/NAME[@REVISION] on the Hugging Face Hub (only its config and tokenizer are
downloaded), or a shape from conf/model/. Shows its layers, weights, context, KV cache, tokenizer and chat format, and
what each of 1, 2, 4 and 8 GPUs would hold; or why Helix cannot run it, with exit code 1. Reads only the headers of the
weights; a config.json alone is enough.

`helix info [MODEL] json=-` prints the same as JSON.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Literal

from launch.inputs import command_parser
from launch.inputs.arguments import handle_help, parse


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the facts as tables or JSON; exits with an error message if the model is refused."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if handle_help(arguments, __doc__):
        return
    try:
        given = parse(arguments, {"model": str, "json": Literal["-"]}, words=["model"])
        if "model" in given:
            command_parser.model_override(given["model"])
            shown = import_module("launch.inputs.model_facts")
            found = shown.facts(given["model"])
        else:
            shown = import_module("launch.inputs.machine")
            found = shown.facts()
    except ValueError as error:
        sys.exit(f"error: {error}")
    if "json" in given:
        print(json.dumps(found, indent=1))
    else:
        shown.show(found)
    if (why := found.get("refused")) is not None:
        sys.exit(f"error: {why}")


if __name__ == "__main__":
    gc.disable()  # with 100,000 tensors a quarter of the time would be garbage collection
    main()
    gc.freeze()  # skips the collection at exit
