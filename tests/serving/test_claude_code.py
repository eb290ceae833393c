"""Sessions of Claude Code: requests in its shapes and with its fields, against a scripted model."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from helix.engine.request import Request
from tests.serving.api_server import READY, ApiServer, FakeJob, Serve, text_of, tokens_of
from tests.serving.chats import END, TRIMMED, chat_model
from tests.serving.test_adapters import events

PATH = "/v1/messages?beta=true"
HEADERS = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14"}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
NUMBERS = count(1)  # of requests, for what differs in each


def own_tool(name: str, **more: Any) -> dict[str, Any]:
    properties = {"command": {"type": "string"}}
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": properties}
    return {"name": name, "description": f"{name}.", "input_schema": schema | {"additionalProperties": False}} | more


TOOLS = [
    own_tool("Bash"),
    own_tool("mcp__files__read-all", defer_loading=True, strict=True),
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    own_tool("Write", eager_input_streaming=True, **CACHED),
]
SHOWN = ["Bash", "mcp__files__read-all", "Write"]
ALWAYS = {
    "metadata",
    "context_management",
    "thinking.budget_tokens",
    "system.x-anthropic-billing-header",
    "tools.web_search_20250305",
    "tools.strict",  # the job has no grammars
}


def request(messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Returns the body of a request; each has another first line of the system message."""
    bill = f"x-anthropic-billing-header: cc_version=2.1.{next(NUMBERS)}; cc_entrypoint=cli; cch={next(NUMBERS):05x};"
    system = [{"type": "text", "text": text} for text in (bill, "You help with code.", "\nBe exact. " * 20)]
    return {
        "max_tokens": 3000,
        "system": [*system[:-1], system[-1] | CACHED],
        "messages": messages,
        "tools": TOOLS,
        "thinking": {"type": "enabled", "budget_tokens": 2000},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "user_1"},
        "stream": True,
    } | more


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*blocks]}


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": content} | more


def result(of: dict[str, Any], content: Any, **more: Any) -> dict[str, Any]:
    return {"tool_use_id": of["id"], "type": "tool_result", "content": content} | more


def assembled(answer: httpx.Response) -> dict[str, Any]:
    """Assembles the assistant's message from a stream, as the client returns it."""
    assert answer.status_code == 200, answer.text
    blocks: list[dict[str, Any]] = []
    for event in events(answer.text):
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"] | {"json": ""})
            case "content_block_delta":
                delta = event["delta"]
                name = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
                field, value = name.get(delta["type"], "json"), next(v for k, v in delta.items() if k != "type")
                blocks[-1][field] += value
    for block in blocks:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(written)
    return {"role": "assistant", "content": blocks}


def ignored(answer: httpx.Response) -> set[str]:
    return {*answer.headers["x-ignored-fields"].split(",")}


class Session:
    """A model that gives its answers one after another.

    Attributes:
        answered: for each request, the prompt and the tokens of the answer.
    """

    def __init__(self, model: Path) -> None:
        self.replies: list[str] = []
        self.answered: list[list[int]] = []
        (self._end,) = tokens_of(END, str(model))
        self.server: ApiServer

    async def script(self, job: FakeJob, submit: Request) -> None:
        ids = [*tokens_of(self.replies.pop(0), job.ready.model), self._end]
        self.answered.append([*submit.prompt.tolist(), *ids])
        for token in ids[:-1]:
            await job.emit(submit, [token])
        await job.emit(submit, ids[-1:], "stop")

    async def ask(self, body: dict[str, Any], reply: str = "Yes.") -> httpx.Response:
        self.replies.append(reply)
        answer = await self.server.post(PATH, body, headers=HEADERS)
        assert answer.status_code == 200, answer.text
        counted = {name: value for name, value in body.items() if name not in ("max_tokens", "stream", "metadata")}
        tokens = (await self.server.post("/v1/messages/count_tokens?beta=true", counted)).json()["input_tokens"]
        assert tokens == len(self.server.job.submits[-1].prompt)
        return answer

    @property
    def prompt(self) -> str:
        return self.server.session.tokenizer.decode(self.server.job.submits[-1].prompt)


