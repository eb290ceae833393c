"""The command `helix`: every command of this package under one name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from launch.inputs.arguments import unknown

ROOT = Path(__file__).resolve().parent.parent  # found here: the list of commands imports nothing that takes seconds
COMMANDS = {
    "run": "decode prompts: one run of one config",
    "serve": "serve a model over HTTP, with OpenAI's interface",
    "convert": "make a checkpoint directory of a GGUF file",
    "sweep": "one job for each point of several values",
    "plan": "rank layouts by predicted time",
    "simulate": "price one layout, phase by phase",
    "demo": "decode the demo prompts, and check that the needle is found",
}
# Started by name, as `benchmarks.NAME`: nothing here imports them.
LABORATORY = {
    "tune": "find how many keys and drafts a model drafts for itself with",
    "bench": "time kernels, collectives and whole models",
    "calibrate": "measure this machine for the planner",
    "planner": "compare the planner's predictions with recorded steps",
    "paper": "redraw the paper's figures with the simulator",
    "fidelity": "what block-sparse attention changes, step by step",
    "acceptance": "how many drafts hold that the model makes itself with few keys",
    "needles": "make needle prompts, and score the answers",
    "plot": "draw figures from what benchmarks recorded",
    "tables": "write the tables of the pages from what benchmarks recorded",
}


def main() -> None:
    """Runs the command that the first argument names; lists all with `--help`."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        listed = "\n".join(f"  {command:<10} {what}" for command, what in (COMMANDS | LABORATORY).items())
        print(f"usage: helix COMMAND ...\n\n{listed}\n\n`helix COMMAND --help` says what a command takes.")
        return
    if name not in COMMANDS | LABORATORY:
        sys.exit(f"error: {unknown(name, COMMANDS | LABORATORY)}")
    if name in LABORATORY and not (ROOT / "benchmarks" / f"{name}.py").exists():
        sys.exit(f"error: helix {name} is in the package benchmarks, which {ROOT} does not have: take Helix's checkout")
    room = "benchmarks" if name in LABORATORY else "launch"
    program = [str(ROOT / "torchrun_entry.py")] if name == "run" else ["-m", f"{room}.{name}"]
    # In place of this process, so that signals and exit codes are the command's own.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.execv(sys.executable, [sys.executable, *program, *sys.argv[2:]])


if __name__ == "__main__":
    main()
