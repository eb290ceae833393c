"""Sets up a job's processes and ends them with their launcher. Standard library only: it runs before slow imports."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from helix import log
from helix.log import print_error

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

LAUNCHER = "HELIX_LAUNCHER"  # environment variable of ranks and of a server that a chat starts: pid of their parent
BEAT_S = 1.0
STOPPED_S = 10.0  # seconds that a process may stay stopped (SIGSTOP): it blocks the others
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP  # signals that end a process by default
SET_DEATH_SIGNAL, SET_NAME = 1, 15  # PR_SET_PDEATHSIG, PR_SET_NAME
STARTED = 19  # index in `status` of the start time, in clock ticks since boot
STORE_S = 3.0  # head start for torchrun on other hosts to end before a host with a store they use
_tied = False  # whether this process dies with its launcher


class _Log(io.FileIO):
    """File whose writes never fail."""

    def write(self, data: ReadableBuffer, /) -> int:
        size = memoryview(data).nbytes
        try:
            written = super().write(data)
        except OSError:
            return size
        return size if written is None else written  # None: a full non-blocking file


def unfailing(stream: TextIO) -> TextIO:
    """Returns a stream to the same file that drops output it cannot write: a pipe without reader, a full disk.

    Streams without a file descriptor are returned unchanged.
    """
    try:
        file = _Log(stream.fileno(), "w", closefd=False)
    except io.UnsupportedOperation:
        return stream
    return io.TextIOWrapper(io.BufferedWriter(file), stream.encoding, "backslashreplace", line_buffering=True)


def begin(serves: bool = False) -> None:
    """Sets up signals, output and lifetime of a rank, a launcher or a server; call it first.

    Control-C ends the process at once, without a traceback: results are already written. On Linux the process dies with
    the launcher that started it on this host, and `ps` and `top` show ranks as `helix rank N`.

    Args:
        serves: whether stdout is only a log, whose write errors are ignored; a run ends if its results have no reader.
    """
    for number in SIGNALS:  # a forked rank inherits its launcher's handlers
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if the parent ignored it, exit codes of ranks would be lost
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the launcher blocked them
    # Escape characters that the terminal cannot encode instead of failing; flush at the end of each line.
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    sys.stderr = unfailing(sys.stderr)
    log.configure()
    if serves:
        sys.stdout = unfailing(sys.stdout)
    if sys.platform != "linux":
        return
    linux = ctypes.CDLL(None)
    if {"TORCHELASTIC_RUN_ID", LAUNCHER} & os.environ.keys():
        linux.prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
        global _tied
        _tied = True
    if LAUNCHER in os.environ and os.getppid() != int(os.environ[LAUNCHER]):
        sys.exit(1)  # the launcher is already dead
    if "RANK" in os.environ:
        linux.prctl(SET_NAME, f"helix rank {os.environ['RANK']}".encode())


def end_torchrun(restartable: bool = True) -> None:
    """Kills the torchrun that started this rank; call it once the rank has failed and printed the reason.

    torchrun would print forty lines of traceback after the reason, and does so for every signal that it can handle. The
    ranks of this host die with it (see `begin`). Returns if this rank was not started by torchrun, if torchrun is to
    restart its ranks, or if the kernel protects it, as it protects the first process of a container.

    Args:
        restartable: whether another attempt may succeed, so that torchrun's --max-restarts applies.
    """
    given, agent = os.environ, os.getppid()
    attempts = int(given.get("TORCHELASTIC_MAX_RESTARTS", 0)) - int(given.get("TORCHELASTIC_RESTART_COUNT", 0))
    with suppress(OSError):  # it is gone, or owned by another user
        if not _tied or not _is_torchrun(agent) or (restartable and attempts > 0):
            return
        sys.stdout.flush()
        if given["LOCAL_WORLD_SIZE"] != given["WORLD_SIZE"] and _listens(agent):
            # Hosts with a store end later: first the one with the ranks' store, then that with torchrun's rendezvous.
            time.sleep(STORE_S if given.get("GROUP_RANK") == "0" else 2 * STORE_S)
        os.kill(agent, signal.SIGKILL)
        time.sleep(BEAT_S)  # this process dies here, unless torchrun is protected


def _is_torchrun(pid: int) -> bool:
    words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:4]
    return "torch.distributed.run" in words or any(Path(word).name == "torchrun" for word in words)


def _listens(pid: int) -> bool:
    """Returns whether a process of this host has a listening TCP socket."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    listeners = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    return any(os.readlink(file) in listeners for file in Path(f"/proc/{pid}/fd").iterdir())


def watch() -> None:
    """Starts a thread that ends this process if its launcher stays stopped (SIGSTOP)."""
    if sys.platform == "linux" and LAUNCHER in os.environ:
        threading.Thread(target=_watch, args=(os.getppid(),), name="lifeline", daemon=True).start()


def status(pid: int) -> list[str]:
    """Reads the fields of /proc/PID/stat from the state on (T: stopped by a signal); empty if unavailable."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def age_s(pid: int) -> float | None:
    """Returns the seconds since a process of this host started; None if unavailable."""
    try:
        began = int(status(pid)[STARTED]) / os.sysconf("SC_CLK_TCK")
        return float(Path("/proc/uptime").read_text().split()[0]) - began
    except (OSError, IndexError):
        return None


def identity(pid: int) -> str:
    """Identifies a process across pid reuse; empty if unavailable."""
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{host} {os.readlink('/proc/self/ns/pid')} {pid} {status(pid)[STARTED]}"
    except (OSError, IndexError):
        return ""


def kill(name: str) -> None:
    """Kills the process with this `identity` if it still runs on this host."""
    if name and name == identity(pid := int(name.split()[2])):
        with suppress(OSError):  # it is gone, or owned by another user
            os.kill(pid, signal.SIGKILL)


def _watch(launcher: int) -> None:
    """Kills a launcher that stays stopped, and this process with it: the launcher's store no longer responds."""
    beats = 0  # counts beats, not time, so that a job that was suspended as a whole can resume
    while beats * BEAT_S < STOPPED_S:
        time.sleep(BEAT_S)
        beats = beats + 1 if status(launcher)[:1] == ["T"] else 0
    print_error(f"the launcher was stopped by a signal for more than {STOPPED_S:.0f} s")
    os.kill(launcher, signal.SIGKILL)
