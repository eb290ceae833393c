"""Responses in OpenAI's format, complete or as stream events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

from launch.client.answer import Answer, DeltaCallback, to_tool_call
from launch.client.choice import Delta
from launch.client.engine_client import Generation
from launch.client.errors import ApiError
from launch.serving.streams import DONE

JSON_LEVELS = 5  # levels of a response to serialize separately: down to the log-probabilities of a token
# By whether the text is ASCII; `json.dumps` would make one for each event.
ENCODERS = [json.JSONEncoder(ensure_ascii=ascii, allow_nan=False, separators=(",", ":")) for ascii in (False, True)]
T = TypeVar("T")


class OpenAIAnswer:
    """An answer in the format of OpenAI's completions and chats."""

    def __init__(self, answer: Answer) -> None:
        self._answer, self._chat = answer, answer.is_chat
        self._id = f"{'chatcmpl' if answer.is_chat else 'cmpl'}-{answer.request_id}"
        options = answer.body.stream_options
        self._usage_at_end = options is not None and options.include_usage
        self._counts = [0] * len(answer.choices)  # per choice: tool calls of a chat, or characters of a completion
        self._reported_progress = 0  # prompt tokens

    async def collect(self, on_delta: DeltaCallback = lambda index, delta: None) -> dict[str, Any]:
        """Waits for all choices and returns the complete response; raises ApiError if one failed.

        Args:
            on_delta: called with the index of a choice and each delta.
        """
        whole = await self._answer.collect(on_delta)
        choices = [await self._maybe_in_thread(self._choice, index, delta, True) for index, delta in enumerate(whole)]
        kind = "chat.completion" if self._chat else "text_completion"
        return self._object(kind, choices) | {"usage": self._answer.usage()}

    async def events(self) -> AsyncIterator[bytes]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        no_usage = {"usage": None} if self._usage_at_end else {}
        started = [False] * len(self._answer.choices)
        try:
            async for deltas in self._answer.deltas():
                if self._answer.body.return_progress and (progress := self._progress()):
                    yield _event(self._object(kind, []) | {"prompt_progress": progress} | no_usage)
                    self._answer.sent()
                elif deltas is None:
                    yield _event(self._object(kind, [self._heartbeat]) | no_usage)
                for index, one in deltas or ():
                    if not self._has_news(one):
                        continue
                    first, started[index] = not started[index], True
                    yield await self._maybe_in_thread(self._piece_event, kind, index, one, first, no_usage)
                    self._answer.sent()
            if self._usage_at_end:
                yield _event(self._object(kind, []) | {"usage": self._answer.usage()})
        except ApiError as error:
            yield b"event: error\n" + _event(error.body(self._answer.request_id))
        yield DONE

    async def _maybe_in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Runs work in a thread if there are log-probabilities, which may be megabytes."""
        return await asyncio.to_thread(work, *arguments) if self._answer.with_logprobs else work(*arguments)

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        answer = self._answer
        return {"id": self._id, "object": kind, "created": answer.created, "model": answer.model, "choices": choices}

    def _choice(self, index: int, delta: Delta, first: bool, is_piece: bool = False) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": delta.finish_reason}
        if not self._chat:
            choice["text"] = (self._echo(index) if first else "") + delta.text
        elif is_piece:
            choice["delta"] = self._message_delta(index, delta, first)
        else:
            choice["message"] = self._answer.message(delta)
        return choice | {"logprobs": self._logprobs(index, delta, first)}

    def _piece_event(self, kind: str, index: int, delta: Delta, first: bool, more: dict[str, Any]) -> bytes:
        levels = JSON_LEVELS if self._answer.with_logprobs else 0
        return _event(self._object(kind, [self._choice(index, delta, first, is_piece=True)]) | more, levels)

    def _message_delta(self, index: int, delta: Delta, first: bool) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": ""} if first else {}
        for part in self._answer.parts(delta):
            if part.kind == "call":
                message.setdefault("tool_calls", []).append({"index": self._calls(index)} | to_tool_call(part))
            else:
                name = "content" if part.kind == "content" else "reasoning_content"
                message[name] = message.get(name, "") + part.text
        return message

    @property
    def _heartbeat(self) -> dict[str, Any]:
        """A running choice without text: clients count its event, which they do not do for comments."""
        empty = {"delta": {"content": ""}} if self._chat else {"text": ""}
        index = next((choice.index for choice in self._answer.choices if choice.finish_reason is None), 0)
        return {"index": index, "finish_reason": None} | empty | {"logprobs": None}

    def _has_news(self, delta: Delta) -> bool:
        """Tells whether a delta has anything to send: while a call is written, a chat's tokens have no parts."""
        told = not self._chat or self._answer.with_logprobs or delta.finish_reason
        return bool(told or self._answer.parts(delta))

    def _calls(self, index: int) -> int:
        self._counts[index] += 1
        return self._counts[index] - 1

    def _echo(self, index: int) -> str:
        return self._answer.echoed[index] if self._answer.echoed else ""

    def _logprobs(self, index: int, delta: Delta, first: bool) -> dict[str, Any] | None:
        if not self._answer.with_logprobs:
            return None
        drawn = [
            (token, entry.sampled, entry.best) for token, entry in zip(delta.token_ids, delta.logprobs, strict=True)
        ]
        text_of = self._answer.tokenizer.token_text
        if self._chat:
            return {
                "content": [
                    self._logprob(token, logprob) | {"top_logprobs": [self._logprob(i, p) for i, p in top]}
                    for token, logprob, top in drawn
                ]
            }
        prompt = _prompt_logprobs(self._answer.choices[index].generation) if first and self._answer.echoed else ()
        fields: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        # Append values one by one: a million small lists would trigger garbage collections.
        for token, logprob, top in chain(prompt, drawn):
            text = text_of(token)
            values = text, logprob, None if top is None else self._logprobs_by_text(top), self._counts[index]
            for column, value in zip(fields.values(), values, strict=True):
                column.append(value)
            self._counts[index] += len(text)
        return fields

    def _logprobs_by_text(self, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Maps token texts to log-probabilities; of tokens with equal text (partial UTF-8), the most likely."""
        found: dict[str, float] = {}
        for token, logprob in top:
            found.setdefault(self._answer.tokenizer.token_text(token), logprob)
        return found

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        fields = {"token": self._answer.tokenizer.token_text(token), "logprob": logprob}
        return fields | {"bytes": list(self._answer.tokenizer.token_bytes(token))}

    def _progress(self) -> dict[str, Any] | None:
        done = sum(choice.generation.progress or 0 for choice in self._answer.choices)
        if done <= self._reported_progress:
            return None
        self._reported_progress = done
        return {
            "total": sum(len(choice.generation.request.prompt) for choice in self._answer.choices),
            "cache": sum(choice.generation.num_cached_tokens or 0 for choice in self._answer.choices),
            "processed": done,
            "time_ms": round((time.monotonic() - self._answer.began) * 1e3),
        }


def _prompt_logprobs(generation: Generation) -> Iterator[tuple[int, float | None, list[tuple[int, float]] | None]]:
    """Yields each prompt token with its log-probability and the most likely tokens; the first token has neither."""
    yield int(generation.request.prompt[0]), None, None
    if generation.prompt_logprobs is not None:
        for ids, values in zip(*(part.tolist() for part in generation.prompt_logprobs), strict=True):
            best = [(token, value) for token, value in zip(ids[1:], values[1:], strict=True) if token >= 0]
            yield ids[0], values[0], best


async def to_json(answer: dict[str, Any]) -> bytes:
    """Serializes a response in a thread, in small parts: the GIL is held during each part."""
    return await asyncio.to_thread(lambda: _json(answer, JSON_LEVELS).encode())


def _json(value: Any, levels: int, ascii: bool = False) -> str:
    if levels and isinstance(value, dict):
        parts = (f"{ENCODERS[True].encode(name)}:{_json(one, levels - 1, ascii)}" for name, one in value.items())
        return f"{{{','.join(parts)}}}"
    if levels and isinstance(value, list):
        return f"[{','.join(_json(one, levels - 1, ascii) for one in value)}]"
    return ENCODERS[ascii].encode(value)


def _event(content: dict[str, Any], levels: int = 0) -> bytes:
    return f"data: {_json(content, levels, ascii=True)}\n\n".encode()
