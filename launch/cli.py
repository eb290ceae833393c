"""The command `helix`: every command of this package under one name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from launch.inputs.arguments import unknown

ROOT = Path(__file__).resolve().parent.parent  # found here: the list of commands imports nothing that takes seconds
COMMANDS = {
    "run": "decode prompts, or time a job: one run of one config",
    "serve": "serve a model over HTTP, with OpenAI's interface",
    "convert": "make a checkpoint directory of a GGUF file",
    "sweep": "one job for each point of several values",
    "plan": "rank layouts by predicted time",
    "simulate": "price one layout, or redraw the paper's figures",
    "tune": "find how many keys and drafts a model drafts for itself with",
    "bench": "time kernels, collectives and whole models",
    "calibrate": "measure this machine for the planner",
    "fidelity": "what block-sparse attention changes, step by step",
    "acceptance": "how many drafts hold that the model makes itself with few keys",
    "demo": "decode the demo prompts, and check that the needle is found",
    "needles": "make needle prompts, and score the answers",
    "plot": "draw figures from what benchmarks recorded",
    "tables": "write the tables of the pages from what benchmarks recorded",
}


def main() -> None:
    """Hands over to the command that the first argument names; with `--help`, lists them."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        listed = "\n".join(f"  {command:<10} {what}" for command, what in COMMANDS.items())
        print(f"usage: helix COMMAND ...\n\n{listed}\n\n`helix COMMAND --help` says what a command takes.")
        return
    if name not in COMMANDS:
        sys.exit(f"error: {unknown(name, COMMANDS)}")
    program = [str(ROOT / "torchrun_entry.py")] if name == "run" else ["-m", f"launch.{name}"]
    # In place of this process, so that signals and exit codes are the command's own.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.execv(sys.executable, [sys.executable, *program, *sys.argv[2:]])


if __name__ == "__main__":
    main()
