"""Terminal chat: with a model that it serves itself, or with a server (`helix chat --url URL`)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from importlib import import_module
from threading import Thread, Timer
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from helix.log import print_error
from helix.schema import parse_value
from launch.inputs import command_parser
from launch.inputs.command_parser import CommandLine
from launch.inputs.commands import CHAT
from launch.inputs.flags import API_KEY
from launch.inputs.terminal import strip_control
from launch.job.lifeline import LAUNCHER

START_S = 1800.0  # for the model to load
READ_TIMEOUT_S = 600.0  # for the next piece of an answer
STOP_S = 30.0  # for the server to end
NUMBERS = {"--max-tokens": ("max_tokens", int), "--temperature": ("temperature", float)}  # fields of a request
COMMANDS = """\
/new        start over                   /system TEXT  set the system prompt and start over
/retry      regenerate the last answer   /quit         end the chat (or control-D)
control-C   stop the answer"""


class ChatClient:
    """A conversation with a server.

    Args:
        options: fields of each request, such as `temperature`.
    """

    def __init__(self, url: str, key: str | None, options: dict[str, Any], system: str | None = None) -> None:
        self.url, self.key, self.options, self.system = url.rstrip("/").removesuffix("/v1"), key, options, system
        self.turns: list[dict[str, str]] = []
        with self._open("/v1/models") as answer:
            try:
                self.model = json.load(answer)["data"][0]["id"]
            except (ValueError, LookupError, TypeError) as error:
                raise ValueError(f"{self.url}/v1/models names no model: give the URL of an OpenAI server") from error

    def ask(self, question: str) -> Iterator[str]:
        """Streams the answer to a question and adds both to the conversation, also if the answer is stopped early.

        Reasoning is streamed too, but not sent back with the conversation.

        Raises:
            ValueError: the server refuses the request, or the connection broke.
        """
        if self.turns and self.turns[-1]["role"] == "user":
            self.turns.pop()  # stopped before the first token: many templates refuse two user turns in a row
        self.turns.append({"role": "user", "content": question})
        system_messages = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.model, "messages": system_messages + self.turns, "stream": True, **self.options}
        pieces: list[str] = []
        try:
            with self._open("/v1/chat/completions", body) as stream:
                for line in stream:
                    if line.startswith(b"data: [DONE]"):
                        return
                    if not line.startswith(b"data: "):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise ValueError(event["error"]["message"])
                    for choice in event["choices"]:
                        if thought := choice["delta"].get("reasoning_content"):
                            yield thought
                        if piece := choice["delta"].get("content"):
                            pieces.append(piece)
                            yield piece
            raise ValueError(f"{self.url}: the connection closed before the answer was complete")
        except ValueError:
            self.turns.pop()
            raise
        except (OSError, HTTPException) as error:
            self.turns.pop()
            raise ValueError(f"{self.url}: the connection broke before the answer was complete: {error}") from error
        finally:
            if self.turns and self.turns[-1]["role"] == "user" and pieces:
                self.turns.append({"role": "assistant", "content": "".join(pieces)})

    def pop_last_question(self) -> str | None:
        """Removes the last question and its answer; returns the question, or None if there is none."""
        while self.turns:
            turn = self.turns.pop()
            if turn["role"] == "user":
                return turn["content"]
        return None

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        data = None if body is None else json.dumps(body).encode()
        try:
            return urlopen(Request(self.url + path, data, headers), timeout=READ_TIMEOUT_S)
        except HTTPError as error:
            text = error.read().decode(errors="replace")
            with suppress(ValueError, KeyError, TypeError):
                text = json.loads(text)["error"]["message"]
            raise ValueError(f"{self.url}: {text}") from error
        except (URLError, OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ValueError(f"{self.url} does not respond: {reason}; `helix serve DIR` starts a server") from error


@contextmanager
def serve_model(line: CommandLine) -> Iterator[str]:
    """Serves a model while the context is open; yields the URL.

    Raises:
        ValueError: the server did not start; it has printed the reason.
    """
    arguments = [sys.executable, "-m", "launch.serve", *line.arguments, "serve.port=0"]
    environment = os.environ | {LAUNCHER: str(os.getpid())}
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    assert process.stdout is not None
    late = Timer(START_S, process.kill)
    late.start()
    try:
        for text in process.stdout:
            if found := re.search(r"is served at (\S+)", text):
                break
            print(text, end="", flush=True)
        else:
            raise ValueError("the server did not start")
        Thread(target=process.stdout.read, daemon=True).start()  # keeps the server from blocking on a full pipe
        late.cancel()
        yield found[1]
    finally:
        late.cancel()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def chat_loop(chat: ChatClient) -> None:
    """Reads questions from the terminal and streams the answers, until the input ends."""
    print(f"{chat.model} is served at {chat.url}\n{COMMANDS}", flush=True)
    while True:
        try:
            text = input("\n> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\ntype /quit or control-D to end the chat")
            continue
        command, _, rest = text.partition(" ")
        if command in ("/quit", "/exit"):
            return
        if command == "/new":
            chat.turns.clear()
            continue
        if command == "/system":
            chat.system = rest.strip() or None
            chat.turns.clear()
            continue
        if command == "/retry":
            text = chat.pop_last_question() or ""
        elif command.startswith("/"):
            print(COMMANDS)
            continue
        if text:
            _answer(chat, text)


def _answer(chat: ChatClient, question: str) -> None:
    begin, first, pieces = time.monotonic(), 0.0, 0
    answer = chat.ask(question)
    try:
        for piece in answer:
            first = first or time.monotonic()
            pieces += 1
            print(strip_control(piece), end="", flush=True)
    except KeyboardInterrupt:
        answer.close()  # type: ignore[attr-defined]
        print(" (stopped)", end="")
    except ValueError as error:
        print(f"error: {error}", end="")
        return
    if pieces > 1:
        rate = (pieces - 1) / max(time.monotonic() - first, 1e-9)
        print(f"\n[{first - begin:.2f} s to the first token, {rate:.1f} pieces/s]", end="")
    print(flush=True)


def main(arguments: Sequence[str]) -> int:
    """Runs a chat; returns the exit code: 0, or 1 after printing an error on one line."""
    try:
        line = command_parser.read(arguments, CHAT)
        if line.options and (text := import_module("launch.inputs.compose").info_text(line, CHAT)) is not None:
            print(text, end="")  # compose is the slowest import, and otherwise only the server needs it
            return 0
        given = {flag: value for flag, value in line.flag_values.items() if flag in NUMBERS}
        options = {NUMBERS[flag][0]: parse_value(flag, value, NUMBERS[flag][1]) for flag, value in given.items()}
        key, system = os.environ.get(API_KEY), line.flag_values.get("--system")
        if (url := line.flag_values.get("--url")) is not None:
            if line.overrides:
                raise ValueError(f"--url {url}: the server has its own settings; remove {line.overrides[0]}")
            chat_loop(ChatClient(url, key, options, system))
            return 0
        with serve_model(line) as url:
            chat_loop(ChatClient(url, key, options, system))
    except ValueError as error:
        print_error(error)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # other commands exit at once (`launch/__init__.py`)
    sys.exit(main(sys.argv[1:]))
