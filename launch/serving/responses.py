"""OpenAI's Responses API, converted to and from chats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from launch.client.answer import Answer
from launch.client.errors import ApiError
from launch.client.request_fields import RESPONSES
from launch.client.schema_base import FalseByDefault, ListOf, Schema, TrueByDefault
from launch.client.schemas import LENGTH_CHECKED, Arguments, Chat, Effort, Function, SamplingFields, validate_body
from launch.serving.content_blocks import Block, BlockAnswer, Event

INCOMPLETE = {"reason": "max_output_tokens"}


def _typed(item: object) -> object:
    return {"type": "message"} | item if isinstance(item, dict) and "role" in item else item


class TextContent(Schema):
    """A text part of a message or tool result."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class ReasoningContent(Schema):
    """A text part of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class MessageItem(Schema):
    """A message of a conversation."""

    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: str | ListOf[TextContent]


class ReasoningItem(Schema):
    """The reasoning of an earlier answer."""

    type: Literal["reasoning"]
    content: ListOf[ReasoningContent] | None = None


class FunctionCallItem(Schema):
    """A tool call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(Schema):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | ListOf[TextContent]


Item = Annotated[MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem, Field(discriminator="type")]


class FunctionTool(Function):
    """An entry of `tools`."""

    type: Literal["function"]


class FunctionChoice(Schema):
    """The field `tool_choice`, if it names a function."""

    type: Literal["function"]
    name: str


class Reasoning(Schema):
    """The field `reasoning`."""

    effort: Effort | None = None


