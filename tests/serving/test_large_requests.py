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
from typing import Any

import pytest
import uvloop
from transformers import AutoTokenizer

from helix.engine.request import Request
from launch.client.errors import ApiError
from launch.client.forms import MOST_SCHEMA
from launch.client.tokens import Tokens
from launch.serving.http import MOST_HEAD, MOST_HEADERS, MOST_URL
from launch.serving.reader import LARGE, Reader
from tests.serving.front import DEMO, READY, FakeJob, Front, counting, run, until

pytestmark = pytest.mark.timeout(120)
MIB = 1 << 20
LATE_S = 0.2  # that others may wait
CHATML = """{% for document in documents or [] %}{{ document.text }}{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if thinking %}<think>{% endif %}{% endif %}{% if tools %}{# <tool_call> <function= #}{% endif %}"""
TRIES = 3  # of which one has to do: this machine may have other work, but no more than once in a while


def post(path: str, body: bytes) -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body)) + body


def completion(more: bytes) -> bytes:
    return post("/v1/completions", b'{"max_tokens":1,%s}' % more)


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


# Name, request, status of its answer and words of it. Each kept the loop for longer than LATE_S when it was read there.
ATTACKS: list[tuple[str, Callable[[], bytes], int, str]] = [
    ("lists", lambda: completion(b'"prompt":"x","more":[' + b"[]," * (4 * MIB) + b"[]]"), 400, "values and"),
    ("ids", lambda: completion(b'"prompt":[' + b"1234," * (4 * MIB) + b"1]"), 400, "values"),
    ("biases", lambda: completion(b'"prompt":"x","logit_bias":{' + b'"7":1,' * (4 * MIB) + b'"7":1}'), 400, "values"),
    ("stop ids", lambda: completion(b'"prompt":[1],"min_tokens":1,"stop_token_ids":[' + b"7," * (4 * MIB) + b"7]"),
     400, "values"),
    ("texts", lambda: completion(b'"prompt":[' + b'"a",' * (4 * MIB) + b'"a"]'), 400, "names and texts"),
    ("fields", lambda: completion(b'"prompt":"x",' + b",".join(b'"u%d":1' % i for i in range(MIB))), 400, "names and"),
    ("text", lambda: completion(b'"prompt":"' + text(8 * MIB) + b'"'), 400, "characters"),
    ("schema", lambda: schema(16 * MIB), 400, f"may have {MOST_SCHEMA}"),
    ("bytes", lambda: completion(b'"prompt":"' + b"x" * (65 * MIB) + b'"'), 413, "64 MiB (serve.body_mib)"),
    ("ids to text", lambda: post("/detokenize", b'{"tokens":[' + b"7," * (8 * MIB) + b"7]}"), 400, "values"),
    ("text to ids", lambda: post("/tokenize", b'{"prompt":"' + text(MIB // 2) + b'"}'), 200, '"count": '),
    ("url", lambda: b"GET /" + b"a" * (100 * MIB), 414, f"{MOST_URL} bytes"),
    ("header", lambda: b"GET / HTTP/1.1\r\na: " + b"a" * (100 * MIB), 431, f"{MOST_HEAD} bytes"),
    ("headers", lambda: b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 100_000, 431, f"{MOST_HEADERS} headers"),
]  # fmt: skip

WORDS = "def read(path): return open(path)\n"
FLAT = {"properties": {f"p{i}": {"enum": [f"{i}-{j}" for j in range(30)]} for i in range(1000)}}
SHARED = {"$defs": {"d": {"const": "x" * 200_000}}, "properties": {f"p{i}": {} for i in range(20_000)}}
SAID = {"messages": [{"role": "assistant", "content": WORDS * 6_000}], "continue_final_message": True}
OF_CHATS: list[tuple[str, Callable[[], bytes], int, str]] = [
    ("text", lambda: chat({}, WORDS * 250_000), 400, "characters are more than"),
    ("documents", lambda: chat({"documents": [{"text": WORDS * 250_000}]}), 400, "characters are more than"),
    ("variables", lambda: chat({"chat_template_kwargs": {"thinking": "x" * (1 << 24)}}), 400, "and may have 65536"),
    ("schema as a text", lambda: chat(form(json='{"enum":[' + "[]," * (1 << 22) + "[]]}")), 400, "may have 524288"),
    ("marks", lambda: chat(form(structural_tag={"structures": [], "triggers": ["x" * MIB]})), 400, "may have 524288"),
    ("a text for each choice", lambda: chat(form(choice=["x" * 100] * 600)), 200, '"choices"'),
    ("an expression", lambda: chat(form(regex="(a|b)" * 13_000)), 200, '"choices"'),
    ("texts of arguments", lambda: chat(called(FLAT)), 200, '"choices"'),
    ("what arguments share", lambda: chat(called(SHARED)), 400, "524288"),
    ("a message that goes on", lambda: chat(SAID), 200, '"choices"'),
    ("a name", lambda: chat({"x" * (1 << 25): 1}), 200, '"choices"'),
    ("log-probabilities", lambda: chat({"logprobs": True, "top_logprobs": 20, "max_tokens": 5000}), 200, '"choices"'),
]  # fmt: skip


async def attack(port: int, request: bytes) -> bytes:
    """Sends all of a request, and then reads its answer."""

    def send() -> bytes:  # in a thread: its calls wait without Python's lock
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            with suppress(OSError):  # it was cut off
                connection.sendall(request)
            answer = b""
            while piece := connection.recv(1 << 16):
                answer += piece
                head, _, body = answer.partition(b"\r\n\r\n")
                length = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
                if length and len(body) >= int(length[0].split(b":")[1]):
                    break
            return answer

    return await asyncio.to_thread(send)


def slowest_health_s(port: int, until: Callable[[], bool]) -> float:
    """The longest that a client waits for /health while something else goes on."""
    slowest, last = 0.0, time.monotonic()
    while not until():
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert b" 200 " in connection.recv(1 << 16)
        # From one answer to the next: what keeps Python's lock keeps this thread too.
        slowest, last = max(slowest, time.monotonic() - last), time.monotonic()
        time.sleep(0.01)
    return slowest


async def answered_meanwhile(front: Front, attacks: list[tuple[str, Callable[[], bytes], int, str]]) -> None:
    late = {}
    for name, make, status, words in attacks:
        request, waits = make(), []
        for _ in range(TRIES):
            attacking = asyncio.create_task(attack(front.port, request))
            waits.append(await asyncio.to_thread(slowest_health_s, front.port, attacking.done))
            answer = await attacking
            assert answer.startswith(b"HTTP/1.1 %d" % status) and words.encode() in answer, (name, answer[:500])
            if waits[-1] < LATE_S:
                break
        else:
            late[name] = waits
    assert not late


def test_everybody_else_is_answered_meanwhile(tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        await answered_meanwhile(front, ATTACKS)
        assert front.job.submits == [] and front.core.flights == {}

    run(check, tmp_path)


def test_everybody_else_is_answered_while_chats_are_made(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 1 << 17
    monkeypatch.setattr("launch.client.compiler.COMPILE_S", 60.0)  # this machine may be busy

    async def script(job: FakeJob, submit: Request) -> None:
        if submit.sampling.logprobs is None:
            await counting(job, submit)
            return
        for n in range(0, submit.max_tokens, 50):
            best = [(-1.0, [(100 + (n + at) % 3000 + i, -1.0) for i in range(20)]) for at in range(50)]
            last = "length" if n + 50 == submit.max_tokens else None
            await job.say(submit, [100] * 50, last, logprobs=tuple(best))

    async def check(front: Front) -> None:
        await answered_meanwhile(front, OF_CHATS)

    run(check, tmp_path, FakeJob(script, replace(READY, model=str(model), guided=True, context=most, max_length=most)))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The demo model's tokenizer, and a template of a family that reads documents."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_ids_that_fill_the_context_are_a_legal_prompt(tmp_path: Path) -> None:
    """However many bytes they take; one more token than that is refused by its number."""
    most = 1 << 18

    async def check(front: Front) -> None:
        ids = b"4095," * (most - 2) + b"7"
        answer = await front.post("/v1/completions", None, content=b'{"max_tokens":1,"prompt":[%s]}' % ids)
        assert answer.status_code == 200, answer.text
        (submit,) = front.job.submits
        assert len(submit.prompt) == most - 1 and submit.prompt[-1] == 7 and set(submit.prompt[:-1]) == {4095}
        answer = await front.post("/v1/completions", None, content=b'{"max_tokens":2,"prompt":[%s]}' % ids)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"

    run(check, tmp_path, FakeJob(ready=replace(READY, context=most, max_length=most)))


def test_trailers_have_an_end(tmp_path: Path) -> None:
    """They come behind a body, and the parser would keep them all."""

    async def check(front: Front) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(b"POST /livez HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\na: ")
        assert b" 405 " in await reader.readuntil(b'"}')
        writer.write(b"a" * (2 * MOST_HEAD))
        assert b"HTTP/1.1 431 " in await reader.read()
        writer.close()

    run(check, tmp_path)


def test_a_head_up_to_the_bound_is_read(tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        fields = b"".join(b"x-%d: %s\r\n" % (i, b"v" * 200) for i in range(MOST_HEADERS - 1))
        for head, status in (
            (b"GET /livez?%s HTTP/1.1\r\nHost: x\r\n\r\n" % (b"q" * (MOST_URL - 7)), 200),
            (b"GET /livez?%s HTTP/1.1\r\nHost: x\r\n\r\n" % (b"q" * (MOST_URL - 6)), 414),
            (b"GET /livez HTTP/1.1\r\nHost: x\r\n%s\r\n" % fields, 200),
            (b"GET /livez HTTP/1.1\r\nHost: x\r\nmore: 1\r\n%s\r\n" % fields, 431),
            (b"GET /livez HTTP/1.1\r\nHost: %s\r\n\r\n" % (b"x" * MOST_HEAD), 431),
        ):
            assert (await attack(front.port, head)).startswith(b"HTTP/1.1 %d" % status), head[:80]
        # One request after the other over one connection: what was read before does not count.
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        for _ in range(4):
            writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\nmore: %s\r\n\r\n" % (b"v" * (MOST_HEAD // 2)))
            assert b" 200 " in await reader.readuntil(b"}")
        writer.close()

    run(check, tmp_path)


def test_the_first_request_waits_for_the_process_that_has_begun() -> None:
    """It starts no other, and the process stays; of two at once, neither waits for one that starts."""

    async def check() -> None:
        reader = Reader(str(DEMO), None, Tokens(str(DEMO)), 60.0)
        reader.workers.start()
        await asyncio.sleep(0)
        (begun,) = await until_begun(reader)
        assert await reader.run(LARGE + 1, abs, -3) == 3
        assert reader.workers.idle == [begun] and reader.workers.processes == {begun}
        begin = time.monotonic()
        assert await asyncio.gather(*(reader.run(LARGE + 1, abs, n) for n in (-1, -2))) == [1, 2]
        at_once = time.monotonic() - begin
        await until(lambda: len(reader.workers.idle) == 2)
        started = time.monotonic() - begin  # the second process, which imports and reads
        assert at_once < started / 4, (at_once, started)
        await reader.close()
        assert begun.returncode is not None

    async def until_begun(reader: Reader) -> list[Any]:
        await until(lambda: len(reader.workers.processes) > 0)
        assert reader.workers.idle == []
        return [*reader.workers.processes]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(check())


def test_a_process_that_fails_is_another_one_for_the_next() -> None:
    """A process that does not come to an end, dies, or raises what it is not to."""

    async def check() -> None:
        reader = Reader(None, None, Tokens(None), 60.0)
        assert await reader.run(LARGE + 1, abs, -3) == 3
        (first,) = reader.workers.processes
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await reader.run(LARGE + 1, time.sleep, 0.5)  # nobody waits for its end, and there it goes on
        await until(lambda: reader.workers.idle == [first])
        with pytest.raises(RuntimeError, match="ValueError: invalid literal"):
            await reader.run(LARGE + 1, int, "x")
        with pytest.raises(ApiError) as refused:
            await reader.run(LARGE + 1, os._exit, 3)
        assert refused.value.status == 500 and reader.workers.processes == set() and first.returncode == 3
        reader.workers._work_s = 0.5
        with pytest.raises(ApiError, match="could not be read within 60 s") as refused:
            await reader.run(LARGE + 1, time.sleep, 60)
        assert refused.value.status == 413 and reader.workers.processes == set()
        await reader.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(check())
