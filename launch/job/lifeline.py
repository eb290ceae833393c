"""Start of a job's process, and its end with its launcher. Standard library only: it works before long imports."""

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

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

LAUNCHER = "HELIX_LAUNCHER"  # environment variable of ranks and of a server's launcher: the id of their parent process
BEAT_S = 1.0
STOPPED_S = 10.0  # seconds stopped after which a process is killed, as it blocks the others
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP  # those that end a process unless it handles them
SET_DEATH_SIGNAL, SET_NAME = 1, 15  # PR_SET_PDEATHSIG, PR_SET_NAME
STARTED = 19  # index in `status` of a process's start, in ticks since the host's
STORE_S = 3.0  # for torchrun of other hosts to end before one that holds a store of theirs
_tied = False  # whether this process ends with its launcher


class _Log(io.FileIO):
    """File whose writes do not fail."""

    def write(self, data: ReadableBuffer, /) -> int:
        size = memoryview(data).nbytes
        try:
            written = super().write(data)
        except OSError:
            return size
        return size if written is None else written  # None: it does not block, and is full


def unfailing(stream: TextIO) -> TextIO:
    """Returns a stream to the same file that drops what cannot be written: a pipe without reader, a full disk.

    A stream that is no file is returned as it is.
    """
    try:
        file = _Log(stream.fileno(), "w", closefd=False)
    except io.UnsupportedOperation:
        return stream
    return io.TextIOWrapper(io.BufferedWriter(file), stream.encoding, "backslashreplace", line_buffering=True)


def begin(serves: bool = False) -> None:
    """Sets up signals, output and lifetime of a rank, its launcher or a server; its first call.

    Control-C ends the process at once and without a traceback: results are written as they come. It ends with the
    launcher of this host that started it. `ps` and `top` show a rank's number as its name.

    Args:
        serves: whether stdout is a log, too: a log that cannot be written ends nothing, and a run whose results have no
            reader ends.
    """
    for number in SIGNALS:  # a forked rank has its launcher's handlers
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or who ignores it would have no exit codes of ranks
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the launcher blocked them
    # Characters that a terminal cannot show are escaped instead of ending the run. Lines are flushed when they end.
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    sys.stderr = unfailing(sys.stderr)
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
        sys.exit(1)  # the launcher died before
    if "RANK" in os.environ:
        linux.prctl(SET_NAME, f"helix rank {os.environ['RANK']}".encode())


def end_torchrun(restartable: bool = True) -> None:
    """Kills the torchrun that started this rank, to be called when the rank has failed and said why.

    torchrun would print forty lines of traceback after the reason, and does so for each signal that it can handle. The
    ranks of this host end with it, as `begin` made sure. Returns if another program started this rank, if torchrun is
    to restart its ranks, or if the kernel protects it, as it does the first process of a container.

    Args:
        restartable: whether another attempt may succeed, as torchrun's --max-restarts wants.
    """
    given, agent = os.environ, os.getppid()
    attempts = int(given.get("TORCHELASTIC_MAX_RESTARTS", 0)) - int(given.get("TORCHELASTIC_RESTART_COUNT", 0))
    with suppress(OSError):  # it is gone, or not ours
        if not _tied or not _is_torchrun(agent) or (restartable and attempts > 0):
            return
        sys.stdout.flush()
        if given["LOCAL_WORLD_SIZE"] != given["WORLD_SIZE"] and _listens(agent):
            # The first host's has the ranks' store; that of torchrun's own rendezvous, if elsewhere, ends last.
            time.sleep(STORE_S if given.get("GROUP_RANK") == "0" else 2 * STORE_S)
        os.kill(agent, signal.SIGKILL)
        time.sleep(BEAT_S)  # this process ends here, unless torchrun is protected


def _is_torchrun(pid: int) -> bool:
    words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:4]
    return "torch.distributed.run" in words or any(Path(word).name == "torchrun" for word in words)


def _listens(pid: int) -> bool:
    """Returns whether a process of this host has a TCP socket at which others connect."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    listeners = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    return any(os.readlink(file) in listeners for file in Path(f"/proc/{pid}/fd").iterdir())


def watch() -> None:
    """Starts a thread that ends this process if its launcher stays stopped."""
    if sys.platform == "linux" and LAUNCHER in os.environ:
        threading.Thread(target=_watch, args=(os.getppid(),), name="lifeline", daemon=True).start()


def status(pid: int) -> list[str]:
    """Reads a process's fields in /proc from its state on (T: stopped by a signal); empty if unavailable."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def age_s(pid: int) -> float | None:
    """Computes the seconds since a process of this host started; None if unavailable."""
    try:
        began = int(status(pid)[STARTED]) / os.sysconf("SC_CLK_TCK")
        return float(Path("/proc/uptime").read_text().split()[0]) - began
    except (OSError, IndexError):
        return None


def identity(pid: int) -> str:
    """Returns a name of a process that no later process with the same id has; empty if unavailable."""
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{host} {os.readlink('/proc/self/ns/pid')} {pid} {status(pid)[STARTED]}"
    except (OSError, IndexError):
        return ""


def kill(name: str) -> None:
    """Kills the process of an `identity` if it runs on this host and is still the same."""
    if name and name == identity(pid := int(name.split()[2])):
        with suppress(OSError):  # gone since, or not ours
            os.kill(pid, signal.SIGKILL)


def _watch(launcher: int) -> None:
    """Kills a launcher that stays stopped, and so this process: the launcher's store does not answer any more."""
    beats = 0  # counted beats, not time: a job that is suspended as a whole can resume
    while beats * BEAT_S < STOPPED_S:
        time.sleep(BEAT_S)
        beats = beats + 1 if status(launcher)[:1] == ["T"] else 0
    print(f"the launcher was stopped by a signal, and stayed so for {STOPPED_S:.0f} s", file=sys.stderr, flush=True)
    os.kill(launcher, signal.SIGKILL)
