"""Detects a checkpoint's chat format: the one that reads back a call that the chat template has written."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import regex

from helix.files import read_json
from launch.answers.answer_parser import Parser
from launch.answers.answer_reader import CALLS
from launch.answers.chat_formats import CHAT_FORMATS, CLOSE_THINK, THINKING_FIELD, ChatFormat, adapted, has_marks
from launch.client.chat_tokenizer import ChatTokenizer
from launch.client.errors import ApiError
from launch.client.schemas import Chat, parse_body

LOG = logging.getLogger(f"helix.{__name__}")
NONE = "none"
MAX_ANCHOR = 128  # characters
MAX_EXPRESSION, MAX_COMPILED = 4096, 1 << 22  # characters of a checkpoint's, alone and times the repetitions
LAST_MARK = regex.compile(r"(?:<[^<>]+>|\[[^\[\]]+\])\s*\Z")
PROBE_LENGTH = 1 << 16  # tokens
# A conversation whose parts are found again in the prompt: a text of digits stays a text, a list and an object do not.
QUESTION, THOUGHT, TEXT, RESULT = "Which lamp is on?", "The list has it.", "I look it up.", "Lamp 7 is on."
NAME = "find_lamp"
ARGUMENTS: dict[str, Any] = {"label": "0042", "rooms": ["hall", "attic"], "options": {"lit": True}}
KINDS = {"label": "string", "rooms": "array", "options": "object"}
PROPERTIES: dict[str, Any] = {name: {"type": kind, "description": name} for name, kind in KINDS.items()}
PROPERTIES["rooms"]["items"] = {"type": "string"}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["label"]}
TOOL = {"type": "function", "function": {"name": NAME, "description": "Finds a lamp.", "parameters": PARAMETERS}}
USER = {"role": "user", "content": QUESTION}
IDS = "a1b2c3d4e", f"functions.{NAME}:0"  # as Mistral's templates want them, and as Kimi's do


class DetectedFormat(NamedTuple):
    """A model's chat format.

    Attributes:
        chat_format: None: answers are not split into reasoning, text and calls.
        reason: how it was chosen, for people.
    """

    chat_format: ChatFormat | None
    reason: str

    @property
    def name(self) -> str | None:
        return None if self.chat_format is None else self.chat_format.name

    @property
    def reads_calls(self) -> bool:
        return self.chat_format is not None and CALLS in self.chat_format.fields


def detect_chat_format(tokenizer: ChatTokenizer, model: str | None, dialect: str | None = None) -> DetectedFormat:
    """Detects the chat format of a checkpoint directory.

    Args:
        dialect: the name of the format, or `none`; None: detect it.

    Raises:
        ValueError: there is no format of this name.
    """
    if dialect == NONE:
        return DetectedFormat(None, "serve.dialect=none")
    template = tokenizer.template
    texts = "".join((template, *tokenizer.added))
    formats = [adapted(one, texts) for one in CHAT_FORMATS]
    if dialect is not None:
        chosen = [one for one in formats if one.name == dialect]
        if not chosen:
            names = ", ".join(one.name for one in formats)
            raise ValueError(f"serve.dialect={dialect} is unknown: use {NONE}, or one of {names}")
        return DetectedFormat(_completed(chosen[0], tokenizer), f"serve.dialect={dialect}")
    model_type = _model_type(model)
    by_marks = [one for one in formats if has_marks(one, template)]
    by_type = [one for one in formats if model_type in one.model_types]
    ordered = [*dict.fromkeys(one.name for one in (*by_marks, *by_type, *formats))]
    if (written := _written_call(tokenizer)) is not None:
        end = _prompt_end(tokenizer, [USER], QUESTION)
        passed = [
            one for one in sorted(formats, key=lambda one: ordered.index(one.name)) if _reads_back(one, written, end)
        ]
        passed.sort(key=lambda one: not _writes_alike(one, written))
        if passed:
            return DetectedFormat(_completed(passed[0], tokenizer), "reads back a call that the chat template writes")
        own = _response_template(model)
        if own is not None and _reads_back(own, written, end):
            return DetectedFormat(_completed(own, tokenizer), "the checkpoint's response_template")
        LOG.warning("no chat format reads back the call that the chat template writes")
    if by_marks:
        return DetectedFormat(_completed(by_marks[0], tokenizer), "marks in the chat template")
    if not template and by_type:
        return DetectedFormat(by_type[0], f"model_type={model_type}")
    return DetectedFormat(None, "no known marks in the chat template" if template else "no chat template")


def _model_type(model: str | None) -> str | None:
    file = None if model is None else Path(model) / "config.json"
    if file is None or not file.exists():
        return None
    config = read_json(file)
    text_part = config.get("text_config")
    found = config.get("model_type") or (text_part.get("model_type") if isinstance(text_part, dict) else None)
    return found if isinstance(found, str) else None


def _render(tokenizer: ChatTokenizer, messages: list[Any], tools: bool = False, begins: bool = True) -> str | None:
    """Returns the prompt of a conversation; None if the chat template rejects it."""
    body = {"messages": messages, "add_generation_prompt": begins} | ({"tools": [TOOL]} if tools else {})
    try:
        chat = parse_body(Chat, json.dumps(body).encode())
        return tokenizer.encode_chat(chat, chat.prompt_tools, PROBE_LENGTH)[1]
    except ApiError:
        return None


def _call_turns(call_id: str, thinks: bool = True) -> list[dict[str, Any]]:
    call = {"id": call_id, "type": "function", "function": {"name": NAME, "arguments": json.dumps(ARGUMENTS)}}
    thought = {"reasoning_content": THOUGHT} if thinks else {}
    result = {"role": "tool", "tool_call_id": call_id, "name": NAME, "content": RESULT}
    return [USER, {"role": "assistant", "content": TEXT, "tool_calls": [call]} | thought, result]


def _written_call(tokenizer: ChatTokenizer) -> str | None:
    """Returns what the chat template writes between a question and the result of the call that answers it."""
    for call_id, thinks in product(IDS, (True, False)):
        text = _render(tokenizer, _call_turns(call_id, thinks), tools=True)
        if text is not None and QUESTION in text and RESULT in text:
            written = text[text.rindex(QUESTION) + len(QUESTION) : text.rindex(RESULT)]
            if NAME in written and ARGUMENTS["label"] in written:
                return written
    return None


class _PromptEnd(NamedTuple):
    """The end of a prompt: what the template adds for an answer, and all text after the last message."""

    added: str
    rest: str

    def start(self, chat_format: ChatFormat) -> str:
        """Returns the text that begins an answer, before marks of reasoning; empty if it is not known."""
        found = _before_thought(chat_format, self.added)
        if not found and (mark := LAST_MARK.search(_before_thought(chat_format, self.rest))) is not None:
            found = mark[0]
        return found if len(found) <= MAX_ANCHOR else ""


def _prompt_end(tokenizer: ChatTokenizer, messages: list[Any], last: str) -> _PromptEnd:
    tools = len(messages) > 1
    text, without = _render(tokenizer, messages, tools), _render(tokenizer, messages, tools, begins=False)
    if text is None or last not in text:
        return _PromptEnd("", "")
    added = text.removeprefix(without) if without is not None and text.startswith(without) else ""
    return _PromptEnd(added, text[text.rindex(last) + len(last) :])


def _reads_back(chat_format: ChatFormat, written: str, end: _PromptEnd) -> bool:
    """Returns whether a format reads the probe's call, thought and text in what the template has written."""
    begin, before_call = 0, written[: written.index(NAME)]  # the text next to the call may have a turn before it
    for start in (*chat_format.anchors, end.start(chat_format)):
        if start and start in before_call:
            begin = before_call.rindex(start) + len(start)
            break
    answer = written[begin:]
    try:
        parser = Parser(chat_format.fields, "", [TOOL])
        parts = [*parser.feed(answer), *parser.finish()]
    except (regex.error, RecursionError):  # an expression of the checkpoint's is invalid
        return False
    calls = [(part.name, part.text) for part in parts if part.kind == "call"]
    if len(calls) != 1 or calls[0][0] != NAME or json.loads(calls[0][1]) != ARGUMENTS:
        return False
    said = {kind: "".join(part.text for part in parts if part.kind == kind) for kind in ("content", THINKING_FIELD)}
    thought_is_read = THOUGHT not in said["content"] or chat_format.thinking_marks is None
    return thought_is_read and (TEXT not in answer or any(TEXT in text for text in said.values()))


