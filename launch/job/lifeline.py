"""How a process of a job begins, and ends with its launcher. Standard library alone: it holds before long imports."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

LAUNCHER = "HELIX_LAUNCHER"  # variable of ranks, and of a server's launcher: the id of the process that started them
BEAT_S = 1.0
STOPPED_S = 10.0  # a process that is stopped for so long holds up the others for good
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP  # those that end a process unless it handles them
SET_DEATH_SIGNAL, SET_NAME = 1, 15  # PR_SET_PDEATHSIG, PR_SET_NAME
STARTED = 19  # in a process's `status`: when it started, in ticks since the host did


def begin() -> None:
    """What a rank or its launcher does first.

    Control-C ends it at once and without a trace, whatever it does: results are in their file as they come. It ends
    with the launcher of this host that started it. A rank has its number as its name, in `ps` and `top`.
    """
    for number in SIGNALS:  # a copy of its launcher has its handlers
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the launcher held them back
    # A terminal that cannot show a character gets its number; a run does not end for that. A line is out when it ends.
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    if sys.platform != "linux":
        return
    linux = ctypes.CDLL(None)
    if {"TORCHELASTIC_RUN_ID", LAUNCHER} & os.environ.keys():
        linux.prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    if LAUNCHER in os.environ and os.getppid() != int(os.environ[LAUNCHER]):
        sys.exit(1)  # it died before
    if "RANK" in os.environ:
        linux.prctl(SET_NAME, f"helix rank {os.environ['RANK']}".encode())


def watch() -> None:
    """Ends this process, from a thread, where the launcher that started it stays stopped."""
    if sys.platform == "linux" and LAUNCHER in os.environ:
        threading.Thread(target=_watch, args=(os.getppid(),), name="lifeline", daemon=True).start()


def status(pid: int) -> list[str]:
    """What Linux says of a process, from its state on (T: a signal stopped it); empty where it says nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def age_s(pid: int) -> float | None:
    """Seconds since a process of this host started; None where Linux does not say."""
    try:
        began = int(status(pid)[STARTED]) / os.sysconf("SC_CLK_TCK")
        return float(Path("/proc/uptime").read_text().split()[0]) - began
    except (OSError, IndexError):
        return None


def identity(pid: int) -> str:
    """Names a process of this host, and no later one of the same number; empty where nobody can say."""
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{host} {os.readlink('/proc/self/ns/pid')} {pid} {status(pid)[STARTED]}"
    except (OSError, IndexError):
        return ""


def kill(name: str) -> None:
    """Kills the process of an `identity`, where it is one of this host and still that one."""
    if name and name == identity(pid := int(name.split()[2])):
        with suppress(OSError):  # gone since, or not ours
            os.kill(pid, signal.SIGKILL)


def _watch(launcher: int) -> None:
    """Kills a launcher that stays stopped, and this process with it: the store that it holds answers nobody."""
    beats = 0  # counted, so that a job that is suspended whole can go on
    while beats * BEAT_S < STOPPED_S:
        time.sleep(BEAT_S)
        beats = beats + 1 if status(launcher)[:1] == ["T"] else 0
    print(f"the launcher was stopped by a signal, and stayed so for {STOPPED_S:.0f} s", file=sys.stderr, flush=True)
    os.kill(launcher, signal.SIGKILL)
