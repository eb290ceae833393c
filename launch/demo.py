"""Runs the demo of `make run`: the demo model on assets/prompts.jsonl, over four CPU ranks or all GPUs.

  helix demo [KEY=VALUE ...]

Keys are those of `helix run` (`helix run --help`). The last line says whether the answer to the first prompt has the
number that is hidden in it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from launch import run
from launch.inputs.arguments import handle_help, need_checkout
from launch.inputs.compose import ROOT


def main() -> None:
    """Runs the demo prompts and exits with their exit code."""
    given = sys.argv[1:]
    if handle_help(given, __doc__):
        return
    need_checkout("helix demo")
    gpus = import_module("torch").cuda.device_count()
    kvp, tpa = (2, 2) if gpus == 0 else (gpus // 2, 2) if gpus % 2 == 0 else (gpus, 1)
    if any(text.startswith("layout") for text in given):  # use the whole layout of the user
        kvp, tpa = 1, 1
    with TemporaryDirectory() as directory:
        results = Path(directory) / "results.jsonl"
        overrides = ["experiment=demo", f"layout.kvp={kvp}", f"layout.tpa={tpa}", f"decode.output={results}"]
        code = run.main([*overrides, *given])
        if code == 0 and results.exists():  # or decode.output was given
            print(verdict(results.read_text(encoding="utf-8").splitlines()), end="")
    sys.exit(code)


def verdict(lines: Sequence[str]) -> str:
    """Says whether the answer to the first prompt has the number hidden in it; empty without a result."""
    with (ROOT / "assets" / "prompts.jsonl").open(encoding="utf-8") as file:
        needle = json.loads(file.readline())["id"]
    answer = next((line for line in lines if json.loads(line)["id"] == needle), None)
    if answer is None:
        return ""
    number, text = needle.split("-")[1], json.loads(answer)["text"]
    found = "found" if text.startswith(f" {number}.") else "NOT found"
    return f"the number hidden in the first prompt was {found}: it is {number}, the answer was {text.strip()!r}\n"


if __name__ == "__main__":
    main()
