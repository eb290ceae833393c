"""Processes large requests in other processes, so that they do not hold the GIL of the server's process."""

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
LOG = logging.getLogger(f"helix.{__name__}")
RECEIVE_S = 60.0  # for a client to send the head, and then the body
LARGE = 1 << 15  # bytes or characters; smaller requests take at most 30 ms
PROCESSES = 4  # maximum
THREADS = 2
NICE = 5  # lower priority than the ranks and the server


class RequestExecutor:
    """Runs calls whose time grows with the request: small ones in a thread, others in another process.

    Processes take seconds to start, because they load the tokenizer.

    Args:
        model: checkpoint directory.
        template: file with the chat template; None: the checkpoint's.
        tokenizer: the model's; as an argument of a call, it is replaced by the process's own.
        deadline_s: seconds to wait for a free process, and for a call to finish.

    Attributes:
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
        """Runs a call and returns its result; function, arguments and result must be picklable.

        Args:
            size: size of the input in bytes or characters.

        Raises:
            ApiError: raised by the call, or the deadline has passed, or the process died.
        """
        if size <= LARGE:
            return await self._in_thread(work, *arguments)
        call = asyncio.create_task(self._in_process(work, arguments))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return await asyncio.shield(call)  # if abandoned, let it finish: restarting a process would cost more

    async def close(self) -> None:
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
            what = f"the request could not be processed within {self._deadline_s:g} s"
            raise ApiError(413, what, code="too_large") from None
        except EOFError as error:
            LOG.warning("%s", error)
            raise ApiError(500, "the process that handled the request ended") from error
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
