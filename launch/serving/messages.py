"""Anthropic's Messages API, converted to and from chats."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from launch.client import errors
from launch.client.chat_history import EFFORT_VARIABLES, THINKING_SWITCHES
from launch.client.errors import ApiError
from launch.client.request_fields import MESSAGES
from launch.client.schema_base import BY_TYPE, FalseByDefault, ListOf, Schema, null_as
from launch.client.schemas import (
    MAX_IGNORED_NAMES,
    Chat,
    Effort,
    Function,
    SamplingFields,
    Stops,
    unsupported_content,
    validate_body,
)
from launch.serving.content_blocks import Block, BlockAnswer, Event, parse_arguments

ENDS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
KINDS = errors.KINDS | {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
# Text that clients put at the beginning of the system message for Anthropic's servers. It differs in each request, so
# that no prompt would have the prefix of an earlier one.
CLIENT_HEADER = re.compile(r"x-anthropic-[\w-]+:[^\n]*\n*")
# Begins texts that Claude Code adds to the results of calls. A user's message in their place would be a new question to
# templates, which drop the reasoning before it.
REMINDER = "<system-reminder>"
SAYS_ERROR = re.compile(r"\W*\w*error\b", re.IGNORECASE)  # such as `<tool_use_error>` or `OSError:`
Report = Callable[[str], None]  # takes the name of what is left out of the prompt


class TextBlock(Schema):
    """A text block."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Schema):
    """A block with the reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: Annotated[str, null_as("")] = ""


class ToolUseBlock(Schema):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class OtherBlock(Schema):
    """A block that the model cannot read, such as an image, or a tool that Anthropic defines."""

    type: str

    @property
    def replacement(self) -> str:
        """A text for the model in place of the block."""
        if self.type == "tool_reference":
            return f"The tool {(self.model_extra or {}).get('tool_name')} is available."
        return f"[{self.type:.40} left out: this model reads only text]"


class ToolResultBlock(Schema):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[str | ListOf[Annotated[TextBlock | OtherBlock, BY_TYPE]], null_as("")] = ""
    is_error: FalseByDefault = False


ContentBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | OtherBlock, BY_TYPE]


class MessageParam(Schema):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | ListOf[ContentBlock]


class ToolParam(Schema):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: str = Function.model_fields["name"]  # type: ignore[assignment]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


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
    tools: ListOf[Annotated[ToolParam | OtherBlock, BY_TYPE]] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None


class Messages(Count, SamplingFields):
    """Body of /v1/messages."""

    max_tokens: int = Field(ge=1, lt=1 << 31)
    stream: FalseByDefault = False
    stop_sequences: Stops | None = None


def chat_of(body: Count, variables: Collection[str]) -> Chat:
    """Converts a Messages body to a chat body, whose `model_extra` names what is left out of the prompt.

    Args:
        variables: the chat template's variables.

    Raises:
        ApiError: 400, fields contradict each other, or a message has an image.
    """
    ignored: dict[str, None] = {}

    def report(name: str) -> None:
        if len(ignored) < MAX_IGNORED_NAMES:
            ignored[name] = None

    turns: list[dict[str, Any]] = []
    if system := _system_text(body.system or "", report):
        turns.append({"role": "system", "content": system})
    for at, turn in enumerate(body.messages):
        turns += _turns(turn, at, report)
    if turns[-1:] == [{"role": "assistant", "content": ""}]:  # Anthropic allows an empty beginning of the answer
        turns.pop()
    chat: dict[str, Any] = {"model": body.model, "messages": turns}
    last = turns[-1] if turns else {}
    chat["continue_final_message"] = last.get("role") == "assistant" and "tool_calls" not in last
    functions = []
    for tool in body.tools or ():
        if isinstance(tool, OtherBlock):
            report(f"tools.{tool.type}")
        else:
            named = tool.model_dump(include={"name", "description", "strict"})
            functions.append({"type": "function", "function": named | {"parameters": tool.input_schema}})
    if functions:
        chat["tools"] = functions
    if (choice := body.tool_choice) is not None:
        forced = {"type": "function", "function": {"name": choice.name or ""}}
        chat["tool_choice"] = {"any": "required", "tool": forced}.get(choice.type, choice.type)
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if body.thinking is not None:
        chat["include_reasoning"] = thinks = body.thinking.type != "disabled"
        chat["chat_template_kwargs"] = {name: thinks for name in THINKING_SWITCHES if name in variables}
    if (config := body.output_config) is not None:
        if any(name in variables for name in EFFORT_VARIABLES):
            chat["reasoning_effort"] = config.effort
        elif config.effort is not None:
            report("output_config.effort")
        if config.format is not None:
            schema = {"name": "answer", "schema": config.format.schema_}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, Messages):
        chat |= {"stream": body.stream, "stop": body.stop_sequences, "max_tokens": body.max_tokens}
        chat |= body.sampling_fields
    return validate_body(Chat, chat | ignored)


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Formats an error as Anthropic does."""
    fields = {"type": KINDS.get(error.status, "invalid_request_error"), "message": error.message}
    return {"type": "error", "error": fields, "request_id": request_id}


