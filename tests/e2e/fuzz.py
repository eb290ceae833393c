"""Fuzzes random models of every family, decoding options and layouts against transformers.

  python -m tests.e2e.fuzz cases=90

  family     one family (default: all, round robin)
  mode       layout.mode of all cases (default: random)
  seed       seed of the first case (default 0)
  cases      number of cases (default 500)
  seconds    time limit: no case starts later
  device     cpu, cuda, or interpreter (default cpu)
  processes  1 for ranks that are threads; 2, 4 or 8 ranks that are processes (default 1)
  workers    workers that share the device (default: 10 on GPUs, else 1)
  dtype      float32 or bfloat16 (default float32)
  record     append a line per case to this file

A case (tests/e2e/fuzz_cases.py) is a valid config with random weights, written in one of many ways, and random
settings: layout, pages and append blocks, drafter and policy, attention, offload, HOP-B chunks, requests that share
prefixes, are aborted, wait or are preempted. tests/e2e/fuzz_checks.py checks the outcome; one case in ten has
invalid settings and must be refused by name. Family, seed and mode reproduce a case.

device=cuda runs ranks as threads on one GPU, and cases of one rank also with CUDA graphs. processes=2 (4, 8) runs
ranks as processes: with a GPU each, over NCCL or symmetric memory, also with CUDA graphs; on CPUs over gloo. Several
workers share the GPUs and Triton's cache. device=interpreter runs the GPU kernels on a CPU, slowly.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from rich.console import Console
from rich.table import Table

if "device=interpreter" in sys.argv:  # Triton reads this when a kernel is defined
    os.environ["TRITON_INTERPRET"] = "1"

from launch.inputs.arguments import handle_help
from launch.job.report import provenance
from tests.e2e.fuzz_cases import MODES, Case, case_of
from tests.e2e.fuzz_checks import Outcome, outcome
from tests.e2e.fuzz_configs import MAKERS
from tests.e2e.fuzz_runs import Tamper, follow, leave, on_loopback, on_processes
from tests.pool import Pool, PoolError
from tests.triton_interpreter import interpreted

DEADLINE_S = {"cpu": 120.0, "cuda": 300.0, "interpreter": 900.0}  # per case; includes compiling kernels on GPUs
WORKERS = {"cpu": 1, "cuda": 10, "interpreter": 1}
Cases = queue.SimpleQueue[tuple[str, int]]
KINDS = "equal", "refused", "refused by both", "undecided", "otherwise"


@dataclass(frozen=True)
class Options:
    """Command-line options.

    Attributes:
        seconds: no case starts later.
        workers: number that share the device; None: as in WORKERS.
    """

    family: str | None = None
    mode: str | None = None
    seed: int = 0
    cases: int = 500
    seconds: float = float("inf")
    device: str = "cpu"
    processes: int = 1
    workers: int | None = None
    dtype: str = "float32"
    record: str | None = None

    def __post_init__(self) -> None:
        known = {
            "family": (None, *MAKERS),
            "mode": (None, *MODES),
            "device": tuple(WORKERS),
            "dtype": ("float32", "bfloat16"),
            "processes": (1, 2, 4, 8),
        }
        for name, values in known.items():
            if (value := getattr(self, name)) not in values:
                raise ValueError(f"{name}={value} is unknown; known: {', '.join(map(str, values))}")
        if self.processes > 1 and self.device == "interpreter":
            raise ValueError("device=interpreter runs its ranks in one process: set processes=1")

    def case(self, family: str, seed: int) -> Case:
        worlds: tuple[int, ...] = (1, 1, 2, 2, 3, 4) if self.device == "cuda" else (1, 2, 2, 3, 4)
        if self.processes > 1:
            worlds = (self.processes,)
        return case_of(family, seed, self.dtype, worlds, (self.mode,) if self.mode else MODES)

    def again(self, family: str, seed: int) -> str:
        given = {"family": family, "seed": seed, "cases": 1, "device": self.device}
        given |= {"processes": self.processes} | ({"mode": self.mode} if self.mode else {})
        return "python -m tests.e2e.fuzz " + " ".join(f"{k}={v}" for k, v in (given | {"dtype": self.dtype}).items())


@dataclass
class Tally:
    """A family's cases by outcome, and the features of those that ran."""

    outcomes: list[Outcome] = field(default_factory=list)
    features: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def count(self, kind: str) -> int:
        return sum(found.kind == kind for found in self.outcomes)


def run_case(case: Case, device: str, timeout_s: float, tamper: Tamper | None = None) -> Outcome:
    """Runs a case on ranks that are threads of this process; `tamper` plants a fault.

    Raises:
        Exception: on a GPU, where the process may be unusable afterwards.
    """
    where = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    try:
        return outcome(case, on_loopback(case.world_size, str(where), timeout_s, tamper), where)
    except Exception as error:
        if device == "cuda":
            raise
        return Outcome("otherwise", f"{type(error).__name__}: {error}; {' '.join(getattr(error, '__notes__', []))}")


def work(rank: int, world_size: int, options: Options, family: str, seed: int) -> Outcome | None:
    """Runs a case in one process of a worker, on GPUs or with all ranks here; the pool's task."""
    quiet()
    case, deadline = options.case(family, seed), DEADLINE_S[options.device]
    alone = world_size == 1 and options.device != "cuda"  # ranks can be threads
    if case.world_size == world_size and not alone:
        backend = case.backend if world_size > 1 and options.device == "cuda" else "torch"
        return run_here(rank, world_size, case, backend, options.device)
    if rank:  # of a case to be refused: its settings have another number of ranks
        return None
    if options.device != "interpreter":
        return run_case(case, options.device, deadline)
    with interpreted():
        return run_case(case, "cpu", deadline)


