"""The command `helix`: every command of this package under one name."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version

from helix.packages import ROOT, rank_environment
from helix.schema import unknown_message

COMMANDS = {
    "run": "decode the prompts of a file",
    "serve": "serve a model over HTTP, with OpenAI's interface and a page to chat at",
    "chat": "talk to a model in the terminal",
    "info": "what this machine has, and which kernels and collectives will be used on it",
    "plan": "rank layouts of a model by predicted time",
    "sweep": "run a job for each combination of several values",
    "convert": "make a checkpoint directory of a GGUF file",
    "simulate": "price one layout, phase by phase",
    "demo": "decode the demo prompts, and check that the needle is found",
}
# Started by name, as `benchmarks.NAME`: nothing here imports them.
LABORATORY = {
    "bench": "time kernels, collectives and whole models",
    "tune": "tune self-speculation: share of keys and number of drafts",
    "calibrate": "measure this machine for the planner",
    "planner": "compare the planner's predictions with recorded steps",
    "papers": "print the papers that Helix follows, item by item; redraw their figures",
    "fidelity": "compare block-sparse attention with dense, step by step",
    "acceptance": "measure how many self-drafted tokens are accepted",
    "needles": "make needle prompts, and score the answers",
    "plot": "draw figures of records",
    "tables": "write the tables of pages from records",
}
USAGE = """\
usage: helix COMMAND ...

  helix serve DIR --port 8000         DIR: a checkpoint; or ORG/NAME of the Hugging Face Hub
  helix run DIR prompts.jsonl -o results.jsonl
  helix plan DIR gpus=8 context=1M
"""


def main() -> None:
    """Runs the command that the first argument names; lists all with `--help`."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        for title, commands in (("Commands", COMMANDS), ("Laboratory", LABORATORY)):
            listed = "\n".join(f"  {command:<11} {what}" for command, what in commands.items())
            print(f"{USAGE if commands is COMMANDS else ''}\n{title}:\n\n{listed}")
        print("\n`helix COMMAND --help` says what a command takes; `helix --shell-completion bash` completes it.")
        return
    if name in ("-V", "--version"):
        print(f"helix {version('helix-runtime')}")
        return
    # In place of this process, so that signals and exit codes are the command's own.
    os.environ.update(rank_environment())
    if name in ("--shell-completion", "-sc", "--complete"):
        os.execv(sys.executable, [sys.executable, "-m", "launch.completion", name, *rest])
    if name not in COMMANDS | LABORATORY:
        sys.exit(f"error: {unknown_message(name, COMMANDS | LABORATORY)}")
    if name in LABORATORY and not (ROOT / "benchmarks").is_dir():
        sys.exit(f"error: helix {name} is in the package benchmarks, which {ROOT} does not have: take Helix's checkout")
    package = "benchmarks" if name in LABORATORY else "launch"
    program = [str(ROOT / "torchrun_entry.py")] if name == "run" else ["-m", f"{package}.{name}"]
    if name == "bench" and any(text.startswith("bench=") or text in ("-m", "--multirun") for text in rest):
        program = ["-m", "benchmarks.entry"]  # a job of one's own, or several
    os.execv(sys.executable, [sys.executable, *program, *rest])


if __name__ == "__main__":
    main()
