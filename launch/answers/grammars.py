"""Grammars of answers in llguidance's format: for a request's constraint, or for tool calls.

A grammar consists of parts; it starts with the first.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from llguidance import LLMatcher

from launch.answers.call_grammars import call_rule
from launch.answers.chat_formats import ChatFormat
from launch.answers.grammar_rules import ANY_TEXT, LARK_HEADER, SPACES, SPECIAL, Rules, json_grammar, json_rule

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

    @property
    def schemas(self) -> list[dict[str, Any]]:
        tags = self.value if self.kind == "structural_tag" else ()
        return [self.value] if self.kind == "json" else [tag.schema for tag in tags]


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
    rules = Rules(added)
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
    marks = None if chat_format is None else chat_format.thinking_marks
    if marks is None or structured_output is None or structured_output.kind != "choice":
        return False
    return any(text.lstrip().startswith(marks[0]) for text in structured_output.value)


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
    rules = Rules(added)
    one = rules.add(" | ".join(call_rule(rules, calls, tool) for tool in tools))
    several = f"{one} ({rules.text(calls.between)} {one})*" if many and calls.between is not None else one
    start = f"{rules.text(calls.before)} {several} {rules.text(calls.after)}"
    # A call that begins within reasoning would end it, and the forced call would be a second one.
    opening = rules.added_in(calls.before + calls.call)[:1]
    return [_lark(_after_thinking(rules, chat_format, turn, {*eos, *opening}, start), rules)]


def strict_tool_grammar(
    chat_format: ChatFormat,
    tools: Sequence[Mapping[str, Any]],
    turn: str,
    added: Mapping[str, int],
    eos: Collection[int],
) -> Parts | None:
    """Creates the grammar of an answer that may call tools: of strict tools, arguments follow the schema.

    Args:
        tools, turn, added, eos: see `tool_call_grammar`.

    Returns:
        None if text of this format may look like a call.
    """
    calls = chat_format.calls
    if calls is None or not calls.openings:
        return None
    rules = Rules(added)
    tools = [tool if tool["function"].get("strict") else _without_schema(tool) for tool in tools]
    if calls.messages:
        marks = [*rules.added_in("".join((*calls.messages, calls.next_message))), *eos]
        text, following = rules.text_without((), marks), rules.text(calls.next_message)
        message = f"({' | '.join(map(rules.text, calls.messages))}) {text}"
        call = " | ".join(call_rule(rules, calls, tool) for tool in tools)
        start = f"({message} {following})* ({message} | {call})"
        return [_lark(f"{text} ({following} {start})?" if turn.strip() else start, rules)]
    head, size = rules.text_and_mark(calls.openings, eos)
    first = calls if calls.before else replace(calls, call=calls.call[size:])
    call = f"({' | '.join(call_rule(rules, first, tool) for tool in tools)})"
    if calls.before:  # without it, the next call follows a text, which may be `between`
        call = f"{rules.text(calls.before[size:])} {call} ({rules.text(calls.between or '')} {call})*"
    call, text = f"{head} {call} {rules.text(calls.after)}", rules.text_without(calls.openings, eos)
    # After a list that no mark closes, the reader takes text that begins with a bracket for more of it.
    start = f"({call} | {text})" if calls.after == "]" else f"({call})* {text}"
    thought_ends = added.get(chat_format.thinking_marks[1]) if chat_format.thinking_marks else None
    if _inside_thinking(chat_format, turn) and thought_ends is not None:
        start = f"{rules.text_without(calls.openings, [*eos, thought_ends])} <[{thought_ends}]> {start}"
    return [_lark(start, rules)]


def _without_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"function": {"name": tool["function"]["name"], "parameters": {"additionalProperties": True}}}


def _inside_thinking(chat_format: ChatFormat, turn: str) -> bool:
    marks = chat_format.thinking_marks
    return marks is not None and marks[0] in turn and marks[1] not in turn


def _after_thinking(rules: Rules, chat_format: ChatFormat, turn: str, excluded: Collection[int], start: str) -> str:
    if chat_format.thinking_marks is None or chat_format.thinking_marks[1] in turn:
        return start
    begin, end, behind = chat_format.thinking_marks
    close = rules.added.get(end)
    if close is not None:
        thought = f"<[^{','.join(map(str, sorted({close, *excluded})))}]>* <[{close}]> {rules.text(behind)}"
        return f"{thought} {start}" if begin in turn else f"({rules.text(begin)} {thought})? {start}"
    if begin in turn:  # the marks are ordinary text
        thought = rules.add(ANY_TEXT, f"[suffix={json.dumps(end)}]")
        return f"{thought} {rules.text(behind)} {start}"
    return start


def _lark(start: str, rules: Rules) -> dict[str, Any]:
    return {"lark_grammar": f"{LARK_HEADER}start: {start}\n{rules}"}


def _answer(structured_output: StructuredOutput, rules: Rules, special: Collection[str]) -> dict[str, Any]:
    match structured_output.kind:
        case "json":
            spaces = structured_output.options.get("x-guidance", SPACES)
            return {"json_schema": json_grammar(structured_output.value, spaces)}
        case "regex":
            return _regex(structured_output.value)
        case "choice":
            return _regex("|".join(SPECIAL.sub(r"\\\1", text) for text in structured_output.value))
        case "grammar":
            return {"ebnf": structured_output.value}
        case "structural_tag":
            return _structural_tags(structured_output.value, Rules(rules.added), special)
    raise AssertionError(structured_output.kind)


def _regex(expression: str) -> dict[str, Any]:
    (part,) = json.loads(LLMatcher.grammar_from_regex(expression))["grammars"]
    return {"lark_grammar": part["lark_grammar"]}


def _structural_tags(tags: Sequence[Tag], rules: Rules, special: Collection[str]) -> dict[str, Any]:
    rules.define("TEXT", ANY_TEXT)
    alternatives = []
    for tag in tags:
        if tag.trigger in special:
            head = f"TEXT {rules.text(tag.trigger)}"
        else:
            head = rules.add(f"TEXT {json.dumps(tag.trigger)}", "[lazy]")
        rest = rules.text(tag.begin.removeprefix(tag.trigger))
        alternatives.append(rules.add(f"{head} {rest} {json_rule(tag.schema)} {rules.text(tag.end)}"))
    return _lark(f"({' | '.join(alternatives)})* TEXT", rules)
