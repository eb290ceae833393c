"""Formats in which model families write reasoning and tool calls, as data, and a parser of chat answers."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launch.answers.answer_reader import CALLS, AnswerReader, Event, json_values
from launch.answers.arguments import read_arguments

THINKING = {"open": "<think>", "close": "</think>"}
AT_ONCE = r"(?=[\s\S])"  # closes a region at once, for marks without content
AFTER_CALLS = {"open": "<｜tool▁calls▁end｜>", "close_pattern": AT_ONCE}
JSON = {"content": "json"}
THINKING_FIELD = "thinking"  # fields of a response template
TEXTS = ("content", "unnamed")
NO_ANCHOR = "\0"  # for a template without an anchor

THINK_MARKS = ("<think>", "</think>", "\n\n")


@dataclass(frozen=True)
class ToolCallFormat:
    """A chat format's syntax of tool calls, for answers that must be calls.

    Attributes:
        call: one call, with NAME and ARGUMENTS.
        before, after: texts around all calls.
        between: text between two calls; None allows only one call.
        argument: one argument, with KEY and VALUE; None: ARGUMENTS is a JSON object.
    """

    call: str
    before: str = ""
    after: str = ""
    between: str | None = None
    argument: str | None = None


@dataclass(frozen=True)
class ChatFormat:
    """A model family's syntax of messages.

    Attributes:
        marks: texts that all of its chat templates contain.
        template: `start_anchor` begins the turn; `fields` are for `AnswerReader`: content, thinking, tool_calls.
        calls: syntax of tool calls; None if there is none.
        thinking_marks: marks around reasoning before the answer, and the text after it; None: no reasoning.
        content_prefix: text before an answer's content.
    """

    name: str
    marks: tuple[str, ...]
    template: dict[str, Any]
    calls: ToolCallFormat | None = None
    thinking_marks: tuple[str, str, str] | None = None
    content_prefix: str = ""


def _fields(anchor: str, **fields: dict[str, Any]) -> dict[str, Any]:
    return {"start_anchor": anchor, "fields": {"content": {}} | fields}


# The first format whose marks are all in the chat template applies.
CHAT_FORMATS = (
    ChatFormat(
        "gpt-oss",
        ("<|channel|>", "<|start|>"),
        {
            "start_anchor": "<|start|>assistant",
            "fields": {
                "content": {},  # text outside of messages
                "thinking": {
                    "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
                    "close_pattern": r"<\|end\|>",
                },
                "tool_calls": {
                    "open_pattern": r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)? ?"
                    r"to=(?:functions\.)?(?P<name>[\w.-]+)(?:<\|channel\|>\w+)?"
                    r" ?(?:<\|constrain\|>)?\w*<\|message\|>",
                    "close_pattern": r"<\|call\|>",
                    **JSON,
                },
                # Messages of other channels; of fields whose marks match the same text, the first by name wins.
                "unnamed": {
                    "open_pattern": r"(?:<\|start\|>assistant)?(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?"
                    r"<\|message\|>",
                    "close_pattern": r"<\|end\|>|<\|return\|>|<\|call\|>",
                },
                "nothing": {  # the head of a truncated message
                    "open_pattern": r"<\|start\|>(?:assistant)?(?:<\|channel\|>[^<]*)?\Z|<\|channel\|>[^<]*\Z",
                    "close_pattern": AT_ONCE,
                },
            },
        },
        ToolCallFormat("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS"),
        ("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant"),
        "<|channel|>final<|message|>",
    ),
    ChatFormat(
        "qwen3-coder",
        ("<tool_call>", "<function="),
        _fields(
            "<|im_start|>assistant\n",
            thinking=THINKING,
            tool_calls={
                "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                "close_pattern": r"</function>\s*(?:</tool_call>|\Z)",
                # A value may contain its closing mark: it ends at one followed by the next argument or by nothing.
                "argument_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?"
                r"(?:</parameter>(?=\s*(?:<parameter=|\Z))|\Z)",
                "argument_end": "</parameter>",
            },
        ),
        ToolCallFormat(
            "<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>",
            between="\n",
            argument="<parameter=KEY>\nVALUE\n</parameter>\n",
        ),
        THINK_MARKS,
    ),
    ChatFormat(
        "qwen",
        ("<tool_call>",),
        _fields(
            "<|im_start|>assistant\n",
            thinking=THINKING,
            tool_calls={"open": "<tool_call>", "close": "</tool_call>", **JSON},
        ),
        ToolCallFormat('<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>', between="\n"),
        THINK_MARKS,
    ),
    ChatFormat(
        "mistral",
        ("[TOOL_CALLS]", "[ARGS]"),
        _fields(
            "[/INST]",
            thinking={"open": "[THINK]", "close": "[/THINK]"},
            tool_calls={
                "open_pattern": r"\[TOOL_CALLS\](?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]",
                "close_pattern": r"(?=\[TOOL_CALLS\])",
                **JSON,
            },
        ),
        ToolCallFormat("[TOOL_CALLS]NAME[ARGS]ARGUMENTS", between=""),
        ("[THINK]", "[/THINK]", ""),
    ),
    ChatFormat(
        "mistral-list",
        ("[TOOL_CALLS]",),
        _fields(
            "[/INST]",
            tool_calls={"open": "[TOOL_CALLS]", **JSON},
        ),
        ToolCallFormat('{"name": "NAME", "arguments": ARGUMENTS}', before="[TOOL_CALLS] [", between=", ", after="]"),
    ),
    ChatFormat(
        "deepseek-v3.1",
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "thinking"),
        _fields(
            "<｜Assistant｜>",
            thinking=THINKING,
            nothing=AFTER_CALLS,
            tool_calls={
                "open_pattern": r"(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>(?P<name>[^<]+?)<｜tool▁sep｜>",
                "close_pattern": r"<｜tool▁call▁end｜>",
                **JSON,
            },
        ),
        ToolCallFormat(
            "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>",
            before="<｜tool▁calls▁begin｜>",
            between="",
            after="<｜tool▁calls▁end｜>",
        ),
        ("<think>", "</think>", ""),
    ),
    ChatFormat(
        "deepseek",
        ("<｜tool▁call▁begin｜>",),
        _fields(
            "<｜Assistant｜>",
            thinking=THINKING,
            nothing=AFTER_CALLS,
            tool_calls={
                "open_pattern": r"(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
                r"(?P<name>[^\n]+)\n```json\n",
                "close_pattern": r"\n?```\s*<｜tool▁call▁end｜>",
                **JSON,
            },
        ),
        ToolCallFormat(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
            before="<｜tool▁calls▁begin｜>",
            between="\n",
            after="<｜tool▁calls▁end｜>",
        ),
        THINK_MARKS,
    ),
    ChatFormat(
        "llama3",
        ("<|start_header_id|>", "ipython"),
        _fields(
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            tool_calls={
                "open_pattern": r"\A\s*(?:<\|python_tag\|>)?(?=\s*\{)",
                **JSON,
            },
        ),
        ToolCallFormat('{"name": "NAME", "parameters": ARGUMENTS}'),
    ),
    ChatFormat(
        "thinking", ("<think>",), _fields(NO_ANCHOR, thinking=THINKING), thinking_marks=("<think>", "</think>", "")
    ),
)


# For models without a known syntax of calls, as in vLLM: only a function's arguments, or a list of calls.
ARGUMENTS_ALONE = ToolCallFormat("ARGUMENTS")
LIST_OF_CALLS = ToolCallFormat('{"name": "NAME", "parameters": ARGUMENTS}', before="[", between=", ", after="]")


def find_chat_format(template: str) -> ChatFormat | None:
    """Returns the format of a chat template; None if it is unknown."""
    return next((d for d in CHAT_FORMATS if all(mark in template for mark in d.marks)), None)


def required_call_format(chat_format: ChatFormat | None, named: bool) -> ChatFormat:
    """Returns the format of an answer that must be calls: the model's, or plain JSON if the model's has no calls.

    Args:
        named: whether the request names the function.
    """
    if chat_format is not None and chat_format.calls is not None:
        return chat_format
    return replace(chat_format or ChatFormat("plain", (), {}), calls=ARGUMENTS_ALONE if named else LIST_OF_CALLS)


def assistant_turn(template: dict[str, Any], prompt: str, continued: str | None = None) -> str:
    """Returns the end of a prompt that belongs to the assistant's turn.

    Args:
        template: the response template.
        continued: the message that the answer continues; None: the answer starts a message.
    """
    _, found, turn = prompt.rpartition(template["start_anchor"])
    said = (continued or "").strip()
    if said and said in prompt and not (found and said in turn):  # the message itself may contain the anchor
        return prompt[prompt.rindex(said) :]
    if found:
        return turn
    # Without an anchor, a prompt ends at most with marks that open or close reasoning; earlier text may be a user's.
    thought = template["fields"].get(THINKING_FIELD, {})
    begin, end = (re.escape(thought.get(mark, NO_ANCHOR)) for mark in ("open", "close"))
    turn_begun = re.search(rf"(?:{begin}\s*(?:{end})?|{end})?\s*\Z", prompt)
    return turn_begun[0] if turn_begun else ""


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
        template: the response template; None: all text is content.
        turn: the end of the prompt from `assistant_turn`.
        tools: callable tools in OpenAI's format; without any, calls are content.
        many: whether several calls are allowed; if not, text after the first call is dropped.

    Attributes:
        calls: number of tool calls so far.
    """

    def __init__(
        self, template: dict[str, Any] | None, turn: str, tools: Sequence[Mapping[str, Any]], many: bool = True
    ) -> None:
        self.calls = 0
        self._allow_several = many
        self._reader: AnswerReader | None = None
        self._functions = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        self._written = False  # whether arguments are written one by one, as text or as JSON
        self._kind = ""  # kind of the last part
        self._spaces, self._spaced = "", ""  # held back trailing spaces, and the kind of the text that they follow
        self._held = 0  # characters of the turn that may begin a mark: the reader returns them with the answer's first
        if template is not None:
            fields = _markup({name: f for name, f in template["fields"].items() if tools or name != CALLS})
            self._reader = AnswerReader(fields, turn)
            self._written = "argument_pattern" in template["fields"].get(CALLS, {})
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
        return self.calls > 0 and not self._allow_several

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
        calls = [_function(self._typed(one)) for one in (value if isinstance(value, list) else [value])]
        # Without a mark that starts a call, the name of a tool identifies it.
        known = event.head.strip() or all(call is not None and call[0] in self._functions for call in calls)
        if not calls or None in calls or not known:  # not a call
            return self._text_part("content", event.text)
        calls = calls if self._allow_several else calls[:1]
        self._kind, self._spaces = "call", ""
        self.calls += len(calls)
        return [_call_part(*call) for call in filter(None, calls)]

    def _typed(self, call: Any) -> Any:
        function = call.get("function") if self._written and isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
            parameters = self._functions.get(str(function.get("name")))
            function["arguments"] = read_arguments(function["arguments"], parameters)
        return call


