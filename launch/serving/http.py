"""HTTP server on uvicorn, with limits on request heads and on clients that stop reading."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus

import httptools
import uvicorn
from starlette.types import ASGIApp, Message
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from helix.config import ServeConfig
from launch.client.errors import ApiError
from launch.serving.request_executor import RECEIVE_S

BACKLOG = 4096
CONNECTIONS = 16384  # concurrent
CLOSING_S = 2  # for connections to finish at shutdown
KEEP_ALIVE_S = 75
LINGER_S = 5.0  # for a client to read a refusal; its remaining data is dropped
MAX_URL, MAX_HEAD = 16 << 10, 64 << 10  # bytes of the URL, and of everything before or after a body
MAX_HEADERS = 256


class UpgradeParser(httptools.HttpRequestParser):
    """Stays with HTTP/1.1 if a client offers to upgrade, as Java's HTTP client does with each request.

    Args:
        go_on: called with the bytes after the head of such a request, which httptools would skip.
    """

    def __init__(self, protocol: HttpToolsProtocol, go_on: Callable[[bytes], None]) -> None:
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._go_on = go_on

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on(data[upgrade.args[0] :])


class Http10Cycle(RequestResponseCycle):
    """A response to HTTP/1.0, which has no chunked encoding: a stream ends by closing the connection."""

    _streams = False

    async def send(self, message: Message) -> None:  # type: ignore[override]
        if message["type"] == "http.response.start":
            self._streams = not any(name.lower() == b"content-length" for name, _ in message["headers"])
            self.chunked_encoding = False if self._streams else None
        elif self._streams:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)  # type: ignore[arg-type]


class Server(uvicorn.Server):
    """A uvicorn server without signal handlers."""

    def refuse(self) -> None:
        """Stops accepting connections and frees the port; open connections continue."""
        for listening in getattr(self, "servers", ()):  # unset before the start
            listening.close()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: ASGIApp, serve: ServeConfig) -> Server:
    """Creates the server of an application."""

    class Protocol(HttpToolsProtocol):
        """A connection with limits on the time and size of headers."""

        def connection_made(self, transport: object) -> None:
            super().connection_made(transport)  # type: ignore[arg-type]
            self._again = False  # the parser reads a head again that another parser has already read
            self.parser = UpgradeParser(self, self._go_on)
            self._refused: ApiError | None = None  # once set, further data is dropped
            self._unread = 0  # bytes since the last complete head or part of a body
            self._late = self.loop.call_later(RECEIVE_S, self.transport.abort)
            self._slow: asyncio.TimerHandle | None = None

        def pause_writing(self) -> None:
            super().pause_writing()
            self._await_reading(self.transport.get_write_buffer_size())

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop_awaiting()

        def data_received(self, data: bytes) -> None:
            if self._refused is not None:
                return
            self._unread += len(data)
            super().data_received(data)
            if self._unread > MAX_HEAD and self._refused is None:
                self._refuse(431, f"the request head is larger than {MAX_HEAD} bytes")

        def _go_on(self, rest: bytes) -> None:
            """Reads the body of a request that offers an upgrade, with a parser that only gets the body's length."""
            named = [(k, v) for k, v in self.headers if k in (b"content-length", b"transfer-encoding")]
            head = b"".join(b"%s: %s\r\n" % header for header in named)
            self.parser, self._again = UpgradeParser(self, self._go_on), True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + head + b"\r\n")
            self._again = False
            if rest:
                self.parser.feed_data(rest)

        def on_message_begin(self) -> None:
            if self._again:
                return
            super().on_message_begin()
            self._size = 0  # bytes of headers, including trailers
            self._late.cancel()
            self._late = self.loop.call_later(RECEIVE_S, self.transport.abort)

        def on_url(self, url: bytes) -> None:
            if self._again:
                return
            if len(self.url) + len(url) > MAX_URL:
                raise self._refuse(414, f"the URL is longer than {MAX_URL} bytes")
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            if self._again:
                return
            self._size += len(name) + len(value)
            if self._size > MAX_HEAD:
                raise self._refuse(431, f"the headers are larger than {MAX_HEAD} bytes")
            if len(self.headers) >= MAX_HEADERS:
                raise self._refuse(431, f"there are more than {MAX_HEADERS} headers")
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            if self._again:
                return
            self._unread = 0
            self._late.cancel()
            super().on_headers_complete()
            if self.scope["http_version"] == "1.0":
                self.cycle.__class__ = Http10Cycle

        def on_body(self, body: bytes) -> None:
            self._unread = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._unread = 0
            if self.parser.should_upgrade():  # only the head has been read
                return
            super().on_message_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._late.cancel()
            self._stop_awaiting()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            if self._refused is None:
                super().send_400_response(msg)

        def _await_reading(self, left: int) -> None:
            """Aborts the connection if the client reads none of the buffered bytes for `serve.write_timeout_s`."""
            self._slow = self.loop.call_later(serve.write_timeout_s, self._look, left)

        def _look(self, left: int) -> None:
            if (size := self.transport.get_write_buffer_size()) < left:
                self._await_reading(size)
            else:
                self.transport.abort()

        def _stop_awaiting(self) -> None:
            if self._slow is not None:
                self._slow.cancel()

        def _refuse(self, status: int, message: str) -> ApiError:
            self._refused = ApiError(status, message)
            self._late.cancel()
            if self.cycle is not None and not self.cycle.response_complete:
                self.transport.abort()  # the refusal would corrupt the response to an earlier request
                return self._refused
            body = json.dumps(self._refused.body()).encode()
            phrase = HTTPStatus(status).phrase
            head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
            # Closing with unread data would reset the connection and lose the refusal.
            self.transport.write_eof()
            self._late = self.loop.call_later(LINGER_S, self.transport.abort)
            return self._refused

    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSING_S,
    )
    return Server(config)


def listen(serve: ServeConfig) -> list[socket.socket]:
    """Opens a listening socket for each process of the server; the kernel spreads connections over them.

    Raises:
        ValueError: the address is not available.
    """
    try:
        family = socket.getaddrinfo(serve.host, serve.port, type=socket.SOCK_STREAM)[0][0]
        listeners = [socket.create_server((serve.host, serve.port), family=family, backlog=BACKLOG)]
        if serve.processes > 1:
            # The first one has shown that no other server has the port: sockets that share it would not notice.
            address = listeners.pop()
            with address:
                free = serve.host, address.getsockname()[1]
            for _ in range(serve.processes):
                listeners.append(socket.create_server(free, family=family, backlog=BACKLOG, reuse_port=True))
    except OSError as error:
        raise ValueError(
            f"serve.host={serve.host} serve.port={serve.port}: cannot listen: {error.strerror or error}"
        ) from error
    for listener in listeners:
        # Accepted connections inherit it. Not every event loop sets it; then a body after its headers waits 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setblocking(False)
    return listeners
