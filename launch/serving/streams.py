"""Answers while they come: server-sent events, which end with their client, however it goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from starlette.types import Message, Receive, Scope, Send

T = TypeVar("T")
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # proxies pass events on as they come
}
COMMENT = b": \n\n"
COMMENT_S = 5.0  # of silence, after which a stream gets a comment
DONE = b"data: [DONE]\n\n"


class Gone(Exception):
    """The client has left."""


class SlowReader(Exception):
    """The client has not taken what was sent for as long as it may."""


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """What `work` gives; it is cancelled where the client leaves, and that is waited for.

    Raises:
        Gone: the client has left.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await one


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """An ASGI response of events.

    Args:
        events: their bytes.
        close: called in the end, whatever happens.
        slow_s: for the client to take a piece.
    """

    def __init__(
        self, events: AsyncIterator[bytes], close: Callable[[], None], slow_s: float, headers: Mapping[str, str]
    ) -> None:
        self._events = events
        self._close = close
        self._slow_s = slow_s
        self._headers = [(k.encode(), v.encode("latin-1")) for k, v in (HEADERS | dict(headers)).items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._write(send))
        except Gone:
            pass
        except SlowReader:
            scope["helix.abort"]()  # to close would be to wait for the client
        finally:
            self._close()

    async def _write(self, send: Send) -> None:
        async def sent(message: Message) -> None:
            try:
                async with asyncio.timeout(self._slow_s):
                    await send(message)
            except TimeoutError:
                raise SlowReader from None

        await sent({"type": "http.response.start", "status": 200, "headers": self._headers})
        # Headers alone would wait for the first piece.
        await sent({"type": "http.response.body", "body": COMMENT, "more_body": True})
        async for event in self._events:
            await sent({"type": "http.response.body", "body": event, "more_body": True})
        await sent({"type": "http.response.body", "body": b"", "more_body": False})
