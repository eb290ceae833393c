"""Starts the ranks of one host, waits for them and sees to it that none is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import torch.distributed as dist

from helix.models import handed
from launch.inputs import parts
from launch.job.lifeline import LAUNCHER, STOPPED_S, status

INTERRUPTED = 130  # exit code after control-C, as shells have it
LOOK_S = 0.1  # between two looks at the ranks
GONE_S = 15.0  # for a process that was killed to be gone
ENTRY = Path(__file__).resolve().parents[2] / "torchrun_entry.py"
REFUSED = 3  # exit code where requests were refused and the others served
# Lines of a failed job that say why, the surest first: who killed a rank, what the runtime said, what was raised.
CAUSES = (r"rank \d+ was killed", r"error\b", r"[\w.]+(Error|Exception): ")


def launch(world_size: int, overrides: Sequence[str]) -> int:
    """Runs `torchrun_entry.py` with `overrides` on `world_size` ranks of this host.

    Returns:
        0, or the exit code of the rank that failed first (1 where a signal killed it), or INTERRUPTED.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # at a port of its own
    environment = os.environ | {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # as under torchrun: the store is there before the ranks are
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        LAUNCHER: str(os.getpid()),
        **handed(),
    }
    # Ranks share the cores; one thread each where there are more ranks than cores.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world_size)))
    ranks: list[subprocess.Popen[bytes]] = []
    with _signals() as came:
        try:
            _start(ranks, environment, overrides)
            failed = _wait(ranks, came)
        except OSError as error:
            print(f"error: rank {len(ranks)} cannot be started: {error.strerror}", file=sys.stderr)
            return 1
        finally:
            _kill(ranks)
    if came:
        kept = "results of finished requests are in decode.output; decode.resume=true runs the rest"
        writes = any(override.startswith("decode.output=") for override in overrides)
        print(f"interrupted: {kept}" if writes else "interrupted", file=sys.stderr)
        return INTERRUPTED
    for rank, code in failed.items():
        if code == -signal.SIGSTOP:
            print(f"rank {rank} was stopped by a signal, and stayed so for {STOPPED_S:.0f} s", file=sys.stderr)
        elif code < 0:
            why = ", as the system does where memory runs out" if code == -signal.SIGKILL else ""
            print(f"rank {rank} was killed by signal {-code} ({signal.Signals(-code).name}){why}", file=sys.stderr)
    return max(min(failed.values(), default=0), 1) if failed else 0


def _start(ranks: list[subprocess.Popen[bytes]], environment: dict[str, str], overrides: Sequence[str]) -> None:
    """Appends the ranks of a job; they begin with control-C held back, until they can end without a trace."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for rank in range(int(environment["WORLD_SIZE"])):
            own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen([sys.executable, "-u", str(ENTRY), *overrides], env=own))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _wait(ranks: Sequence[subprocess.Popen[bytes]], came: Sequence[int]) -> dict[int, int]:
    """Waits until all ranks have ended well, one has failed or a signal came; exit codes of those that failed first."""
    stopped = [0] * len(ranks)  # looks in a row
    while not came:
        codes = [process.poll() for process in ranks]
        if any(codes):
            # Who noticed a killed rank may have been seen before it; and a terminal's control-C comes to all at once.
            time.sleep(LOOK_S)
            failed = {rank: code for rank, process in enumerate(ranks) if (code := process.poll())}
            killed = {rank: code for rank, code in failed.items() if code < 0}
            return killed or failed
        if None not in codes:
            return {}
        stopped = [looks + 1 if status(p.pid)[:1] == ["T"] else 0 for looks, p in zip(stopped, ranks, strict=True)]
        if stuck := {rank: -int(signal.SIGSTOP) for rank, looks in enumerate(stopped) if looks * LOOK_S > STOPPED_S}:
            return stuck
        time.sleep(LOOK_S)
    return {}


def _kill(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in ranks:
        process.kill()
    deadline = time.monotonic() + GONE_S
    for rank, process in enumerate(ranks):
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            print(f"rank {rank} (process {process.pid}) was killed and is not gone", file=sys.stderr)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Signals that would end this process, noted instead for as long as the context lasts."""
    came: list[int] = []
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in numbers}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class JobError(RuntimeError):
    """A job failed; the message is the line that says why."""


def measure(ranks: int, overrides: Sequence[str]) -> dict[str, Any]:
    """The record of a job; where there are fewer GPUs than ranks, one or two of them emulate it.

    Raises:
        JobError: it failed.
        KeyboardInterrupt: it was interrupted, and no other shall start.
    """
    emulated = parts.is_emulated(ranks)
    with tempfile.TemporaryDirectory() as directory:
        record = Path(directory) / "record.json"
        backend = ["comm.backend=emulated"] if emulated else []
        with heard() as lines:
            code = launch(
                parts.emulating_processes() if emulated else ranks, [*backend, *overrides, f"record={record}"]
            )
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        if code:
            raise JobError(cause(lines) or f"exit code {code}")
        written: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    return written


def rows(overrides: Sequence[str], **variables: str) -> Iterator[dict[str, Any]]:
    """What a job measures, as it measures it: lines of JSON that it prints, beside others that the terminal shows.

    Args:
        variables: of its environment.

    Raises:
        JobError: it failed.
    """
    command = [sys.executable, "-u", str(ENTRY), *overrides]
    environment = os.environ | {LAUNCHER: str(os.getpid())} | variables
    with heard() as lines, subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as job:
        assert job.stdout is not None
        try:
            for line in job.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
                else:
                    print(line, end="", flush=True)
        finally:
            job.terminate()  # where nobody wants the rest: its launcher ends the ranks
    if job.returncode:
        raise JobError(cause(lines) or f"exit code {job.returncode}")


@contextmanager
def heard() -> Iterator[list[str]]:
    """Lines that this process and those that it starts write to stderr meanwhile; the terminal shows them as well."""
    lines: list[str] = []
    terminal = os.dup(2)
    read, write = os.pipe()
    os.dup2(write, 2)
    os.close(write)

    def listen() -> None:
        with os.fdopen(read, errors="replace") as pipe:
            for line in pipe:
                os.write(terminal, line.encode())
                lines.append(line.strip())
        os.close(terminal)  # nobody else writes to it: the pipe ends after stderr is the terminal again

    thread = Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield lines
    finally:
        os.dup2(terminal, 2)
        thread.join(1.0)  # a process that somebody left behind may hold the other end for longer


def cause(lines: Sequence[str]) -> str:
    """The line that says why a job failed; empty where none does."""
    causes = (line for pattern in CAUSES for line in lines if re.match(pattern, line))
    return next(causes, "").removeprefix("error: ")
