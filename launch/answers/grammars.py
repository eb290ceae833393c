"""Grammars of answers in llguidance's format: for a request's constraint, or for tool calls.

A grammar consists of parts; it starts with the first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from llguidance import LLMatcher

from launch.answers.arguments import enum_texts, is_text
from launch.answers.chat_formats import ChatFormat, ToolCallFormat

MAX_GRAMMAR_BYTES = 1 << 19  # of all parts as JSON
# Space between JSON tokens: one space, or a line break with indentation. Without a bound, some models never stop.
SPACES = {"x-guidance": {"whitespace_pattern": r"( |\n[ \t]{0,64})?"}}
NO_PARAMETERS = {"properties": {}, "additionalProperties": False}
# Without no_forcing, llguidance looks ahead for forced tokens, and the time of a mask grows with the forced text.
LARK_HEADER = '%llguidance {"no_forcing": true}\n'
SPECIAL = re.compile(r"([\\.+*?()|\[\]{}^$#&~-])")  # characters to escape in a regular expression
Parts = Sequence[dict[str, Any]]


class Tag(NamedTuple):
    """JSON between tags in free text; `trigger`, a prefix of `begin`, starts it."""

    begin: str
    trigger: str
    schema: dict[str, Any]
    end: str


@dataclass(frozen=True)
class StructuredOutput:
    """A constraint on an answer.

    Attributes:
        param: the request field that sets it.
        kind: json, regex, choice, grammar or structural_tag.
        value: a schema, a regex, a list of texts, a GBNF or Lark grammar, or a list of `Tag`.
        options: llguidance's options for whitespace in JSON.
    """

    param: str
    kind: str
    value: Any
    options: dict[str, Any] = field(default_factory=dict)


def structured_output_grammar(
    structured_output: StructuredOutput,
    added: Mapping[str, int],
    special: Collection[str],
    eos: Collection[int],
    chat_format: ChatFormat | None = None,
    turn: str = "",
    continues: bool = False,
) -> Parts:
    """Creates the grammar of an answer with a constraint, after optional reasoning.

    Args:
        added: ids of the tokenizer's added tokens by text.
        special: texts of the added tokens that are special.
        eos: the model's end tokens, which reasoning cannot contain.
        chat_format: None if nothing precedes the answer, as in completions.
        turn: the end of the prompt that belongs to the assistant's turn.
        continues: whether the prompt ends within the answer's text, unless it ends within reasoning.
    """
    rules = _Rules(added)
    start, thinks = "@answer", False
    if chat_format is not None:
        thinks = _inside_thinking(chat_format, turn)
        if starts_with_think_mark(structured_output, chat_format) and not thinks:  # ambiguous: allow no reasoning
            start = f"{rules.text(chat_format.content_prefix)} {start}"
        elif thinks or not continues:
            start = _after_thinking(rules, chat_format, turn, eos, f"{rules.text(chat_format.content_prefix)} {start}")
    return [_lark(start, rules), {"name": "answer"} | _answer(structured_output, rules, special)]


def starts_with_think_mark(structured_output: StructuredOutput | None, chat_format: ChatFormat | None) -> bool:
    """Returns whether the constraint allows an answer that begins with the mark that opens reasoning."""
    if (
        structured_output is None
        or structured_output.kind != "choice"
        or chat_format is None
        or chat_format.thinking_marks is None
    ):
        return False
    return any(text.lstrip().startswith(chat_format.thinking_marks[0]) for text in structured_output.value)


def tool_call_grammar(
    chat_format: ChatFormat,
    tools: Sequence[Mapping[str, Any]],
    many: bool,
    turn: str,
    added: Mapping[str, int],
    eos: Collection[int],
) -> Parts:
    """Creates the grammar of an answer that consists of tool calls, after optional reasoning.

    Args:
        tools: tools in OpenAI's format.
        many: whether several calls are allowed, if the format has a syntax for that.
        turn: the end of the prompt that belongs to the assistant's turn, which may end within reasoning.
        added: ids of the tokenizer's added tokens by text.
        eos: the model's end tokens, which reasoning cannot contain.
    """
    calls = chat_format.calls
    assert calls is not None, "checked by the caller"
    rules = _Rules(added)
    one = rules.add(" | ".join(_call(rules, calls, tool) for tool in tools))
    several = f"{one} ({rules.text(calls.between)} {one})*" if many and calls.between is not None else one
    start = f"{rules.text(calls.before)} {several} {rules.text(calls.after)}"
    return [_lark(_after_thinking(rules, chat_format, turn, eos, start), rules)]


def _inside_thinking(chat_format: ChatFormat, turn: str) -> bool:
    return (
        chat_format.thinking_marks is not None
        and chat_format.thinking_marks[0] in turn
        and chat_format.thinking_marks[1] not in turn
    )


def _after_thinking(rules: _Rules, chat_format: ChatFormat, turn: str, eos: Collection[int], start: str) -> str:
    if chat_format.thinking_marks is None or chat_format.thinking_marks[1] in turn:
        return start
    begin, end, behind = chat_format.thinking_marks
    close = rules.added.get(end)
    if close is not None:
        thought = f"<[^{','.join(map(str, sorted({close, *eos})))}]>* <[{close}]> {rules.text(behind)}"
        return f"{thought} {start}" if begin in turn else f"({rules.text(begin)} {thought})? {start}"
    if begin in turn:  # the marks are ordinary text
        thought = rules.add("/(?s:.*)/", f"[suffix={json.dumps(end)}]")
        return f"{thought} {rules.text(behind)} {start}"
    return start


def _lark(start: str, rules: _Rules) -> dict[str, Any]:
    return {"lark_grammar": f"{LARK_HEADER}start: {start}\n{rules}"}


def _answer(structured_output: StructuredOutput, rules: _Rules, special: Collection[str]) -> dict[str, Any]:
    match structured_output.kind:
        case "json":
            return {"json_schema": SPACES | structured_output.options | structured_output.value}
        case "regex":
            return _regex(structured_output.value)
        case "choice":
            return _regex("|".join(SPECIAL.sub(r"\\\1", text) for text in structured_output.value))
        case "grammar":
            return {"ebnf": structured_output.value}
        case "structural_tag":
            return _structural_tags(structured_output.value, _Rules(rules.added), special)
    raise AssertionError(structured_output.kind)


def _regex(expression: str) -> dict[str, Any]:
    (part,) = json.loads(LLMatcher.grammar_from_regex(expression))["grammars"]
    return {"lark_grammar": part["lark_grammar"]}


def _structural_tags(tags: Sequence[Tag], rules: _Rules, special: Collection[str]) -> dict[str, Any]:
    rules.define("TEXT", "/(?s:.*)/")
    alternatives = []
    for tag in tags:
        if tag.trigger in special:
            head = f"TEXT {rules.text(tag.trigger)}"
        else:
            head = rules.add(f"TEXT {json.dumps(tag.trigger)}", "[lazy]")
        rest = rules.text(tag.begin.removeprefix(tag.trigger))
        alternatives.append(rules.add(f"{head} {rest} {_json(tag.schema)} {rules.text(tag.end)}"))
    return _lark(f"({' | '.join(alternatives)})* TEXT", rules)


class _Rules:
    """Builds rules and literals in Lark's syntax."""

    def __init__(self, added: Mapping[str, int]) -> None:
        self.added = added
        self._pattern = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))) or "(?!)")
        self._rules: list[str] = []
        self._budget = MAX_GRAMMAR_BYTES

    def __str__(self) -> str:
        return "".join(f"{rule}\n" for rule in self._rules)

    def add(self, body: str, options: str = "") -> str:
        name = f"r{len(self._rules)}"
        self.define(f"{name}{options}", body)
        return name

    def define(self, name: str, body: str) -> None:
        """Adds a rule with a given name.

        Raises:
            ValueError: the grammar becomes too large, since shared definitions are repeated for each argument.
        """
        self._budget -= len(body)
        if self._budget < 0:
            raise ValueError(f"its grammar has more than {MAX_GRAMMAR_BYTES} characters")
        self._rules.append(f"{name}: {body}")

    def text(self, text: str) -> str:
        """Converts a text to literals and ids of the tokenizer's added tokens."""
        return " ".join(self._pieces(text)) or '""'

    def _pieces(self, text: str) -> Iterator[str]:
        end = 0
        for found in self._pattern.finditer(text):
            yield from self._literal(text[end : found.start()])
            yield f"<[{self.added[found[0]]}]>"
            end = found.end()
        yield from self._literal(text[end:])

    def _literal(self, text: str) -> Iterator[str]:
        if text:
            yield json.dumps(text, ensure_ascii=False)


