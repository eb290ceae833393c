"""Dialects in which model families write reasoning and tool calls, as data, and a parser of chat answers."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from helix.answers.arguments import read_arguments

CAPTURED = {"function": {"name": "{name}", "arguments": "{content}"}}
THINKING = {"open": "<think>", "close": "</think>"}
BEHIND_CALLS = {"open": "<｜tool▁calls▁end｜>"}  # text to ignore
JSON = {"content": "json", "content_args": {"allow_non_json": True}}
NO_ANCHOR = "\0"  # replaces an anchor: parsing begins at the turn
UNTOLD = 1024  # characters of a prompt to parse if the begin of the turn is unknown

THOUGHT = ("<think>", "</think>", "\n\n")


@dataclass(frozen=True)
class Calls:
    """A dialect's syntax of tool calls, for answers that must be calls.

    Attributes:
        call: one call, with NAME and ARGUMENTS.
        before, after: texts around all calls.
        between: text between two calls; None allows a single call.
        argument: one argument, with KEY and VALUE; None: ARGUMENTS are a JSON object.
    """

    call: str
    before: str = ""
    after: str = ""
    between: str | None = None
    argument: str | None = None


@dataclass(frozen=True)
class Dialect:
    """A model family's syntax of messages.

    Attributes:
        marks: texts that its chat templates all contain.
        template: transformers' `response_template` with the fields content, thinking and tool_calls.
        calls: syntax of tool calls; None if it has none.
        thought: the marks that open and close a thought before the answer, and the text after it; None: no thoughts.
        said: text before an answer's content.
    """

    name: str
    marks: tuple[str, ...]
    template: dict[str, Any]
    calls: Calls | None = None
    thought: tuple[str, str, str] | None = None
    said: str = ""


def _fields(anchor: str, **fields: dict[str, Any]) -> dict[str, Any]:
    return {"start_anchor": anchor, "fields": {"content": {}} | fields}


# The first dialect whose marks are all in a template applies.
DIALECTS = (
    Dialect(
        "gpt-oss",
        ("<|channel|>", "<|start|>"),
        {
            "start_anchor": "<|start|>assistant",
            "fields": {
                "content": {
                    "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)"
                    r"(?: <\|constrain\|>\w+)?<\|message\|>",
                    "close_pattern": r"<\|end\|>|<\|return\|>",
                },
                "thinking": {
                    "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
                    "close_pattern": r"<\|end\|>",
                    "repeats": True,
                    "join": "\n",
                },
                "tool_calls": {
                    "open_pattern": r"(?:<\|start\|>assistant)?(?:<\|channel\|>(?:commentary|analysis))? ?"
                    r"to=functions\.(?P<name>[\w.-]+)(?:<\|channel\|>(?:commentary|analysis))?"
                    r"(?: ?(?:<\|constrain\|>)?json)?<\|message\|>",
                    "close_pattern": r"<\|call\|>",
                    "repeats": True,
                    "transform": CAPTURED,
                    **JSON,
                },
            },
        },
        Calls("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS"),
        ("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant"),
        "<|channel|>final<|message|>",
    ),
    Dialect(
        "qwen3-coder",
        ("<tool_call>", "<function="),
        _fields(
            "<|im_start|>assistant\n",
            thinking=THINKING,
            tool_calls={
                "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                "close_pattern": r"</function>\s*</tool_call>",
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
                },
                "repeats": True,
                "transform": CAPTURED,
            },
        ),
        Calls(
            "<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>",
            between="\n",
            argument="<parameter=KEY>\nVALUE\n</parameter>\n",
        ),
        THOUGHT,
    ),
    Dialect(
        "qwen",
        ("<tool_call>",),
        _fields(
            "<|im_start|>assistant\n",
            thinking=THINKING,
            tool_calls={"open": "<tool_call>", "close": "</tool_call>", "repeats": True, **JSON},
        ),
        Calls('<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>', between="\n"),
        THOUGHT,
    ),
    Dialect(
        "mistral",
        ("[TOOL_CALLS]", "[ARGS]"),
        _fields(
            "[/INST]",
            thinking={"open": "[THINK]", "close": "[/THINK]"},
            tool_calls={
                "open_pattern": r"\[TOOL_CALLS\](?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]",
                "close_pattern": r"(?=\[TOOL_CALLS\])",
                "repeats": True,
                "transform": CAPTURED,
                **JSON,
            },
        ),
        Calls("[TOOL_CALLS]NAME[ARGS]ARGUMENTS", between=""),
        ("[THINK]", "[/THINK]", ""),
    ),
    Dialect(
        "mistral-list",
        ("[TOOL_CALLS]",),
        _fields(
            "[/INST]",
            tool_calls={"open": "[TOOL_CALLS]", **JSON},
        ),
        Calls('{"name": "NAME", "arguments": ARGUMENTS}', before="[TOOL_CALLS] [", between=", ", after="]"),
    ),
    Dialect(
        "deepseek-v3.1",
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "thinking"),
        _fields(
            "<｜Assistant｜>",
            thinking=THINKING,
            nothing=BEHIND_CALLS,
            tool_calls={
                "open_pattern": r"(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>(?P<name>[^<]+?)<｜tool▁sep｜>",
                "close_pattern": r"<｜tool▁call▁end｜>",
                "repeats": True,
                "transform": CAPTURED,
                **JSON,
            },
        ),
        Calls(
            "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>",
            before="<｜tool▁calls▁begin｜>",
            between="",
            after="<｜tool▁calls▁end｜>",
        ),
        ("<think>", "</think>", ""),
    ),
    Dialect(
        "deepseek",
        ("<｜tool▁call▁begin｜>",),
        _fields(
            "<｜Assistant｜>",
            thinking=THINKING,
            nothing=BEHIND_CALLS,
            tool_calls={
                "open_pattern": r"(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
                r"(?P<name>[^\n]+)\n```json\n",
                "close_pattern": r"\n?```\s*<｜tool▁call▁end｜>",
                "repeats": True,
                "transform": CAPTURED,
                **JSON,
            },
        ),
        Calls(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
            before="<｜tool▁calls▁begin｜>",
            between="\n",
            after="<｜tool▁calls▁end｜>",
        ),
        THOUGHT,
    ),
    Dialect(
        "llama3",
        ("<|start_header_id|>", "ipython"),
        _fields(
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            tool_calls={
                "open_pattern": r"\A\s*(?:<\|python_tag\|>)?(?=\s*\{)",
                **JSON,
            },
        ),
        Calls('{"name": "NAME", "parameters": ARGUMENTS}'),
    ),
    Dialect("thinking", ("<think>",), _fields("\n", thinking=THINKING), thought=("<think>", "</think>", "")),
)


# Calls where no family's syntax is known, as vLLM has them: a function's arguments alone, or a list of calls.
ARGUMENTS_ALONE = Calls("ARGUMENTS")
LIST_OF_CALLS = Calls('{"name": "NAME", "parameters": ARGUMENTS}', before="[", between=", ", after="]")


def dialect_of(template: str) -> Dialect | None:
    """Returns the dialect of a chat template; None if it has none of these."""
    return next((d for d in DIALECTS if all(mark in template for mark in d.marks)), None)


def calling(dialect: Dialect | None, named: bool) -> Dialect:
    """Returns the dialect of an answer that must be calls: the model's own, or plain JSON where it has none for calls.

    Args:
        named: whether the request names the function.
    """
    if dialect is not None and dialect.calls is not None:
        return dialect
    return replace(dialect or Dialect("plain", (), {}), calls=ARGUMENTS_ALONE if named else LIST_OF_CALLS)


def turn_of(template: dict[str, Any], prompt: str, begun: str | None = None) -> str:
    """Returns the end of a prompt that belongs to the answer's turn.

    Args:
        template: the response template.
        begun: the message that the answer continues; None: it begins a message.
    """
    _, found, turn = prompt.rpartition(template["start_anchor"])
    said = (begun or "").strip()
    if said and said not in turn and said in prompt:  # the message itself contains the anchor
        return prompt[prompt.rindex(said) :]
    return turn if found else turn[-UNTOLD:]


@dataclass
class AnswerPart:
    """A part of an answer: `kind` is content, thinking or call; a call is whole, with name and arguments in `text`."""

    kind: str
    text: str
    name: str = ""
    id: str = ""


class Parser:
    """Incremental parser of one answer's text.

    Args:
        template: the response template; None: all of it is content.
        turn: the prompt's end that belongs to the turn, by `turn_of`.
        tools: tools that may be called, in OpenAI's format; without any, calls are content.
        many: whether several calls are allowed; if not, text after the first call is dropped.

    Attributes:
        calls: number of tool calls so far.
    """

    def __init__(
        self, template: dict[str, Any] | None, turn: str, tools: Sequence[Mapping[str, Any]], many: bool = True
    ) -> None:
        self.calls = 0
        self._many = many
        self._parser: Any = None
        # Parameters of functions whose arguments are written one by one, as texts or as JSON.
        self._parameters: dict[str, Any] = {}
        self._raw = ""  # text of the call being read
        self._kind = ""  # kind of the last part
        self._spaces = ""  # spaces after it, dropped unless it goes on
        self._held = 0  # characters of the turn that may begin a mark; else they come with the answer's first
        if template is not None:
            fields = {name: f for name, f in template["fields"].items() if tools or name != "tool_calls"}
            spec = template | {"fields": fields, "start_anchor": NO_ANCHOR}
            self._parser = _reader(spec, turn, tools)
            if template["fields"].get("tool_calls", {}).get("content") == "xml-inline":
                functions = [tool["function"] for tool in tools]
                self._parameters = {f["name"]: f.get("parameters") for f in functions}
            self._parts(self._parser.initial_events)
            self.calls, self._spaces = 0, ""  # spaces after the prompt belong to the answer
            if turn:
                held = _reader(spec, turn, []).finalize()[1]
                self._held = sum(len(event["text"]) for event in held if event["type"] == "region_chunk")

    @property
    def wants_special(self) -> bool:
        """Whether the text must include special tokens, which mark parts of the answer."""
        return self._parser is not None

    @property
    def full(self) -> bool:
        """Whether the answer is complete."""
        return self.calls > 0 and not self._many

    def feed(self, text: str) -> list[AnswerPart]:
        """Returns the parts that more text completes."""
        if self._parser is None:
            return [AnswerPart("content", text)] if text else []
        return self._parts(self._parser.feed(text))

    def finish(self) -> list[AnswerPart]:
        """Returns the parts that were waiting for more text."""
        return [] if self._parser is None else self._parts(self._parser.finalize()[1])

    def _parts(self, events: Sequence[dict[str, Any]]) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for event in events:
            if self.full:
                break
            match event["type"], event["field"]:
                case "region_chunk", "tool_calls":
                    self._raw += event["text"]
                case "region_chunk", ("content" | "thinking") as kind:
                    held, self._held = self._held, max(0, self._held - len(event["text"]))
                    parts += self._said(kind, event["text"][held:])
                case "region_close", field:
                    self._held = 0
                    parts += self._called(event["value"]) if field == "tool_calls" else []
                case "region_open", field if field != "content":
                    self._held = 0
        return parts

    def _said(self, kind: str, text: str) -> list[AnswerPart]:
        """Returns text as a part, without the spaces between parts."""
        if kind != self._kind:
            text, self._spaces = text.lstrip(), ""
            if not text:
                return []
            self._kind = kind
        text = self._spaces + text
        kept = text.rstrip()
        self._spaces = text[len(kept) :]
        return [AnswerPart(kind, kept)] if kept else []

    def _called(self, value: Any) -> list[AnswerPart]:
        raw, self._raw = self._raw, ""
        calls = [_function(self._typed(one)) for one in (value if isinstance(value, list) else [value])]
        if not calls or None in calls:  # it only looked like a call
            return self._said("content", raw)
        calls = calls if self._many else calls[:1]
        self._kind = "call"
        self.calls += len(calls)
        return [_called(*call) for call in filter(None, calls)]

    def _typed(self, call: Any) -> Any:
        """Reads the arguments of a call that are written one by one; the parser itself knows the plain types alone."""
        function = call.get("function") if isinstance(call, dict) else None
        if self._parameters and isinstance(function, dict) and isinstance(function.get("arguments"), dict):
            parameters = self._parameters.get(str(function.get("name")))
            function["arguments"] = read_arguments(function["arguments"], parameters)
        return call


class PlainParser(Parser):
    """Parser of an answer that is calls as plain JSON, behind an optional thought; calls come at its end.

    Args:
        template: the response template, for thoughts.
        function: the function whose arguments the answer is; None: it is a list of calls.
    """

    def __init__(self, template: dict[str, Any] | None, turn: str, function: str | None) -> None:
        super().__init__(template, turn, [])
        self._function = function
        self._content = ""

    def feed(self, text: str) -> list[AnswerPart]:
        return self._thoughts(super().feed(text))

    def finish(self) -> list[AnswerPart]:
        parts, text = self._thoughts(super().finish()), self._content
        if self._function is not None:
            calls = [(self._function, text)] if _json_values(text) else []
        else:
            calls = [*filter(None, map(_function, _json_values(text, len(LIST_OF_CALLS.before))))]
        self.calls = len(calls)
        if not calls and text:  # it was cut within the first
            parts.append(AnswerPart("content", text))
        return [*parts, *(_called(*call) for call in calls)]

    def _thoughts(self, parts: list[AnswerPart]) -> list[AnswerPart]:
        self._content += "".join(part.text for part in parts if part.kind == "content")
        return [part for part in parts if part.kind != "content"]


def _reader(spec: dict[str, Any], turn: str, tools: Sequence[Mapping[str, Any]]) -> Any:
    """Creates transformers' parser; a call whose JSON is too deep or has a number too long closes with its text."""
    from transformers.utils.chat_parsing import ResponseParser  # seconds

    class CallReader(ResponseParser):
        def _close_current(self, events: list[dict[str, Any]]) -> None:
            field, text = self._current, self._body
            try:
                super()._close_current(events)
            except (ValueError, RecursionError):
                events.append({"type": "region_close", "field": field, "value": text})
                self._reset_to_implicit()

    return CallReader(spec, prefix=turn, tools=[*tools])


def _json_values(text: str, at: int = 0) -> list[Any]:
    """Returns the JSON values that stand in a text from a place on, as calls do in a list, up to one that is cut."""
    decoder = json.JSONDecoder()
    found: list[Any] = []
    while True:
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return found
        found.append(value)
        at += len(LIST_OF_CALLS.between or "")


def _called(name: str, arguments: str) -> AnswerPart:
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
    except ValueError:  # a number that is too large was read as infinite
        return None
