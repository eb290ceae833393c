"""Answers that have to be calls: whatever is drawn, it is calls of the tools, in the words of the model's family."""

from __future__ import annotations

import json
import random
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from launch.answers.dialects import DIALECTS, AnswerPart, Dialect, Parser, PlainParser, calling, turn_of
from launch.answers.grammars import Shape, of_calls, of_shape
from launch.answers.matcher import BegunGrammar, Grammars
from launch.client.schemas import Tool
from tests.e2e.checkpoints import DEMO
from tests.serving.test_dialects import RECORDED, TOOLS

EOS = 0
MARK = re.compile(r"<[｜|/\w][^<>\n=]*>|\[/?[A-Z_]{4,}\]")  # texts that are tokens of a family
STRICT = [
    Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})
    for name, parameters in (
        (
            "get_weather",
            {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "São Paulo"]}, "days": {"type": "integer", "maximum": 9}},
                "required": ["city"],
                "additionalProperties": False,
            },
        ),
        (
            "set.note-1",
            {
                "type": "object",
                "properties": {"text": {"type": "string", "maxLength": 5}, "keys": {"$ref": "#/$defs/keys"}},
                "required": ["text", "keys"],
                "additionalProperties": False,
                "$defs": {"keys": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
            },
        ),
        ("now", None),
    )
]
WITH_CALLS = [dialect for dialect in DIALECTS if dialect.calls is not None]


def dialect_of(name: str) -> Dialect:
    return next(d for d in DIALECTS if d.name == name)


@cache
def tokenizer_of(name: str) -> tuple[Tokenizer, dict[str, int]]:
    """The demo model's, with the tokens of a family; Qwen's are not special, all others' are."""
    dialect = dialect_of(name)
    calls = [] if dialect.calls is None else [dialect.calls.call, dialect.calls.before, dialect.calls.after]
    marks = MARK.findall(" ".join([*calls, *(dialect.thought or ()), dialect.said]))
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(mark, special="qwen" not in name) for mark in dict.fromkeys(marks)])
    return tokenizer, {mark: tokenizer.token_to_id(mark) for mark in marks}


@cache
def grammars_of(name: str) -> Grammars:
    tokenizer, _ = tokenizer_of(name)
    with TemporaryDirectory() as directory:
        tokenizer.save(str(path := Path(directory, "tokenizer.json")))
        return Grammars(path, tokenizer.get_vocab_size(), [EOS])


def given(tools: list[Tool]) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_none=True) for tool in tools]


def grammar_of(name: str, tools: list[Tool], many: bool = True, prompt: str = "") -> str:
    dialect = dialect_of(name)
    turn = turn_of(dialect.template, prompt)
    return json.dumps({"grammars": of_calls(dialect, given(tools), many, turn, tokenizer_of(name)[1], [EOS])})


def allowed(grammar: BegunGrammar) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(grammar.allowed().view(np.uint8), bitorder="little"))


def walk(name: str, grammar: BegunGrammar, seed: int, most: int = 300) -> str | None:
    """A random answer; None where it comes to no end."""
    tokenizer, marks = tokenizer_of(name)
    thought = dialect_of(name).thought
    close = marks[thought[1]] if thought is not None else EOS
    rng, drawn = random.Random(seed), list[int]()
    while (may := allowed(grammar)).tolist() != [EOS]:
        if len(drawn) == most:
            return None
        # A thought ends after some tokens, and an answer where it can, every other time.
        ends = [token for token in (close, EOS) if token in may and rng.random() < 0.5]
        if ends == [EOS]:
            break
        drawn.append(ends[0] if ends else int(rng.choice(may[may != EOS])))
        grammar.take(drawn[-1])
    return str(tokenizer.decode(drawn, skip_special_tokens=False))


def read(name: str, prompt: str, answer: str, tools: list[Tool]) -> tuple[str, list[tuple[str, Any]]]:
    template = dialect_of(name).template
    parser = Parser(template, turn_of(template, prompt), given(tools))
    parts: list[AnswerPart] = [*parser.feed(answer), *parser.finish()]
    content = "".join(part.text for part in parts if part.kind == "content")
    return content, [(part.name, json.loads(part.text)) for part in parts if part.kind == "call"]


def fits(name: str, arguments: dict[str, Any]) -> bool:
    match name:
        case "get_weather":
            days = arguments.get("days", 0)
            return arguments["city"] in ("Paris", "São Paulo") and arguments.keys() <= {"city", "days"} and days <= 9
        case "set.note-1":
            return arguments.keys() == {"text", "keys"} and all(isinstance(key, bool) for key in arguments["keys"])
    return name == "now" and arguments == {}


