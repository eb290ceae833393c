"""The answer to a request: its choices while they run, and the complete output once they have finished."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

from helix.engine.request import Logprobs
from launch.answers.answer_parser import AnswerPart
from launch.client.chat_tokenizer import ChatTokenizer
from launch.client.choice import Choice, Delta
from launch.client.engine_client import RETRY_S
from launch.client.errors import ApiError
from launch.client.input_processor import ProcessedPrompt
from launch.client.sampling import num_logprobs
from launch.client.schemas import Chat, Completion

DeltaCallback = Callable[[int, Delta], None]
REPR_CHARS = 60  # characters of a text in the `repr` of an output


class Answer:
    """The answer to a request, until all of its choices have finished.

    Args:
        processed: the prompts of the request.
        choices: `n` for each prompt.
        changed: set when a choice has new tokens.
        request_id: id in the log; empty: a new one.
        model: the model's name in responses.
        heartbeat_s: seconds without `sent` after which `deltas` yields None.

    Attributes:
        echoed: for each choice, the prompt text that a completion with echo repeats.
        prompt_tokens: tokens of all prompts, each prompt counted once.
        left_out: fields of messages that the prompt does not have as they were sent.
        created: Unix time of the request, in seconds.
    """

    def __init__(
        self,
        body: Chat | Completion,
        processed: ProcessedPrompt,
        choices: list[Choice],
        tokenizer: ChatTokenizer,
        changed: asyncio.Event,
        request_id: str = "",
        model: str = "",
        heartbeat_s: float = 10.0,
    ) -> None:
        self.body, self.choices, self.tokenizer, self.model = body, choices, tokenizer, model
        self.is_chat = isinstance(body, Chat)
        self.request_id = request_id or uuid.uuid4().hex
        self.echoed = [text for text in processed.echoed for _ in range(body.n or 1)]
        self.prompt_tokens = sum(map(len, processed.prompts))
        self.left_out = processed.left_out
        self.with_logprobs = num_logprobs(body) is not None
        self.created, self.began = int(time.time()), time.monotonic()
        self._changed = changed
        self._heartbeat_s, self._heartbeat_at = heartbeat_s, 0.0

    def close(self) -> None:
        """Aborts unfinished choices; call it once the answer is sent."""
        for choice in self.choices:
            choice.abort("abort")

    def usage(self) -> dict[str, Any]:
        new = sum(choice.num_tokens for choice in self.choices)
        cached: dict[int, int] = {}  # by prompt: the choices of a prompt share its array of token ids
        for generation in (choice.generation for choice in self.choices):
            prompt = id(generation.request.prompt)
            cached[prompt] = max(generation.num_cached_tokens or 0, cached.get(prompt, 0))
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self.prompt_tokens + new,
            "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        }

    def sent(self) -> None:
        """Tells that the client is sent something: the next heartbeat is due `heartbeat_s` later."""
        self._heartbeat_at = asyncio.get_running_loop().time() + self._heartbeat_s

    async def deltas(self) -> AsyncIterator[list[tuple[int, Delta]] | None]:
        """Yields the new deltas by choice until all have finished; None when a heartbeat is due.

        Tokens may come without anything to send, as while a call is written: only `sent` postpones heartbeats.

        Raises:
            ApiError: a choice failed.
        """
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None  # one for many tokens: a timeout for each takes 4 us

        def wake() -> None:
            nonlocal timer
            timer = None
            self._changed.set()

        self.sent()
        try:
            while any(choice.finish_reason is None for choice in self.choices):
                if loop.time() >= self._heartbeat_at:
                    self.sent()
                    yield None
                timer = timer or loop.call_at(self._heartbeat_at, wake)
                await self._changed.wait()
                self._changed.clear()
                deltas = [(choice.index, one) for choice in self.choices if (one := choice.poll())]
                for index, one in deltas:
                    if one.finish_reason in ("error", "abort"):
                        reason = self.choices[index].generation.reason or "the server aborted it"
                        if one.finish_reason == "abort":
                            raise ApiError(503, reason, code="draining", retry_s=RETRY_S["draining"])
                        raise ApiError(500, reason)
                if deltas or self.body.return_progress:
                    yield deltas
        finally:
            if timer is not None:
                timer.cancel()

    async def collect(self, on_delta: DeltaCallback = lambda index, delta: None) -> list[Delta]:
        """Waits for all choices to finish; returns the concatenated deltas of each.

        Args:
            on_delta: called with the index of a choice and each delta.

        Raises:
            ApiError: a choice failed.
        """
        pieces_of: list[list[Delta]] = [[] for _ in self.choices]
        async for deltas in self.deltas():
            for index, one in deltas or ():
                on_delta(index, one)
                pieces_of[index].append(one)
        return [Delta.concat(pieces) for pieces in pieces_of]

    def parts(self, delta: Delta) -> list[AnswerPart]:
        """Returns the parts of a delta to send: without reasoning if the chat request excludes it."""
        if isinstance(self.body, Chat) and not self.body.include_reasoning:
            return [part for part in delta.parts if part.kind != "thinking"]
        return delta.parts

    def message(self, delta: Delta) -> dict[str, Any]:
        parts = self.parts(delta)
        message: dict[str, Any] = {"role": "assistant", "content": None}
        for kind, name in (("content", "content"), ("thinking", "reasoning_content")):
            if texts := [part.text for part in parts if part.kind == kind]:
                message[name] = "".join(texts)
        if calls := [to_tool_call(part) for part in parts if part.kind == "call"]:
            message["tool_calls"] = calls
        elif message["content"] is None:
            message["content"] = ""
        return message


def to_tool_call(part: AnswerPart) -> dict[str, Any]:
    """Converts a part to a tool call in OpenAI's format."""
    return {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.text}}