Start = Callable[..., Awaitable[Session]]


@pytest.fixture
def start(serve: Serve, tmp_path: Path) -> Start:
    """A factory of sessions; await it with the model's template."""

    async def start(template: str = text_of("agent.jinja"), **ready: Any) -> Session:
        model = chat_model(tmp_path / "agent", template)
        session = Session(model)
        info = replace(READY, model=str(model), vocab=4100, eos=(0, session._end), **ready)
        session.server = await serve(FakeJob(session.script, info))
        return session

    return start


async def test_a_session_computes_only_what_is_new(start: Start) -> None:
    """Each prompt is the one before, the model's answer, and the results."""
    session = await start()
    history = [user(text("<system-reminder>\nToday.\n</system-reminder>"), text("List the files.", **CACHED))]
    first = f"Let me see.\n</think>\n\nI look.\n{call('Bash', command='ls')}"
    answer = await session.ask(request(history), first)
    assert ignored(answer) == ALWAYS
    assert "x-anthropic" not in session.prompt and "web_search" not in session.prompt
    assert [line["function"]["name"] for line in map(json.loads, session.prompt.splitlines()[1:4])] == SHOWN
    message = assembled(answer)
    thought, said, use = message["content"]
    assert (thought["thinking"], said["text"], use["input"]) == ("Let me see.", "I look.", {"command": "ls"})
    assert thought["signature"], "clients do not return reasoning without one"
    assert events(answer.text)[-2]["delta"]["stop_reason"] == "tool_use"

    history += [message, user(result(use, "é.py\nb.py", is_error=False, **CACHED))]
    calls = call("Bash", command="cat 'é.py'"), call("mcp__files__read-all", command="")
    message = assembled(await session.ask(request(history), f"Two files.\n</think>\n\n{calls[0]}\n{calls[1]}"))
    thought, one, other = message["content"]
    screenshot = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    reference = {"type": "tool_reference", "tool_name": "Write"}
    history += [
        message,
        user(
            result(one, [text("A picture:"), screenshot]),
            result(other, [reference]),
            text("<system-reminder>\nMind the tests.\n</system-reminder>"),
        ),
        {"role": "system", "content": "The agents are: none."},
    ]
    answer = await session.ask(request(history), f"\n</think>\n\n{call('Write', command='x')}")
    assert ignored(answer) == ALWAYS | {"messages.tool_result.image", "messages.tool_result.tool_reference"}
    assert session.prompt.endswith(
        "\n<tool_response>\nA picture:[image left out: this model reads only text]\n</tool_response>"
        "\n<tool_response>\nThe tool Write is available.\n\n<system-reminder>\nMind the tests.\n</system-reminder>"
        "\n\nThe agents are: none.\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    prompts = [submit.prompt.tolist() for submit in session.server.job.submits]
    for earlier, prompt in zip(session.answered, prompts[1:], strict=False):
        assert prompt[: len(earlier)] == earlier
    assert len(prompts) == 3

    # The request is sent again, as after a time-out; only the bill differs.
    await session.ask(request(history))
    assert session.server.job.submits[-1].prompt.tolist() == prompts[2]


async def test_a_compacted_session_goes_on(start: Start) -> None:
    """The conversation is summarised by a request without thinking, and the next one begins with the summary."""
    session = await start()
    used = {"type": "tool_use", "id": "toolu_01", "name": "Bash", "input": {}, "caller": {"type": "direct"}}
    search = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "q"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []}
    hidden = {"type": "redacted_thinking", "data": "abc"}
    said = {"role": "assistant", "content": [hidden, search, found, text("I look."), used]}
    history = [user(text("Go.")), said, user(result(used, "no such file", is_error=True), text("Summarise."))]
    answer = await session.ask(request(history, thinking={"type": "disabled"}, tool_choice={"type": "none"}), "Short.")
    assert session.prompt.endswith("Summarise.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    left_out = {f"messages.{name}" for name in ("redacted_thinking", "server_tool_use", "web_search_tool_result")}
    assert "<tool_response>\nError: no such file\n" in session.prompt
    assert ignored(answer) == ALWAYS - {"thinking.budget_tokens", "tools.strict"} | left_out
    assert [block["type"] for block in assembled(answer)["content"]] == ["text"]
    history = [
        user(text("It goes on. Short.")),
        {"role": "assistant", "content": [text("(no content)")]},
        user(text("On.")),
    ]
    await session.ask(request(history))
    assert session.prompt.count("<|im_start|>user") == 2


async def test_effort_without_a_switch_is_told(start: Start) -> None:
    session = await start(TRIMMED)
    body = {"max_tokens": 1, "messages": [user(text("quota"))], "output_config": {"effort": "max"}}
    answer = await session.ask(body | {"system": "x-anthropic-billing-header: cch=1;\nBe kind."})
    assert answer.headers["x-ignored-fields"] == "output_config.effort,system.x-anthropic-billing-header"
    assert "Be kind." in session.prompt and "cch" not in session.prompt
    answer = await session.ask(body | {"tools": [{"type": "memory_20250818", "name": "memory"}]})
    assert answer.headers["x-ignored-fields"] == "output_config.effort,tools.memory_20250818"


async def test_a_users_image_is_refused(start: Start) -> None:
    session = await start()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    for path in (PATH, "/v1/messages/count_tokens"):
        answer = await session.server.post(path, request([user(text("What is it?"), image)]))
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["message"].startswith("messages.0.content.1.type has type image: only text is read")


async def test_names_of_what_is_ignored_are_limited(start: Start) -> None:
    session = await start()
    tools = [{"type": f"tool_{i}\n{'x' * 99}", "name": "x"} for i in range(99)]
    names = ignored(await session.ask(request([user(text("Hi."))], tools=tools)))
    assert len(names) < 64 and all(len(name) <= 80 and name.isprintable() for name in names)


# A picture of one pixel.
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
CLAUDE = shutil.which("claude")


@pytest.mark.clients
@pytest.mark.skipif(
    CLAUDE is None, reason="npm install --prefix DIR @anthropic-ai/claude-code; in DIR/node_modules/.bin"
)
async def test_the_program_itself(start: Start, tmp_path: Path) -> None:
    """It reads a text and a picture, is asked again, and computes only what is new within a question."""
    session = await start(context=1 << 20, max_length=1 << 20, kv_tokens=1 << 20)
    (work := tmp_path / "work").mkdir()
    (work / "note.txt").write_text("forty-two\n")
    (work / "picture.png").write_bytes(base64.b64decode(PIXEL))
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "ANTHROPIC_BASE_URL": session.server.url,
        "ANTHROPIC_AUTH_TOKEN": "-",
        "ANTHROPIC_MODEL": "agent",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }

    async def ask(question: str, *options: str) -> str:
        process = await asyncio.create_subprocess_exec(
            str(CLAUDE), "-p", question, *options, cwd=work, env=environment, stdin=DEVNULL, stdout=PIPE
        )  # fmt: skip
        return (await asyncio.wait_for(process.communicate(), 100))[0].decode().strip()

    calls = "\n".join(call("Read", file_path=str(work / name)) for name in ("note.txt", "picture.png"))
    session.replies = [f"Two.\n</think>\n\nI read them.\n{calls}", "Fine.\n</think>\n\nIt says forty-two."]
    assert await ask("What do the files say?") == "It says forty-two."
    first, second = (submit.prompt.tolist() for submit in session.server.job.submits)
    assert second[: len(session.answered[0])] == session.answered[0] and len(first) < len(session.answered[0])
    results = session.prompt.rpartition("</tool_call>")[2]
    assert "forty-two" in results and "[image left out: this model reads only text]" in results
    session.replies = ["So.\n</think>\n\nNothing else."]
    assert await ask("And?", "--continue") == "Nothing else."
    assert "It says forty-two.<|im_end|>" in session.prompt
