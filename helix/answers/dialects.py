"""Dialects in which model families write reasoning and tool calls, as data, and a parser of chat answers."""

from __future__ import annotations

import json
import re
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from helix.answers.arguments import read_arguments
from helix.library import import_transformers

CAPTURED = {"function": {"name": "{name}", "arguments": "{content}"}}
THINKING = {"open": "<think>", "close": "</think>"}
AT_ONCE = r"(?=[\s\S])"  # closes the region of a mark that is no text
BEHIND_CALLS = {"open": "<｜tool▁calls▁end｜>", "close_pattern": AT_ONCE}
JSON = {"content": "json"}
CALLS = "tool_calls"  # fields of a response template
THOUGHTS = "thinking"
TEXTS = ("content", "unnamed")
NO_ANCHOR = "\0"  # replaces an anchor: parsing begins at the turn

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
                "content": {},  # text outside of messages
                "thinking": {
                    "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
                    "close_pattern": r"<\|end\|>",
                    "repeats": True,
                    "join": "\n",
                },
                "tool_calls": {
                    "open_pattern": r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)? ?"
                    r"to=(?:functions\.)?(?P<name>[\w.-]+)(?:<\|channel\|>\w+)?"
                    r" ?(?:<\|constrain\|>)?\w*<\|message\|>",
                    "close_pattern": r"<\|call\|>",
                    "repeats": True,
                    "transform": CAPTURED,
                    **JSON,
                },
                # Messages of all other channels; of two fields that open alike, the first by name counts.
                "unnamed": {
                    "open_pattern": r"(?:<\|start\|>assistant)?(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?"
                    r"<\|message\|>",
                    "close_pattern": r"<\|end\|>|<\|return\|>|<\|call\|>",
                },
                "nothing": {  # the head of a message that was cut
                    "open_pattern": r"<\|start\|>(?:assistant)?(?:<\|channel\|>[^<]*)?\Z|<\|channel\|>[^<]*\Z",
                    "close_pattern": AT_ONCE,
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
                "close_pattern": r"</function>\s*(?:</tool_call>|\Z)",
                "content": "xml-inline",
                "content_args": {
                    # A value may contain its closing mark: it ends at one that the next argument follows, or nothing.
                    "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?"
                    r"(?:</parameter>(?=\s*(?:<parameter=|\Z))|\Z)",
                    "end": "</parameter>",
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
    Dialect("thinking", ("<think>",), _fields(NO_ANCHOR, thinking=THINKING), thought=("<think>", "</think>", "")),
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
    if said and said in prompt and not (found and said in turn):  # the message itself may contain the anchor
        return prompt[prompt.rindex(said) :]
    if found:
        return turn
    # No anchor: all that a prompt writes of a turn is a mark that opens or closes a thought. Text before is a user's.
    thought = template["fields"].get(THOUGHTS, {})
    begin, end = (re.escape(thought.get(mark, NO_ANCHOR)) for mark in ("open", "close"))
    turn_begun = re.search(rf"(?:{begin}\s*(?:{end})?|{end})?\s*\Z", prompt)
    return turn_begun[0] if turn_begun else ""


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
        self._functions = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        self._written = False  # whether arguments are written one by one, as texts or as JSON
        self._kind = ""  # kind of the last part
        self._spaces, self._spaced = "", ""  # spaces that wait for what follows, and the kind of text that has them
        self._held = 0  # characters of the turn that may begin a mark; else they come with the answer's first
        if template is not None:
            fields = {name: f for name, f in template["fields"].items() if tools or name != CALLS}
            spec = template | {"fields": fields, "start_anchor": NO_ANCHOR}
            self._parser = _reader(spec, turn)
            self._written = template["fields"].get(CALLS, {}).get("content") == "xml-inline"
            self._parts(self._parser.initial_events)
            self.calls, self._spaces = 0, ""  # spaces after the prompt belong to the answer
            if turn:
                held = _reader(spec, turn).finalize()[1]
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

    def finish(self, cut: bool = False) -> list[AnswerPart]:
        """Returns the parts that were waiting for more text.

        Args:
            cut: whether the model would have gone on: a call that it has not closed is text then.
        """
        if self._parser is None:
            return []
        parts = self._parts(self._parser.end(cut))
        if self._spaces and self._spaced == "content" and self._kind != "call" and not self.full:
            parts.append(AnswerPart("content", self._spaces))
        return parts

    def _parts(self, events: Sequence[dict[str, Any]]) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for event in events:
            if self.full:
                break
            kind = "content" if event["field"] in TEXTS else event["field"]
            match event["type"], kind:
                case "region_chunk", ("content" | "thinking"):
                    held, self._held = self._held, max(0, self._held - len(event["text"]))
                    parts += self._said(kind, event["text"][held:])
                case "region_close", _:
                    self._held = 0
                    parts += self._called(event) if kind == CALLS else []
                case "region_open", _ if event["field"] != "content":
                    self._held = 0
        return parts

    def _said(self, kind: str, text: str) -> list[AnswerPart]:
        """Returns text as a part. Its last spaces wait: before a call, and at a thought's end, they are markup."""
        if kind != self._spaced:
            self._spaces, self._spaced = "", kind
        if kind != self._kind and (kind == THOUGHTS or self._kind == "call"):
            text = text.lstrip()
        text = self._spaces + text
        kept = text.rstrip()
        self._spaces = text[len(kept) :]
        if not kept:
            return []
        self._kind = kind
        return [AnswerPart(kind, kept)]

    def _called(self, event: dict[str, Any]) -> list[AnswerPart]:
        value = event["value"]
        calls = [_function(self._typed(one)) for one in (value if isinstance(value, list) else [value])]
        # Where no mark says that it is a call, a tool's name does.
        known = event["head"].strip() or all(call is not None and call[0] in self._functions for call in calls)
        if not calls or None in calls or not known:  # it only looked like a call
            return self._said("content", event["text"])
        calls = calls if self._many else calls[:1]
        self._kind, self._spaces = "call", ""
        self.calls += len(calls)
        return [_called(*call) for call in filter(None, calls)]

    def _typed(self, call: Any) -> Any:
        """Reads the arguments of a call that are written one by one."""
        function = call.get("function") if self._written and isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
            parameters = self._functions.get(str(function.get("name")))
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

    def finish(self, cut: bool = False) -> list[AnswerPart]:
        parts, text = self._thoughts(super().finish(cut)), self._content.strip()
        if self._function is not None:
            values, end = _json_values(text, 0, "")
            calls = [(self._function, text[:end])] if values else []
        else:
            values, end = _json_values(text, len(LIST_OF_CALLS.before), LIST_OF_CALLS.between or "")
            calls = [*filter(None, map(_function, values))]
        self.calls = len(calls)
        rest = text[end if calls else 0 :].removeprefix(LIST_OF_CALLS.between or "")
        if rest not in ("", LIST_OF_CALLS.after):  # it was cut within a call
            parts.append(AnswerPart("content", rest))
        return [*parts, *(_called(*call) for call in calls)]

    def _thoughts(self, parts: list[AnswerPart]) -> list[AnswerPart]:
        self._content += "".join(part.text for part in parts if part.kind == "content")
        return [part for part in parts if part.kind != "content"]


def _reader(spec: dict[str, Any], turn: str) -> Any:
    """Creates transformers' parser of a response template, which is changed where it would lose or move text.

    A thought begins where the answer does, and up to two line breaks after it are markup. A call ends at a closing mark
    that is not a part of its arguments. The event of its end has its `value` (None: it is no call), its whole `text`,
    and the mark that opened it, `head`.
    """
    if "torch" not in sys.modules:  # keeps out torch's 335 MB
        import_transformers()
    from transformers.utils.chat_parsing import ResponseParser  # seconds
    from transformers.utils.chat_parsing.content_parsers import process_field

    class CallReader(ResponseParser):
        _cut = False
        _buffer: str
        _pos: int

        def end(self, cut: bool) -> list[dict[str, Any]]:
            """Returns the last events."""
            events: list[dict[str, Any]] = []
            if cut:  # a mark that could have grown is one if anything else follows
                events, self._cut = self.feed(NO_ANCHOR), True
                self._buffer = self._buffer.removesuffix(NO_ANCHOR)
                self._pos = min(self._pos, len(self._buffer))
                for event in events:
                    event["text"] = event.get("text", "").removesuffix(NO_ANCHOR)
            return [*events, *self.finalize()[1]]

        def _open_explicit(self, events: list[dict[str, Any]], field: Any, m: Any) -> None:
            super()._open_explicit(events, field, m)
            self._head, self._begin, self._mark, self._early = m[0], m.end(), None, None

        def _scan(self, watch: Any, eos: bool) -> Any:
            if self._current != CALLS:
                return super()._scan(watch, eos)
            field, last = self._spec.fields[CALLS], eos and self._cut
            while True:
                best, hold = (None, len(self._buffer)) if last else super()._scan(watch, eos)
                if best is None:
                    self._mark = self._last(field) if eos else None
                    break
                closes = self._closes(field, best[2], eos)
                if closes is None:
                    return None, min(hold, best[2].start())
                if closes:
                    self._mark = best[2] if closes is True else closes
                    break
                self._early = self._early or best[2]
                self._pos = max(best[2].end(), best[2].start() + 1)
            return (None if self._mark is None else ("close", field, self._mark)), hold

        def _closes(self, field: Any, mark: Any, eos: bool) -> Any:
            """Returns whether a call ends at a mark, or which earlier one it ends at; None: what follows decides."""
            early, body = self._early, self._buffer[self._begin : mark.start()]
            if field.content == "json":
                try:
                    json.loads(body)
                except ValueError as error:  # within a string it is a part of it
                    return False if str(error).startswith("Unterminated string") else early or True
                except RecursionError:
                    pass
                return True
            end = field.content_args.get("end", "")
            if body.strip() and not body.rstrip().endswith(end):
                return False
            if early is not None and field.open_re.match(self._buffer[early.end() :].lstrip()):
                return early  # the next call begins behind it
            rest = self._buffer[mark.end() :].lstrip()
            if end and not eos and end.startswith(rest):
                return None
            return not (end and rest.startswith(end))

        def _last(self, field: Any) -> Any:
            """Returns where a call ends that nothing closes: at a mark that came too early, or behind its JSON."""
            if self._early is not None and not self._cut:
                return self._early
            if field.content != "json":
                return None
            text = self._buffer[self._begin :]
            values, end = _json_values(text, 0, ";")
            return re.compile("").match(self._buffer, self._begin + end) if values else None

        def _close_current(self, events: list[dict[str, Any]]) -> None:
            if self._current != CALLS:
                super()._close_current(events)
                return
            mark, self._mark = self._mark, None
            body = self._buffer[self._begin : mark.start() if mark is not None else len(self._buffer)]
            event = {"type": "region_close", "field": CALLS, "head": self._head}
            event["text"] = self._head + body + (mark[0] if mark is not None else "")
            event["value"] = self._value(self._spec.fields[CALLS], body, bool(mark))
            events.append(event)
            self._reset_to_implicit()

        def _value(self, field: Any, body: str, closed: bool) -> Any:
            if field.content != "json":
                return process_field(body, field, self._captures) if closed else None
            name = self._captures.get("name")
            value: Any = None
            if name is not None and not body.strip() and (closed or not self._cut):
                value = {}
            else:
                values, end = _json_values(body, 0, ";")
                if values and not body[end:].strip():
                    value = values if name is None and len(values) > 1 else values[0]
                elif name is not None and closed and not values and _is_mistaken(body):
                    value = body.strip()  # clients tell the model of it
            return value if name is None or value is None else {"name": name, "arguments": value}

    thought = dict(spec["fields"].get(THOUGHTS, {}))
    if "open" in thought:
        thought["open_pattern"] = rf"\A\s*{re.escape(thought.pop('open'))}"
        thought["close_pattern"] = rf"{re.escape(thought.pop('close'))}\n{{0,2}}"
        spec = spec | {"fields": spec["fields"] | {THOUGHTS: thought}}
    return CallReader(spec, prefix=turn)


def _is_mistaken(text: str) -> bool:
    """Returns whether a text is JSON with a mistake; JSON that is too deep or has a number too long is no mistake."""
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        return isinstance(error, json.JSONDecodeError)
    return False


def _json_values(text: str, at: int, between: str) -> tuple[list[Any], int]:
    """Returns the JSON values that stand in a text from a place on, up to one that is cut, and where they end."""
    decoder = json.JSONDecoder()
    found: list[Any] = []
    end = at
    while True:
        at += len(text[at:]) - len(text[at:].lstrip())
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return found, end
        found.append(value)
        end = at
        at += len(text[at:]) - len(text[at:].lstrip().removeprefix(between.strip()))


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
