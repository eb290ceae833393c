"""Response objects in OpenAI's format, whole or as stream events."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

from helix.answers.dialects import THOUGHTS, AnswerPart, Dialect, Parser, PlainParser
from helix.answers.grammars import begins_with_mark
from launch.client.choice import Choice, News
from launch.client.core import Flight
from launch.client.errors import ApiError
from launch.client.prompts import Reading
from launch.client.sampling import logprobs_of
from launch.client.schemas import Chat, Completion
from launch.client.tokens import Tokens
from launch.serving.streams import COMMENT, COMMENT_S, DONE

PARTS = 5  # levels of an answer that are written apart: down to the log-probabilities of a token
T = TypeVar("T")


@dataclass
class Answer:
    """The answer to a request: its choices, and how they are presented.

    Attributes:
        chat: whether it answers a chat, not a completion.
        request_id: that of the log.
        echoed: prompt text of each choice of a completion with echo.
        tells_thoughts: whether a chat's answer includes the model's reasoning.
        prompt_tokens: tokens of all prompts, each counted once.
        changed: set when a choice has new tokens.
        close: aborts unfinished continuations; called once the answer is sent.
    """

    chat: bool
    request_id: str
    model: str
    choices: list[Choice]
    tokens: Tokens
    prompt_tokens: int
    changed: asyncio.Event
    close: Callable[[], None]
    usage_at_end: bool = False
    progress: bool = False
    echoed: list[str] = field(default_factory=list)
    with_logprobs: bool = False
    tells_thoughts: bool = True
    created: int = field(default_factory=lambda: int(time.time()))
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{self.request_id}"
        self._counts = [0] * len(self.choices)  # tool calls of a chat so far, characters of a completion
        self._said = 0  # prompt tokens reported as progress

    async def whole(self, heard: Callable[[News], None] = lambda news: None) -> dict[str, Any]:
        """Waits for all choices and returns the whole answer.

        Args:
            heard: called with the news of each choice as they come.

        Raises:
            ApiError: a continuation failed.
        """
        told: list[list[News]] = [[] for _ in self.choices]
        async for news in self.news():
            for index, one in news:
                heard(one)
                told[index].append(one)
        choices = [await self._apart(self._choice, index, news) for index, news in enumerate(told)]
        return self._object("chat.completion" if self.chat else "text_completion", choices) | {"usage": self.usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """Yields the answer as events; errors become an event of the stream."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        no_usage = {"usage": None} if self.usage_at_end else {}
        begun = [False] * len(self.choices)
        try:
            async for news in self.news():
                if self.progress and (progress := self._progress()):
                    yield _event(self._object(kind, []) | {"prompt_progress": progress} | no_usage)
                elif not news:
                    yield COMMENT
                for index, one in news:
                    first, begun[index] = not begun[index], True
                    yield await self._apart(self._piece_event, kind, index, one, first, no_usage)
            if self.usage_at_end:
                yield _event(self._object(kind, []) | {"usage": self.usage()})
        except ApiError as error:
            yield b"event: error\n" + _event(error.body(self.request_id))
        yield DONE

    async def _apart(self, work: Callable[..., T], *arguments: Any) -> T:
        """Runs work in a thread if it takes long: with log-probabilities, of which there may be megabytes."""
        return await asyncio.to_thread(work, *arguments) if self.with_logprobs else work(*arguments)

    def usage(self) -> dict[str, Any]:
        """Counts the tokens so far."""
        new = sum(choice.tokens for choice in self.choices)
        cached: dict[int, int] = {}  # by prompt: its choices share the array of its ids
        for flight in (choice.flight for choice in self.choices):
            cached[id(flight.submit.ids)] = max(flight.cached or 0, cached.get(id(flight.submit.ids), 0))
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self.prompt_tokens + new,
            "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        }

    async def news(self) -> AsyncIterator[list[tuple[int, News]]]:
        """Yields news by choice until all choices have ended; an empty list after `comment_s` seconds of silence."""
        while any(choice.ended is None for choice in self.choices):
            try:
                async with asyncio.timeout(COMMENT_S):
                    await self.changed.wait()
            except TimeoutError:
                yield []
                continue
            self.changed.clear()
            news = [(choice.index, one) for choice in self.choices if (one := choice.take())]
            for index, one in news:
                if one.finish_reason in ("error", "abort"):
                    reason = self.choices[index].flight.reason or "the server has ended it"
                    raise ApiError(500, reason)
            if news or self.progress:
                yield news

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _choice(self, index: int, news: list[News]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": news[-1].finish_reason}
        logprobs = self._logprobs(index, news, first=True)
        if not self.chat:
            text = "".join(one.text for one in news)
            return choice | {"text": self._echo(index) + text, "logprobs": logprobs}
        parts = self.parts(news)
        message: dict[str, Any] = {"role": "assistant", "content": None}
        for kind, name in (("content", "content"), ("thinking", "reasoning_content")):
            if texts := [part.text for part in parts if part.kind == kind]:
                message[name] = "".join(texts)
        if calls := [_call(part) for part in parts if part.kind == "call"]:
            message["tool_calls"] = calls
        elif message["content"] is None:
            message["content"] = ""
        return choice | {"message": message, "logprobs": logprobs}

    def _piece_event(self, kind: str, index: int, news: News, first: bool, more: dict[str, Any]) -> bytes:
        return _event(self._object(kind, [self._piece(index, news, first)]) | more)

    def _piece(self, index: int, news: News, first: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": news.finish_reason}
        logprobs = self._logprobs(index, [news], first)
        if not self.chat:
            return choice | {"text": (self._echo(index) if first else "") + news.text, "logprobs": logprobs}
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if first else {}
        for part in self.parts([news]):
            if part.kind == "call":
                delta.setdefault("tool_calls", []).append({"index": self._calls(index)} | _call(part))
            else:
                name = "content" if part.kind == "content" else "reasoning_content"
                delta[name] = delta.get(name, "") + part.text
        return choice | {"delta": delta, "logprobs": logprobs}

    def parts(self, news: list[News]) -> list[AnswerPart]:
        """Returns the parts of news that are told."""
        parts = [part for one in news for part in one.parts]
        return [part for part in parts if self.tells_thoughts or part.kind != "thinking"]

    def _calls(self, index: int) -> int:
        """Returns the index of a choice's next tool call, and counts it."""
        self._counts[index] += 1
        return self._counts[index] - 1

    def _echo(self, index: int) -> str:
        return self.echoed[index] if self.echoed else ""

    def _logprobs(self, index: int, news: list[News], first: bool) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        drawn = [(token, *logprobs) for one in news for token, logprobs in zip(one.ids, one.logprobs, strict=True)]
        text_of = self.tokens.token_text
        if self.chat:
            return {
                "content": [
                    self._logprob(token, own) | {"top_logprobs": [self._logprob(i, p) for i, p in top]}
                    for token, own, top in drawn
                ]
            }
        prompt = _scored(self.choices[index].flight) if first and self.echoed else ()
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
            found.setdefault(self.tokens.token_text(token), logprob)
        return found

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        told = {"token": self.tokens.token_text(token), "logprob": logprob}
        return told | {"bytes": list(self.tokens.token_bytes(token))}

    def _progress(self) -> dict[str, Any] | None:
        done = sum(choice.flight.progress or 0 for choice in self.choices)
        if done <= self._said:
            return None
        self._said = done
        return {
            "total": sum(len(choice.flight.submit.ids) for choice in self.choices),
            "cache": sum(choice.flight.cached or 0 for choice in self.choices),
            "processed": done,
            "time_ms": round((time.monotonic() - self.began) * 1e3),
        }


def parsers_of(body: Chat | Completion, reading: Reading, dialect: Dialect | None, count: int) -> list[Parser | None]:
    """Creates the parsers of `count` continuations; None for completions, which are text alone."""
    if not isinstance(body, Chat):
        return [None] * count
    template, turn = None if dialect is None else dialect.template, reading.turn or ""
    if template is not None and begins_with_mark(body.shape, dialect) and not turn.strip():
        template = template | {"fields": {name: f for name, f in template["fields"].items() if name != THOUGHTS}}
    if body.has_to_call and (dialect is None or dialect.calls is None):
        return [PlainParser(template, turn, body.named) for _ in range(count)]
    given = [tool.model_dump(exclude_none=True) for tool in body.shown_tools]
    return [Parser(template, turn, given, body.may_call_again) for _ in range(count)]


def answer_of(
    body: Chat | Completion,
    reading: Reading,
    flights: Sequence[Flight],
    parsers: Sequence[Parser | None],
    tokens: Tokens,
    eos: Collection[int],
    model: str,
    changed: asyncio.Event,
    abort: Callable[..., None],
    request_id: str | None = None,
    kind: Callable[..., Answer] = Answer,
) -> Answer:
    """Creates the answer to a body.

    Args:
        flights: the continuations of `submits_of`, in their order.
        model: its name to clients.
        changed: set when a continuation has new tokens.
        abort: cancels a continuation, with a finish reason if the answer has one.
        request_id: that of the log; None: a new one.
        kind: creates the answer, in the format that the client reads.
    """
    choices = [
        Choice(
            index,
            flight,
            tokens,
            body.stop or (),
            body.stop_token_ids or (),
            eos,
            abort,
            parser,
            not body.skip_special_tokens,
            min_tokens=body.min_tokens or 0,
            silent=body.max_tokens == 0,
        )
        for index, (flight, parser) in enumerate(zip(flights, parsers, strict=True))
    ]

    def close() -> None:
        for flight in flights:
            abort(flight)

    return kind(
        chat=isinstance(body, Chat),
        request_id=request_id or uuid.uuid4().hex,
        model=model,
        choices=choices,
        tokens=tokens,
        prompt_tokens=sum(map(len, reading.prompts)),
        changed=changed,
        close=close,
        usage_at_end=body.stream_options is not None and body.stream_options.include_usage,
        progress=body.return_progress,
        echoed=[text for text in reading.echoed for _ in range(body.n or 1)],
        with_logprobs=logprobs_of(body) is not None,
        tells_thoughts=not isinstance(body, Chat) or body.include_reasoning,
    )


def _scored(flight: Flight) -> Iterator[tuple[int, float | None, list[tuple[int, float]] | None]]:
    """Yields the tokens of a prompt, each with its log-probability and the likeliest tokens; the first has none."""
    yield int(flight.submit.ids[0]), None, None
    if flight.scored is not None:
        for ids, values in zip(*(part.tolist() for part in flight.scored), strict=True):
            best = [(token, value) for token, value in zip(ids[1:], values[1:], strict=True) if token >= 0]
            yield ids[0], values[0], best


def _call(part: Any) -> dict[str, Any]:
    return {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.text}}


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
