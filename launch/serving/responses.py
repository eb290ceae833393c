"""OpenAI's Responses API, converted to and from chats."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from launch.client.answer import Answer
from launch.client.errors import ApiError
from launch.client.schemas import Chat, validate_body
from launch.serving.content_blocks import Block, BlockAnswer, Event, parse_arguments
from launch.serving.response_items import (
    CUSTOM_INPUT,
    CallOutputItem,
    CustomTool,
    CustomToolCallItem,
    FunctionCallItem,
    FunctionChoice,
    FunctionTool,
    Item,
    ItemReference,
    ItemsQuery,
    LeftOutContent,
    MessageItem,
    OtherItem,
    ReasoningContent,
    ReasoningItem,
    RefusalContent,
    Responses,
    StoredItems,
    TextContent,
    full_name,
)

INCOMPLETE = {"reason": "max_output_tokens"}


def convert(body: Responses, previous: Sequence[bytes], referenced: Mapping[str, bytes]) -> tuple[Chat, bytes]:
    """Converts a Responses body to a chat body; returns it, and the items as JSON if its answer is to be stored.

    Args:
        previous: the items of the conversation that it continues, as JSON lists.
        referenced: a JSON list with the item, by the id of each reference.

    Raises:
        ApiError: 400, fields contradict each other; 404, a referenced item is not stored.
    """
    items = [_resolve(item, referenced) if isinstance(item, ItemReference) else item for item in body.items]
    before = [item for stored in previous for item in _stored_items(stored)]
    chat = chat_of(body, before + items)
    dumped = [item.model_dump(exclude_none=True) for item in items] if body.store else []
    try:
        return chat, json.dumps(dumped, allow_nan=False).encode()
    except ValueError as error:
        raise ApiError(400, "input must be JSON, which has no NaN or Infinity", param="input") from error


def _stored_items(stored: bytes) -> list[Item]:
    return StoredItems.model_validate_json(b'{"items":' + stored + b"}").items


def _resolve(reference: ItemReference, referenced: Mapping[str, bytes]) -> Item:
    for item in _stored_items(referenced[reference.id]):
        if (item.model_extra or {}).get("id") == reference.id:
            return item
    what = f"item_reference {reference.id!r:.80} is not in its response: send the item itself"
    raise ApiError(404, what, param="input", code="item_not_found")


def list_items(name: str, stored: Sequence[bytes], page: ItemsQuery) -> dict[str, Any]:
    """Lists the items of a conversation as OpenAI's `input_items` does, a page at a time.

    Args:
        name: id of the response.
        stored: the items, as JSON lists.

    Raises:
        ApiError: 400, the page is to begin after an item that is not there.
    """
    items = [item for part in stored for item in json.loads(part)]
    for at, item in enumerate(items):
        item.setdefault("id", f"item_{name.removeprefix('resp_')}_{at}")
        if isinstance(text := item.get("content"), str):
            kind = "output_text" if item.get("role") == "assistant" else "input_text"
            item["content"] = [{"type": kind, "text": text}]
    if page.order == "desc":
        items.reverse()
    begin = 0
    if page.after is not None:
        begin = next((at + 1 for at, item in enumerate(items) if item["id"] == page.after), 0)
        if begin == 0:
            what = f"after={page.after!r:.80} is not an item of this response: send the last_id of a page"
            raise ApiError(400, what, param="after")
    found = items[begin : begin + page.limit]
    listed: dict[str, Any] = {"object": "list", "data": found, "has_more": begin + page.limit < len(items)}
    return listed | {"first_id": found[0]["id"] if found else None, "last_id": found[-1]["id"] if found else None}


def chat_of(body: Responses, items: Sequence[Item] | None = None) -> Chat:
    """Converts a Responses body to a chat body.

    Args:
        items: the conversation; None: the body's input.

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
    for item in body.items if items is None else items:
        _add(turns, item)
    if not turns:
        raise ApiError(400, "input has no message: all of its items are of types that are left out", param="input")
    chat: dict[str, Any] = {"model": body.model, "messages": turns, "max_tokens": body.max_output_tokens}
    chat |= {"stream": body.stream, "parallel_tool_calls": body.parallel_tool_calls}
    chat |= {"chat_template_kwargs": body.chat_template_kwargs} | body.sampling_fields
    if functions := body.functions:
        chat["tools"] = [
            {"type": "function", "function": _function(tool) | {"name": name}} for name, (tool, _) in functions
        ]
    chat["tool_choice"] = choice = body.tool_choice
    if isinstance(choice, FunctionChoice):
        name = full_name(choice.name, choice.namespace)
        chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    chat["reasoning_effort"] = body.reasoning.effort if body.reasoning is not None else None
    if body.text is not None and (wanted := body.text.format) is not None:
        schema = {"json_schema": {"name": wanted.name or "answer", "schema": wanted.schema_}}
        chat["response_format"] = {"type": wanted.type} | (schema if wanted.type == "json_schema" else {})
    return validate_body(Chat, chat)