def _writes_alike(chat_format: ChatFormat, written: str) -> bool:
    """Returns whether forced calls of a format begin as the template writes them."""
    if (calls := chat_format.calls) is None:
        return False
    head = calls.call.split("ARGUMENTS")[0].replace("NAME", NAME).split("INDEX")[0]
    if calls.argument is None:
        return head in written
    start = calls.argument.split("VALUE")[0]
    return any(head + start.replace("KEY", key).replace("KIND", "true") in written for key in ARGUMENTS)


def _completed(chat_format: ChatFormat, tokenizer: ChatTokenizer) -> ChatFormat:
    """Adds what the chat template says of a format: where answers begin, and whether they may have reasoning."""
    if chat_format.thinking_marks is None and all(mark in tokenizer.template for mark in CLOSE_THINK[:2]):
        thought = {THINKING_FIELD: {"open": CLOSE_THINK[0], "close": CLOSE_THINK[1]}}
        chat_format = replace(chat_format, fields=chat_format.fields | thought, thinking_marks=CLOSE_THINK)
    ends = [_prompt_end(tokenizer, [USER], QUESTION)]
    ends += [_prompt_end(tokenizer, _call_turns(call_id), RESULT) for call_id in IDS]
    anchors = dict.fromkeys(start for end in ends if (start := end.start(chat_format)))
    return replace(chat_format, anchors=tuple(anchors) or chat_format.anchors)


