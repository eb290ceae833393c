"""Counts the tests that went since a commit, and checks that each names the one that covers it.

`python -m tests.removed [COMMIT]`. Lines of tests/removed/*.tsv: the old test, the covering one (`path::test` or
`path::test[row]`, or `-`), and for `-` the reason. The exit code is 1 where a test is missing, or what covers it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
BASE = "684767b1"


def tests_of(source: str) -> Iterator[str]:
    for node in ast.parse(source).body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner.name.startswith("test"):
                yield inner.name


def is_test_file(path: str) -> bool:
    return path.startswith("tests/") and path.endswith(".py") and Path(path).name.startswith("test_")


def before(commit: str) -> set[str]:
    command = ["git", "ls-tree", "-r", "--name-only", commit, "tests"]
    names = subprocess.check_output(command, cwd=ROOT, text=True).split()
    paths = [path for path in names if is_test_file(path)]
    shown = {path: subprocess.check_output(["git", "show", f"{commit}:{path}"], cwd=ROOT, text=True) for path in paths}
    return {f"{path}::{test}" for path, source in shown.items() for test in tests_of(source)}


def now() -> set[str]:
    paths = (ROOT / "tests").rglob("test_*.py")
    return {f"{path.relative_to(ROOT)}::{test}" for path in paths for test in tests_of(path.read_text())}


def main(commit: str = BASE) -> int:
    there, problems, lines = now(), [], {}
    for file in sorted(Path(__file__).parent.glob("*.tsv")):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            old, covering, *reason = line.split("\t")
            lines[old] = covering
            if covering == "-":
                problems += [] if reason and reason[0] else [f"{file.name}:{number}: no reason"]
            elif covering.split("[")[0] not in there:
                problems.append(f"{file.name}:{number}: {covering} is not there")
    gone = before(commit) - there
    problems += [f"{test} went, and no line says what covers it" for test in sorted(gone - lines.keys())]
    for problem in problems:
        print(problem)
    bare = sum(lines[test] == "-" for test in gone & lines.keys())
    print(f"{len(gone)} tests went since {commit}: {len(gone & lines.keys()) - bare} covered, {bare} without a subject")
    print(f"{len(there)} test functions, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
