"""State that all processes of a server share. The first process has it; the others call it over a socket."""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
import struct
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from prometheus_client.metrics_core import Metric

from launch.client.errors import ApiError
from launch.serving.metrics import Collected, Snapshot
from launch.serving.response_store import ResponseStore, StoredResponse

LOG = logging.getLogger(f"helix.{__name__}")
SIZE = struct.Struct("=Q")
CALL_S = 5.0  # for another process to answer a call


class FoundResponse(NamedTuple):
    """A stored response: its conversation's items as JSON lists, with its output as the last, and its JSON."""

    conversation: list[bytes]
    response: bytes


class NewResponse(NamedTuple):
    """A response to store.

    Attributes:
        previous: the response that it continues, and `before`, the items of that one's conversation.
        items: what was asked; `output`, the answer; both are JSON lists.
        response: its JSON without the output.
    """

    name: str
    previous: str | None
    before: list[bytes]
    items: bytes
    output: bytes
    response: bytes


class LocalState:
    """Stored responses and metrics of a server, in its first process.

    Attributes:
        store: stored responses.
        snapshot: returns what this process has counted.
        server_metrics: returns the metrics that a server has once.
        others: returns what the other processes have counted.
    """

    def __init__(
        self, store: ResponseStore, snapshot: Callable[[], Snapshot], server_metrics: Callable[[], list[Metric]]
    ) -> None:
        self.store, self.snapshot, self.server_metrics = store, snapshot, server_metrics
        self.others: Callable[[], Any] = _no_others

    async def find_response(self, owner: str | None, name: str, param: str, given: str, advice: str) -> FoundResponse:
        """Returns a stored response; see `ResponseStore.find`."""
        stored = self.store.find(owner, name, param, given, advice)
        return FoundResponse(stored.conversation, stored.response)

    async def add_response(self, owner: str | None, new: NewResponse) -> None:
        node = None if new.previous is None else self.store.get(owner, new.previous)
        before = () if node is not None else new.before  # the previous one may have been dropped since
        self.store.add(owner, new.name, StoredResponse(node, (*before, new.items, new.output), new.response))

    async def delete_response(self, owner: str | None, name: str) -> None:
        """Deletes a stored response, if it is still there."""
        if self.store.get(owner, name) is not None:
            self.store.delete(owner, name)

    async def collect(self) -> Collected:
        """Returns the metrics of all processes."""
        others = await self.others()
        return Collected([self.snapshot(), *others], self.server_metrics())


async def _no_others() -> list[Snapshot]:
    return []


class RemoteState:
    """The methods of the first process's `LocalState`, called over a channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def find_response(self, *given: Any) -> FoundResponse:
        return await self._call("find_response", *given)  # type: ignore[no-any-return]

    async def add_response(self, *given: Any) -> None:
        await self._call("add_response", *given)

    async def delete_response(self, *given: Any) -> None:
        await self._call("delete_response", *given)

    async def collect(self) -> Collected:
        return await self._call("collect")  # type: ignore[no-any-return]

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return await self._channel.call(method, *arguments)
        except (TimeoutError, ConnectionError) as error:
            what = "the server's first process did not answer"
            raise ApiError(503, what, code="busy", retry_s=int(CALL_S)) from error


class Channel:
    """Calls between two processes of a server over a socket, in both directions; pickled.

    Args:
        methods: asynchronous functions that the other end may call, by name.
    """

    def __init__(self, reader: StreamReader, writer: StreamWriter, methods: Mapping[str, Callable[..., Any]]) -> None:
        self._reader, self._writer = reader, writer
        self._methods = methods
        self._ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def call(self, method: str, *arguments: Any, timeout_s: float = CALL_S) -> Any:
        """Calls a function of the other end and returns its result.

        Raises:
            ApiError: raised by the function.
            TimeoutError: there was no answer in time.
            ConnectionError: the other end has gone.
        """
        if self._closed:
            raise ConnectionError("the other process has gone")
        number, future = next(self._ids), asyncio.get_running_loop().create_future()
        self._calls[number] = future
        try:
            self._send((number, method, arguments))
            async with asyncio.timeout(timeout_s):
                return await future
        finally:
            del self._calls[number]

    async def serve(self) -> None:
        """Serves calls until the other end closes the connection."""
        try:
            while True:
                (size,) = SIZE.unpack(await self._reader.readexactly(SIZE.size))
                number, method, content = pickle.loads(await self._reader.readexactly(size))
                if method is not None:
                    task = asyncio.create_task(self._answer(number, method, content))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                elif (future := self._calls.get(number)) is not None and not future.done():
                    done, result = content
                    future.set_result(result) if done else future.set_exception(result)
        except (EOFError, ConnectionError):
            pass
        finally:
            self.close()

    def close(self) -> None:
        self._closed = True
        for future in self._calls.values():
            if not future.done():
                future.set_exception(ConnectionError("the other process has gone"))
        self._writer.close()

    async def _answer(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            content = True, await self._methods[method](*arguments)
        except ApiError as error:
            content = False, error
        except Exception as error:
            LOG.exception("%s failed", method)
            content = False, ApiError(500, f"the server failed: {type(error).__name__}")
        self._send((number, None, content))

    def _send(self, message: Any) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if not self._writer.is_closing():
            self._writer.write(SIZE.pack(len(data)) + data)