def _before_thought(chat_format: ChatFormat, anchor: str) -> str:
    """Returns the part of a text before the marks of reasoning."""
    for mark in (chat_format.thinking_marks or ())[:2]:
        anchor = anchor.partition(mark.strip())[0]
    return anchor.strip()


def _compiled_size(expression: str) -> int:
    """Returns a bound: compiling nested counts of repetitions may take all memory."""
    return len(expression) * math.prod(max(1, int(count)) for count in regex.findall(r"\d+(?=[\d,]*\})", expression))


def _response_template(model: str | None) -> ChatFormat | None:
    """Returns the format in a checkpoint's `response_template`; None if it has none that is supported.

    Supported is content in JSON, or in text for reasoning.
    """
    file = None if model is None else Path(model) / "tokenizer_config.json"
    given = read_json(file).get("response_template") if file is not None and file.exists() else None
    given = given if isinstance(given, dict) else {}
    fields = given.get("fields")
    if not isinstance(fields, dict) or not isinstance(calls := fields.get(CALLS), dict):
        return None
    opener, closer = (
        calls.get(f"{mark}_pattern", regex.escape(str(calls.get(mark, "")))) for mark in ("open", "close")
    )
    if calls.get("content") != "json" or not opener or calls.get("content_args", {}).keys() - {"allow_non_json"}:
        LOG.warning("the checkpoint's response_template is not supported: its calls are not JSON between marks")
        return None
    if any(len(one) > MAX_EXPRESSION or _compiled_size(one) > MAX_COMPILED for one in (opener, closer)):
        LOG.warning("the checkpoint's response_template is not supported: an expression is too large")
        return None
    reads = {"open_pattern": opener, "content": "json", "limited": True} | ({"close_pattern": closer} if closer else {})
    known: dict[str, Any] = {"content": {}, CALLS: reads}
    thought = fields.get(THINKING_FIELD)
    marks = None
    if isinstance(thought, dict) and {"open", "close"} <= thought.keys():
        marks = (str(thought["open"]), str(thought["close"]), "")
        known[THINKING_FIELD] = {"open": marks[0], "close": marks[1]}
    anchor = given.get("start_anchor")
    return ChatFormat("response_template", (), known, (anchor,) if isinstance(anchor, str) else (), None, marks)