class TextFormat(Schema):
    """The field `text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class TextOptions(Schema):
    """The field `text`."""

    format: TextFormat | None = None


class Responses(SamplingFields):
    """Body of /v1/responses."""

    route: ClassVar[str] = RESPONSES
    model: str | None = None
    input: str | Annotated[ListOf[Annotated[Item, BeforeValidator(_typed)]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    stream: FalseByDefault = False
    tools: ListOf[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: TrueByDefault = True
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    metadata: Annotated[dict[str, str], LENGTH_CHECKED] | None = None
    chat_template_kwargs: Arguments | None = None


def chat_of(body: Responses) -> Chat:
    """Converts a Responses body to a chat body.

    Raises:
        ApiError: 400, fields contradict each other.
    """
    try:
        json.dumps(body.model_dump(include={"tools", "text", "tool_choice"}), allow_nan=False)  # the response has them
    except ValueError as error:
        raise ApiError(400, "tools and text must be JSON, which has no NaN or Infinity") from error
    turns: list[dict[str, Any]] = []
    if body.instructions:
        turns.append({"role": "system", "content": body.instructions})
    for item in (
        [MessageItem(type="message", role="user", content=body.input)] if isinstance(body.input, str) else body.input
    ):
        _add(turns, item)
    chat: dict[str, Any] = {"model": body.model, "messages": turns, "max_tokens": body.max_output_tokens}
    chat |= {"stream": body.stream, "parallel_tool_calls": body.parallel_tool_calls}
    chat |= {"chat_template_kwargs": body.chat_template_kwargs} | body.sampling_fields
    if body.tools:
        functions = [tool.model_dump(exclude={"type"}, exclude_none=True) for tool in body.tools]
        chat["tools"] = [{"type": "function", "function": function} for function in functions]
    chat["tool_choice"] = choice = body.tool_choice
    if isinstance(choice, FunctionChoice):
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    chat["reasoning_effort"] = body.reasoning.effort if body.reasoning is not None else None
    if body.text is not None and (wanted := body.text.format) is not None:
        schema = {"json_schema": {"name": wanted.name or "answer", "schema": wanted.schema_}}
        chat["response_format"] = {"type": wanted.type} | (schema if wanted.type == "json_schema" else {})
    return validate_body(Chat, chat)


def _add(turns: list[dict[str, Any]], item: Item) -> None:
    """Adds an item to a conversation; consecutive reasoning, text and calls of the assistant become one message."""
    if isinstance(item, FunctionCallOutputItem):
        turns.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        return
    if isinstance(item, MessageItem) and item.role != "assistant":
        turns.append({"role": item.role, "content": _text(item.content)})
        return
    if not turns or turns[-1]["role"] != "assistant":
        turns.append({"role": "assistant"})
    last = turns[-1]
    match item:
        case MessageItem():
            last["content"] = last.get("content", "") + _text(item.content)
        case ReasoningItem():
            last["reasoning_content"] = last.get("reasoning_content", "") + _text(item.content or [])
        case FunctionCallItem():
            call = {"name": item.name, "arguments": item.arguments or "{}"}
            last.setdefault("tool_calls", []).append({"id": item.call_id, "function": call})


def _text(content: str | list[TextContent] | list[ReasoningContent]) -> str:
    return content if isinstance(content, str) else "".join(piece.text for piece in content)


@dataclass(kw_only=True)
class ResponsesAnswer(BlockAnswer):
    """An answer in the format of OpenAI's Responses."""

    def __init__(self, answer: Answer, body: Responses) -> None:
        super().__init__(answer)
        self._body = body
        self._number = 0  # sequence number of the next event

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        body = self._body
        given = body.model_dump(include={"instructions", "max_output_tokens", "parallel_tool_calls", "temperature"})
        choice = body.tool_choice.model_dump() if isinstance(body.tool_choice, FunctionChoice) else body.tool_choice
        wanted = body.text.format if body.text is not None else None
        return {
            "id": f"resp_{self.answer.request_id}",
            "object": "response",
            "created_at": self.answer.created,
            "status": status,
            "model": self.answer.model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "metadata": body.metadata or {},
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
            "store": False,
            "text": {"format": {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True)},
            "tool_choice": choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": body.top_p,
            "truncation": "disabled",
            **given,
            **more,
        }

    def _collected(self) -> dict[str, Any]:
        usage = self.answer.usage()
        return self._response(
            "incomplete" if self._is_incomplete else "completed",
            output=[self._item(block, self._status(block)) for block in self.blocks],
            incomplete_details=INCOMPLETE if self._is_incomplete else None,
            usage={
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
                "total_tokens": usage["total_tokens"],
            },
        )

    @property
    def _is_incomplete(self) -> bool:
        return self.finish_reason == "length"

    def _status(self, block: Block) -> str:
        """Returns the status of a finished block; the last one is incomplete if the answer was cut off."""
        return "incomplete" if self._is_incomplete and block is self.blocks[-1] else "completed"

    @property
    def _reasoning_tokens(self) -> int:
        thoughts = [block.text for block in self.blocks if block.kind == "thinking"]
        return sum(len(self.answer.tokenizer.encode_segments(text)) for text in thoughts)

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        suffix = f"{self.answer.request_id}_{block.index}"
        match block.kind:
            case "call":
                called = {"call_id": block.call, "name": block.name, "arguments": block.text}
                return {"id": f"fc_{suffix}", "type": "function_call", "status": status} | called
            case "thinking":
                thought = {"id": f"rs_{suffix}", "type": "reasoning", "summary": [], "status": status}
                return thought | {"content": [_content_part(block)] if block.text else []}
        said = {"id": f"msg_{suffix}", "type": "message", "role": "assistant", "status": status}
        return said | {"content": [_content_part(block)] if block.text else []}

    def _part_event(self, kind: str, block: Block, **more: Any) -> Event:
        where = {} if block.kind == "call" else {"content_index": 0}
        item = self._item(block, "in_progress")["id"]
        return {"type": f"response.{kind}", "item_id": item, "output_index": block.index} | where | more

    def _start_events(self) -> Iterator[Event]:
        yield {"type": "response.created", "response": self._response("in_progress")}
        yield {"type": "response.in_progress", "response": self._response("in_progress")}

    def _block_start_events(self, block: Block) -> Iterator[Event]:
        item = self._item(block, "in_progress")
        yield {"type": "response.output_item.added", "output_index": block.index, "item": item}
        if block.kind != "call":
            yield self._part_event("content_part.added", block, part=_content_part(block))

    def _delta_event(self, block: Block, text: str) -> Event:
        more: dict[str, Any] = {"logprobs": []} if block.kind == "content" else {}
        return self._part_event(f"{STREAMS[block.kind]}.delta", block, delta=text, **more)

    def _block_stop_events(self, block: Block) -> Iterator[Event]:
        match block.kind:
            case "call":
                yield self._part_event("function_call_arguments.done", block, name=block.name, arguments=block.text)
            case "thinking":
                yield self._part_event("reasoning_text.done", block, text=block.text)
            case _:
                yield self._part_event("output_text.done", block, text=block.text, logprobs=[])
        if block.kind != "call":
            yield self._part_event("content_part.done", block, part=_content_part(block))
        item = self._item(block, self._status(block))
        yield {"type": "response.output_item.done", "output_index": block.index, "item": item}

    def _end_events(self) -> Iterator[Event]:
        response = self._collected()
        yield {"type": f"response.{response['status']}", "response": response}

    def _error_event(self, error: ApiError) -> Event:
        error_object = {"code": "server_error", "message": error.message}
        return {"type": "response.failed", "response": self._response("failed", error=error_object)}

    def _encode(self, event: Event) -> bytes:
        self._number += 1
        return super()._encode(event | {"sequence_number": self._number - 1})


STREAMS = {"content": "output_text", "thinking": "reasoning_text", "call": "function_call_arguments"}


def _content_part(block: Block) -> dict[str, Any]:
    if block.kind == "thinking":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