def _system_text(system: str | list[TextBlock], report: Report) -> str:
    texts = [system] if isinstance(system, str) else [part.text for part in system]
    for at, text in enumerate(texts):
        if header := CLIENT_HEADER.match(text):
            report(f"system.{text.partition(':')[0]}")
            texts[at] = text[header.end() :]
    return "".join(texts)


def _result_text(result: ToolResultBlock, report: Report) -> str:
    """Returns the text of a result; templates have no field for an error, so that its text has to say so."""
    texts = [result.content] if isinstance(result.content, str) else []
    for part in result.content if isinstance(result.content, list) else ():
        if isinstance(part, OtherBlock):
            report(f"messages.tool_result.{part.type}")
        texts.append(part.replacement if isinstance(part, OtherBlock) else part.text)
    text = "".join(texts)
    return f"Error: {text}" if result.is_error and not SAYS_ERROR.match(text) else text


def _turns(turn: MessageParam, at: int, report: Report) -> list[dict[str, Any]]:
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    turns: list[dict[str, Any]] = []
    message: dict[str, Any] = {}  # collects blocks; the last one of the turns
    for index, part in enumerate(turn.content):
        if not message and not isinstance(part, ToolResultBlock):
            if turns and isinstance(part, TextBlock) and part.text.startswith(REMINDER):
                turns[-1]["content"] += f"\n\n{part.text}"
                continue
            message = {"role": turn.role}
            turns.append(message)
        match part:
            case TextBlock():
                message["content"] = message.get("content", "") + part.text
            case ThinkingBlock():
                message["reasoning_content"] = message.get("reasoning_content", "") + part.thinking
            case ToolUseBlock():
                call = {"name": part.name, "arguments": json.dumps(part.input, ensure_ascii=False)}
                message.setdefault("tool_calls", []).append({"id": part.id, "function": call})
            case ToolResultBlock():
                turns.append({"role": "tool", "tool_call_id": part.tool_use_id, "content": _result_text(part, report)})
                message = {}
            case OtherBlock() if turn.role == "assistant":  # of another model's answer: redacted thinking, searches
                report(f"messages.{part.type}")
            case OtherBlock():
                raise unsupported_content(f"messages.{at}.content.{index}.type", part.type)
    return turns


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

    async def _collected(self) -> dict[str, Any]:
        content = [_content(block) for block in self.blocks]
        for block in content:
            if block["type"] == "thinking":  # clients return only reasoning that has a signature; it is not checked
                block["signature"] = self.answer.request_id
        return self._message(content, **self._end)

    def _start_events(self) -> Iterator[Event]:
        yield {"type": "message_start", "message": self._message([], stop_reason=None, stop_sequence=None)}

    def _heartbeat_events(self) -> Iterator[Event]:
        yield {"type": "ping"}
        if self.blocks:  # Anthropic's clients do not pass pings on to applications, which have time limits of their own
            yield self._delta_event(self.blocks[-1], "")

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
        if block.kind == "thinking":
            signature = {"type": "signature_delta", "signature": self.answer.request_id}
            yield {"type": "content_block_delta", "index": block.index, "delta": signature}
        yield {"type": "content_block_stop", "index": block.index}

    async def _end_events(self) -> AsyncIterator[Event]:
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
    found = parse_arguments(block.text or "{}")
    given = {"arguments": block.text} if found is None else found
    return {"type": "tool_use", "id": block.call, "name": block.name, "input": given}
