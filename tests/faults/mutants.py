"""Samples mutants of product files with a seed, and records which of them a test kills.

`python -m tests.faults.mutants record=FILE [count=150 seed=71 copies=2]` writes a line for each mutant: the change
(file, line, before and after), whether a test failed, and which; an existing FILE is continued.
`... compare=FILE` reads an earlier record, runs the mutants killed then, and exits with 1 if one survives now.
Each mutant runs against the test files that import its file, and against the rows of the parity table.
"""

from __future__ import annotations

import ast
import json
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from tests.faults.__main__ import OK, ROOT, Tree, copies_of_this_tree, write

FILES = (
    "comm/hopb.py",
    "comm/dual_batch_overlap.py",
    "helix/engine/block_tables.py",
    "helix/engine/scheduler_output.py",
    "helix/engine/inbox.py",
    "helix/engine/pages.py",
    "helix/engine/prefix.py",
    "helix/engine/request.py",
    "helix/engine/scheduler.py",
    "helix/engine/snapshots.py",
    "helix/layers/rotary.py",
    "helix/layout.py",
    "helix/kv_placement.py",
    "helix/sampling_params.py",
    "helix/speculation/acceptance.py",
    "helix/worker/blocks.py",
    "helix/worker/graph_keys.py",
    "helix/worker/host_store.py",
    "helix/worker/kv_cache.py",
    "helix/worker/sampling.py",
    "helix/worker/logits_processor.py",
    "helix/worker/step_tokens.py",
    "kernels/tokens/accept.py",
    "launch/answers/grammar_matcher.py",
    "launch/answers/answer_reader.py",
    "launch/client/detokenizer.py",
    "launch/client/engine_messages.py",
)
DEADLINE_S = 60  # of a test; a mutant that makes one hang counts as killed
SESSION_S = 120  # of all tests of a mutant: it survives if none has failed by then
ROWS = "tests/e2e/test_parity.py"  # covers the whole product, which it imports through the fuzzer
ORDER = "unit", "kernels", "serving", "dist", "e2e"  # of the test files, fastest first
SWAPS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.Add: ("+", "-"), ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "*"), ast.Div: ("/", "*"), ast.Mod: ("%", "//"),
    ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """A change of a file: `new` replaces the bytes from `begin` to `end`; `number` counts the file's mutants."""

    file: str
    number: int
    line: int
    begin: int
    end: int
    old: str
    new: str


def mutants_of(file: str) -> Iterator[Mutant]:
    """Yields all mutants of a file: operators, comparisons, integers, conditions and calls of min, max, any and all."""
    source = (ROOT / file).read_text()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    data, number = source.encode(), count()

    def at(line: int | None, column: int | None) -> int:
        assert line is not None and column is not None
        return starts[line - 1] + column

    def change(line: int, begin: int, end: int, new: str) -> Mutant:
        return Mutant(file, next(number), line, begin, end, data[begin:end].decode(), new)

    def operator(kind: ast.AST, left: ast.expr, right: ast.expr) -> Iterator[Mutant]:
        begin, end = at(left.end_lineno, left.end_col_offset), at(right.lineno, right.col_offset)
        old, new = SWAPS.get(type(kind), ("", ""))
        offset = data.find(old.encode(), begin, end)
        if old and offset >= 0:
            yield change(right.lineno, offset, offset + len(old), new)

    for node in code_of(ast.parse(source)):
        match node:
            case ast.Compare(left=left, ops=ops, comparators=others):
                for kind, a, b in zip(ops, [left, *others], others, strict=False):
                    yield from operator(kind, a, b)
            case ast.BinOp(left=left, op=op, right=right):
                yield from operator(op, left, right)
            case ast.BoolOp(op=op, values=values):
                for a, b in pairwise(values):
                    yield from operator(op, a, b)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield change(node.lineno, at(node.lineno, node.col_offset), at(operand.lineno, operand.col_offset), "")
            case ast.Constant(value=int(value)) if not isinstance(value, bool):
                begin = at(node.lineno, node.col_offset)
                yield change(node.lineno, begin, at(node.end_lineno, node.end_col_offset), str(value + 1))
            case ast.Call(func=ast.Name(id=name) as called) if name in CALLS:
                begin = at(called.lineno, called.col_offset)
                yield change(called.lineno, begin, begin + len(name), CALLS[name])
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                begin, end = at(test.lineno, test.col_offset), at(test.end_lineno, test.end_col_offset)
                yield change(test.lineno, begin, end, f"(not ({data[begin:end].decode()}))")