@dataclass(frozen=True, repr=False)
class CompletionOutput:
    """One answer to a prompt.

    Attributes:
        text: in a chat, without reasoning and tool calls.
        token_ids: output tokens, including the end token.
        finish_reason: `stop`, `length`, `tool_calls`, or `error` if the prompt was refused.
        logprobs: one per token of `token_ids`, if requested.
        message: in a chat, the assistant message to continue with; may have `reasoning_content` and `tool_calls`.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str = "error"
    logprobs: tuple[Logprobs, ...] = ()
    message: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"CompletionOutput({shorten(self.text)!r}, {len(self.token_ids)} tokens, {self.finish_reason!r})"


@dataclass(frozen=True, repr=False)
class RequestOutput:
    """The answers to a prompt; `text`, `token_ids` etc. are shortcuts to the first one.

    Attributes:
        prompt_tokens: number of prompt tokens.
        cached_tokens: number of prompt tokens found in the prefix cache.
        outputs: the `n` answers.
        reason: why the prompt was refused, if it was.
    """

    prompt_tokens: int
    cached_tokens: int
    outputs: tuple[CompletionOutput, ...]
    reason: str | None = None

    @classmethod
    def refused(cls, reason: str, prompt_tokens: int = 0) -> RequestOutput:
        return cls(prompt_tokens, 0, (CompletionOutput(),), reason)

    def __repr__(self) -> str:
        if self.reason is not None:
            return f"RequestOutput(refused: {shorten(self.reason)!r})"
        more = f", and {len(self.outputs) - 1} more" if len(self.outputs) > 1 else ""
        answer = f"{shorten(self.text)!r}, {len(self.token_ids)} tokens, {self.finish_reason!r}{more}"
        return f"RequestOutput({answer}; {self.prompt_tokens} prompt tokens, {self.cached_tokens} of them cached)"

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> tuple[Logprobs, ...]:
        return self.outputs[0].logprobs

    @property
    def message(self) -> dict[str, Any] | None:
        return self.outputs[0].message


def shorten(text: str) -> str:
    """Truncates a text to `REPR_CHARS`."""
    return text if len(text) <= REPR_CHARS else f"{text[: REPR_CHARS - 3]}..."


async def to_request_output(answer: Answer, on_delta: DeltaCallback = lambda index, delta: None) -> RequestOutput:
    """Waits for an answer to finish; returns its output, or a refusal if a choice failed.

    Args:
        on_delta: called with the index of a choice and each delta.
    """
    try:
        deltas = await answer.collect(on_delta)
    except ApiError as error:
        return RequestOutput.refused(error.message, answer.prompt_tokens)
    outputs = []
    for choice, delta in zip(answer.choices, deltas, strict=True):
        output = CompletionOutput(delta.text, tuple(delta.token_ids), str(delta.finish_reason), tuple(delta.logprobs))
        if choice.has_parser:
            message = answer.message(delta)
            output = replace(output, text=message["content"] or "", message=message)
        outputs.append(output)
    cached = answer.usage()["prompt_tokens_details"]["cached_tokens"]
    return RequestOutput(answer.prompt_tokens, cached, tuple(outputs))
