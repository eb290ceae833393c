"""Runs the command line as users do, and checks that no process is left.

Python programs start from a process with their imports done (`tests.e2e.fork_server`); with a word before them, such as
`env`, they are new processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.e2e.fork_server import has_ranks, start_copy_async
from tests.exit_cleanup import at_exit

ROOT = Path(__file__).parents[2]
ENTRY = [sys.executable, "torchrun_entry.py"]
LABORATORY = [sys.executable, "-m", "benchmarks.entry"]
PROCESS = subprocess.Popen
T = TypeVar("T")
DYING_S = 60.0  # for the ranks of a killed job to exit


def torchrun(ranks: int, *options: str) -> list[str]:
    """Returns a torchrun command."""
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *options, "torchrun_entry.py"]


def environment(gpus: bool = False) -> dict[str, str]:
    """Returns the environment of a user's job."""
    found = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "RANK", "WORLD_SIZE")}
    return found | {"OMP_NUM_THREADS": "1"} | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})


@dataclass
class Ended:
    """The end of a command."""

    code: int
    output: str  # stdout and stderr, interleaved
    seconds: float = 0.0


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Reads JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, *lines: Mapping[str, Any]) -> Path:
    """Writes JSON lines; returns the path."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


class Copy:
    """A program in a fork of the process with the imports; its interface is like `subprocess.Popen`'s."""

    _parent: subprocess.Popen[bytes] | None = None
    _channel: socket.socket

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, stdout: int | None = None,
        stderr: int | None = None, **_: object,
    ) -> None:  # fmt: skip
        if Copy._parent is None:
            Copy._channel, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            program = [sys.executable, "-P", str(Path(__file__).with_name("fork_server.py"))]
            with end:
                Copy._parent = PROCESS(program, cwd=ROOT, stdin=end, env=environment())
            at_exit(Copy._end)
        read, write = os.pipe()
        request = json.dumps({"arguments": [*map(str, command[1:])], "environment": dict(env or os.environ)}).encode()
        with open(os.devnull, "w") as nowhere:
            outputs = [nowhere.fileno() if fd == subprocess.DEVNULL else fd for fd in (stdout or 1, stderr or 2)]
            socket.send_fds(Copy._channel, [request], [*outputs, write])
        os.close(write)
        self._status_fd = open(read)  # noqa: SIM115
        self.pid = int(self._status_fd.readline())
        self.returncode: int | None = None

    @staticmethod
    def _end() -> None:
        Copy._channel.close()
        if Copy._parent is not None:
            Copy._parent.wait()

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status_fd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired([], timeout or 0.0)
            self.returncode = int(self._status_fd.readline())
            self._status_fd.close()
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Copy:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()


def as_copies(patch: pytest.MonkeyPatch) -> None:
    """Makes this process start ranks as forks with their imports done."""

    def start(command: Sequence[str], **options: Any) -> Copy | subprocess.Popen[Any]:
        return Copy(command, **options) if has_ranks(command) else PROCESS(command, **options)

    patch.setattr(subprocess, "Popen", start)
    patch.setattr(asyncio, "create_subprocess_exec", start_copy_async)


class Job:
    """A command whose processes can be found, however they were started, and must all exit."""

    def __init__(self, command: Sequence[str], *overrides: str, log: Path, gpus: bool = False) -> None:
        self.log, self._log = log, str(log.resolve())
        mark = {"HELIX_TEST_JOB": uuid.uuid4().hex}
        self._mark = f"HELIX_TEST_JOB={mark['HELIX_TEST_JOB']}".encode()
        self.process: subprocess.Popen[bytes] | Copy
        with log.open("w") as output:
            if command[0] == sys.executable and not gpus:
                self.process = Copy([*command, *overrides], environment(), output.fileno(), output.fileno())
            else:
                self.process = subprocess.Popen(
                    [*command, *overrides], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                    env=environment(gpus) | mark,
                )  # fmt: skip

    def wait(self, timeout_s: float = 300.0) -> Ended:
        """Waits for the end; kills a job that does not end, and fails."""
        begin = time.monotonic()
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            stack = self.log.read_text()
            self.kill()
            raise AssertionError(f"no end within {timeout_s} s; so far:\n{stack}") from None
        seconds = time.monotonic() - begin
        while (left := self.members()) and time.monotonic() < begin + seconds + DYING_S:
            time.sleep(0.02)
        self.kill()
        assert left == [], f"processes {left} outlive the job"
        return Ended(code, self.log.read_text(), seconds)

    def send(self, number: signal.Signals) -> None:
        """Signals every process, as a terminal does; the first one to react may already end others."""
        for pid in self.members():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def members(self) -> list[int]:
        """Returns the job's living processes: those with its mark or its log as output, whatever their parents."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    marked = self._mark in (entry / "environ").read_bytes().split(b"\0")  # in forks it is the parent's
                    if marked or self._log in {os.readlink(entry / "fd" / "1"), os.readlink(entry / "fd" / "2")}:
                        found.append(int(entry.name))
        return found

    def ranks(self) -> dict[int, int]:
        """Returns the pids of running ranks; a process's name has its rank."""
        found = {}
        for pid in self.members():
            with suppress(OSError):
                name, _, rank = Path(f"/proc/{pid}/comm").read_text().rpartition(" ")
                found |= {int(rank): pid} if name == "helix rank" else {}
        return found

    def rank(self, rank: int, timeout_s: float = 120.0) -> int:
        return self.until(lambda: self.ranks().get(rank), f"no rank {rank}", timeout_s)

    def wait_for(self, path: Path, text: str, timeout_s: float = 120.0) -> None:
        self.until(lambda: path.exists() and text in path.read_text(), f"{text!r} not in {path}", timeout_s)

    def until(self, look: Callable[[], T | None], otherwise: str, timeout_s: float = 120.0) -> T:
        """Polls a running job until `look` returns something."""
        deadline = time.monotonic() + timeout_s
        while not (found := look()):
            assert self.process.poll() is None, f"ended early:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"{otherwise} within {timeout_s} s:\n{self.log.read_text()}"
            time.sleep(0.02)
        return found
