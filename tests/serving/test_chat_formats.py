"""Answers as models of each family write them: thinking, text and calls come out whole, however they are cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launch.answers.answer_parser import AnswerPart, JsonCallParser, Parser
from launch.answers.chat_formats import CHAT_FORMATS, assistant_turn, has_marks
from tests.serving.transcripts import BY_NAME, KNOWN, TOOLS, TRANSCRIPTS, Transcript, text_of

SIZES = 1, 3, 5, 1000  # characters at a time


def parsed(dialect: str, answer: str, size: int, turn: str = "", tools: Any = TOOLS) -> tuple[list[AnswerPart], Parser]:
    parser = Parser(BY_NAME[dialect].fields, turn, tools)
    parts = [part for at in range(0, len(answer), size) for part in parser.feed(answer[at : at + size])]
    return [*parts, *parser.finish()], parser


def calls_of(parts: list[AnswerPart]) -> list[tuple[str | None, Any]]:
    return [(part.name, json.loads(part.text)) for part in parts if part.kind == "call"]


@pytest.mark.parametrize("script", TRANSCRIPTS, ids=lambda script: script.id)
def test_transcripts(script: Transcript) -> None:
    for size in SIZES:
        parts, parser = parsed(script.dialect.name, script.answer, size, script.turn)
        received = text_of(parts, "thinking"), text_of(parts, "content"), calls_of(parts)
        assert received == (script.thinking, script.content, script.calls), size
        assert parser.calls == len(script.calls)


DEEP, LONG = "[" * 3000, "1" * 5000


@pytest.mark.parametrize(
    "dialect, before, behind",
    [
        ("qwen", "So: <tool_call>", "</tool_call>."),
        ("mistral", "[TOOL_CALLS]now[ARGS]", ""),
        ("deepseek-v3.1", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        ("llama3", '{"a": ', ""),
    ],
)
def test_json_that_python_does_not_read_is_content(dialect: str, before: str, behind: str) -> None:
    """Nested without end, or with thousands of digits."""
    for inner in (DEEP, LONG) if dialect == "qwen" else (DEEP,):
        for size in (7, 10_000):
            parts, parser = parsed(dialect, answer := f"{before}{inner}{behind}", size)
            assert {part.kind for part in parts} == {"content"} and parser.calls == 0
            assert text_of(parts, "content") == answer
    for function in (None, "now"):
        plain = JsonCallParser(None, "", function)
        text = f'[{{"name": "now", "parameters": {DEEP}'
        assert [(p.kind, p.text) for p in [*plain.feed(text), *plain.finish()]] == [("content", text)]


@pytest.mark.parametrize(
    "script",
    [script for script in TRANSCRIPTS if script.calls and script.answer[-1] in ">}]"],
    ids=lambda script: script.id,
)
def test_a_call_that_is_cut_is_no_call(script: Transcript) -> None:
    """At every place: what is told as a call is one of the whole answer's, and the text of the others is told."""
    numbers = set()
    for end in range(len(script.answer)):
        parser = Parser(script.dialect.fields, script.turn, TOOLS)
        parts = [*parser.feed(script.answer[:end]), *parser.finish(cut=True)]
        calls = calls_of(parts)
        if calls != script.calls[: len(calls)]:  # the call within the value has come to its end, and no more
            assert script.id == "qwen3-coder: call within a value"
            assert calls == [("get_time", {"zone": "a\n<tool_call>\n<function=get_time>\n<parameter=zone>\nb"})]
        at = script.answer.find("zone", 0, end)
        assert calls or at < 0 or "zone" in text_of(parts, "content") + text_of(parts, "thinking"), end
        numbers.add(len(calls))
    assert 0 in numbers


@pytest.mark.parametrize("row", KNOWN["turns"])
def test_the_turn_is_the_prompts_end(row: dict[str, str]) -> None:
    """What a user writes is no part of it, in prompts of families that are read as another's too."""
    assert assistant_turn(BY_NAME[row["dialect"]], row["prompt"], row.get("begun")) == row["turn"]


def test_without_tools_calls_are_text() -> None:
    parts, _ = parsed("llama3", answer := '{"name": "get_weather", "parameters": {}}', 5, tools=[])
    assert text_of(parts, "content") == answer and calls_of(parts) == []


@pytest.mark.parametrize("row", KNOWN["templates"])
def test_the_template_tells_the_dialect(row: dict[str, str]) -> None:
    found = [chat_format.name for chat_format in CHAT_FORMATS if has_marks(chat_format, row["template"])]
    assert (found[0] if found else None) == row["dialect"]


DEFS = {"color": {"type": "string", "enum": ["red", "1"]}, "point": {"type": "object"}}


@pytest.mark.parametrize("row", KNOWN["typed"])
def test_arguments_are_typed_once(row: dict[str, Any]) -> None:
    """By their schema where they have no quotes, as Qwen3-Coder writes them; in JSON they have their types."""
    text = row["text"]
    parameters = {"type": "object", "properties": {"x": row["schema"]}, "$defs": DEFS}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for dialect, answer, wanted in (
        ("qwen3-coder", f"<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n", row["value"]),
        ("qwen", json.dumps({"name": "f", "arguments": {"x": text}}), text),
    ):
        parts, _ = parsed(dialect, f"<tool_call>\n{answer}</tool_call>", 1000, tools=tools)
        assert calls_of(parts) == [("f", {"x": wanted})] and text_of(parts, "content") == ""
