"""Queues jobs over a machine's GPUs until a deadline: `python -m benchmarks.queue LIST`.

A line of LIST is a job: its name, its number of GPUs, its time limit in seconds, and a shell command.

  qwen-tp    8  80  python -m benchmarks.layout_steps baselines model=qwen2.5-7b layout=tp layout.tpa=8 points=1x1M
  indexer    1  90  helix bench indexer output=$ROWS/indexer.jsonl

Jobs start in this order as soon as their GPUs are free; a waiting job holds up those after it. A job that takes
all GPUs starts its ranks early: they import while the job before it runs, then wait for the GPUs.

  to        directory for one log per job, and for `$ROWS`, where commands append their records, and the queue what
            each job cost: `ledger.jsonl`, with its GPUs and seconds
  seconds   time limit: running jobs are then killed and no other starts (default 540)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from launch.inputs.arguments import handle_help, parse

KEYS: dict[str, Any] = {"to": Path, "seconds": float}
POLL_S, ENDING_S = 0.1, 3.0
WAITS = ("benchmarks.layout_steps", "benchmarks.entry")  # modules that wait for START_AFTER


@dataclass(frozen=True)
class QueuedJob:
    """One line of a job list."""

    name: str
    gpus: int
    seconds: float
    command: str


@dataclass
class RunningJob:
    """A started job.

    Attributes:
        gate: the file it waits for; None: none.
        since: when it got its GPUs; None: not yet.
    """

    job: QueuedJob
    process: subprocess.Popen[bytes]
    gpus: set[int]
    gate: Path | None
    since: float | None

    def end(self) -> None:
        """Terminates the process group: children may outlive the shell that started them."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(ENDING_S)


def read(text: str) -> list[QueuedJob]:
    """Parses a job list; raises ValueError for a malformed line."""
    jobs = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            name, gpus, seconds, command = line.split(maxsplit=3)
            jobs.append(QueuedJob(name, int(gpus), float(seconds), command))
        except ValueError:
            raise ValueError(f"line {number}, {line!r}: a job is NAME GPUS SECONDS COMMAND") from None
    return jobs


class Queue:
    """Waiting and running jobs.

    Args:
        gpus: number of GPUs of the machine.
        to: directory of logs and records.
    """

    def __init__(self, jobs: Sequence[QueuedJob], gpus: int, to: Path) -> None:
        if large := [job for job in jobs if job.gpus > gpus]:
            raise ValueError(f"{large[0].name} takes {large[0].gpus} GPUs, and there are {gpus}")
        self.jobs, self.free, self.to, self.all = list(jobs), set(range(gpus)), to, gpus
        self.running: list[RunningJob] = []
        (to / "rows").mkdir(parents=True, exist_ok=True)
        self._gates = Path(tempfile.mkdtemp())

    def run(self, seconds: float) -> Iterator[str]:
        """Yields a line for each start and end, until all jobs have ended or `seconds` have passed."""
        begin = time.monotonic()
        while (self.jobs or self.running) and time.monotonic() - begin < seconds:
            for line in [*self._ended(), *self._started()]:
                yield f"{time.monotonic() - begin:6.1f} s  {line}"
            time.sleep(POLL_S)
        for one in self.running:
            one.end()
            self._note(one, "time is up")
            yield f"{time.monotonic() - begin:6.1f} s  {one.job.name}: time is up"
        if self.jobs:
            yield f"not begun: {', '.join(job.name for job in self.jobs)}"

    def _ended(self) -> Iterator[str]:
        for one in [*self.running]:
            late = one.since is not None and time.monotonic() - one.since > one.job.seconds
            if late:
                one.end()
            if (code := one.process.poll()) is not None:
                self.running.remove(one)
                if one.since is None:
                    yield f"{one.job.name}: exit code {code} before its GPUs were free"
                    continue
                self.free |= one.gpus
                how = f"ended after its {one.job.seconds:.0f} s" if late else f"exit code {code}"
                self._note(one, how)
                yield f"{one.job.name}: {how}, {time.monotonic() - one.since:.0f} s"

    def _note(self, one: RunningJob, how: str) -> None:
        """Appends to the ledger what a job cost; one that waited for its GPUs cost nothing."""
        if one.since is None:
            return
        row: dict[str, Any] = {
            "job": one.job.name,
            "gpus": len(one.gpus),
            "seconds": round(time.monotonic() - one.since, 1),
        }
        row |= {"end": how, "command": one.job.command, "commit": os.environ.get("HELIX_COMMIT")}
        with (self.to / "rows" / "ledger.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": "ledger", **row}) + "\n")

    def _started(self) -> Iterator[str]:
        waiting = [one for one in self.running if one.since is None]
        if waiting and len(self.free) == self.all:
            (one,) = waiting
            assert one.gate is not None
            one.gate.touch()
            one.since, waiting = time.monotonic(), []
            self.free -= one.gpus
            yield f"{one.job.name} has the GPUs"
        while self.jobs and not waiting and self.jobs[0].gpus <= len(self.free):
            job = self.jobs.pop(0)
            gpus = set(sorted(self.free)[: job.gpus])
            self.free -= gpus
            self._start(job, gpus, None)
            yield f"{job.name} on {', '.join(map(str, sorted(gpus)))}"
        if (
            self.jobs
            and not waiting
            and not self.free
            and self.jobs[0].gpus == self.all
            and any(name in self.jobs[0].command for name in WAITS)
        ):
            job = self.jobs.pop(0)
            self._start(job, set(range(self.all)), self._gates / job.name)

    def _start(self, job: QueuedJob, gpus: set[int], gate: Path | None) -> None:
        environment = os.environ | {"ROWS": str(self.to / "rows"), "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        if gate is not None:
            environment["START_AFTER"] = str(gate)
        with (self.to / f"{job.name}.log").open("ab") as log:
            process = subprocess.Popen(
                job.command, shell=True, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        since = time.monotonic() if gate is None else None
        self.running.append(RunningJob(job, process, gpus, gate, since))


def main() -> None:
    """Runs the jobs of a list."""
    if handle_help(sys.argv[1:] or ["--help"], __doc__ or ""):
        return
    try:
        values = parse(sys.argv[2:], KEYS)
        if "to" not in values:
            raise ValueError("to missing: add to=DIR, the directory for logs and records")
        jobs = read(Path(sys.argv[1]).read_text(encoding="utf-8"))
        queue = Queue(jobs, torch.cuda.device_count(), values["to"])
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    for line in queue.run(values.get("seconds", 540.0)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
