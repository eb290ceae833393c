"""Needles in code: prompts that a model answers only if it finds one line among thousands.

  helix needles make length=32768 count=50 output=needles.jsonl
  helix needles score results.jsonl

A prompt is Python source with the line `# The magic number for WORD is NNNNN.` at its own depth, and ends with the
question. Its id has the answer. `score` counts the needles found in a result file; exit code 1: none.

  output     JSON lines file to write
  length     tokens of a prompt and its answer (default 32768)
  count      prompts, with needles at evenly spaced depths (default 50)
  tokenizer  the model's tokenizer.json (default: the demo model's)
  source     comma-separated directories of Python files (default: helix, and Python's standard library)
"""

from __future__ import annotations

import bisect
import json
import random
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.inputs.arguments import handle_help, need_checkout, parse
from launch.inputs.compose import ROOT

SOURCES = [ROOT / "helix", Path(sysconfig.get_path("stdlib"))]
WORDS = ["falcon", "river", "copper", "lantern", "meadow", "harbor", "violet", "glacier", "tunnel", "saddle", "orchard"]
KEYS: dict[str, Any] = {
    "output": Path, "length": int, "count": int, "tokenizer": Path, "source": list[str]
}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "length": 32768, "count": 50, "tokenizer": ROOT / "assets/demo-model/tokenizer.json", "source": SOURCES
}  # fmt: skip
ANSWER_TOKENS = 8  # " 12345." and some slack


def source_lines(directories: Sequence[Path], seed: int) -> list[str]:
    """Returns the lines of all Python files in `directories`, with the files in an order fixed by the seed."""
    files = [file for directory in directories for file in sorted(directory.glob("*.py"))]
    random.Random(seed).shuffle(files)
    return [line for file in files for line in file.read_text(encoding="utf-8", errors="ignore").splitlines()]


def make(tokenizer_path: Path, directories: Sequence[Path], length: int, count: int) -> list[dict[str, object]]:
    """Makes `count` prompts of at most `length` tokens with their answer, as long as whole lines allow."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    return [
        _prompt(tokenizer, source_lines(directories, index), index, (index + 0.5) / count, length)
        for index in range(count)
    ]


def _prompt(tokenizer: Any, lines: list[str], seed: int, depth: float, length: int) -> dict[str, object]:
    rng = random.Random(seed)
    word, number = rng.choice(WORDS), f"{rng.randrange(100_000):05d}"
    needle, question = f"# The magic number for {word} is {number}.", f"\n# The magic number for {word} is"

    def text(take: int) -> str:
        before = int(take * depth)
        return "\n".join([*lines[:before], needle, *lines[before:take]]) + question

    def too_long(take: int) -> bool:
        return len(tokenizer.encode(text(take)).ids) > length - ANSWER_TOKENS

    take = bisect.bisect_left(range(1, min(len(lines), length)), True, key=too_long)
    return {"id": f"{word}-{number}-{seed}", "prompt": text(take), "max_tokens": ANSWER_TOKENS}


def score(lines: list[str]) -> tuple[int, int]:
    """Returns the numbers of needles found and of all results, by the ids of `make`."""
    results = [json.loads(line) for line in lines]
    found = sum(result["text"].startswith(f" {result['id'].split('-')[1]}.") for result in results)
    return found, len(results)


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes prompts, or scores results; exits with a one-line error for a wrong value."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if handle_help(arguments or ["--help"], __doc__):
        return
    command, *rest = arguments
    try:
        if command == "make":
            if not {"tokenizer", "source"} <= (options := parse(rest, KEYS, needed=("output",))).keys():
                need_checkout("helix needles make without tokenizer and source")
            options = DEFAULTS | options
            sources = [Path(directory) for directory in options["source"]]
            prompts = make(options["tokenizer"], sources, options["length"], options["count"])
            options["output"].write_text("".join(json.dumps(p) + "\n" for p in prompts), encoding="utf-8")
        elif command == "score" and len(rest) == 1:
            found, total = score(Path(rest[0]).read_text(encoding="utf-8").splitlines())
            print(f"{found} of {total} needles found")
            sys.exit(found == 0)
        else:
            raise ValueError(f"{' '.join(arguments)}: expected `make KEY=VALUE ...` or `score FILE` (see --help)")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
