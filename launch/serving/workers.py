"""Worker processes for work that takes long or much memory: in the server's own, Python's lock would block others.

Requests and answers are bytes preceded by their length. A process sends an empty answer first, once it is ready.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import struct
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from pathlib import Path

from launch.serving.errors import ApiError

ROOT = Path(__file__).parents[2]
SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
PIECE = 1 << 20  # bytes read at a time
BUSY_S = 10  # when to try again
SIZE = struct.Struct("=Q")
Answerer = Callable[[bytes], bytes]


class Workers:
    """Pool of processes that answer requests, each one at a time; they start on demand, and stay.

    Args:
        module: the program, which calls `answer`.
        arguments: its command line.
        most: processes at a time.
        wait_s: seconds for one to be free and ready.
        work_s: seconds for an answer; a process that takes longer is killed.

    Attributes:
        processes: all running processes.
        idle: those without work.
    """

    def __init__(self, module: str, arguments: Sequence[str], most: int, wait_s: float, work_s: float) -> None:
        self.processes: set[Process] = set()
        self.idle: list[Process] = []
        self._command = sys.executable, "-m", module, *arguments
        self._free = asyncio.Semaphore(most)
        self._wait_s, self._work_s = wait_s, work_s
        self._ahead: asyncio.Task[bytes] | None = None

    def start(self) -> None:
        """Starts a process, so that the first request does not wait for it; to be called in the event loop, once."""
        self._ahead = asyncio.create_task(self.ask(None))

    async def ask(self, request: bytes | None) -> bytes:
        """Sends a request to a process and returns its answer; kills the process if the caller is cancelled.

        Args:
            request: None: a process is ready behind it, and that is all.

        Raises:
            ApiError: 503, no process was free in time.
            TimeoutError: the answer did not come in time.
            EOFError: the process died; the message has its exit code.
            RuntimeError: the process died before it was ready.
        """
        process, ready = None, False
        try:
            async with asyncio.timeout(self._wait_s) as deadline, self._free:
                if request is not None and self._ahead is not None:
                    await asyncio.wait({self._ahead})  # it is ready before one that would be started now
                process, begun = await self._one()
                ready = begun or await _read(process) == b""
                deadline.reschedule(asyncio.get_running_loop().time() + self._work_s)
                answer = b"" if request is None else await _exchange(process, request)
        except BaseException as error:
            if process is not None:
                await self._end(process)
            if isinstance(error, TimeoutError) and not ready:
                what = f"the server was busy with other large requests for {self._wait_s:g} s"
                raise ApiError(503, what, code="busy", retry_s=BUSY_S) from None
            if isinstance(error, EOFError | ConnectionError) and process is not None:
                what = f"{self._command[2]} ended with exit code {process.returncode}"
                raise (EOFError if ready else RuntimeError)(what) from error
            raise
        self.idle.append(process)
        return answer

    async def close(self) -> None:
        """Ends all processes; to be called when no request is pending."""
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.gather(self._ahead, return_exceptions=True)
        for process in [*self.processes]:
            await self._end(process)

    async def _one(self) -> tuple[Process, bool]:
        """Takes an idle process, or starts one; also returns whether it is ready."""
        while self.idle:
            process = self.idle.pop()
            if process.returncode is None:
                return process, True
            await self._end(process)
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        process = await asyncio.create_subprocess_exec(
            *self._command,
            env=os.environ | {"PYTHONPATH": paths},
            stdin=PIPE,
            stdout=PIPE,
            limit=PIECE,
            start_new_session=True,  # a terminal's control-C reaches only the server
        )
        self.processes.add(process)
        return process, False

    async def _end(self, process: Process) -> None:
        self.processes.discard(process)
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _exchange(process: Process, request: bytes) -> bytes:
    assert process.stdin is not None
    process.stdin.write(SIZE.pack(len(request)))
    process.stdin.write(request)
    await process.stdin.drain()
    return await _read(process)


async def _read(process: Process) -> bytes:
    assert process.stdout is not None
    (size,) = SIZE.unpack(await process.stdout.readexactly(SIZE.size))
    return await process.stdout.readexactly(size)


def answer(made: Callable[[], Answerer]) -> None:
    """Answers requests from standard input until it ends.

    Args:
        made: creates the function that does the work.
    """
    inward, outward = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints go to the log
    if sys.platform == "linux":  # a running call does not outlive the server
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    work, answered = made(), b""
    while True:
        outward.write(SIZE.pack(len(answered)) + answered)
        outward.flush()
        if not (head := inward.read(SIZE.size)):
            return
        answered = work(inward.read(*SIZE.unpack(head)))
