"""Launches the ranks of one host: start, wait, clean up."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from helix.log import print_error
from launch.client.errors import REFUSED
from launch.job import lifeline
from launch.job.lifeline import LAUNCHER, SIGNALS, STOPPED_S, status

LOG = logging.getLogger(f"helix.{__name__}")
INTERRUPTED = 130  # exit code after control-C, as in shells
POLL_S = 0.1  # interval of polling the ranks
GONE_S = 15.0  # for a killed process to be gone
CLIENT_S = 600.0  # for a client to end after its ranks
SOCKET = "HELIX_SOCKET"  # environment variable of ranks: where rank 0 listens for their client
TIME_EXCHANGE = "HELIX_TIME_EXCHANGE"  # environment variable of a launcher: its ranks also time the exchange alone


Client = Callable[[Path], Coroutine[Any, Any, int]]


def launch(world_size: int, work: Callable[[], int], command: Sequence[str], client: Client | None = None) -> int:
    """Runs `work` on ranks of this host, which are forks of this process and so need no imports.

    Args:
        work: runs a rank; returns its exit code.
        command: Python arguments that do the same, if forks cannot use CUDA.
        client: sends requests to the ranks over a socket, from this process; returns an exit code.

    Returns:
        0, or the exit code of the rank that failed first (1 if a signal killed it), or the client's, or INTERRUPTED.
    """
    lost = "threads and CUDA do not survive a fork: start this job with `run`, in a separate process"
    assert threading.active_count() == 1 and not torch.cuda.is_initialized(), lost
    # The port is open before ranks start; the store, which has a thread, is created after the forks.
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        _signals() as signals,
        TemporaryDirectory(prefix="helix-") as directory,
    ):
        port = listener.getsockname()[1]
        ranks: list[Fork] = []
        code, path = 0, Path(directory) / "ranks.sock"
        try:
            _start(ranks, world_size, listener, work, command, {} if client is None else {SOCKET: str(path)})
            store = dist.TCPStore(
                "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
            lifeline.watch()
            if client is None:
                failed = _wait(ranks, signals)
            else:
                failed, code = asyncio.run(_wait_with_client(ranks, signals, client(path)))
        except OSError as error:
            print_error(f"rank {len(ranks)} failed to start: {error.strerror}")
            return 1
        finally:
            _kill(ranks)
    del store  # it has to respond until here
    if signals:
        return INTERRUPTED
    for rank, code in failed.items():
        if code == -signal.SIGSTOP:
            print_error(f"rank {rank} was stopped by a signal for more than {STOPPED_S:.0f} s")
        elif code < 0:
            why = ", probably because memory ran out" if code == -signal.SIGKILL else ""
            print_error(f"rank {rank} was killed by signal {-code} ({signal.Signals(-code).name}){why}")
    return max(min(failed.values(), default=0), 1) if failed else code


async def _wait_with_client(
    ranks: Sequence[Fork], signals: list[int], work: Coroutine[Any, Any, int]
) -> tuple[dict[int, int], int]:
    """Waits for the ranks (see `_wait`) and their client; returns the failed ranks and the client's exit code."""
    client_codes: list[int] = []  # set if the client failed: it then does not end the ranks

    async def run_client() -> int:
        code = 1
        try:
            code = await work
        finally:
            client_codes.extend([code] if code not in (0, REFUSED) else [])
        return code

    waiting = asyncio.create_task(asyncio.to_thread(_wait, ranks, signals, client_codes))
    client = asyncio.create_task(run_client())
    failed = await waiting
    if failed or signals:
        client.cancel()
    await asyncio.wait((client,), timeout=CLIENT_S)
    return failed, client.result() if client.done() and not client.cancelled() else 1


