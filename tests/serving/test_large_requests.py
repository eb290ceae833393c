"""Requests that are large wherever they can be: each is told so, and meanwhile everybody else is answered."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from helix.engine.request import Request
from launch.client.chat_tokenizer import ChatTokenizer
from launch.client.errors import ApiError
from launch.client.structured_outputs import MAX_SCHEMA
from launch.serving.http import MAX_HEAD, MAX_HEADERS, MAX_URL
from launch.serving.request_executor import LARGE, RequestExecutor
from tests.serving.api_server import DEMO, READY, ApiServer, FakeJob, Serve, counting, text_of, until
from tests.serving.chats import COMPLETIONS, chat_model

MIB = 1 << 20
HELD_S = 0.2  # of a core, for which others may wait
CHATML = text_of("documents.jinja")


def post(path: str, body: bytes) -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body)) + body


def completion(more: bytes) -> bytes:
    return post(COMPLETIONS, b'{"max_tokens":1,%s}' % more)


def schema(size: int) -> bytes:
    """A completion whose schema has so many characters."""
    content = {"type": "object", "description": ""}
    form = {"type": "json_schema", "json_schema": {"schema": content}}
    content["description"] = "x" * (size - len(json.dumps(form["json_schema"])))
    return completion(b'"prompt":"x","response_format":' + json.dumps(form).encode())


def text(size: int) -> bytes:
    return (b"def read(path): return open(path)\\n" * (size // 30))[:size].rstrip(b"\\")


def chat(more: dict[str, Any], content: str = "x") -> bytes:
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": content}]} | more
    return post("/v1/chat/completions", json.dumps(body).encode())


def called(parameters: dict[str, Any]) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    return {"tools": tools, "tool_choice": "required"}


def form(**kinds: Any) -> dict[str, Any]:
    return {"structured_outputs": kinds}


# Name, request, status of its answer and words of it. Each kept the loop for longer than HELD_S when it was read there.
ATTACKS: list[tuple[str, Callable[[], bytes], int, str]] = [
    ("lists", lambda: completion(b'"prompt":"x","more":[' + b"[]," * (4 * MIB) + b"[]]"), 400, "values and"),
    ("ids", lambda: completion(b'"prompt":[' + b"1234," * (4 * MIB) + b"1]"), 400, "values"),
    ("biases", lambda: completion(b'"prompt":"x","logit_bias":{' + b'"7":1,' * (4 * MIB) + b'"7":1}'), 400, "values"),
    ("stop ids", lambda: completion(b'"prompt":[1],"min_tokens":1,"stop_token_ids":[' + b"7," * (4 * MIB) + b"7]"),
     400, "values"),
    ("texts", lambda: completion(b'"prompt":[' + b'"a",' * (4 * MIB) + b'"a"]'), 400, "names and strings"),
    ("fields", lambda: completion(b'"prompt":"x",' + b",".join(b'"u%d":1' % i for i in range(MIB))), 400, "names and"),
    ("text", lambda: completion(b'"prompt":"' + text(8 * MIB) + b'"'), 400, "characters"),
    ("schema", lambda: schema(16 * MIB), 400, f"at most {MAX_SCHEMA}"),
    ("bytes", lambda: completion(b'"prompt":"' + b"x" * (65 * MIB) + b'"'), 413, "64 MiB (serve.body_mib)"),
    ("ids to text", lambda: post("/detokenize", b'{"tokens":[' + b"7," * (8 * MIB) + b"7]}"), 400, "values"),
    ("text to ids", lambda: post("/tokenize", b'{"prompt":"' + text(MIB // 2) + b'"}'), 200, '"count": '),
    ("url", lambda: b"GET /" + b"a" * (100 * MIB), 414, f"{MAX_URL} bytes"),
    ("header", lambda: b"GET / HTTP/1.1\r\na: " + b"a" * (100 * MIB), 431, f"{MAX_HEAD} bytes"),
    ("headers", lambda: b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 100_000, 431, f"{MAX_HEADERS} headers"),
]  # fmt: skip

WORDS = "def read(path): return open(path)\n"
FLAT = {"properties": {f"p{i}": {"enum": [f"{i}-{j}" for j in range(30)]} for i in range(1000)}}
SHARED = {"$defs": {"d": {"const": "x" * 200_000}}, "properties": {f"p{i}": {} for i in range(20_000)}}
SAID = {"messages": [{"role": "assistant", "content": WORDS * 6_000}], "continue_final_message": True}
CHAT_ATTACKS: list[tuple[str, Callable[[], bytes], int, str]] = [
    ("text", lambda: chat({}, WORDS * 250_000), 400, "characters are more than"),
    ("documents", lambda: chat({"documents": [{"text": WORDS * 250_000}]}), 400, "characters are more than"),
    ("variables", lambda: chat({"chat_template_kwargs": {"thinking": "x" * (1 << 24)}}), 400, "at most 65536"),
    ("schema as a text", lambda: chat(form(json='{"enum":[' + "[]," * (1 << 22) + "[]]}")), 400, "at most 524288"),
    ("marks", lambda: chat(form(structural_tag={"structures": [], "triggers": ["x" * MIB]})), 400, "at most 524288"),
    ("a text for each choice", lambda: chat(form(choice=["x" * 100] * 600)), 200, '"choices"'),
    ("an expression", lambda: chat(form(regex="(a|b)" * 13_000)), 200, '"choices"'),
    ("texts of arguments", lambda: chat(called(FLAT)), 200, '"choices"'),
    ("what arguments share", lambda: chat(called(SHARED)), 400, "524288"),
    ("a message that goes on", lambda: chat(SAID), 200, '"choices"'),
    ("a name", lambda: chat({"x" * (1 << 25): 1}), 200, '"choices"'),
    ("log-probabilities", lambda: chat({"logprobs": True, "top_logprobs": 20, "max_tokens": 5000}), 200, '"choices"'),
]  # fmt: skip


class Attack(Thread):
    """Sends all of a request, and reads its answer; it lasts until `left` is set, so that its clock can be read."""

    def __init__(self, port: int, request: bytes) -> None:
        super().__init__(daemon=True)
        self._port, self._request = port, request
        self.answer, self.done, self.left = b"", Event(), Event()
        self.start()

    def run(self) -> None:
        try:
            self._exchange()
        finally:
            self.done.set()
            self.left.wait()

    def _exchange(self) -> None:
        with socket.create_connection(("127.0.0.1", self._port), timeout=60) as connection:
            with suppress(OSError):  # it was cut off
                connection.sendall(self._request)
            while piece := connection.recv(1 << 16):
                self.answer += piece
                head, _, body = self.answer.partition(b"\r\n\r\n")
                length = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
                if length and len(body) >= int(length[0].split(b":")[1]):
                    return

    def spent_s(self) -> float:
        return time.clock_gettime(time.pthread_getcpuclockid(self.ident or 0))


async def attacked(api_server: ApiServer, request: bytes) -> tuple[float, bytes]:
    """For how long others waited, and the answer.

    The clock is that of the server's threads, not of the wall: what other programs do meanwhile does not count.
    """
    attack = Attack(api_server.port, request)
    most, last = 0.0, time.process_time() - attack.spent_s()
    while not attack.done.is_set():
        await asyncio.sleep(0.001)
        now = time.process_time() - attack.spent_s()
        most, last = max(most, now - last), now
    attack.left.set()
    return most, attack.answer


async def answered_meanwhile(api_server: ApiServer, attacks: list[tuple[str, Callable[[], bytes], int, str]]) -> None:
    held = {}
    for name, make, status, words in attacks:
        held[name], answer = await attacked(api_server, make())
        assert answer.startswith(b"HTTP/1.1 %d" % status) and words.encode() in answer, (name, answer[:500])
    assert {name: seconds for name, seconds in held.items() if seconds >= HELD_S} == {}


async def test_everybody_else_is_answered_meanwhile(serve: Serve) -> None:
    api_server = await serve()
    await answered_meanwhile(api_server, ATTACKS)
    assert api_server.job.submits == [] and api_server.engine_client.generations == {}


async def test_everybody_else_is_answered_while_chats_are_made(serve: Serve, tmp_path: Path) -> None:
    async def script(job: FakeJob, submit: Request) -> None:
        if submit.sampling.logprobs is None:
            await counting(job, submit)
            return
        for n in range(0, submit.max_tokens, 50):
            best = [(-1.0, [(100 + (n + at) % 3000 + i, -1.0) for i in range(20)]) for at in range(50)]
            last = "length" if n + 50 == submit.max_tokens else None
            await job.emit(submit, [100] * 50, last, logprobs=tuple(best))

    most, model = 1 << 17, str(chat_model(tmp_path / "model", CHATML))
    ready = replace(READY, model=model, vocab=4100, guided=True, context=most, max_length=most)
    api_server = await serve(FakeJob(script, ready))
    await answered_meanwhile(api_server, CHAT_ATTACKS)


async def test_ids_that_fill_the_context_are_a_legal_prompt(serve: Serve) -> None:
    """However many bytes they take; one more token than that is refused by its number."""
    most = 1 << 18
    api_server = await serve(FakeJob(ready=replace(READY, context=most, max_length=most)))
    ids = b"4095," * (most - 2) + b"7"
    answer = await api_server.post(COMPLETIONS, None, content=b'{"max_tokens":1,"prompt":[%s]}' % ids)
    assert answer.status_code == 200, answer.text
    (submit,) = api_server.job.submits
    assert len(submit.prompt) == most - 1 and submit.prompt[-1] == 7 and set(submit.prompt[:-1]) == {4095}
    answer = await api_server.post(COMPLETIONS, None, content=b'{"max_tokens":2,"prompt":[%s]}' % ids)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


async def test_trailers_have_an_end(serve: Serve) -> None:
    """They come behind a body, and the parser would keep them all."""
    api_server = await serve()
    reader, writer = await asyncio.open_connection("127.0.0.1", api_server.port)
    writer.write(b"POST /livez HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\na: ")
    assert b" 405 " in await reader.readuntil(b'"}')
    writer.write(b"a" * (2 * MAX_HEAD))
    assert b"HTTP/1.1 431 " in await reader.read()
    writer.close()


async def test_a_head_up_to_the_bound_is_read(serve: Serve) -> None:
    api_server = await serve()
    fields = b"".join(b"x-%d: %s\r\n" % (i, b"v" * 200) for i in range(MAX_HEADERS - 1))
    for head, status in (
        (b"GET /livez?%s HTTP/1.1\r\nHost: x\r\n\r\n" % (b"q" * (MAX_URL - 7)), 200),
        (b"GET /livez?%s HTTP/1.1\r\nHost: x\r\n\r\n" % (b"q" * (MAX_URL - 6)), 414),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\n%s\r\n" % fields, 200),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nmore: 1\r\n%s\r\n" % fields, 431),
        (b"GET /livez HTTP/1.1\r\nHost: %s\r\n\r\n" % (b"x" * MAX_HEAD), 431),
    ):
        assert (await attacked(api_server, head))[1].startswith(b"HTTP/1.1 %d" % status), head[:80]
    # One request after the other over one connection: what was read before does not count.
    reader, writer = await asyncio.open_connection("127.0.0.1", api_server.port)
    for _ in range(4):
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\nmore: %s\r\n\r\n" % (b"v" * (MAX_HEAD // 2)))
        assert b" 200 " in await reader.readuntil(b"}")
    writer.close()


async def test_the_first_request_waits_for_the_process_that_has_begun() -> None:
    """It starts no other, and the process stays; of two at once, neither waits for one that starts."""
    reader = RequestExecutor(str(DEMO), None, ChatTokenizer(str(DEMO)), 60.0)
    reader.workers.start()
    await until(lambda: reader.workers.processes)
    assert reader.workers.idle == []
    (begun,) = reader.workers.processes
    assert await reader.run(LARGE + 1, abs, -3) == 3
    assert reader.workers.idle == [begun] and reader.workers.processes == {begun}
    reader.workers._command = "sleep", "1000"  # it never begins
    assert await asyncio.gather(*(reader.run(LARGE + 1, abs, n) for n in (-1, -2))) == [1, 2]
    await until(lambda: len(reader.workers.processes) == 2)
    await reader.close()
    assert begun.returncode is not None


async def test_a_process_that_fails_is_another_one_for_the_next() -> None:
    """A process that does not come to an end, dies, or raises what it is not to."""
    reader = RequestExecutor(None, None, ChatTokenizer(None), 60.0)
    assert await reader.run(LARGE + 1, abs, -3) == 3
    (first,) = reader.workers.processes
    left = asyncio.create_task(reader.run(LARGE + 1, time.sleep, 0.2))
    await until(lambda: reader.workers.idle == [])
    left.cancel()  # the client leaves, and the work in the other process goes on
    await until(lambda: reader.workers.idle == [first])
    with pytest.raises(RuntimeError, match="ValueError: invalid literal"):
        await reader.run(LARGE + 1, int, "x")
    with pytest.raises(ApiError) as refused:
        await reader.run(LARGE + 1, os._exit, 3)
    assert refused.value.status == 500 and reader.workers.processes == set() and first.returncode == 3
    reader.workers._work_s = 0.5
    with pytest.raises(ApiError, match="could not be processed within 60 s") as refused:
        await reader.run(LARGE + 1, time.sleep, 60)
    assert refused.value.status == 413 and reader.workers.processes == set()
    await reader.close()
