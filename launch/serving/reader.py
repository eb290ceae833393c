"""Reading of what is large in processes of its own: in this one, Python's lock would keep everybody else waiting."""

from __future__ import annotations

import asyncio
import ctypes
import io
import os
import pickle
import signal
import struct
import sys
import traceback
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from launch.serving.errors import ApiError
from launch.serving.tokens import Tokens

T = TypeVar("T")
LARGE = 1 << 15  # bytes, or characters: less is read within some 30 ms
PROCESSES = 4  # at most
THREADS = 2
SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
NICE = 5  # steps of ranks, and answers to others, come first
PIECE = 1 << 20  # bytes read at a time
BUSY_S = 10  # when to try again
SIZE = struct.Struct("=Q")
ROOT = Path(__file__).parents[2]


class Reader:
    """Does what takes time by the size of a request: in a thread where that is small, else in another process.

    Processes start where there is work, stay, and take the largest part of a second for it once.

    Args:
        model: the checkpoint's directory.
        deadline_s: for a request to be read, seconds; a process that takes longer is killed.

    Attributes:
        tokens: of the model; wherever they are part of a call, the other process has its own.

    Raises:
        ValueError: the tokenizer cannot be read.
    """

    def __init__(self, model: str | None, deadline_s: float) -> None:
        self.tokens = Tokens(model)
        self._model, self._deadline_s = model, deadline_s
        self._threads = ThreadPoolExecutor(THREADS, "reader")
        self._free = asyncio.Semaphore(PROCESSES)
        self._idle: list[Process] = []
        self._all: set[Process] = set()
        self._calls: set[asyncio.Task[Any]] = set()

    async def run(self, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """The result of a call; `work`, its arguments and its result have to be picklable.

        Args:
            size: of what is read, bytes or characters.

        Raises:
            ApiError: of the call's own, or the deadline has passed, or the process died.
        """
        if size <= LARGE:
            return await self._in_thread(work, *arguments)
        # One that nobody waits for any more comes to its end: to start a process anew would cost more.
        return await asyncio.shield(self._call(work, *arguments))

    def start(self) -> None:
        """Starts a process, so that the first large request does not wait for it; to be called in the loop."""
        self._call(int)

    def _call(self, work: Callable[..., T], *arguments: Any) -> asyncio.Task[T]:
        call = asyncio.create_task(self._elsewhere(work, arguments))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    async def close(self) -> None:
        """Ends all processes."""
        calls = [*self._calls]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        for process in [*self._all]:
            await self._end(process)
        self._threads.shutdown(wait=False)

    async def _elsewhere(self, work: Callable[..., T], arguments: tuple[Any, ...]) -> T:
        process = None
        try:
            async with asyncio.timeout(self._deadline_s), self._free:
                process = await self._one()
                request = await self._in_thread(self._packed, (work, arguments))
                done, result = await self._in_thread(pickle.loads, await _exchange(process, request))
        except BaseException as error:
            if process is not None:
                await self._end(process)
            if isinstance(error, TimeoutError) and process is None:
                what = f"requests before this one were not read within serve.receive_s={self._deadline_s:g} s"
                raise ApiError(503, what, code="busy", retry_s=BUSY_S) from None
            if isinstance(error, TimeoutError):
                what = f"the request could not be read within serve.receive_s={self._deadline_s:g} s"
                raise ApiError(413, what, code="too_large") from None
            if isinstance(error, OSError | EOFError):
                code = None if process is None else process.returncode
                print(f"a process that read a request ended (exit code {code})", file=sys.stderr, flush=True)
                raise ApiError(500, "the process that read the request ended") from error
            raise
        self._idle.append(process)
        if not done:
            raise result
        return result  # type: ignore[no-any-return]

    async def _one(self) -> Process:
        """A process that has nothing to do."""
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
            await self._end(process)
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "launch.serving.reader", self._model or ""),
            env=os.environ | {"PYTHONPATH": paths},
            stdin=PIPE,
            stdout=PIPE,
            limit=PIECE,
            start_new_session=True,  # a terminal's control-C is the server's
        )
        self._all.add(process)
        return process

    async def _end(self, process: Process) -> None:
        self._all.discard(process)
        if process.returncode is None:
            process.kill()
        await process.wait()

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def _packed(self, content: Any) -> bytes:
        buffer = io.BytesIO()
        _Pickler(buffer, self.tokens).dump(content)
        return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, tokens: Tokens) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self._tokens = tokens

    def persistent_id(self, value: Any) -> str | None:
        return "tokens" if value is self._tokens else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, tokens: Tokens) -> None:
        super().__init__(buffer)
        self._tokens = tokens

    def persistent_load(self, name: Any) -> Tokens:
        return self._tokens


async def _exchange(process: Process, request: bytes) -> bytes:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(SIZE.pack(len(request)))
    process.stdin.write(request)
    await process.stdin.drain()
    (size,) = SIZE.unpack(await process.stdout.readexactly(SIZE.size))
    return await process.stdout.readexactly(size)


def main(model: str) -> None:
    """Answers calls that come over standard input, until that ends."""
    inward, outward = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed belongs into the log
    os.nice(NICE)
    if sys.platform == "linux":  # a call that is under way does not outlive the server either
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    tokens = Tokens(model or None)
    while head := inward.read(SIZE.size):
        content = inward.read(*SIZE.unpack(head))
        result: tuple[bool, Any]
        try:
            work, arguments = _Unpickler(io.BytesIO(content), tokens).load()
            result = True, work(*arguments)
        except ApiError as error:
            result = False, error
        except Exception as error:
            traceback.print_exc()
            result = False, RuntimeError(f"{type(error).__name__}: {error}")
        content = pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
        outward.write(SIZE.pack(len(content)) + content)
        outward.flush()


if __name__ == "__main__":
    main(sys.argv[1])