class Fork:
    """A fork of this process that runs only `begin`, with methods like those of `subprocess.Popen`.

    Args:
        begin: returns the exit code.
    """

    def __init__(self, begin: Callable[[], int]) -> None:
        sys.stdout.flush()  # or both processes would write the buffered output
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                returned = begin()
                sys.stdout.flush()
                code = returned
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(code)  # without cleanup, which is the launcher's
        self._code: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code, or minus the signal that killed it; None while it runs."""
        if self._code is None and (ended := os.waitpid(self.pid, os.WNOHANG)) != (0, 0):
            self._code = os.waitstatus_to_exitcode(ended[1])
        return self._code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _start(
    ranks: list[Fork],
    world_size: int,
    listener: socket.socket,
    work: Callable[[], int],
    command: Sequence[str],
    variables: dict[str, str],
) -> None:
    """Starts the ranks of a job and appends them; signals are blocked until ranks reset their handlers."""
    environment = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # as under torchrun: the store exists before the ranks
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        LAUNCHER: str(os.getpid()),
        **variables,
    }
    # Ranks share the cores: at least one thread each.
    share = max(1, (os.cpu_count() or 1) // world_size)
    threads = torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else share
    command = [sys.executable, "-u", *command]

    def begin(rank: int) -> int:
        listener.close()  # or this rank would accept connections for a dead launcher
        os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
        if torch.cuda._is_in_bad_fork():  # the launcher used CUDA, not NVML, to count GPUs: forks cannot use CUDA
            os.environ["OMP_NUM_THREADS"] = str(threads)
            os.execv(sys.executable, command)
        lifeline.begin()
        lifeline.watch()
        torch.set_num_threads(threads)
        return work()

    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        for rank in range(world_size):
            ranks.append(Fork(partial(begin, rank)))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(ranks: Sequence[Fork], signals: Sequence[int], client_codes: Sequence[int] = ()) -> dict[int, int]:
    """Waits until all ranks succeed, one fails, a signal arrives or the client fails; returns the first failures."""
    stopped = [0] * len(ranks)  # consecutive polls in which a rank was stopped
    while not signals and not client_codes:
        codes = [process.poll() for process in ranks]
        if any(codes):
            # A killed rank may be seen after a rank that noticed it, and control-C reaches all ranks at once.
            time.sleep(POLL_S)
            failed = {rank: code for rank, process in enumerate(ranks) if (code := process.poll())}
            killed = {rank: code for rank, code in failed.items() if code < 0}
            return killed or failed
        if None not in codes:
            return {}
        stopped = [looks + 1 if status(p.pid)[:1] == ["T"] else 0 for looks, p in zip(stopped, ranks, strict=True)]
        if stuck := {rank: -int(signal.SIGSTOP) for rank, looks in enumerate(stopped) if looks * POLL_S > STOPPED_S}:
            return stuck
        time.sleep(POLL_S)
    return {}


def _kill(ranks: Sequence[Fork]) -> None:
    for process in ranks:
        process.kill()
    deadline = time.monotonic() + GONE_S
    for rank, process in enumerate(ranks):
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S / 10)
        if process.poll() is None:
            LOG.error("rank %d (process %d) was killed but has not ended", rank, process.pid)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects signals that would end this process, while the context is open."""
    signals: list[int] = []
    numbers = [n for n in SIGNALS if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda n, _: signals.append(n)) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(command: Sequence[str], **variables: str) -> int:
    """Runs `launch` in a new process, since this one may have threads or have used CUDA; returns its exit code.

    Args:
        command: Python arguments.
        variables: added to its environment.
    """
    with _signals() as signals, started(command, None, **variables) as job:
        while job.poll() is None and not signals:
            time.sleep(POLL_S)
    return INTERRUPTED if signals else job.returncode


@contextmanager
def started(command: Sequence[str], stdout: int | None = None, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Starts a launcher in a new process, which ends with its ranks when the context closes."""
    environment = os.environ | {LAUNCHER: str(os.getpid())} | variables
    with subprocess.Popen([sys.executable, "-u", *command], stdout=stdout, text=True, env=environment) as job:
        try:
            yield job
        finally:
            job.terminate()


@contextmanager
def captured_stderr() -> Iterator[list[str]]:
    """Collects the lines that this process and its children write to stderr, and still shows them."""
    lines: list[str] = []
    terminal = os.dup(2)
    read, write = os.pipe()
    os.dup2(write, 2)
    os.close(write)

    def listen() -> None:
        with os.fdopen(read, errors="replace") as pipe:
            for line in pipe:
                with suppress(OSError):  # a closed terminal must not end a job that writes here
                    os.write(terminal, line.encode())
                lines.append(line.strip())
        os.close(terminal)  # the pipe ends once stderr is the terminal again and no process writes to it

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield lines
    finally:
        os.dup2(terminal, 2)
        thread.join(1.0)  # an orphaned process may keep the pipe open longer