def _function(tool: FunctionTool | CustomTool) -> dict[str, Any]:
    return tool.function if isinstance(tool, CustomTool) else tool.model_dump(exclude={"type"}, exclude_none=True)


def _add(turns: list[dict[str, Any]], item: Item) -> None:
    """Adds an item to a conversation; consecutive reasoning, text and calls of the assistant become one message."""
    match item:
        case OtherItem():
            return
        case CallOutputItem():
            turns.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            return
        case MessageItem() if item.role != "assistant":
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
        case FunctionCallItem() | CustomToolCallItem():
            call = {"name": full_name(item.name, item.namespace), "arguments": item.json_arguments}
            last.setdefault("tool_calls", []).append({"id": item.call_id, "function": call})


def _text(content: str | Sequence[TextContent | RefusalContent | LeftOutContent | ReasoningContent]) -> str:
    return content if isinstance(content, str) else "".join(piece.text for piece in content)


class ResponsesAnswer(BlockAnswer):
    """An answer in the format of OpenAI's Responses.

    Args:
        store: called at the end with the response.
    """

    def __init__(self, answer: Answer, body: Responses, store: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        super().__init__(answer)
        self._body = body
        self._functions = dict(body.functions)
        self._store = store
        self._number = 0  # sequence number of the next event

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        body = self._body
        given = body.model_dump(include={"instructions", "max_output_tokens", "parallel_tool_calls", "temperature"})
        choice = body.tool_choice.model_dump() if isinstance(body.tool_choice, FunctionChoice) else body.tool_choice
        wanted = body.text.format if body.text is not None else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self.answer.created,
            "status": status,
            "model": self.answer.model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "metadata": body.metadata or {},
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
            "store": body.store,
            "text": {"format": {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True)},
            "tool_choice": choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": body.top_p,
            "truncation": "disabled",
            **given,
            **more,
        }

    async def _collected(self) -> dict[str, Any]:
        usage = self.answer.usage()
        output = [self._item(block, self._status(block)) for block in self.blocks]
        response = self._response(
            "incomplete" if self._is_incomplete else "completed",
            output=output,
            incomplete_details=INCOMPLETE if self._is_incomplete else None,
            usage={
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
                "total_tokens": usage["total_tokens"],
            },
        )
        if self._body.store:
            await self._store(response)
        return response

    @property
    def _id(self) -> str:
        return f"resp_{self.answer.request_id}"

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

    def _item_id(self, block: Block) -> str:
        prefix = "ctc" if self._is_custom(block) else PREFIXES[block.kind]
        return f"{prefix}_{self.answer.request_id}_{block.index}"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        item_id = self._item_id(block)
        match block.kind:
            case "call":
                tool, namespace = self._functions.get(block.name, (None, None))
                called = {"call_id": block.call, "name": block.name if tool is None else tool.name}
                called |= {} if namespace is None else {"namespace": namespace}
                if isinstance(tool, CustomTool):
                    custom = {"id": item_id, "type": "custom_tool_call", "status": status}
                    return custom | called | {"input": _custom_input(block.text)}
                item = {"id": item_id, "type": "function_call", "status": status}
                return item | called | {"arguments": block.text}
            case "thinking":
                thought = {"id": item_id, "type": "reasoning", "summary": [], "status": status}
                return thought | {"content": [_content_part(block)] if block.text else []}
        said = {"id": item_id, "type": "message", "role": "assistant", "status": status}
        return said | {"content": [_content_part(block)] if block.text else []}

    def _part_event(self, kind: str, block: Block, **more: Any) -> Event:
        where = {} if block.kind == "call" else {"content_index": 0}
        item_id = self._item_id(block)
        return {"type": f"response.{kind}", "item_id": item_id, "output_index": block.index} | where | more

    def _start_events(self) -> Iterator[Event]:
        yield {"type": "response.created", "response": self._response("in_progress")}
        yield {"type": "response.in_progress", "response": self._response("in_progress")}

    def _heartbeat_events(self) -> Iterator[Event]:
        yield {"type": "response.in_progress", "response": self._response("in_progress")}

    def _block_start_events(self, block: Block) -> Iterator[Event]:
        item = self._item(block, "in_progress")
        yield {"type": "response.output_item.added", "output_index": block.index, "item": item}
        if block.kind != "call":
            yield self._part_event("content_part.added", block, part=_content_part(block))

    def _delta_event(self, block: Block, text: str) -> Event:
        if self._is_custom(block):  # calls come whole
            return self._part_event("custom_tool_call_input.delta", block, delta=_custom_input(text))
        more: dict[str, Any] = {"logprobs": []} if block.kind == "content" else {}
        return self._part_event(f"{STREAMS[block.kind]}.delta", block, delta=text, **more)

    def _is_custom(self, block: Block) -> bool:
        called = self._functions.get(block.name) if block.kind == "call" else None
        return called is not None and isinstance(called.tool, CustomTool)

    def _block_stop_events(self, block: Block) -> Iterator[Event]:
        match block.kind:
            case "call" if self._is_custom(block):
                yield self._part_event("custom_tool_call_input.done", block, input=_custom_input(block.text))
            case "call":
                name = self._item(block, "completed")["name"]
                yield self._part_event("function_call_arguments.done", block, name=name, arguments=block.text)
            case "thinking":
                yield self._part_event("reasoning_text.done", block, text=block.text)
            case _:
                yield self._part_event("output_text.done", block, text=block.text, logprobs=[])
        if block.kind != "call":
            yield self._part_event("content_part.done", block, part=_content_part(block))
        item = self._item(block, self._status(block))
        yield {"type": "response.output_item.done", "output_index": block.index, "item": item}

    async def _end_events(self) -> AsyncIterator[Event]:
        response = await self._collected()
        yield {"type": f"response.{response['status']}", "response": response}

    def _error_event(self, error: ApiError) -> Event:
        error_object = {"code": "server_error", "message": error.message}
        return {"type": "response.failed", "response": self._response("failed", error=error_object)}

    def _encode(self, event: Event) -> bytes:
        self._number += 1
        return super()._encode(event | {"sequence_number": self._number - 1})


STREAMS = {"content": "output_text", "thinking": "reasoning_text", "call": "function_call_arguments"}
PREFIXES = {"content": "msg", "thinking": "rs", "call": "fc"}  # of ids


def _content_part(block: Block) -> dict[str, Any]:
    if block.kind == "thinking":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _custom_input(arguments: str) -> str:
    """Returns a custom tool's input from the arguments of its function; other text is the input itself."""
    given = (parse_arguments(arguments) or {}).get(CUSTOM_INPUT)
    return given if isinstance(given, str) else arguments
