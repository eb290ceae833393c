"""`helix chat`: a conversation in the terminal, with a model that it serves and with a server."""

from __future__ import annotations

import json
import os
import pty
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import SO_LINGER, SOL_SOCKET
from threading import Event, Thread
from typing import Any

import pytest

from launch.chat import ChatClient, chat_loop
from tests.e2e.command_line import ROOT
from tests.real.smollm2 import MODEL


class FakeServer(ThreadingHTTPServer):
    """A server whose answers are the words that it was asked, one a piece; `slow` never ends."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.ended = Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *of: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.keys.append(self.headers.get("Authorization"))
        others = {"/none/v1/models": b'{"data": []}', "/html/v1/models": b"<html>"}
        self.reply(200, others.get(self.path, b'{"data": [{"id": "tiny"}]}'))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        question = body["messages"][-1]["content"]
        if question == "wrong":
            return self.reply(400, b'{"error": {"message": "no such word"}}')
        self.send_response(200)
        self.end_headers()
        if question == "think":
            self.delta(reasoning_content="well, ")
            self.delta(reasoning_content="yes. ", content="I ")
        for word in question.split():
            self.delta(content=word + " ")
        if question == "halfway":
            self.event({"error": {"message": "the ranks died"}})
        try:
            while question == "slow":
                self.delta(content=".")
        except OSError:
            return self.server.ended.set()
        if question == "reset":
            self.connection.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        elif question != "cut":
            self.wfile.write(b"data: [DONE]\n\n")
        return None

    def delta(self, **of: str) -> None:
        self.event({"choices": [{"delta": of}]})

    def event(self, of: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(of)}\n\n".encode())

    def reply(self, code: int, data: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    made = FakeServer()
    yield made
    made.shutdown()


def sent_messages(fake_server: FakeServer) -> list[str]:
    """The turns of the last request."""
    return [turn["content"] for turn in fake_server.bodies[-1]["messages"]]


def test_a_conversation(
    fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    escapes = "a\x1b]52;c;eA==\x07b\u009b2J"  # they could write the clipboard, or hide what was said
    typed = iter(["/system be brief", "one two", "", "three", "/retry", "wrong", "halfway", "/help", "/new", escapes])

    def read(prompt: str) -> str:
        if (text := next(typed, None)) is None:
            raise EOFError
        return text

    monkeypatch.setattr("builtins.input", read)
    chat_loop(ChatClient(fake_server.url + "/v1", "secret", {"temperature": 0.0, "max_tokens": 9}))
    shown = capsys.readouterr().out
    assert shown.startswith(f"tiny is served at {fake_server.url}\n") and "one two \n[" in shown
    assert "error: " in shown and "no such word" in shown and "the ranks died" in shown
    assert "a]52;c;eA==b2J \n" in shown and not {"\x1b", "\x07", "\u009b"} & {*shown}, "a terminal obeys no model"
    turns = [[turn["content"] for turn in body["messages"]] for body in fake_server.bodies]
    brief, first = "be brief", ["one two", "one two "]
    again = [brief, *first, "three"]
    assert turns == [
        [brief, "one two"], again, again, [*again, "three ", "wrong"], [*again, "three ", "halfway"], [brief, escapes],
    ]  # fmt: skip
    assert all(body["stream"] and body["max_tokens"] == 9 and body["temperature"] == 0 for body in fake_server.bodies)
    assert fake_server.keys == ["Bearer secret"]


@pytest.mark.parametrize("how", ["cut", "reset"])
def test_an_answer_that_breaks_off_is_said_to(how: str, fake_server: FakeServer) -> None:
    """The chat goes on, without the words of a server that was killed."""
    chat = ChatClient(fake_server.url, None, {})
    with pytest.raises(ValueError, match="before the answer was complete"):
        list(chat.ask(how))
    assert chat.turns == [] and list(chat.ask("one")) == ["one "]


def test_a_question_that_was_stopped_before_a_word_is_not_told_with_the_next(
    fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*of: object) -> None:
        raise KeyboardInterrupt

    chat = ChatClient(fake_server.url, None, {})
    with monkeypatch.context() as patched:
        patched.setattr(chat, "_open", stopped)
        with pytest.raises(KeyboardInterrupt):
            list(chat.ask("one"))
    assert list(chat.ask("two")) == ["two "]
    assert sent_messages(fake_server) == ["two"]


def test_thoughts_are_shown_and_not_told_again(fake_server: FakeServer) -> None:
    chat = ChatClient(fake_server.url, None, {})
    assert "".join(chat.ask("think")) == "well, yes. I think "
    list(chat.ask("one"))
    assert sent_messages(fake_server) == ["think", "I think ", "one"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:9", "127.0.0.1:9 does not respond: .*refused"),
        ("http://127.0.0.1:80a0", "80a0 does not respond: nonnumeric port"),
        ("http://127.0.0.1:9/a b", "a b does not respond: URL can't contain control characters"),
        ("127.0.0.1", "127.0.0.1 does not respond: unknown url type"),
        ("{fake}/none", "/none/v1/models names no model"),
        ("{fake}/html", "/html/v1/models names no model"),
    ],
)
def test_what_is_said_where_no_model_answers(url: str, message: str, fake_server: FakeServer) -> None:
    with pytest.raises(ValueError, match=message):
        ChatClient(url.format(fake=fake_server.url), None, {})


def test_control_c_stops_an_answer_and_control_d_ends(fake_server: FakeServer) -> None:
    here, there = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "launch.chat", "--url", fake_server.url],
        cwd=ROOT,
        stdin=there,
        stdout=there,
        stderr=there,
    )
    os.close(there)
    seen = b""

    def until(text: bytes) -> None:
        nonlocal seen
        while text not in seen:
            seen += os.read(here, 4096)
        seen = seen[seen.index(text) + len(text) :]

    until(b"> ")
    os.write(here, b"slow\n")
    until(b"....")
    process.send_signal(signal.SIGINT)
    until(b"(stopped)")
    assert fake_server.ended.wait(60), "the server is not asked for more"
    until(b"> ")
    os.write(here, b"\x04")
    assert process.wait(60) == 0
    os.close(here)


@pytest.mark.real
def test_a_model_is_served_for_a_chat_and_ends_with_it() -> None:
    command = [sys.executable, "-m", "launch.chat", str(MODEL), "--max-tokens", "8", "--temperature", "0"]
    done = subprocess.run(command, cwd=ROOT, input="What is the capital of France?\n", capture_output=True, text=True)
    assert done.returncode == 0 and "Paris" in done.stdout, done
    assert "is served at" in done.stdout
