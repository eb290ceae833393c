"""Parses chat answers into reasoning, text and calls, by a chat format."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.answers.answer_reader import CALLS, AnswerReader, Event
from launch.answers.arguments import read_arguments
from launch.answers.call_bodies import SPACE, json_values
from launch.answers.chat_formats import AT_ONCE, LIST_OF_CALLS, THINKING_FIELD

TEXTS = ("content", "unnamed")  # fields of a response template
LINE_BREAKS = r"\n{0,2}"  # after reasoning


@dataclass
class AnswerPart:
    """A part of an answer: `kind` is content, thinking or call; the `text` of a call is its complete arguments."""

    kind: str
    text: str
    name: str = ""
    id: str = ""


class Parser:
    """Incremental parser of one answer's text.

    Args:
        fields: of the chat format; None: all text is content.
        turn: the end of the prompt from `assistant_turn`.
        tools: callable tools in OpenAI's format; without any, calls are content.
        many: whether several calls are allowed; if not, text after the first call is dropped.

    Attributes:
        calls: number of tool calls so far.
        allows_several: `many`.
    """

    def __init__(
        self, fields: Mapping[str, Any] | None, turn: str, tools: Sequence[Mapping[str, Any]], many: bool = True
    ) -> None:
        self.calls = 0
        self.allows_several = many
        self._reader: AnswerReader | None = None
        self._functions = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        self._written = False  # whether arguments are written one by one, as text or as JSON
        self._kind = ""  # kind of the last part
        self._spaces, self._spaced = "", ""  # held back trailing spaces, and the kind of the text that they follow
        self._held = 0  # characters of the turn that may begin a mark: the reader returns them with the answer's first
        if fields is not None:
            self._written = "argument_pattern" in fields.get(CALLS, {})
            fields = _markup(fields, bool(tools))
            self._reader = AnswerReader(fields, turn)
            self._parts(self._reader.turn_events)
            self.calls, self._spaces = 0, ""  # spaces after the prompt belong to the answer
            held = AnswerReader(fields, turn).end(False)
            self._held = sum(len(event.text) for event in held if event.kind == "text")

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the text must include special tokens, which mark parts of the answer."""
        return self._reader is not None

    @property
    def is_complete(self) -> bool:
        return self.calls > 0 and not self.allows_several

    def feed(self, text: str) -> list[AnswerPart]:
        if self._reader is None:
            return [AnswerPart("content", text)] if text else []
        return self._parts(self._reader.feed(text))

    def finish(self, cut: bool = False) -> list[AnswerPart]:
        """Returns the parts that were held back.

        Args:
            cut: whether the answer was cut off: an unclosed call is then text.
        """
        if self._reader is None:
            return []
        parts = self._parts(self._reader.end(cut))
        if self._spaces and self._spaced == "content" and self._kind != "call" and not self.is_complete:
            parts.append(AnswerPart("content", self._spaces))
        return parts

    def _parts(self, events: Sequence[Event]) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for event in events:
            if self.is_complete:
                break
            kind = "content" if event.field in TEXTS else event.field
            if event.kind != "text":
                self._held = 0
                parts += self._call_parts(event) if (event.kind, kind) == ("close", CALLS) else []
            elif kind in ("content", THINKING_FIELD):
                held, self._held = self._held, max(0, self._held - len(event.text))
                parts += self._text_part(kind, event.text[held:])
        return parts

    def _text_part(self, kind: str, text: str) -> list[AnswerPart]:
        """Returns text as a part; holds back trailing spaces: markup if a call or the end of reasoning follows."""
        if kind != self._spaced:
            self._spaces, self._spaced = "", kind
        if kind != self._kind and (kind == THINKING_FIELD or self._kind == "call"):
            text = text.lstrip()
        text = self._spaces + text
        kept = text.rstrip()
        self._spaces = text[len(kept) :]
        if not kept:
            return []
        self._kind = kind
        return [AnswerPart(kind, kept)]

    def _call_parts(self, event: Event) -> list[AnswerPart]:
        value = event.value
        found = value if isinstance(value, list) else [value]
        calls = [_function(self._typed(one)) for one in found]
        # Without a mark that starts a call, the name of a tool identifies it.
        known = event.head.strip() or all(call is not None and call[0] in self._functions for call in calls)
        if not calls or None in calls or not known:  # not a call
            return self._text_part("content", event.text)
        calls = calls if self.allows_several else calls[:1]
        self._kind, self._spaces = "call", ""
        self.calls += len(calls)
        return [_call_part(*call, event.call_id) for call in filter(None, calls)]

    def _typed(self, call: Any) -> Any:
        function = call.get("function") if self._written and isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
            parameters = self._functions.get(str(function.get("name")))
            function["arguments"] = read_arguments(function["arguments"], parameters)
        return call


