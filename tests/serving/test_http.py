"""Connections of the front end: bodies that are too large or late, readers that are slow, other protocols."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from helix.config import ServeConfig
from helix.engine.request import Request
from launch.serving.http import listen
from tests.serving.api_server import ApiServer, FakeJob, Serve, until
from tests.serving.chats import CHATS, COMPLETIONS

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[ApiServer, str, Any], Awaitable[Connection]]


@pytest.fixture
async def narrow(monkeypatch: pytest.MonkeyPatch) -> Connect:
    """`await narrow(front, path, body)` is a connection with the smallest buffers, which are soon full."""

    def listening(serve: ServeConfig) -> list[socket.socket]:
        (made := listen(serve))[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return made

    async def connect(api_server: ApiServer, path: str, body: Any) -> Connection:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", api_server.port))
        return await api_server.connect(path, body, sock=client, limit=4096)

    monkeypatch.setattr("tests.serving.api_server.listen", listening)
    return connect


async def test_a_slow_reader_gets_larger_pieces_and_then_the_end(narrow: Connect, serve: Serve) -> None:
    """While nobody reads, tokens wait as ids; where nobody does for long, the request ends."""

    async def flood(job: FakeJob, submit: Request) -> None:
        while not job.aborts:
            await job.emit(submit, [200] * 1000)
            await asyncio.sleep(0.001)

    api_server = await serve(FakeJob(flood), write_timeout_s=0.5)
    _kept = await narrow(api_server, COMPLETIONS, {"prompt": [1], "max_tokens": 4000, "stream": True})
    await until(lambda: api_server.job.aborts)
    assert api_server.engine_client.generations == {}


@pytest.mark.parametrize("reads", [False, True])
async def test_a_client_that_reads_nothing_of_a_whole_answer_is_left(
    reads: bool, narrow: Connect, serve: Serve
) -> None:
    """It would hold the answer's memory for as long as it likes; one that reads on, however slowly, has all of it."""

    async def telling(job: FakeJob, submit: Request) -> None:
        every = [(-1.0, [(token, -1.0) for token in range(20)])] * 400
        await job.emit(submit, [100] * 400, "length", logprobs=tuple(every))

    api_server = await serve(FakeJob(telling), write_timeout_s=600)  # the test looks in place of the clock
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 400, "logprobs": True, "top_logprobs": 20}
    reader, _kept = await narrow(api_server, CHATS, body)
    await until(lambda: any(one._slow for one in api_server.server.server_state.connections))
    (connection,) = api_server.server.server_state.connections
    left, got = connection.transport.get_write_buffer_size(), 0
    while reads and connection.transport.get_write_buffer_size() == left:
        got += len(await reader.read(4096))
    connection._look(left)
    with suppress(ConnectionError):
        while piece := await reader.read(4096):
            got += len(piece)
    assert (got > 350_000) == reads, got


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_that_is_too_large_is_not_read(declared: bool, serve: Serve) -> None:
    api_server = await serve(body_mib=1)
    reader, writer = await asyncio.open_connection("127.0.0.1", api_server.port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    if declared:
        writer.write(head + b"Content-Length: 1000000000000\r\n\r\n")
    else:
        writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(20):
            writer.write(b"10000\r\n" + b" " * (1 << 16) + b"\r\n")
    assert b" 413 " in await reader.readline()
    writer.close()


@pytest.mark.parametrize(
    "module, begin, answer",
    [
        ("http", b"", b""),
        ("http", b"POST /v1/completions HTTP/1.1\r\nHost", b""),
        ("routes", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{", b"HTTP/1.1 408"),
    ],
    ids=["nothing", "half a head", "half a body"],
)
async def test_a_request_that_does_not_come_whole_is_given_up(
    module: str, begin: bytes, answer: bytes, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"launch.serving.{module}.RECEIVE_S", 0.1)
    api_server = await serve()
    reader, writer = await asyncio.open_connection("127.0.0.1", api_server.port)
    writer.write(begin)
    try:
        assert await reader.read(12) == answer
    except ConnectionResetError:
        assert answer == b""
    writer.close()


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("cut", [None, 30, -60, -3])
async def test_a_client_that_offers_another_protocol_is_read_in_this_one(
    cut: int | None, chunked: bool, serve: Serve
) -> None:
    """Java's HttpClient offers one with each request; two more behind it use the same connection."""
    api_server = await serve()
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 1, "user": "u" * 99}).encode()
    framed = b"Transfer-Encoding: chunked", b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    length, sent = framed if chunked else (b"Content-Length: %d" % len(body), body)
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + upgrade + length + b"\r\n\r\n" + sent
    reader, writer = await asyncio.open_connection("127.0.0.1", api_server.port)
    for request in (post, b"GET /livez HTTP/1.1\r\nHost: x\r\n" + upgrade + b"\r\n", post):
        writer.write(request[:cut])
        if cut is not None:
            await asyncio.sleep(0.05)
            writer.write(request[cut:])
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        answer = await reader.readexactly(int(re.search(r"content-length: (\d+)", head)[1]))  # type: ignore[index]
        assert head.startswith("HTTP/1.1 200"), (head, answer)
    assert [submit.prompt.tolist() for submit in api_server.job.submits] == [[1, 2, 3]] * 2
    writer.close()


BODY = json.dumps({"prompt": [1, 2, 3], "max_tokens": 1}).encode()


@pytest.mark.parametrize(
    "coding, body, status, words",
    [
        ("gzip", gzip.compress(BODY), 200, "choices"),
        ("identity", BODY, 200, "choices"),
        ("gzip", BODY, 400, "content-encoding is gzip, but the body is not"),
        ("gzip", gzip.compress(BODY)[:-3], 400, "the body is truncated"),
        ("gzip", gzip.compress(BODY) * 2, 400, "the body has data after its end"),
        ("gzip", gzip.compress(bytes(1 << 25)), 413, "larger than 1 MiB"),
        ("zstd", BODY, 415, "content-encoding='zstd' is not supported"),
    ],
    ids=["whole", "plain", "none", "cut", "twice", "large", "other"],
)
async def test_a_compressed_body_is_read_within_bounds(
    coding: str, body: bytes, status: int, words: str, serve: Serve
) -> None:
    api_server = await serve(body_mib=1)
    answer = await api_server.post(COMPLETIONS, None, content=body, headers={"content-encoding": coding})
    assert answer.status_code == status and words in answer.text, answer.text
