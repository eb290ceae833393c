"""Forks Python programs from a process that has done three seconds of imports.

Each message of the socket on stdin is a program's command line and environment in JSON, with three files. A
grandchild runs the program with the first two as stdout and stderr; the third receives the program's pid,
then its exit code. Ranks that these programs start are forks, too.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import inspect
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from helix.transformers_import import import_transformers
from launch.job import lifeline

RANKS = "torchrun_entry", "benchmarks.entry", "benchmarks.agent", "examples.batch"  # programs with ranks, and launchers
PIPES = "p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"
start, start_async = subprocess.Popen._execute_child, asyncio.create_subprocess_exec  # type: ignore[attr-defined]


def has_ranks(command: Sequence[str]) -> bool:
    """Returns whether a command starts a program of RANKS."""
    words = [word.removesuffix(".py").rpartition("/")[2] for word in command[:4]]
    return command[0] == sys.executable and any(word in RANKS for word in words)


def run(arguments: Sequence[str]) -> int:
    """Runs a Python command line with -u, -c and -m; returns the exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.root.handlers.clear()
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # what it was before the fork may have been a file
    program, *sys.argv = [text for text in arguments if text != "-u"]
    try:
        if program == "-m":
            sys.modules.pop(sys.argv[0], None)  # as if the program had not been imported
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        elif program == "-c":
            exec(compile(sys.argv[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv.insert(0, program)
            runpy.run_path(program, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    return code


def start_copy(self: subprocess.Popen[Any], *given: Any) -> None:
    """Forks instead of starting a process that would repeat the imports."""
    named = inspect.signature(start).bind(self, *given).arguments
    if not has_ranks(named["args"]):
        start(self, *given)
        return
    if (pid := os.fork()) == 0:
        for standard, name in enumerate(("p2cread", "c2pwrite", "errwrite")):
            if named[name] != -1:
                os.dup2(named[name], standard)
        os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
        if named["start_new_session"]:
            os.setsid()
        if (environment := named["env"]) is not None:
            os.environ.clear()
            os.environ.update(environment)
        os._exit(run(named["args"][1:]))  # do not run the parent's cleanup
    self.pid, self._child_created = pid, True  # type: ignore[attr-defined]
    self._close_pipe_fds(*(named[name] for name in PIPES))  # type: ignore[attr-defined]


class Process:
    """A process with asyncio's interface."""

    def __init__(self, started: subprocess.Popen[Any]) -> None:
        self._started, self.pid = started, started.pid

    @property
    def returncode(self) -> int | None:
        return self._started.returncode

    async def wait(self) -> int:
        return await asyncio.to_thread(self._started.wait)


async def start_copy_async(*command: str, **options: Any) -> Any:
    """Replaces `asyncio.create_subprocess_exec`."""
    if has_ranks(command):
        return Process(subprocess.Popen(command, **options))
    return await start_async(*command, **options)


def end_with_parent() -> None:
    """Makes this process die with its parent."""
    ctypes.CDLL(None).prctl(lifeline.SET_DEATH_SIGNAL, signal.SIGKILL)


def keep(request: dict[str, Any], stdout: int, stderr: int, status_fd: int) -> None:
    """Runs a program as a child and reports its pid and exit code; both die with the process with the imports."""
    end_with_parent()
    if (pid := os.fork()) == 0:
        end_with_parent()
        os.close(status_fd)
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.closerange(3, status_fd)
        os.environ.clear()
        os.environ.update(request["environment"])
        if lifeline.LAUNCHER in os.environ:
            os.environ[lifeline.LAUNCHER] = str(os.getppid())
        sys.exit(run(request["arguments"]))
    os.write(status_fd, b"%d\n" % pid)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(BrokenPipeError):  # the client may be gone
        os.write(status_fd, b"%d\n" % code)
    os._exit(0)


if __name__ == "__main__":
    programs = (program for program in RANKS if not program.startswith("examples."))  # examples would run on import
    for program in (*programs, "launch.llm", "launch.job.rank", "launch.serving.server", "torch.distributed.run"):
        import_module(program)
    import_transformers()
    gc.freeze()
    gc.enable()
    subprocess.Popen._execute_child = start_copy  # type: ignore[attr-defined]
    asyncio.create_subprocess_exec = start_copy_async  # type: ignore[assignment]
    channel = socket.socket(fileno=0)
    while True:
        request, files, *_ = socket.recv_fds(channel, 1 << 20, 3)
        if not request:  # the input is closed
            break
        if os.fork() == 0:
            channel.detach()
            keep(json.loads(request), *files)
        for file in files:
            os.close(file)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # reap keepers of ended programs
                pass
