"""Streams answers as server-sent events, with cleanup when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from starlette.types import Receive, Scope, Send

T = TypeVar("T")
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # keeps nginx from buffering events
}
COMMENT = b": \n\n"
DONE = b"data: [DONE]\n\n"


class ClientDisconnected(Exception):
    """The client has disconnected."""


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Returns the result of `work`; if the client disconnects, cancels it and waits for its end.

    Raises:
        ClientDisconnected: the client has disconnected.
    """
    task, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(_wait_disconnect(receive))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        for one in (task, disconnect):
            one.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await one


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """An ASGI response that streams events.

    Args:
        events: encoded events.
        close: always called at the end.
    """

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None], headers: Mapping[str, str]) -> None:
        self._events = events
        self._close = close
        self._headers = [(k.encode(), v.encode("latin-1")) for k, v in (HEADERS | dict(headers)).items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._write(send))
        except ClientDisconnected:
            pass
        finally:
            self._close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        # uvicorn sends the headers only with the first piece of the body.
        await send({"type": "http.response.body", "body": COMMENT, "more_body": True})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
