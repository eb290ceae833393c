"""Needles in code: prompts that the demo model answers only if it finds one line among thousands.

    python -m launch.needles make --length 32768 --count 50 --output needles.jsonl
    python -m launch.needles score results.jsonl

A prompt is Python source with the line `# The magic number for WORD is
NNNNN.` at a depth of its own, and ends with the question. Its id holds the answer.
"""

from __future__ import annotations

import argparse
import bisect
import json
import random
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.inputs.compose import ROOT

SOURCES = [ROOT / "helix", Path(sysconfig.get_path("stdlib"))]
WORDS = ["falcon", "river", "copper", "lantern", "meadow", "harbor", "violet", "glacier", "tunnel", "saddle", "orchard"]
ANSWER_TOKENS = 8  # " 12345." and a little more


def source_lines(directories: Sequence[Path], seed: int) -> list[str]:
    """Lines of the Python files in some directories, file after file in an order that the seed fixes."""
    files = [file for directory in directories for file in sorted(directory.glob("*.py"))]
    random.Random(seed).shuffle(files)
    return [line for file in files for line in file.read_text(encoding="utf-8", errors="ignore").splitlines()]


def make(tokenizer_path: Path, directories: Sequence[Path], length: int, count: int) -> list[dict[str, object]]:
    """`count` prompts of at most `length` tokens with their answer, and as near to that as whole lines allow."""
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
    return {"id": f"{word}-{number}-{seed}", "prompt": text(take), "max_new_tokens": ANSWER_TOKENS}


def score(lines: list[str]) -> tuple[int, int]:
    """Needles found and needles asked for, of result lines whose ids are those of `make`."""
    results = [json.loads(line) for line in lines]
    found = sum(result["text"].startswith(f" {result['id'].split('-')[1]}.") for result in results)
    return found, len(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="write a prompt file")
    making.add_argument("--length", type=int, default=32768, help="tokens of prompt and answer")
    making.add_argument("--count", type=int, default=50, help="prompts, their needles at evenly spread depths")
    making.add_argument("--tokenizer", type=Path, default=ROOT / "assets/demo-model/tokenizer.json")
    making.add_argument("--source", type=Path, nargs="+", default=SOURCES, help="directories of Python files")
    making.add_argument("--output", type=Path, required=True, help="file of JSON lines")
    scoring = commands.add_parser("score", help="count the needles found in a result file")
    scoring.add_argument("results", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "make":
        prompts = make(arguments.tokenizer, arguments.source, arguments.length, arguments.count)
        arguments.output.write_text("".join(json.dumps(p) + "\n" for p in prompts), encoding="utf-8")
        return
    found, asked = score(arguments.results.read_text(encoding="utf-8").splitlines())
    print(f"{found} of {asked} needles found")
    sys.exit(found == 0)
