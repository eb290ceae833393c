"""Plants faults one by one in copies of this tree, and shows which test catches each.

`make test-faults`, `make test-faults ARGS=mailbox`: faults whose name or file has the words. The exit code is 1 if a
fault survives, if its place is not found exactly once, or if its tests fail without it.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from tests.faults.planted import FAULTS, Fault

ROOT = Path(__file__).parents[2]
SHARED = "assets", "benchmarks/results", "benchmarks/figures", "docs"  # folders without faults, which are linked
COPIES = 2  # tested in parallel
DEADLINE_S = 120.0  # of a test; a fault that makes one hang counts as caught
OK, FAILED = 0, 1  # pytest's exit codes
CRASHES = -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT  # of pytest's process: a fault may write to invalid memory

T = TypeVar("T")


@dataclass(frozen=True)
class Found:
    """What happened to a fault.

    Attributes:
        by: the test that caught it, or why none is known.
    """

    caught: bool
    by: str
    seconds: float


def copy_tree(target: Path) -> None:
    """Copies the tracked files."""
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for name in map(Path, listed.splitlines()):
        if not any(name.is_relative_to(shared) for shared in SHARED) and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)
    for name in SHARED:
        (target / name).symlink_to(ROOT / name)


def misplaced(fault: Fault) -> str | None:
    """Returns why a fault cannot be planted, or None."""
    count = (ROOT / fault.file).read_text().count(fault.old) if (ROOT / fault.file).is_file() else 0
    return None if count == 1 else f"{fault.name}: its old text occurs {count} times in {fault.file}, expected once"


class Tree:
    """A copy of this tree, with a process that runs its tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        copy_tree(folder)
        command = [sys.executable, "-P", str(folder / "tests" / "faults" / "server.py")]
        self.server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, tests: Iterable[str], deadline_s: float = DEADLINE_S) -> tuple[int, str]:
        """Returns pytest's exit code, and the first failed test, or else the end of its output."""
        code, output = self._pytest(["-x", *tests], deadline_s)
        failed = failed_of(output)
        return code, failed[0] if failed else output.strip()[-2000:]

    def failures(self, tests: Iterable[str], deadline_s: float = DEADLINE_S) -> list[str]:
        """Runs `tests` and returns the ones that fail."""
        return failed_of(self._pytest([*tests], deadline_s)[1])

    def _pytest(self, tests: list[str], deadline_s: float) -> tuple[int, str]:
        assert self.server.stdin is not None and self.server.stdout is not None
        arguments = ["-p", "no:cacheprovider", "--tb=no", "--hypothesis-profile=first-failure", "-rfE"]
        self.server.stdin.write(json.dumps([str(self.folder), *arguments, f"--timeout={deadline_s}", *tests]) + "\n")
        self.server.stdin.flush()
        code = int(self.server.stdout.readline())
        return code, (self.folder / "output").read_text()

    def close(self) -> None:
        self.server.communicate()  # it ends when its input is closed


def failed_of(output: str) -> list[str]:
    """Returns the failed tests of pytest's output."""
    lines = [line.split(maxsplit=1)[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return [line.split(" - ")[0] for line in lines]


def plant(tree: Tree, fault: Fault) -> Found:
    """Plants a fault, runs its tests, and restores the file."""
    path = tree.folder / fault.file
    original = path.read_text()
    begin = time.monotonic()
    try:
        write(path, original.replace(fault.old, fault.new))
        code, by = tree.run(fault.tests, fault.deadline_s or DEADLINE_S)
    finally:
        write(path, original)
    seconds = time.monotonic() - begin
    if code in CRASHES:
        by = signal.strsignal(-code) or str(code)
    elif code != FAILED:
        by = "survived" if code == OK else f"exit {code}: {by}"
    return Found(code in (FAILED, *CRASHES), by, seconds)


def write(path: Path, text: str) -> None:
    """Writes a source file and deletes its bytecode."""
    path.write_text(text)
    Path(cache_from_source(str(path))).unlink(missing_ok=True)  # size and mtime may equal the other version's


@contextmanager
def copies_of_this_tree(count: int, prefix: str) -> Iterator[Callable[[Callable[[Tree], T]], Future[T]]]:
    """Yields a function that submits work; each piece gets one of `count` copies to itself."""
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(count))
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix))
        trees: SimpleQueue[Tree] = SimpleQueue()
        for i in range(count):
            trees.put(tree := Tree(Path(directory, str(i))))
            stack.callback(tree.close)

        def with_tree(work: Callable[[Tree], T]) -> T:
            tree = trees.get()
            try:
                return work(tree)
            finally:
                trees.put(tree)

        yield lambda work: threads.submit(with_tree, work)


def main(words: list[str]) -> int:
    """Plants the selected faults; returns the exit code."""
    console = Console()
    faults = [f for f in FAULTS if all(word in f"{f.name} {f.file}" for word in words)]
    problems = [problem for fault in faults if (problem := misplaced(fault))]
    if problems or not faults:
        console.print("\n".join(problems) or f"no fault has {' '.join(words)} in its name or file", markup=False)
        return 1
    with copies_of_this_tree(COPIES, "helix-faults-") as submit:
        tests = sorted({test for fault in faults for test in fault.tests})
        halves = [tests[i::COPIES] for i in range(COPIES) if tests[i::COPIES]]
        with console.status(f"{len(tests)} tests without any fault"):
            for code, by in [job.result() for job in [submit(partial(Tree.run, tests=half)) for half in halves]]:
                if code != OK:
                    console.print(f"without any fault: {by}", markup=False)
                    return 1
        jobs = [submit(partial(plant, fault=fault)) for fault in faults]
        work = (job.result() for job in jobs)
        found = list(track(work, f"{len(faults)} faults", len(faults), console=console, transient=True))
    table = Table("fault", "in", "caught by", "s")
    for fault, result in zip(faults, found, strict=True):
        by = Text(result.by.split("::", 1)[-1], "green" if result.caught else "bold red")
        table.add_row(fault.name, fault.file, by, f"{result.seconds:.0f}")
    console.print(table)
    caught = sum(result.caught for result in found)
    console.print(f"{caught} of {len(faults)} faults are caught")
    return caught != len(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
