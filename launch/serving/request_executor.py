"""Reading of large requests in other processes: in the server's own, Python's lock would block all other requests."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from launch.client.chat_tokenizer import ChatTokenizer
from launch.client.errors import ApiError
from launch.client.worker_pool import RequestHandler, WorkerPool, serve_requests

T = TypeVar("T")
LOG = logging.getLogger("helix.serving")
RECEIVE_S = 60.0  # for a client to send a request, and then for its body to be read
LARGE = 1 << 15  # bytes, or characters: less is read within some 30 ms
PROCESSES = 4  # at most
THREADS = 2
NICE = 5  # lower priority than ranks' steps and answers


class RequestExecutor:
    """Executor of calls whose time grows with the request: in a thread for small ones, else in another process.

    Processes take seconds to start: they read the tokenizer.

    Args:
        model: the checkpoint's directory.
        template: file with the chat template; None: the checkpoint's.
        tokens: the model's tokenizer.
        deadline_s: seconds for a process to be free, and for it to read a request.

    Attributes:
        tokens: the model's tokenizer; in a call's arguments, the other process substitutes its own.
        workers: the processes.
    """

    def __init__(self, model: str | None, template: str | None, tokenizer: ChatTokenizer, deadline_s: float) -> None:
        arguments = model or "", template or ""
        self.workers = WorkerPool("launch.serving.request_executor", arguments, PROCESSES, deadline_s, deadline_s)
        self.tokenizer = tokenizer
        self._deadline_s = deadline_s
        self._threads = ThreadPoolExecutor(THREADS, "reader")
        self._calls: set[asyncio.Task[Any]] = set()

    async def run(self, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """Runs a call and returns its result; `work`, its arguments and its result must be picklable.

        Args:
            size: size of the input, bytes or characters.

        Raises:
            ApiError: the call's own, or the deadline has passed, or the process died.
        """
        if size <= LARGE:
            return await self._in_thread(work, *arguments)
        call = asyncio.create_task(self._in_process(work, arguments))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return await asyncio.shield(call)  # an abandoned one runs to its end: restarting a process would cost more

    async def close(self) -> None:
        """Ends all processes."""
        calls = [*self._calls]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self.workers.close()
        self._threads.shutdown(wait=False)

    async def _in_process(self, work: Callable[..., T], arguments: tuple[Any, ...]) -> T:
        request = await self._in_thread(self._pickled, (work, arguments))
        try:
            done, result = await self._in_thread(pickle.loads, await self.workers.ask(request))
        except TimeoutError:
            what = f"the request could not be read within {self._deadline_s:g} s"
            raise ApiError(413, what, code="too_large") from None
        except EOFError as error:
            LOG.warning("%s", error)
            raise ApiError(500, "the process that read the request ended") from error
        if not done:
            raise result
        return result  # type: ignore[no-any-return]

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def _pickled(self, content: Any) -> bytes:
        buffer = io.BytesIO()
        _Pickler(buffer, self.tokenizer).dump(content)
        return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, tokenizer: ChatTokenizer) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self._tokenizer = tokenizer

    def persistent_id(self, value: Any) -> str | None:
        return "tokenizer" if value is self._tokenizer else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, tokenizer: ChatTokenizer) -> None:
        super().__init__(buffer)
        self._tokenizer = tokenizer

    def persistent_load(self, name: Any) -> ChatTokenizer:
        return self._tokenizer


def _work(model: str, template: str) -> RequestHandler:
    os.nice(NICE)
    tokenizer = ChatTokenizer(model or None, template or None)

    def handle(request: bytes) -> bytes:
        result: tuple[bool, Any]
        try:
            work, arguments = _Unpickler(io.BytesIO(request), tokenizer).load()
            result = True, work(*arguments)
        except ApiError as error:
            result = False, error
        except Exception as error:
            traceback.print_exc()
            result = False, RuntimeError(f"{type(error).__name__}: {error}")
        return pickle.dumps(result, pickle.HIGHEST_PROTOCOL)

    return handle


if __name__ == "__main__":
    serve_requests(lambda: _work(*sys.argv[1:]))