@pytest.mark.parametrize("name", [dialect.name for dialect in WITH_CALLS])
@pytest.mark.parametrize("inside", [False, True])
def test_any_walk_is_calls_that_the_parser_reads(name: str, inside: bool) -> None:
    dialect = dialect_of(name)
    calls = dialect.calls
    assert calls is not None
    if inside and dialect.thought is None:
        return
    prompt = dialect.template["start_anchor"] + (dialect.thought[0] + "\n" if inside and dialect.thought else "")
    numbers = set()
    for many in (False, True):
        grammar = grammar_of(name, STRICT, many, prompt)
        for seed in range(30):
            answer = walk(name, grammars_of(name).begun(grammar), seed)
            if answer is None:
                continue
            content, called = read(name, prompt, answer, STRICT)
            assert content == "" and called and (many or len(called) == 1), answer
            assert all(fits(*call) for call in called), answer
            numbers.add(len(called))
    assert 1 in numbers and (calls.between is None or len(numbers) > 1), "several calls, where there can be"


COLOURS = {"$defs": {"colour": {"type": "string", "enum": ["red", "1"]}}}


@pytest.mark.parametrize("name", [dialect.name for dialect in WITH_CALLS])
@pytest.mark.parametrize(
    "schema, wanted",
    [
        ({"$ref": "#/$defs/colour"}, ["red", "1"]),
        ({"anyOf": [{"$ref": "#/$defs/colour"}, {"type": "null"}]}, ["red", "1", None]),
        ({"allOf": [{"$ref": "#/$defs/colour"}]}, ["red", "1"]),
        ({"oneOf": [{"const": "a"}, {"const": True}]}, ["a", True]),
        ({"type": ["string", "null"], "enum": ["a", None]}, ["a", None]),
        ({"enum": ["1", 1, 2, None]}, ["1", 1, 2, None]),
        ({"enum": ["1", "null", " a"]}, ["1", "null", " a"]),
        ({"const": {"k": ["v"]}}, [{"k": ["v"]}]),
        ({"type": "string", "const": "1"}, ["1"]),
        ({"enum": ["</parameter>", "</tool_call>"]}, ["</parameter>", "</tool_call>"]),
    ],
)
def test_arguments_are_what_their_schema_says(name: str, schema: dict[str, Any], wanted: list[Any]) -> None:
    only = {"required": ["x"], "additionalProperties": False}
    parameters = {"type": "object", "properties": {"x": schema}} | only | COLOURS
    tools = [Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": parameters}})]
    grammar, found = grammar_of(name, tools, many=False), set[str]()
    for seed in range(30):
        answer = walk(name, grammars_of(name).begun(grammar), seed)
        if answer is not None:
            _, ((_, arguments),) = read(name, "", answer, tools)
            assert list(arguments) == ["x"], answer
            found.add(json.dumps(arguments["x"]))
    assert found and found <= {json.dumps(one) for one in wanted}


@pytest.mark.parametrize("name", [dialect.name for dialect in WITH_CALLS if dialect.calls and dialect.calls.argument])
@pytest.mark.parametrize("listed", [["a", None], [1], []], ids=str)
def test_a_text_that_lists_other_values_is_any_text(name: str, listed: list[Any]) -> None:
    def grammar(**more: Any) -> str:
        parameters = {"type": "object", "properties": {"x": {"type": "string"} | more}, "required": ["x"]}
        tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": parameters}})
        return grammar_of(name, [tool], many=False)

    assert grammar(enum=listed) == grammar() != grammar(enum=["a"])


@pytest.mark.parametrize(
    "schema, text, wanted",
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "42", "42"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "Paris", "Paris"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"type": "string"}, '"Paris"', '"Paris"'),
        ({"$ref": "#/$defs/colour"}, "red", "red"),
        ({"$ref": "#/$defs/point"}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/$defs/nowhere"}, "[1]", [1]),
        ({"type": "number"}, "1e999", "1e999"),
    ],
)
def test_arguments_may_be_written_without_quotes(schema: dict[str, Any], text: str, wanted: Any) -> None:
    """Models of Qwen3-Coder write texts as they are where nothing forces a form."""
    more = {"$defs": {"point": {"type": "object"}} | COLOURS["$defs"]}
    parameters = {"type": "object", "properties": {"x": schema}} | more
    tools = [Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": parameters}})]
    answer = f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
    assert read("qwen3-coder", "", answer, tools) == ("", [("f", {"x": wanted})])


@pytest.mark.parametrize("base", [None, "thinking"])
@pytest.mark.parametrize("function", [None, "set.note-1"])
def test_any_walk_of_plain_json_is_calls(base: str | None, function: str | None) -> None:
    """Behind a thought or none, of one function that is named or of any."""
    spoken = calling(None if base is None else dialect_of(base), function is not None)
    tools = [tool for tool in STRICT if function in (None, tool.function.name)]
    numbers = set()
    for many in (False, True):
        parts = of_calls(spoken, given(tools), many, "", tokenizer_of("thinking")[1], [EOS])
        for seed in range(30):
            answer = walk("thinking", grammars_of("thinking").begun(json.dumps({"grammars": parts})), seed)
            if answer is None:
                continue
            parser = PlainParser(spoken.template or None, "", function)
            said = [part for cut in (answer[:9], answer[9:]) for part in parser.feed(cut)] + parser.finish()
            called = [(part.name, json.loads(part.text)) for part in said if part.kind == "call"]
            assert len(called) == parser.calls > 0 and all(fits(*call) for call in called), answer
            assert {part.kind for part in said} <= {"call", "thinking"} and (many or len(called) == 1)
            numbers.add(len(called))
    assert 1 in numbers and (function is not None or len(numbers) > 1)


@pytest.mark.parametrize("name", [dialect.name for dialect in DIALECTS if dialect.thought is not None])
@pytest.mark.parametrize("inside", [False, True])
def test_a_form_begins_behind_a_thought(name: str, inside: bool) -> None:
    """Thoughts are free; the answer is the form alone, in the family's own marks."""
    dialect = dialect_of(name)
    assert dialect.thought is not None
    _, marks = tokenizer_of(name)
    turn = dialect.thought[0] + "\n" if inside else ""
    parts = of_shape(Shape("x", "choice", ["Yes", "No"]), marks, (), [EOS], dialect, turn)
    thoughts = set()
    for seed in range(30):
        answer = walk(name, grammars_of(name).begun(json.dumps({"grammars": parts})), seed)
        if answer is None:
            continue
        parser = Parser(dialect.template, turn, [])
        said = [*parser.feed(answer), *parser.finish()]
        assert "".join(part.text for part in said if part.kind == "content") in ("Yes", "No"), answer
        thoughts.add(dialect.thought[1] in answer)
    assert thoughts == ({True} if inside else {False, True})


def test_no_thought_precedes_a_choice_that_begins_as_one() -> None:
    choices = ["<think> a", "b"]
    parts = of_shape(Shape("x", "choice", choices), tokenizer_of("qwen")[1], (), [EOS], dialect_of("qwen"))
    walks = {walk("qwen", grammars_of("qwen").begun(json.dumps({"grammars": parts})), seed) for seed in range(30)}
    assert walks == {*choices}


def test_recorded_calls_are_among_what_may_come() -> None:
    """Token by token, without what was said before them; some families write calls in several ways."""
    followed = set()
    for name, prompt, answer, _, content, called in RECORDED:
        if not called:
            continue
        tokenizer, _ = tokenizer_of(name)
        grammar = grammars_of(name).begun(grammar_of(name, TOOLS, True, prompt))
        alone = re.sub(re.escape(content) + r"\s*", "", answer) if content else answer
        for token in tokenizer.encode(alone, add_special_tokens=False).ids:
            if token not in allowed(grammar):
                break
            grammar.take(token)
        else:
            followed |= {name} if EOS in allowed(grammar) else set()
    assert followed == {dialect.name for dialect in WITH_CALLS}


@pytest.mark.parametrize("name", [dialect.name for dialect in WITH_CALLS])
def test_parameters_that_cannot_be_followed_are_named(name: str) -> None:
    parameters = {"properties": {"a": {"type": "nonsense"}}}
    tool = Tool.model_validate({"type": "function", "function": {"name": "x", "parameters": parameters}})
    with pytest.raises(ValueError, match="nonsense"):
        grammars_of(name).begun(grammar_of(name, [tool]))


@pytest.mark.parametrize("name", [dialect.name for dialect in WITH_CALLS])
@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": 5},
        {"properties": {"a": 5}, "required": 5},
        {"properties": {"VALUE": {"type": "integer", "enum": 5}}},
    ],
)
def test_parameters_of_any_kind_are_followed_or_refused(name: str, parameters: dict[str, Any]) -> None:
    function = {"name": "ARGUMENTS.NAME", "parameters": parameters}
    tool = Tool.model_validate({"type": "function", "function": function})
    grammar = grammar_of(name, [tool])
    with suppress(ValueError):  # which the server tells
        grammars_of(name).begun(grammar)
