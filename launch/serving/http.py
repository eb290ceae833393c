"""HTTP by uvicorn, with limits that it does not have: for headers to come, and for connections that are given up."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from helix.config import ServeConfig

BACKLOG = 4096
CLOSING_S = 2  # for connections to end, once the server does
KEEP_ALIVE_S = 75


class Server(uvicorn.Server):
    """A server in a loop whose signals are somebody else's."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: ASGIApp, serve: ServeConfig) -> Server:
    class Protocol(HttpToolsProtocol):
        """A connection that ends where no headers come, and that an application can end at once."""

        def connection_made(self, transport: object) -> None:
            super().connection_made(transport)  # type: ignore[arg-type]
            self._late = self.loop.call_later(serve.receive_s, self.transport.abort)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.scope["helix.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
            self._late.cancel()
            self._late = self.loop.call_later(serve.receive_s, self.transport.abort)

        def on_headers_complete(self) -> None:
            self._late.cancel()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._late.cancel()
            super().connection_lost(exc)

    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        limit_concurrency=serve.connections,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSING_S,
    )
    return Server(config)


def listen(serve: ServeConfig) -> socket.socket:
    """The socket of the server's address.

    Raises:
        ValueError: it cannot be listened at.
    """
    try:
        family = socket.getaddrinfo(serve.host, serve.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((serve.host, serve.port), family=family, backlog=BACKLOG)
        # Connections inherit it; not every loop sets it, and a body behind its headers would wait 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise ValueError(
            f"serve.host={serve.host} serve.port={serve.port} cannot be listened at: {error.strerror or error}"
        ) from error
    listener.setblocking(False)
    return listener
