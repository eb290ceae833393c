"""The `helix` command: dispatches to all commands of this package."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version

from helix.packages import ROOT, rank_environment
from helix.schema import unknown_message
from launch.inputs.arguments import need_checkout

COMMANDS = {
    "run": "generate completions for a file of prompts",
    "serve": "serve a model over an OpenAI-compatible HTTP API, with a chat page",
    "chat": "chat with a model in the terminal",
    "info": "show this machine, or what a model is and what GPUs would hold of it",
    "plan": "rank a model's layouts by predicted time",
    "sweep": "run a job for each combination of values",
    "cache": "show or delete the prefixes that kv.prefix_dir keeps on disk",
    "convert": "convert a GGUF file to a Hugging Face checkpoint",
    "simulate": "predict the decode step of one layout, phase by phase",
    "demo": "run the demo prompts and check that the needle is found",
}
# Run by name, as `benchmarks.NAME`: nothing here imports them.
LABORATORY = {
    "bench": "benchmark kernels, collectives and whole models",
    "tune": "tune speculation=sparse: the share of keys to read and the number of drafts",
    "calibrate": "measure this machine for the planner",
    "planner": "compare the planner's predictions with recorded steps",
    "papers": "list which parts of its papers Helix implements, and redraw their figures",
    "fidelity": "compare block-sparse with dense attention, step by step",
    "acceptance": "measure the acceptance rate of self-drafted tokens",
    "needles": "generate needle prompts and score the answers",
    "plot": "plot records",
    "tables": "write the tables of docs pages from records",
}
USAGE = """\
usage: helix COMMAND ...

  helix serve DIR --port 8000         DIR: a checkpoint directory, or ORG/NAME on the Hugging Face Hub
  helix run DIR prompts.jsonl -o results.jsonl
  helix plan DIR gpus=8 context=1M
"""


def main() -> None:
    """Runs the command that the first argument names; `--help` lists all commands."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        for title, commands in (("Commands", COMMANDS), ("Benchmarks and experiments", LABORATORY)):
            listed = "\n".join(f"  {command:<11} {what}" for command, what in commands.items())
            print(f"{USAGE if commands is COMMANDS else ''}\n{title}:\n\n{listed}")
        print("\n`helix COMMAND --help` shows a command's options; `helix --shell-completion bash` completes them.")
        return
    if name in ("-V", "--version"):
        print(f"helix {version('helix-runtime')}")
        return
    # exec replaces this process, so signals and exit codes are the command's.
    os.environ.update(rank_environment())
    if name in ("--shell-completion", "-sc", "--complete"):
        os.execv(sys.executable, [sys.executable, "-m", "launch.completion", name, *rest])
    if name not in COMMANDS | LABORATORY:
        sys.exit(f"error: {unknown_message(name, COMMANDS | LABORATORY)}")
    if name in LABORATORY:
        need_checkout(f"helix {name}")
    package = "benchmarks" if name in LABORATORY else "launch"
    program = [str(ROOT / "torchrun_entry.py")] if name == "run" else ["-m", f"{package}.{name}"]
    if name == "bench" and any(text.startswith("bench=") or text in ("-m", "--multirun") for text in rest):
        program = ["-m", "benchmarks.entry"]  # a separate job, or several
    os.execv(sys.executable, [sys.executable, *program, *rest])


if __name__ == "__main__":
    main()