def code_of(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes that execute, without annotations, `assert`s and error messages."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns") or isinstance(value, ast.Assert):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.Assert | ast.Raise | ast.JoinedStr):
                yield child
                yield from code_of(child)


def sampled_mutants(max_count: int, seed: int) -> list[Mutant]:
    """Samples `max_count` mutants, about equally many per file."""
    chance = random.Random(seed)
    piles = [chance.sample(pile, len(pile)) for pile in ([*mutants_of(file)] for file in FILES)]
    rounds = [pile[i] for i in range(max_count) for pile in piles if i < len(pile)]
    return sorted(rounds[:max_count], key=lambda mutant: (mutant.file, mutant.begin))


def importing(file: str) -> list[str]:
    """Returns the test files that import `file`, and the parity rows."""
    module = file.removesuffix(".py").replace("/", ".")
    found = [path for path in (ROOT / "tests").rglob("test_*.py") if module in imported(path)]
    assert found, f"no test imports {file}: pytest would run all"
    rank = {name: i for i, name in enumerate(ORDER)}
    found.sort(key=lambda path: (rank.get(path.parent.name, 0), str(path)))
    return [*dict.fromkeys([*(str(path.relative_to(ROOT)) for path in found), ROWS])]


def imported(path: Path) -> set[str]:
    """Returns the names that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
    return names


def fate(tree: Tree, mutant: Mutant, failing: list[str]) -> dict[str, Any]:
    """Runs a mutant; returns its record."""
    path = tree.folder / mutant.file
    original = path.read_bytes()
    begin = time.monotonic()
    without = [f"--deselect={test}" if "::" in test else f"--ignore={test}" for test in failing]
    tests = [f"--session-timeout={SESSION_S}", *importing(mutant.file), *without]
    try:
        write(path, (original[: mutant.begin] + mutant.new.encode() + original[mutant.end :]).decode())
        code, by = tree.run(tests, DEADLINE_S)
    finally:
        write(path, original.decode())
    by = "survived" if code == OK or "session-timeout" in by else by[-200:]
    return asdict(mutant) | {"killed": by != "survived", "by": by, "s": round(time.monotonic() - begin)}


def main(words: list[str]) -> int:
    """Records or compares mutants; returns the exit code."""
    options = dict(word.split("=", 1) for word in words)
    console, copies, record = Console(), int(options.get("copies", 2)), Path(options["record"])
    mutants = sampled_mutants(int(options.get("count", 150)), int(options.get("seed", 71)))
    before = read(Path(options["compare"]))[1] if "compare" in options else None
    if before is not None:
        mutants = [mutant for mutant in mutants if before[key(asdict(mutant))]]
    failing, fates = read(record) if record.exists() else (None, {})
    with copies_of_this_tree(copies, "helix-mutants-") as submit, record.open("a") as file:
        if failing is None:
            files = sorted({test for mutant in mutants for test in importing(mutant.file)})
            work = [submit(partial(Tree.failures, tests=[test], deadline_s=DEADLINE_S)) for test in files]
            alone = track((job.result() for job in work), "files without any mutant", len(files), console=console)
            failing = [test for tests in alone for test in tests if test.startswith("tests/")]
            file.write(json.dumps({"fail without any mutant": failing}) + "\n")
        left = [mutant for mutant in mutants if key(asdict(mutant)) not in fates]
        jobs = [submit(partial(fate, mutant=mutant, failing=failing)) for mutant in left]
        for job in track(as_completed(jobs), f"{len(left)} mutants", len(left), console=console):
            file.write(json.dumps(line := job.result()) + "\n")
            file.flush()
            fates[key(line)] = line["killed"]
    console.print(f"{sum(fates.values())} of {len(fates)} mutants are killed")
    survivors = sorted(name for name, killed in (before or {}).items() if killed and not fates[name])
    for file_name, number, new in survivors:
        console.print(f"was killed, survives: {file_name}, number {number}: {new}", markup=False)
    return 1 if survivors else 0


def key(line: dict[str, Any]) -> tuple[str, int, str]:
    """Returns what identifies a mutant."""
    return line["file"], line["number"], line["new"]


def read(record: Path) -> tuple[list[str], dict[tuple[str, int, str], bool]]:
    """Returns the tests that fail without a mutant, and whether each mutant was killed."""
    first, *lines = [json.loads(line) for line in record.read_text().splitlines()]
    return first["fail without any mutant"], {key(line): line["killed"] for line in lines}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
