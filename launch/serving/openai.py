"""Response objects in OpenAI's format, whole or as stream events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

from launch.client.answer import Answer, Heard, call_of
from launch.client.choice import News
from launch.client.core import Flight
from launch.client.errors import ApiError
from launch.serving.streams import COMMENT, DONE

PARTS = 5  # levels of an answer that are written apart: down to the log-probabilities of a token
T = TypeVar("T")


class OpenAIAnswer:
    """An answer as OpenAI's completions and chats present it."""

    def __init__(self, answer: Answer) -> None:
        self._answer, self._chat = answer, answer.chat
        self._id = f"{'chatcmpl' if answer.chat else 'cmpl'}-{answer.request_id}"
        options = answer.body.stream_options
        self._usage_at_end = options is not None and options.include_usage
        self._counts = [0] * len(answer.choices)  # tool calls of a chat so far, characters of a completion
        self._said = 0  # prompt tokens reported as progress

    async def whole(self, heard: Heard = lambda index, news: None) -> dict[str, Any]:
        """Waits for all choices and returns the whole answer; raises ApiError if a continuation failed.

        Args:
            heard: called with a choice's index and its news, as they come.
        """
        whole = await self._answer.whole(heard)
        choices = [await self._apart(self._choice, index, news) for index, news in enumerate(whole)]
        kind = "chat.completion" if self._chat else "text_completion"
        return self._object(kind, choices) | {"usage": self._answer.usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """Yields the answer as events; errors become an event of the stream."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        no_usage = {"usage": None} if self._usage_at_end else {}
        begun = [False] * len(self._answer.choices)
        try:
            async for news in self._answer.news():
                if self._answer.body.return_progress and (progress := self._progress()):
                    yield _event(self._object(kind, []) | {"prompt_progress": progress} | no_usage)
                elif not news:
                    yield COMMENT
                for index, one in news:
                    first, begun[index] = not begun[index], True
                    yield await self._apart(self._piece_event, kind, index, one, first, no_usage)
            if self._usage_at_end:
                yield _event(self._object(kind, []) | {"usage": self._answer.usage()})
        except ApiError as error:
            yield b"event: error\n" + _event(error.body(self._answer.request_id))
        yield DONE

    async def _apart(self, work: Callable[..., T], *arguments: Any) -> T:
        """Runs work in a thread if it takes long: with log-probabilities, of which there may be megabytes."""
        return await asyncio.to_thread(work, *arguments) if self._answer.with_logprobs else work(*arguments)

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        of = self._answer
        return {"id": self._id, "object": kind, "created": of.created, "model": of.model, "choices": choices}

    def _choice(self, index: int, news: News) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": news.finish_reason}
        logprobs = self._logprobs(index, news, first=True)
        if not self._chat:
            return choice | {"text": self._echo(index) + news.text, "logprobs": logprobs}
        return choice | {"message": self._answer.message(news), "logprobs": logprobs}

    def _piece_event(self, kind: str, index: int, news: News, first: bool, more: dict[str, Any]) -> bytes:
        return _event(self._object(kind, [self._piece(index, news, first)]) | more)

    def _piece(self, index: int, news: News, first: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": news.finish_reason}
        logprobs = self._logprobs(index, news, first)
        if not self._chat:
            return choice | {"text": (self._echo(index) if first else "") + news.text, "logprobs": logprobs}
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if first else {}
        for part in self._answer.parts(news):
            if part.kind == "call":
                delta.setdefault("tool_calls", []).append({"index": self._calls(index)} | call_of(part))
            else:
                name = "content" if part.kind == "content" else "reasoning_content"
                delta[name] = delta.get(name, "") + part.text
        return choice | {"delta": delta, "logprobs": logprobs}

    def _calls(self, index: int) -> int:
        """Returns the index of a choice's next tool call, and counts it."""
        self._counts[index] += 1
        return self._counts[index] - 1

    def _echo(self, index: int) -> str:
        return self._answer.echoed[index] if self._answer.echoed else ""

    def _logprobs(self, index: int, news: News, first: bool) -> dict[str, Any] | None:
        if not self._answer.with_logprobs:
            return None
        drawn = [(token, of.drawn, of.best) for token, of in zip(news.ids, news.logprobs, strict=True)]
        text_of = self._answer.tokens.token_text
        if self._chat:
            return {
                "content": [
                    self._logprob(token, own) | {"top_logprobs": [self._logprob(i, p) for i, p in top]}
                    for token, own, top in drawn
                ]
            }
        prompt = _scored(self._answer.choices[index].flight) if first and self._answer.echoed else ()
        told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, own, top in chain(prompt, drawn):  # one by one: a million values would wake the garbage collector
            text = text_of(token)
            values = text, own, None if top is None else self._by_text(top), self._counts[index]
            for column, value in zip(told.values(), values, strict=True):
                column.append(value)
            self._counts[index] += len(text)
        return told

    def _by_text(self, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Returns log-probabilities by tokens' texts: of several tokens with one text, such as parts of letters, the
        likeliest."""
        found: dict[str, float] = {}
        for token, logprob in top:
            found.setdefault(self._answer.tokens.token_text(token), logprob)
        return found

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        told = {"token": self._answer.tokens.token_text(token), "logprob": logprob}
        return told | {"bytes": list(self._answer.tokens.token_bytes(token))}

    def _progress(self) -> dict[str, Any] | None:
        done = sum(choice.flight.progress or 0 for choice in self._answer.choices)
        if done <= self._said:
            return None
        self._said = done
        return {
            "total": sum(len(choice.flight.request.prompt) for choice in self._answer.choices),
            "cache": sum(choice.flight.cached or 0 for choice in self._answer.choices),
            "processed": done,
            "time_ms": round((time.monotonic() - self._answer.began) * 1e3),
        }


def _scored(flight: Flight) -> Iterator[tuple[int, float | None, list[tuple[int, float]] | None]]:
    """Yields the tokens of a prompt, each with its log-probability and the likeliest tokens; the first has none."""
    yield int(flight.request.prompt[0]), None, None
    if flight.scored is not None:
        for ids, values in zip(*(part.tolist() for part in flight.scored), strict=True):
            best = [(token, value) for token, value in zip(ids[1:], values[1:], strict=True) if token >= 0]
            yield ids[0], values[0], best


async def rendered(answer: dict[str, Any]) -> bytes:
    """Writes an answer as JSON, in a thread and in small parts: Python's lock is held while a part is written."""
    return await asyncio.to_thread(lambda: _json(answer, PARTS).encode())


def _json(value: Any, levels: int, ascii: bool = False) -> str:
    if levels and isinstance(value, dict):
        parts = (f"{json.dumps(name)}:{_json(one, levels - 1, ascii)}" for name, one in value.items())
        return f"{{{','.join(parts)}}}"
    if levels and isinstance(value, list):
        return f"[{','.join(_json(one, levels - 1, ascii) for one in value)}]"
    return json.dumps(value, ensure_ascii=ascii, allow_nan=False, separators=(",", ":"))


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {_json(content, PARTS, ascii=True)}\n\n".encode()
