"""Worker processes for slow or memory-hungry work, which would hold the GIL of the server's process.

Requests and answers are length-prefixed bytes. A process first sends an empty answer to say that it is ready.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import struct
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable, Sequence

from helix.packages import rank_environment
from launch.client.errors import ApiError

SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
PIECE = 1 << 20  # bytes read at a time
BUSY_S = 10  # Retry-After for clients
SIZE = struct.Struct("=Q")
RequestHandler = Callable[[bytes], bytes]


class WorkerPool:
    """Pool of worker processes, one request each at a time; they start on demand and stay.

    A request goes to the first free process: a new one takes seconds to start, a busy one is mostly free in
    milliseconds.

    Args:
        module: the worker's module, which calls `serve_requests`.
        arguments: its command line.
        wait_s: seconds to wait for a free process, and for a process to start.
        work_s: seconds for an answer; a process that takes longer is killed.

    Attributes:
        processes: all running processes.
        idle: ready processes without work.
    """

    def __init__(self, module: str, arguments: Sequence[str], max_processes: int, wait_s: float, work_s: float) -> None:
        self.processes: set[Process] = set()
        self.idle: list[Process] = []
        self._command = sys.executable, "-m", module, *arguments
        self._max_processes, self._wait_s, self._work_s = max_processes, wait_s, work_s
        self._starts: set[asyncio.Task[Process]] = set()
        self._num_spawning = 0  # starts whose process does not exist yet
        self._waiters: deque[asyncio.Future[Process]] = deque()

    def start(self) -> None:
        """Starts a process, which a waiting request can use; call it in the event loop."""
        self._num_spawning += 1
        task = asyncio.create_task(self._spawn())
        self._starts.add(task)
        task.add_done_callback(self._on_started)

    async def ask(self, request: bytes) -> bytes:
        """Sends a request to a process and returns the answer; kills the process if the caller is cancelled.

        Raises:
            ApiError: 503, no process was free in time.
            TimeoutError: the answer took too long.
            EOFError: the process died; the message has its exit code.
            RuntimeError: a process died before it was ready.
        """
        try:
            async with asyncio.timeout(self._wait_s):
                process = await self._acquire()
        except TimeoutError:
            what = f"the server was busy with other large requests for {self._wait_s:g} s"
            raise ApiError(503, what, code="busy", retry_s=BUSY_S) from None
        try:
            async with asyncio.timeout(self._work_s):
                answer = await _exchange(process, request)
        except BaseException as error:
            await self._kill(process)
            self._start_more()
            if isinstance(error, EOFError | ConnectionError):
                raise EOFError(self._exit_message(process)) from error
            raise
        self._release(process)
        return answer

    async def close(self) -> None:
        """Ends all processes; call it when no request is pending."""
        starts = [*self._starts]
        for task in starts:
            task.cancel()
        await asyncio.gather(*starts, return_exceptions=True)
        for process in [*self.processes]:
            await self._kill(process)

    async def _acquire(self) -> Process:
        while self.idle:
            process = self.idle.pop()
            if process.returncode is None:
                return process
            await self._kill(process)
        waiter: asyncio.Future[Process] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._start_more()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._release(waiter.result())  # assigned to a cancelled request
            raise

    def _start_more(self) -> None:
        waiting = sum(not waiter.done() for waiter in self._waiters)
        if waiting > len(self._starts) and len(self.processes) + self._num_spawning < self._max_processes:
            self.start()

    def _release(self, process: Process) -> None:
        waiter = self._pop_waiter()
        if waiter is None:
            self.idle.append(process)
        else:
            waiter.set_result(process)

    def _pop_waiter(self) -> asyncio.Future[Process] | None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                return waiter
        return None

    def _on_started(self, task: asyncio.Task[Process]) -> None:
        """Assigns a new process; if it failed to start, one request gets the error and the others another process."""
        self._starts.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._release(task.result())
            return
        waiter = self._pop_waiter()
        if waiter is not None:
            waiter.set_exception(error)
        self._start_more()

    async def _spawn(self) -> Process:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                env=os.environ | rank_environment(),
                stdin=PIPE,
                stdout=PIPE,
                limit=PIECE,
                start_new_session=True,  # control-C in a terminal reaches only the server
            )
        finally:
            self._num_spawning -= 1
        self.processes.add(process)
        try:
            async with asyncio.timeout(self._wait_s):
                await _read(process)
        except BaseException as error:
            await self._kill(process)
            if isinstance(error, EOFError | ConnectionError):
                raise RuntimeError(self._exit_message(process)) from error
            raise
        return process

    def _exit_message(self, process: Process) -> str:
        return f"{self._command[2]} ended with exit code {process.returncode}"

    async def _kill(self, process: Process) -> None:
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


def serve_requests(make_handler: Callable[[], RequestHandler]) -> None:
    """Answers requests from standard input until it ends.

    Args:
        make_handler: creates the function that answers a request.
    """
    inward, outward = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints go to the log
    if sys.platform == "linux":  # a call that is still running must not outlive the server
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    work, reply = make_handler(), b""
    while True:
        outward.write(SIZE.pack(len(reply)) + reply)
        outward.flush()
        if not (head := inward.read(SIZE.size)):
            return
        reply = work(inward.read(*SIZE.unpack(head)))
