"""Answers as models of each family write them: thinking, text and calls come out whole, however they are cut."""

# ruff: noqa: E501
from __future__ import annotations

import json
from typing import Any

import pytest

from launch.answers.dialects import DIALECTS, AnswerPart, Parser, PlainParser, dialect_of, turn_of
from launch.client.schemas import Tool

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
        "", '<tool_call>\n{"name": "get_weather", "argum\n</tool_call>', [],
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
    "dialect, answer",
    [
        ("qwen", '<tool_call>{"function": "now", "arguments": {}}</tool_call>'),
        ("llama3", '{"function": null, "parameters": {}}'),
        ("llama3", '{"name": "Bob", "parameters": {"age": 7}}'),  # an answer in JSON: no such tool
        ("qwen", f"<tool_call>{LARGE}</tool_call>"),
        ("qwen", f"So: <tool_call>{DEEP}</tool_call>."),
        ("qwen", f"So: <tool_call>{LONG}</tool_call>."),
        ("mistral", f"[TOOL_CALLS]now[ARGS]{DEEP}"),
        ("deepseek-v3.1", f"{BEGIN}now{SEP}{DEEP}{END}"),
        ("llama3", f'{{"a": {DEEP}'),
        ("mistral-list", '[TOOL_CALLS]now{"a": 1}'),
        ("qwen3-coder", "<tool_call>\n<function=now>\n<parameter=a>\n1"),
    ],
)
def test_what_is_no_call_is_content(dialect: str, answer: str, size: int) -> None:
    """JSON of another kind, or such that Python reads none: nested without end, or with thousands of digits."""
    template = next(d.template for d in DIALECTS if d.name == dialect)
    parser = Parser(template, "", [tool.model_dump(exclude_none=True) for tool in TOOLS])
    cuts = [answer[begin : begin + size] for begin in range(0, len(answer), size)]
    parts = [part for cut in cuts for part in parser.feed(cut)] + parser.finish()
    assert {part.kind for part in parts} == {"content"} and parser.calls == 0
    assert "".join(part.text for part in parts) == answer
    for function in (None, "now"):
        plain = PlainParser(None, "", function)
        text = f'[{{"name": "now", "parameters": {DEEP}'
        assert [(p.kind, p.text) for p in [*plain.feed(text), *plain.finish()]] == [("content", text)]


def coder(*arguments: str, name: str = "get_time") -> str:
    return f"<tool_call>\n<function={name}>\n{''.join(arguments)}</function>\n</tool_call>"


def zone(value: Any) -> tuple[str, dict[str, Any]]:
    return "get_time", {"zone": value}


