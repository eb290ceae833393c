"""A rank does not outlive its launcher. Standard library alone: it holds before the imports that take seconds."""

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
SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
STARTED = 19  # in a process's `status`: when it started, in ticks since the host did


def hold() -> None:
    """Ties this process, where a launcher of this host started it, to that launcher's life."""
    if sys.platform != "linux" or not {"TORCHELASTIC_RUN_ID", LAUNCHER} & os.environ.keys():
        return
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    if LAUNCHER in os.environ:
        if os.getppid() != int(os.environ[LAUNCHER]):
            sys.exit(1)  # it died before
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