class JsonCallParser(Parser):
    """Parser of an answer that is calls in plain JSON after optional reasoning; returns the calls at the end.

    Args:
        fields: of the chat format, for reasoning.
        function: the function whose arguments the answer is; None: the answer is a list of calls.
    """

    def __init__(self, fields: Mapping[str, Any] | None, turn: str, function: str | None) -> None:
        super().__init__(fields, turn, [])
        self._function = function
        self._content = ""

    def feed(self, text: str) -> list[AnswerPart]:
        return self._thinking_parts(super().feed(text))

    def finish(self, cut: bool = False) -> list[AnswerPart]:
        parts, text = self._thinking_parts(super().finish(cut)), self._content.strip()
        if self._function is not None:
            values, end = json_values(text, 0, "")
            calls = [(self._function, text[:end])] if values else []
        else:
            values, end = json_values(text, len(LIST_OF_CALLS.before), LIST_OF_CALLS.between or "")
            calls = [*filter(None, map(_function, values))]
        self.calls = len(calls)
        rest = text[end if calls else 0 :].removeprefix((LIST_OF_CALLS.between or "").strip()).lstrip()
        if rest not in ("", LIST_OF_CALLS.after):  # cut off within a call
            parts.append(AnswerPart("content", rest))
        return [*parts, *(_call_part(*call) for call in calls)]

    def _thinking_parts(self, parts: list[AnswerPart]) -> list[AnswerPart]:
        self._content += "".join(part.text for part in parts if part.kind == "content")
        return [part for part in parts if part.kind != "content"]


def _markup(given: Mapping[str, Any], tools: bool) -> dict[str, Any]:
    """Adapts the fields of a format for a reader: reasoning begins the answer, and its end includes line breaks."""
    fields = {name: field for name, field in given.items() if tools or name != CALLS}
    if "open" not in (thought := fields.get(THINKING_FIELD, {})):
        return fields
    close = re.escape(thought["close"])
    ahead = f"|(?={thought['ahead']})" if tools and "ahead" in thought else ""
    fields[THINKING_FIELD] = {
        "open_pattern": rf"\A{SPACE}{re.escape(thought['open'])}",
        "close_pattern": rf"{close}{thought.get('after_pattern', LINE_BREAKS)}{ahead}",
    }
    # Some models close reasoning again that the prompt has closed.
    return fields | {
        "closed": {"open_pattern": rf"\A{SPACE}{close}{LINE_BREAKS}", "close_pattern": AT_ONCE, "blank": True}
    }


def _call_part(name: str, arguments: str, call_id: str | None = None) -> AnswerPart:
    # Half of a surrogate pair, which UTF-8 cannot have, stays the escape that the model wrote.
    name, arguments = (text.encode(errors="backslashreplace").decode() for text in (name, arguments))
    return AnswerPart("call", arguments, name, call_id or f"call_{uuid.uuid4().hex[:24]}")


def _function(value: Any) -> tuple[str, str] | None:
    """Returns name and JSON arguments of a call; None if it is not a call."""
    if not isinstance(value, dict):
        return None
    function = inner if isinstance(inner := value.get("function"), dict) else value
    arguments = function.get("arguments", function.get("parameters"))
    if not isinstance(function.get("name"), str) or arguments is None:
        return None
    if isinstance(arguments, str):
        return function["name"], arguments
    try:
        return function["name"], json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):  # infinity, a Python literal such as a set, or too many levels
        return None
