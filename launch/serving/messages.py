"""Anthropic's Messages API, converted to and from chats."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from launch.client.chat_tokenizer import THINKING_SWITCHES, ChatTokenizer
from launch.client.errors import ApiError
from launch.client.input_processor import encode_chat_prompt
from launch.client.request_fields import MESSAGES
from launch.client.schema_base import FalseByDefault, ListOf, Schema, null_as
from launch.client.schemas import Chat, Effort, Function, SamplingFields, Stops, validate_body
from launch.serving.content_blocks import Block, BlockAnswer, Event

ENDS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class TextBlock(Schema):
    """A text block."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Schema):
    """A block with the reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: Annotated[str, null_as("")] = ""


class RedactedThinkingBlock(Schema):
    """A redacted reasoning block, which is ignored."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Schema):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Schema):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[str | ListOf[TextBlock], null_as("")] = ""
    is_error: FalseByDefault = False


ContentBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class MessageParam(Schema):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | ListOf[ContentBlock]


class ToolParam(Schema):
    """A tool that the client runs; Anthropic's built-in tools are not supported."""

    type: Literal["custom"] | None = None
    name: str = Function.model_fields["name"]  # type: ignore[assignment]
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoiceParam(Schema):
    """The field `tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: FalseByDefault = False


class ThinkingParam(Schema):
    """The field `thinking`."""

    type: Literal["enabled", "adaptive", "disabled"]


class JsonOutputFormat(Schema):
    """A JSON schema for the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Schema):
    """The field `output_config`."""

    effort: Effort | None = None
    format: JsonOutputFormat | None = None


class Count(Schema):
    """Body of /v1/messages/count_tokens."""

    route: ClassVar[str] = MESSAGES
    model: str | None = None
    messages: ListOf[MessageParam] = Field(min_length=1)
    system: str | ListOf[TextBlock] | None = None
    tools: ListOf[ToolParam] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None


class Messages(Count, SamplingFields):
    """Body of /v1/messages."""

    max_tokens: int = Field(ge=1, lt=1 << 31)
    stream: FalseByDefault = False
    stop_sequences: Stops | None = None


def chat_of(body: Count, switches: Collection[str]) -> Chat:
    """Converts a Messages body to a chat body.

    Args:
        switches: the chat template's variables that switch thinking on and off.

    Raises:
        ApiError: 400, fields contradict each other.
    """
    turns: list[dict[str, Any]] = []
    if body.system:
        turns.append({"role": "system", "content": _text(body.system)})
    for turn in body.messages:
        turns += _turns(turn)
    chat: dict[str, Any] = {"model": body.model, "messages": turns}
    last = turns[-1] if turns else {}
    chat["continue_final_message"] = last.get("role") == "assistant" and "tool_calls" not in last
    if body.tools:
        named = ((tool, tool.model_dump(include={"name", "description"})) for tool in body.tools)
        functions = [fields | {"parameters": tool.input_schema} for tool, fields in named]
        chat["tools"] = [{"type": "function", "function": function} for function in functions]
    if (choice := body.tool_choice) is not None:
        forced = {"type": "function", "function": {"name": choice.name or ""}}
        chat["tool_choice"] = {"any": "required", "tool": forced}.get(choice.type, choice.type)
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if body.thinking is not None:
        chat["include_reasoning"] = thinks = body.thinking.type != "disabled"
        chat["chat_template_kwargs"] = {name: thinks for name in THINKING_SWITCHES if name in switches}
    if (config := body.output_config) is not None:
        chat["reasoning_effort"] = config.effort
        if config.format is not None:
            schema = {"name": "answer", "schema": config.format.schema_}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, Messages):
        chat |= {
            "stream": body.stream,
            "stop": body.stop_sequences,
            "max_tokens": body.max_tokens,
        } | body.sampling_fields
    return validate_body(Chat, chat)


def count_tokens(tokenizer: ChatTokenizer, body: Count, switches: Collection[str], limit: int) -> dict[str, int]:
    """Counts the prompt tokens of a body."""
    ids: np.ndarray = encode_chat_prompt(tokenizer, chat_of(body, switches), limit)
    return {"input_tokens": len(ids)}


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Formats an error as Anthropic does."""
    fields = {"type": KINDS.get(error.status, "invalid_request_error"), "message": error.message}
    return {"type": "error", "error": fields, "request_id": request_id}


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _turns(turn: MessageParam) -> Iterator[dict[str, Any]]:
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
        return
    message: dict[str, Any] = {}
    for part in turn.content:
        match part:
            case TextBlock():
                message["content"] = message.get("content", "") + part.text
            case ThinkingBlock():
                message["reasoning_content"] = message.get("reasoning_content", "") + part.thinking
            case ToolUseBlock():
                call = {"name": part.name, "arguments": json.dumps(part.input, ensure_ascii=False)}
                message.setdefault("tool_calls", []).append({"id": part.id, "function": call})
            case ToolResultBlock():
                if message:
                    yield {"role": turn.role} | message
                    message = {}
                yield {"role": "tool", "tool_call_id": part.tool_use_id, "content": _text(part.content)}
    if message:
        yield {"role": turn.role} | message


class MessagesAnswer(BlockAnswer):
    """An answer in Anthropic's format."""

    def _message(self, content: list[dict[str, Any]], **end: Any) -> dict[str, Any]:
        answer = self.answer
        message = {"id": f"msg_{answer.request_id}", "type": "message", "role": "assistant", "model": answer.model}
        return message | {"content": content} | end | {"usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        usage = self.answer.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }

    @property
    def _end(self) -> dict[str, str | None]:
        stop = self.answer.choices[0].matched_stop
        reason = "stop_sequence" if stop is not None else ENDS[str(self.finish_reason)]
        return {"stop_reason": reason, "stop_sequence": stop}

    def _collected(self) -> dict[str, Any]:
        return self._message([_content(block) for block in self.blocks], **self._end)

    def _start_events(self) -> Iterator[Event]:
        yield {"type": "message_start", "message": self._message([], stop_reason=None, stop_sequence=None)}

    def _block_start_events(self, block: Block) -> Iterator[Event]:
        yield {"type": "content_block_start", "index": block.index, "content_block": _content(block)}

    def _delta_event(self, block: Block, text: str) -> Event:
        kind, name = {
            "content": ("text_delta", "text"),
            "thinking": ("thinking_delta", "thinking"),
            "call": ("input_json_delta", "partial_json"),
        }[block.kind]
        return {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: text}}

    def _block_stop_events(self, block: Block) -> Iterator[Event]:
        yield {"type": "content_block_stop", "index": block.index}

    def _end_events(self) -> Iterator[Event]:
        yield {"type": "message_delta", "delta": self._end, "usage": self._usage()}
        yield {"type": "message_stop"}

    def _error_event(self, error: ApiError) -> Event:
        return error_body(error, self.answer.request_id)


def _content(block: Block) -> dict[str, Any]:
    match block.kind:
        case "content":
            return {"type": "text", "text": block.text}
        case "thinking":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "tool_use", "id": block.call, "name": block.name, "input": _input(block.text)}


def _input(arguments: str) -> dict[str, Any]:
    """Parses a call's arguments; text that is not a JSON object is wrapped in one."""
    try:
        found = json.loads(arguments or "{}")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}
