"""Answers as models of each family write them: thinking, text and calls come out whole, however they are cut."""

# ruff: noqa: E501
from __future__ import annotations

import json
from typing import Any

import pytest

from helix.answers.dialects import DIALECTS, AnswerPart, Parser, PlainParser, dialect_of, turn_of
from launch.serving.schemas import Tool

TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})
    for name, parameters in (
        ("get_weather", {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}),
        ("get_time", {"type": "object", "properties": {"zone": {"type": "string"}}}),
    )
]
PARIS, UTC = ("get_weather", {"city": "Paris", "days": 2}), ("get_time", {"zone": "UTC"})
P, U = '{"city": "Paris", "days": 2}', '{"zone": "UTC"}'
BEGIN, END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
CALLS, ENDS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

# dialect, end of the prompt, answer without its end-of-turn token, thinking, content, calls
RECORDED: list[tuple[str, str, str, str, str, list[Any]]] = [
    (
        "qwen", "<|im_start|>assistant\n",
        "<think>\nThe user wants\nboth.\n</think>\n\nLet me look.\n"
        f'<tool_call>\n{{"name": "get_weather", "arguments": {P}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "get_time", "arguments": {U}}}\n</tool_call>',
        "The user wants\nboth.", "Let me look.", [PARIS, UTC],
    ),
    ("qwen", "<|im_start|>assistant\n<think>\n", "Hm.\n</think>\n\nHello  there.", "Hm.", "Hello  there.", []),
    ("qwen", "<|im_start|>assistant\n", "a < b, <thin and <tool_cal", "", "a < b, <thin and <tool_cal", []),
    (
        "qwen", "<|im_start|>assistant\n", '<tool_call>\n{"name": "get_weather", "argum\n</tool_call>',
        "", '{"name": "get_weather", "argum', [],
    ),
    (
        "qwen3-coder", "<|im_start|>assistant\n",
        "I'll check.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
        "", "I'll check.", [PARIS],
    ),
    ("llama3", "<|start_header_id|>assistant<|end_header_id|>\n\n", f'{{"name": "get_weather", "parameters": {P}}}', "", "", [PARIS]),
    (
        "llama3", "<|start_header_id|>assistant<|end_header_id|>\n\n",
        f'<|python_tag|>{{"name": "get_weather", "parameters": {P}}}', "", "", [PARIS],
    ),
    ("llama3", "<|start_header_id|>assistant<|end_header_id|>\n\n", '{"answer": 42}', "", '{"answer": 42}', []),
    ("llama3", "<|start_header_id|>assistant<|end_header_id|>\n\n", 'As JSON: {"name": 1}', "", 'As JSON: {"name": 1}', []),
    ("mistral", "[/INST]", f"[TOOL_CALLS]get_weather[ARGS]{P}[TOOL_CALLS]get_time[ARGS]{U}", "", "", [PARIS, UTC]),
    ("mistral", "[/INST]", "[THINK]So.[/THINK]Hello!", "So.", "Hello!", []),
    (
        "mistral-list", "[/INST]",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {P}}}, {{"name": "get_time", "arguments": {U}}}]',
        "", "", [PARIS, UTC],
    ),
    (
        "gpt-oss", "<|start|>assistant",
        f"<|channel|>analysis<|message|>Need weather.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{P}",
        "Need weather.", "", [PARIS],
    ),
    (
        "gpt-oss", "<|start|>assistant",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It is **4**.",
        "Easy.", "It is **4**.", [],
    ),
    (
        "gpt-oss", "<|start|>assistant", f"<|channel|>commentary to=functions.get_time<|message|>{U}", "", "", [UTC],
    ),
    (
        "deepseek", "<｜Assistant｜>",
        f"<think>\nBoth.\n</think>\n\n{CALLS}{BEGIN}function{SEP}get_weather\n```json\n{P}\n```{END}\n"
        f"{BEGIN}function{SEP}get_time\n```json\n{U}\n```{END}{ENDS}",
        "Both.", "", [PARIS, UTC],
    ),
    (
        "deepseek-v3.1", "<｜Assistant｜></think>",
        f"Checking.{CALLS}{BEGIN}get_weather{SEP}{P}{END}{BEGIN}get_time{SEP}{U}{END}{ENDS}",
        "", "Checking.", [PARIS, UTC],
    ),
    ("thinking", "<|user|>\nhi\n", "<think>x</think>y", "x", "y", []),
]  # fmt: skip