class JsonCallParser(Parser):
    """Parser of an answer that is calls in plain JSON after optional reasoning; returns the calls at the end.

    Args:
        template: the response template, for reasoning.
        function: the function whose arguments the answer is; None: the answer is a list of calls.
    """

    def __init__(self, template: dict[str, Any] | None, turn: str, function: str | None) -> None:
        super().__init__(template, turn, [])
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
        rest = text[end if calls else 0 :].removeprefix(LIST_OF_CALLS.between or "")
        if rest not in ("", LIST_OF_CALLS.after):  # cut off within a call
            parts.append(AnswerPart("content", rest))
        return [*parts, *(_call_part(*call) for call in calls)]

    def _thinking_parts(self, parts: list[AnswerPart]) -> list[AnswerPart]:
        self._content += "".join(part.text for part in parts if part.kind == "content")
        return [part for part in parts if part.kind != "content"]


def _markup(fields: dict[str, Any]) -> dict[str, Any]:
    """Adapts a template's fields for a reader: reasoning begins the answer, and its end includes line breaks."""
    thought = dict(fields.get(THINKING_FIELD, {}))
    if "open" in thought:
        thought["open_pattern"] = rf"\A\s*{re.escape(thought.pop('open'))}"
        thought["close_pattern"] = rf"{re.escape(thought.pop('close'))}\n{{0,2}}"
        return fields | {THINKING_FIELD: thought}
    return fields


def _call_part(name: str, arguments: str) -> AnswerPart:
    return AnswerPart("call", arguments, name, f"call_{uuid.uuid4().hex[:24]}")


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
    except ValueError:  # a number too large was parsed as infinity
        return None