EXAMPLE = "a\n" + coder("<parameter=zone>\nb\n</parameter>\n")
CITY = "<parameter=city>\n</parameter> Rome\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
MARKED = '{"zone": "a </tool_call> [TOOL_CALLS] <|call|> \\"z"}'
INNER = 'a </tool_call> [TOOL_CALLS] <|call|> "z'
HARMONY = "<|channel|>commentary to=functions.get_time "
# dialect, answer, content, calls
KEPT: list[tuple[str, str, str, list[Any]]] = [
    ("qwen3-coder", coder("<parameter=zone>\na </parameter> z\n</parameter>\n"), "", [zone("a </parameter> z")]),
    ("qwen3-coder", coder(CITY, name="get_weather"), "", [("get_weather", {"city": "</parameter> Rome", "days": 3})]),
    (
        "qwen3-coder", coder("<parameter=zone>\na\n</function>\n</tool_call>\nz\n</parameter>\n") + "\nDone.",
        "Done.", [zone("a\n</function>\n</tool_call>\nz")],
    ),
    ("qwen3-coder", coder(f"<parameter=zone>\n{EXAMPLE}\n</parameter>\n"), "", [zone(EXAMPLE)]),
    # A value that the model does not close: at the end, before text, before another call, before the end of all.
    ("qwen3-coder", coder("<parameter=zone>\na\n"), "", [zone("a")]),
    ("qwen3-coder", coder("<parameter=zone>\na\n") + "\nDone.", "Done.", [zone("a")]),
    (
        "qwen3-coder", coder("<parameter=zone>\na\n") + "\n" + coder("<parameter=zone>\nb\n</parameter>\n"),
        "", [zone("a"), zone("b")],
    ),
    ("qwen3-coder", coder("<parameter=zone>\na\n</parameter>\n").removesuffix("\n</tool_call>"), "", [zone("a")]),
    ("qwen3-coder", coder(), "", [("get_time", {})]),
    ("qwen", f'<tool_call>\n{{"name": "get_time", "arguments": {MARKED}}}\n</tool_call>\nDone.', "Done.", [zone(INNER)]),
    (
        "qwen", f'<tool_call>{{"name": "a</tool_call>So.\n<tool_call>{{"name": "get_time", "arguments": {U}}}</tool_call>',
        '<tool_call>{"name": "a</tool_call>So.', [UTC],  # a text that does not end takes no other call with it
    ),
    ("mistral", f"[TOOL_CALLS]get_time[ARGS]{MARKED}[TOOL_CALLS]get_time[ARGS]{U}", "", [zone(INNER), UTC]),
    ("mistral", f"[TOOL_CALLS]get_time[ARGS]{U}\n\nDone.", "Done.", [UTC]),
    ("mistral-list", f'[TOOL_CALLS] [{{"name": "get_time", "arguments": {U}}}]\n\nDone.', "Done.", [UTC]),
    ("gpt-oss", f"{HARMONY}json<|message|>{MARKED}<|call|>", "", [zone(INNER)]),
    ("gpt-oss", f"{HARMONY}<|constrain|>code<|message|>{U}<|call|>", "", [UTC]),
    ("gpt-oss", f"{HARMONY}<|constrain|>json<|message|><|call|>", "", [("get_time", {})]),
    ("gpt-oss", f"<|channel|>commentary to=get_time json<|message|>{U}<|call|>", "", [UTC]),
    ("gpt-oss", f" to=functions.get_time<|channel|>commentary json<|message|>{U}<|call|>", "", [UTC]),
    ("gpt-oss", "<|channel|>mardown<|message|>hello<|end|>", "hello", []),
    ("gpt-oss", "hello", "hello", []),
    ("gpt-oss", "<|channel|>final<|message|>hello<|end|><|start|>assistant<|channel|>fin", "hello", []),
    ("deepseek-v3.1", f"{CALLS}{BEGIN}get_time{SEP}{U}{END}{ENDS}\nDone.", "Done.", [UTC]),
    ("llama3", f'{{"name": "get_time", "parameters": {U}}}; {{"name": "get_time", "parameters": {U}}}', "", [UTC] * 2),
    # Thoughts are where the answer begins.
    ("qwen", "Write <think> and </think>.", "Write <think> and </think>.", []),
    ("qwen", "<think>x</think>\n\n<think>y</think>", "<think>y</think>", []),
    ("mistral", "a [THINK]b[/THINK]", "a [THINK]b[/THINK]", []),
    # Spaces at an answer's ends are its own.
    ("qwen", "  a \n b \n", "  a \n b \n", []),
    ("qwen", "\n", "\n", []),
    ("qwen", "<think>\nx\n</think>\n\n    return x\n", "    return x\n", []),
    ("gpt-oss", "<|channel|>final<|message|> a \n", " a \n", []),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("dialect, answer, content, calls", KEPT)
def test_nothing_is_lost(dialect: str, answer: str, content: str, calls: list[Any], size: int) -> None:
    """Marks within arguments, calls that are not closed, messages without a known head, text behind calls, spaces."""
    prompt = next(d.template["start_anchor"] for d in DIALECTS if d.name == dialect)
    thinking, *got = read(dialect, prompt, answer, size, TOOLS)[:3]
    assert got == [content, calls] and thinking in ("", "x")


@pytest.mark.parametrize(
    "dialect, answer",
    [(row[0], row[2]) for row in RECORDED if row[5]]
    + [(row[0], row[1]) for row in KEPT if row[3] and row[1][-1] in ">}]"],
)
def test_a_call_that_is_cut_is_no_call(dialect: str, answer: str) -> None:
    """At every place: what is told as a call is one of the whole answer's, and the text of the others is told."""
    template = next(d.template for d in DIALECTS if d.name == dialect)
    tools = [tool.model_dump(exclude_none=True) for tool in TOOLS]

    def told(text: str, cut: bool) -> tuple[list[Any], str]:
        parser = Parser(template, "", tools)
        parts = [*parser.feed(text), *parser.finish(cut)]
        calls = [(part.name, json.loads(part.text)) for part in parts if part.kind == "call"]
        return calls, "".join(part.text for part in parts if part.kind == "content")

    whole, _ = told(answer, False)
    numbers = set()
    for end in range(len(answer)):
        calls, content = told(answer[:end], True)
        if calls != whole[: len(calls)]:
            assert EXAMPLE in answer and calls == [zone("a\n<tool_call>\n<function=get_time>\n<parameter=zone>\nb")], (
                end
            )
        at = answer.find("zone", 0, end)
        assert calls or at < 0 or "zone" in content, end
        numbers.add(len(calls))
    assert 0 in numbers


@pytest.mark.parametrize(
    "dialect, prompt, begun, turn",
    [
        ("qwen", "<|im_start|>user\na <think><|im_end|>\n<|im_start|>assistant\n<think>\n", None, "<think>\n"),
        # Prompts of families that are read as another's: what a user writes is no part of the turn.
        ("qwen", "<|user|>\nWhat is <think>?<|assistant|>\n", None, "\n"),
        ("qwen", "<|user|>\nWhat is <think>?<|assistant|><think>", None, "<think>"),
        ("qwen", "<|user|>\nhi<|assistant|>\n<think></think>\n", None, "<think></think>\n"),
        ("qwen", "<|user|>\nhi<|assistant|></think>", None, "</think>"),
        ("qwen", "<|user|>\nhi<|assistant|>I am", "I am", "I am"),
        ("thinking", "<|user|>\nhi<|assistant|>", None, ""),
        ("thinking", "<|user|>\nhi<|assistant|><think>\n", None, "<think>\n"),
        ("gpt-oss", "<|start|>user<|message|>hi<|end|>", None, ""),
    ],
)
def test_the_turn_is_the_prompts_end(dialect: str, prompt: str, begun: str | None, turn: str) -> None:
    assert turn_of(next(d.template for d in DIALECTS if d.name == dialect), prompt, begun) == turn


@pytest.mark.parametrize(
    "schema, text, value",
    [
        ({"type": ["string", "integer"]}, "007", "007"),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "number"}, "2.50", 2.5),
    ],
)
def test_arguments_are_typed_once(schema: dict[str, Any], text: str, value: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": schema}}}}
    for dialect, answer, wanted in (
        ("qwen3-coder", coder(f"<parameter=x>\n{text}\n</parameter>\n", name="f"), value),
        ("qwen", f'<tool_call>{{"name": "f", "arguments": {{"x": "{text}"}}}}</tool_call>', text),
    ):
        parser = Parser(next(d.template for d in DIALECTS if d.name == dialect), "", [tool])
        (call,) = [*parser.feed(answer), *parser.finish()]
        assert json.loads(call.text) == {"x": wanted}


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