def read(dialect: str, prompt: str, answer: str, size: int, tools: list[Tool]) -> tuple[str, str, list[Any], Parser]:
    template = next(d.template for d in DIALECTS if d.name == dialect)
    parser = Parser(template, turn_of(template, prompt), [tool.model_dump(exclude_none=True) for tool in tools])
    parts: list[AnswerPart] = []
    for begin in range(0, len(answer), size):
        parts += parser.feed(answer[begin : begin + size])
    parts += parser.finish()
    texts = ("".join(p.text for p in parts if p.kind == kind) for kind in ("thinking", "content"))
    calls = [(p.name, json.loads(p.text)) for p in parts if p.kind == "call"]
    return *texts, calls, parser  # type: ignore[return-value]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("dialect, prompt, answer, thinking, content, calls", RECORDED)
def test_recorded_answers(
    dialect: str, prompt: str, answer: str, thinking: str, content: str, calls: list[Any], size: int
) -> None:
    *got, parser = read(dialect, prompt, answer, size, TOOLS)
    assert got == [thinking, content, calls]
    assert parser.calls == len(calls)


DEEP, LONG = "[" * 3000, "1" * 5000
LARGE = '{"name": "now", "arguments": {"a": 1e999}}'


@pytest.mark.parametrize("size", [7, 10_000])
@pytest.mark.parametrize(
    "dialect, answer, content",
    [
        ("qwen", '<tool_call>{"function": "now", "arguments": {}}</tool_call>', '{"function": "now", "arguments": {}}'),
        ("llama3", '{"function": null, "parameters": {}}', '{"function": null, "parameters": {}}'),
        ("qwen", f"<tool_call>{LARGE}</tool_call>", LARGE),
        ("qwen", f"So: <tool_call>{DEEP}</tool_call>.", f"So: {DEEP}."),
        ("qwen", f"So: <tool_call>{LONG}</tool_call>.", f"So: {LONG}."),
        ("mistral", f"[TOOL_CALLS]now[ARGS]{DEEP}", DEEP),
        ("llama3", f'{{"a": {DEEP}', f'{{"a": {DEEP}'),
    ],
)
def test_what_is_no_call_is_content(dialect: str, answer: str, content: str, size: int) -> None:
    """JSON of another kind, or such that Python reads none: nested without end, or with thousands of digits."""
    template = next(d.template for d in DIALECTS if d.name == dialect)
    parser = Parser(template, "", [tool.model_dump(exclude_none=True) for tool in TOOLS])
    cuts = [answer[begin : begin + size] for begin in range(0, len(answer), size)]
    parts = [part for cut in cuts for part in parser.feed(cut)] + parser.finish()
    assert {part.kind for part in parts} == {"content"} and parser.calls == 0
    assert "".join(part.text for part in parts) == content
    for function in (None, "now"):
        plain = PlainParser(None, "", function)
        text = f'[{{"name": "now", "parameters": {DEEP}'
        assert [(p.kind, p.text) for p in [*plain.feed(text), *plain.finish()]] == [("content", text)]


def test_without_tools_calls_are_text() -> None:
    answer = '{"name": "get_weather", "parameters": {}}'
    assert read("llama3", "", answer, 5, [])[:3] == ("", answer, [])


def test_every_dialect_has_a_recorded_answer() -> None:
    assert {row[0] for row in RECORDED} == {d.name for d in DIALECTS}


@pytest.mark.parametrize(
    "template, name",
    [
        ("{% if tools %}<tool_call>\n{'name'", "qwen"),
        ("<tool_call>\n<function=x>", "qwen3-coder"),
        ("<|start_header_id|>ipython<|end_header_id|>", "llama3"),
        ("<|start|>system<|channel|>analysis", "gpt-oss"),
        ("[TOOL_CALLS] [", "mistral-list"),
        ("{% if thinking %}<｜tool▁call▁begin｜>x<｜tool▁sep｜>", "deepseek-v3.1"),
        ("{{ '<think>' }}", "thinking"),
        ("{{ message.content }}", None),
    ],
)
def test_the_template_tells_the_dialect(template: str, name: str | None) -> None:
    found = dialect_of(template)
    assert (found and found.name) == name