def _call(rules: _Rules, calls: ToolCallFormat, tool: Mapping[str, Any]) -> str:
    name, parameters = tool["function"]["name"], tool["function"].get("parameters", NO_PARAMETERS) | {"type": "object"}
    arguments = _json(parameters) if calls.argument is None else _arguments(rules, calls.argument, parameters)
    before, after = (text.replace("NAME", name) for text in calls.call.split("ARGUMENTS"))
    return rules.add(f"{rules.text(before)} {arguments} {rules.text(after)}")


def _arguments(rules: _Rules, argument: str, parameters: dict[str, Any]) -> str:
    """Writes arguments one by one, in the schema's order: strings unquoted (only `enum` enforced), others as JSON."""
    shared = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
    written = []
    properties, required = parameters.get("properties"), parameters.get("required")
    for name, schema in properties.items() if isinstance(properties, dict) else ():
        before, after = (text.replace("KEY", name) for text in argument.split("VALUE"))
        schema = schema if isinstance(schema, dict) else {}
        if texts := enum_texts(schema):
            value = "(" + " | ".join(map(rules.text, texts)) + f") {rules.text(after)}"
        elif is_text(schema):
            value = rules.add("/(?s:.*)/", f"[suffix={json.dumps(after)}]")
        else:
            value = f"{_json(schema | shared)} {rules.text(after)}"
        one = rules.add(f"{rules.text(before)} {value}")
        written.append(one if isinstance(required, list) and name in required else f"{one}?")
    return " ".join(written) or '""'


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps(SPACES | schema)}"