def run_here(rank: int, world_size: int, case: Case, backend: str, device: str) -> Outcome | None:
    """Runs a case on ranks that are processes, of which this is one; the pool's task."""
    here = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
    if rank:
        follow(here)
        return None
    found = outcome(case, on_processes(backend, here), here)
    leave()
    return found


def worker(options: Options, cases: Cases, done: queue.SimpleQueue[Any], end: float) -> None:
    """Takes cases until none are left or time is up; replaces processes that fail or hang."""
    processes = Pool(options.processes, "nccl" if options.device == "cuda" else "gloo")
    try:
        while time.monotonic() < end:
            try:
                family, seed = cases.get_nowait()
            except queue.Empty:
                break
            begin = time.monotonic()
            try:
                found = processes.run(work, options, family, seed, timeout_s=DEADLINE_S[options.device])[0]
            except PoolError as error:
                found = Outcome("otherwise", str(error)[-3000:])
            done.put((family, seed, found, time.monotonic() - begin))
    finally:
        processes.close()
        done.put(None)


def main() -> int:
    """Runs cases of one family or all; returns 1 if any has an unexpected outcome."""
    if handle_help(sys.argv[1:], __doc__):
        return 0
    options = parsed(sys.argv[1:])
    quiet()
    families = [options.family] if options.family else list(MAKERS)
    cases: Cases = queue.SimpleQueue()
    for i in range(options.cases):
        # Round robin over families: neighboring seeds share compiled kernels.
        cases.put((families[i % len(families)], options.seed + i // len(families)))
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    end = time.monotonic() + options.seconds
    workers = options.workers or max(WORKERS[options.device] // options.processes, 1)
    threads = [threading.Thread(target=worker, args=(options, cases, done, end), daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    console, tallies = Console(width=120), {family: Tally() for family in families}
    _note(options, {"options": asdict(options), **provenance(torch.device(_place(options)))})
    while workers:
        if (result := done.get()) is None:
            workers -= 1
            continue
        family, seed, found, seconds = result
        tally, case = tallies[family], options.case(family, seed)
        tally.outcomes.append(found)
        tally.seconds += seconds
        if not found.kind.startswith("refused"):
            tally.features.update(f"{name}={value}" for name, value in case.features.items())
        line = {"family": family, "seed": seed, "kind": found.kind, "seconds": round(seconds, 2)}
        if found.kind in ("otherwise", "undecided"):
            console.print(f"[red]{found.kind}[/] {options.again(family, seed)}", soft_wrap=True)
            console.print(f"{found.reason}; {case}", soft_wrap=True, markup=False)
            line |= {"content": case.content, "settings": str(case)}
        _note(options, line | {"reason": found.reason, "features": case.features, "seen": found.seen})
    _show(console, tallies)
    return 1 if any(tally.count("otherwise") for tally in tallies.values()) else 0


def parsed(arguments: list[str]) -> Options:
    """Parses the command line; exits with an error for invalid options."""
    given: dict[str, Any] = dict(argument.partition("=")[::2] for argument in arguments)
    if unknown := set(given) - set(Options.__dataclass_fields__):
        _end(f"{', '.join(sorted(unknown))} unknown; known: {', '.join(Options.__dataclass_fields__)}")
    try:
        numbers = {"seed": int, "cases": int, "seconds": float, "processes": int, "workers": int}
        return Options(**{name: numbers.get(name, str)(value) for name, value in given.items()})
    except ValueError as error:
        _end(str(error))


def _end(why: str) -> NoReturn:
    sys.exit(f"error: {why}")


def _place(options: Options) -> str:
    return "cuda" if options.device == "cuda" else "cpu"


def _note(options: Options, line: dict[str, Any]) -> None:
    if options.record is not None:
        with Path(options.record).open("a") as file:
            file.write(json.dumps(line) + "\n")


def _show(console: Console, tallies: dict[str, Tally]) -> None:
    table = Table("family", "cases", *KINDS, "s")
    for family, tally in tallies.items():
        counts = (str(tally.count(kind)) for kind in KINDS)
        table.add_row(family, str(len(tally.outcomes)), *counts, f"{tally.seconds:.0f}")
    console.print(table)
    all_of_them = [found for tally in tallies.values() for found in tally.outcomes]
    seen = sum((Counter(found.seen) for found in all_of_them), Counter[str]())
    console.print("seen: " + ", ".join(f"{n} {name}" for name, n in seen.most_common()), soft_wrap=True)
    ran = sum((tally.features for tally in tallies.values()), Counter[str]())
    console.print("ran: " + ", ".join(f"{n} {name}" for name, n in sorted(ran.items())), soft_wrap=True)
    refused = Counter(found.reason for found in all_of_them if found.kind.startswith("refused"))
    for reason, count in refused.most_common():
        console.print(f"{count} x refused: {reason}", soft_wrap=True, markup=False)


def quiet() -> None:
    """Silences transformers, which would comment on each of a thousand models."""
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()


if __name__ == "__main__":
    sys.exit(main())
