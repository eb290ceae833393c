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

from launch.answers.answer_parser import JsonCallParser, Parser
from launch.answers.chat_formats import CHAT_FORMATS, assistant_turn, required_call_format
from launch.answers.grammar_matcher import GrammarMatcher, GrammarMatcherFactory
from launch.answers.grammars import (
    StructuredOutput,
    strict_tool_grammar,
    structured_output_grammar,
    tool_call_grammar,
)
from tests.e2e.checkpoints import DEMO
from tests.serving.transcripts import BY_NAME, KNOWN, TOOLS, TRANSCRIPTS, text_of, validated

EOS = 0
MARK = re.compile(r"<[｜|/\w][^<>\n=]*>|\[/?[A-Z_]{4,}\]")  # texts that are tokens of a family
Parameters = dict[str, Any] | None
CLOSED = {"type": "object", "additionalProperties": False}


def tool(name: str, parameters: Parameters) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


STRICT = KNOWN["strict"]
WITH_CALLS = [dialect.name for dialect in CHAT_FORMATS if dialect.calls is not None]
# Those whose marks of thoughts are tokens: a random thought ends.
THINKING = [one.name for one in CHAT_FORMATS if one.thinking_marks is not None and MARK.search(one.thinking_marks[0])]
SEEDS = range(30)


@cache
def tokenizer_of(name: str) -> tuple[Tokenizer, dict[str, int]]:
    """The demo model's, with the tokens of a family; Qwen's are not special, all others' are."""
    dialect = BY_NAME[name]
    calls = [] if dialect.calls is None else [dialect.calls.call, dialect.calls.before, dialect.calls.after]
    marks = MARK.findall(" ".join([*calls, *(dialect.thinking_marks or ()), dialect.content_prefix]))
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(mark, special="qwen" not in name) for mark in dict.fromkeys(marks)])
    return tokenizer, {mark: tokenizer.token_to_id(mark) for mark in marks}


@cache
def grammars_of(name: str) -> GrammarMatcherFactory:
    tokenizer, _ = tokenizer_of(name)
    with TemporaryDirectory() as directory:
        tokenizer.save(str(path := Path(directory, "tokenizer.json")))
        return GrammarMatcherFactory(path, tokenizer.get_vocab_size(), [EOS])


def grammar_of(name: str, tools: list[dict[str, Any]], many: bool = True, prompt: str = "") -> str:
    dialect = BY_NAME[name]
    turn = assistant_turn(dialect, prompt)
    return json.dumps(
        {"grammars": tool_call_grammar(dialect, validated(tools), many, turn, tokenizer_of(name)[1], [EOS])}
    )


def allowed(grammar: GrammarMatcher) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(grammar.token_bitmask().view(np.uint8), bitorder="little"))


def walk(name: str, grammar: GrammarMatcher, seed: int, max_tokens: int = 300) -> str | None:
    """A random answer; None where it comes to no end."""
    tokenizer, marks = tokenizer_of(name)
    thought = BY_NAME[name].thinking_marks
    close = EOS if thought is None else marks.get(thought[1], EOS)
    rng, output_token_ids = random.Random(seed), list[int]()
    while (may := allowed(grammar)).tolist() != [EOS]:
        if len(output_token_ids) == max_tokens:
            return None
        # A thought ends after some tokens, and an answer where it can, every other time.
        ends = [token for token in (close, EOS) if token in may and rng.random() < 0.5]
        if ends == [EOS]:
            break
        output_token_ids.append(ends[0] if ends else int(rng.choice(may[may != EOS])))
        grammar.accept_token(output_token_ids[-1])
    return str(tokenizer.decode(output_token_ids, skip_special_tokens=False))


def walks(name: str, grammar: str) -> list[str]:
    """Random answers that come to an end."""
    found = [walk(name, grammars_of(name).create_matcher(grammar), seed) for seed in SEEDS]
    return [answer for answer in found if answer is not None]


def read(parser: Parser | JsonCallParser, answer: str) -> tuple[str, list[tuple[Any, Any]]]:
    """Content and calls of an answer in two pieces."""
    parts = [*parser.feed(answer[:9]), *parser.feed(answer[9:]), *parser.finish()]
    calls = [(part.name, json.loads(part.text)) for part in parts if part.kind == "call"]
    assert len(calls) == parser.calls
    return text_of(parts, "content"), calls


def fits(name: str, arguments: dict[str, Any]) -> bool:
    match name:
        case "get_weather":
            days = arguments.get("days", 0)
            return arguments["city"] in ("Paris", "São Paulo") and arguments.keys() <= {"city", "days"} and days <= 9
        case "set.note-1":
            return arguments.keys() == {"text", "keys"} and all(isinstance(key, bool) for key in arguments["keys"])
    return name == "now" and arguments == {}


@pytest.mark.parametrize("name", WITH_CALLS)
@pytest.mark.parametrize("inside", [False, True], ids=["", "inside a thought"])
def test_any_walk_is_calls_that_the_parser_reads(name: str, inside: bool) -> None:
    dialect = BY_NAME[name]
    assert dialect.calls is not None
    if inside and name not in THINKING:
        return
    prompt = next(iter(dialect.anchors), "") + (
        dialect.thinking_marks[0] + "\n" if inside and dialect.thinking_marks else ""
    )
    turn, numbers = assistant_turn(dialect, prompt), set()
    for many in (False, True):
        for answer in walks(name, grammar_of(name, STRICT, many, prompt)):
            content, called = read(Parser(dialect.fields, turn, validated(STRICT)), answer)
            assert content == "" and called and (many or len(called) == 1), answer
            assert all(fits(*call) for call in called), answer
            numbers.add(len(called))
    assert 1 in numbers and (dialect.calls.between is None or len(numbers) > 1), "several calls, where there can be"


@pytest.mark.parametrize("base", [None, "thinking"])
@pytest.mark.parametrize("function", [None, "set.note-1"])
def test_any_walk_of_plain_json_is_calls(base: str | None, function: str | None) -> None:
    """Behind a thought or none, of one function that is named or of any."""
    spoken = required_call_format(None if base is None else BY_NAME[base], function is not None)
    tools = [one for one in STRICT if function in (None, one["function"]["name"])]
    numbers = set()
    for many in (False, True):
        parts = tool_call_grammar(spoken, validated(tools), many, "", tokenizer_of("thinking")[1], [EOS])
        for answer in walks("thinking", json.dumps({"grammars": parts})):
            content, called = read(JsonCallParser(spoken.fields or None, "", function), answer)
            assert content == "" and called and (many or len(called) == 1), answer
            assert all(fits(*call) for call in called), answer
            numbers.add(len(called))
    assert 1 in numbers and (function is not None or len(numbers) > 1)


COLORS = {"$defs": {"color": {"type": "string", "enum": ["red", "1"]}}}


@pytest.mark.parametrize("name", WITH_CALLS)
@pytest.mark.parametrize("row", KNOWN["schemas"])
def test_arguments_are_what_their_schema_says(name: str, row: dict[str, Any]) -> None:
    tools = [tool("f", {"properties": {"x": row["schema"]}, "required": ["x"]} | CLOSED | COLORS)]
    found = set[str]()
    for answer in walks(name, grammar_of(name, tools, many=False)):
        _, ((_, arguments),) = read(Parser(BY_NAME[name].fields, "", validated(tools)), answer)
        assert list(arguments) == ["x"], answer
        found.add(json.dumps(arguments["x"]))
    assert found and found <= {json.dumps(one) for one in row["values"]}


UNQUOTED = [dialect.name for dialect in CHAT_FORMATS if dialect.calls and dialect.calls.values == "text"]


@pytest.mark.parametrize("name", WITH_CALLS)
@pytest.mark.parametrize("parameters", KNOWN["forced"], ids=range(len(KNOWN["forced"])))
def test_forced_calls_fit_schemas_as_pydantic_and_zod_write_them(name: str, parameters: dict[str, Any]) -> None:
    """References, alternatives, recursion and dictionaries, at the root and below."""
    tools = [tool("f", parameters)]
    answers = walks(name, grammar_of(name, tools, many=False))
    for answer in answers:
        content, called = read(Parser(BY_NAME[name].fields, "", validated(tools)), answer)
        ((function, arguments),) = called
        assert content == "" and function == "f" and arguments["x"] == 7, answer
        free = parameters.get("additionalProperties") == {"const": 7}
        assert {*arguments.values()} == {7} if free else arguments.keys() <= {"x", "a", "tree", "y"}, answer
        assert "tree" not in arguments or arguments["tree"].keys() <= {"left", "n"}, answer
    assert answers


@pytest.mark.parametrize("name", WITH_CALLS)
def test_a_thousand_parameters_are_followed_or_refused(name: str) -> None:
    """Rules that nest a thousand deep would overflow llguidance's stack."""
    tools = [tool("f", {"properties": {f"p{i}": {"type": "integer"} for i in range(1000)}, "required": ["p999"]})]
    if name in ("gemma4", "pythonic"):
        with pytest.raises(ValueError, match="200"):
            grammar_of(name, tools)
    else:
        grammars_of(name).create_matcher(grammar_of(name, tools))


FREE_TEXTS = ["night", "null", "0042", "a\n b", "a </parameter> <b>", "</", '"', "<arg"]
UNIONS: list[dict[str, Any]] = [
    {"type": "string"},
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"type": ["integer", "string"]},
    {"$ref": "#/$defs/name"},
]


@pytest.mark.parametrize("name", UNQUOTED)
@pytest.mark.parametrize("schema", UNIONS, ids=str)
def test_where_text_is_allowed_any_text_may_come(name: str, schema: dict[str, Any]) -> None:
    """Unquoted, even with parts of marks; also before another argument, which may be left out."""
    properties = {"x": schema, "y": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": ["x"], "$defs": {"name": {"type": "string"}}}
    tools = [tool("f", parameters)]
    grammar, calls = grammar_of(name, tools, many=False), BY_NAME[name].calls
    assert calls is not None and calls.argument is not None
    for text in FREE_TEXTS:
        x = calls.argument.replace("KEY", "x").replace("KIND", "true").replace("VALUE", text)
        for y in ("", calls.argument.replace("KEY", "y").replace("KIND", "false").replace("VALUE", "5")):
            answer = calls.before + calls.call.replace("NAME", "f").replace("ARGUMENTS", x + y) + calls.after
            matcher = grammars_of(name).create_matcher(grammar)
            for token in tokenizer_of(name)[0].encode(answer, add_special_tokens=False).ids:
                assert token in allowed(matcher), (answer, tokenizer_of(name)[0].decode([token]))
                matcher.accept_token(token)
            assert EOS in allowed(matcher), answer
            _, ((_, found),) = read(Parser(BY_NAME[name].fields, "", validated(tools)), answer)
            is_null = text == "null" and "null" in str(schema) and "KIND" not in calls.argument
            assert found == {"x": None if is_null else text} | ({"y": 5} if y else {}), answer


@pytest.mark.parametrize(
    "name", [dialect.name for dialect in CHAT_FORMATS if dialect.calls and dialect.calls.values == "text"]
)
@pytest.mark.parametrize("listed", [["a", None], [1], []], ids=str)
def test_a_text_that_lists_other_values_is_any_text(name: str, listed: list[Any]) -> None:
    def grammar(**more: Any) -> str:
        parameters = {"type": "object", "properties": {"x": {"type": "string"} | more}, "required": ["x"]}
        return grammar_of(name, [tool("f", parameters)], many=False)

    assert grammar(enum=listed) == grammar() != grammar(enum=["a"])


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.parametrize("inside", [False, True], ids=["", "inside a thought"])
def test_a_form_begins_behind_a_thought(name: str, inside: bool) -> None:
    """Thoughts are free; the answer is the form alone, in the family's own marks."""
    dialect = BY_NAME[name]
    assert dialect.thinking_marks is not None
    turn = dialect.thinking_marks[0] + "\n" if inside else ""
    parts = structured_output_grammar(
        StructuredOutput("x", "choice", ["Yes", "No"]), tokenizer_of(name)[1], (), [EOS], dialect, turn
    )
    thoughts = set()
    for answer in walks(name, json.dumps({"grammars": parts})):
        content, _ = read(Parser(dialect.fields, turn, []), answer)
        assert content in ("Yes", "No"), answer
        thoughts.add(dialect.thinking_marks[1] in answer)
    assert thoughts == ({True} if inside else {False, True})


def test_no_thought_precedes_a_choice_that_begins_as_one() -> None:
    choices = ["<think> a", "b"]
    parts = structured_output_grammar(
        StructuredOutput("x", "choice", choices), tokenizer_of("qwen")[1], (), [EOS], BY_NAME["qwen"]
    )
    assert {*walks("qwen", json.dumps({"grammars": parts}))} == {*choices}


def test_recorded_calls_are_among_what_may_come() -> None:
    """Token by token, without what was said before them; some families write calls in several ways."""
    assert {script.dialect.name for script in TRANSCRIPTS} == {*BY_NAME}, "each family has some"
    followed = set()
    for script in TRANSCRIPTS:
        if not script.calls:
            continue
        name = script.dialect.name
        grammar = grammars_of(name).create_matcher(grammar_of(name, TOOLS, True, script.prompt))
        alone = re.sub(re.escape(script.content) + r"\s*", "", script.answer) if script.content else script.answer
        for token in tokenizer_of(name)[0].encode(alone, add_special_tokens=False).ids:
            if token not in allowed(grammar):
                break
            grammar.accept_token(token)
        else:
            followed |= {name} if EOS in allowed(grammar) else set()
    assert followed == {*WITH_CALLS}


@pytest.mark.parametrize("name", WITH_CALLS)
def test_parameters_of_any_kind_are_followed_or_refused(name: str) -> None:
    """What cannot be followed is named."""
    with pytest.raises(ValueError, match="nonsense"):
        grammars_of(name).create_matcher(grammar_of(name, [tool("x", {"properties": {"a": {"type": "nonsense"}}})]))
    for parameters in (
        {"properties": 5},
        {"properties": {"a": 5, "b": {"type": 5}}, "required": 5},
        {"properties": {"VALUE": {"type": "integer", "enum": 5}}},
    ):
        grammar = grammar_of(name, [tool("ARGUMENTS.NAME", parameters)])
        with suppress(ValueError):  # which the server tells
            grammars_of(name).create_matcher(grammar)


# ---- strict tools, where a call may come or not

MAY_CALL = [name for name in WITH_CALLS if name != "llama3"]
INTEGER = {"properties": {"x": {"type": "integer"}}, "required": ["x"]} | CLOSED
FREE_ARGUMENTS = {"y": [1, {"a": "b", "c": [None]}], "z": "t", "n": None}
TEXT = "So < I <b>look\n"
LAST = "gpt-oss", "granite", "mistral-list"  # where calls end the answer
HEADS = "<|channel|>final<|message|>", "<|end|><|start|>assistant"  # of gpt-oss, where no text is without


def strict(tools: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    return [one | {"function": one["function"] | {"strict": one["function"]["name"] in names}} for one in tools]


def strict_grammar(name: str, tools: list[dict[str, Any]], turn: str = "") -> str:
    parts = strict_tool_grammar(BY_NAME[name], validated(tools), turn, tokenizer_of(name)[1], [EOS])
    return json.dumps({"grammars": parts})


def gemma(value: Any) -> str:
    match value:
        case dict():
            return "{" + ",".join(f"{key}:{gemma(value[key])}" for key in sorted(value)) + "}"
        case list():
            return f"[{','.join(map(gemma, value))}]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def written(name: str, function: str, arguments: dict[str, Any]) -> str:
    """A call in the words of a family."""
    calls = BY_NAME[name].calls
    assert calls is not None
    text = gemma(arguments) if calls.values == "gemma" else json.dumps(arguments)
    if calls.argument is not None:
        values = {
            key: value if isinstance(value, str) and calls.values == "text" else json.dumps(value)
            for key, value in arguments.items()
        }
        text = calls.separator.join(
            calls.argument.replace("KEY", key)
            .replace("KIND", str(isinstance(arguments[key], str)).lower())
            .replace("VALUE", value)
            for key, value in values.items()
        )
    call = calls.call.replace("INDEX", "0").replace("NAME", function).replace("ARGUMENTS", text)
    return calls.before + call + calls.after


def refused(name: str, grammar: str, answer: str) -> str | None:
    """What is left of an answer from the first token on that a grammar does not allow; None if it allows all."""
    tokenizer, matcher = tokenizer_of(name)[0], grammars_of(name).create_matcher(grammar)
    ids = tokenizer.encode(answer, add_special_tokens=False).ids
    for at, token in enumerate([*ids, EOS]):
        if token not in allowed(matcher):
            return str(tokenizer.decode(ids[at:], skip_special_tokens=False))
        matcher.accept_token(token)
    return None


@pytest.mark.parametrize("name", MAY_CALL)
def test_calls_of_strict_tools_follow_their_schema_and_others_are_free(name: str) -> None:
    free = {"properties": {"y": {"type": "array"}, "z": {"type": "string"}, "n": {}}, "required": ["x"]}
    tools = strict([tool("f", INTEGER), tool("ADD_INDEX", free)], "f")
    grammar, parser = strict_grammar(name, tools), BY_NAME[name].fields
    call, other = written(name, "f", {"x": 7}), written(name, "ADD_INDEX", FREE_ARGUMENTS)
    said, following = (f"{HEADS[0]}{TEXT}", f"{HEADS[0]}{TEXT}{HEADS[1]}") if name == "gpt-oss" else (TEXT, TEXT)
    answers = [(said, []), (call, ["f"]), (following + call, ["f"]), (other, ["ADD_INDEX"])]
    if name not in LAST:
        answers += [(said + call + other + said + call + said, ["f", "ADD_INDEX", "f"]), ("", [])]
    for answer, functions in answers:
        assert refused(name, grammar, answer) is None, answer
        content, called = read(Parser(parser, "", validated(tools)), answer)
        assert (TEXT.strip() in content) == (TEXT in answer)
        assert called == [(one, {"x": 7} if one == "f" else FREE_ARGUMENTS) for one in functions], answer
    for wrong in (
        written(name, "f", {"x": "seven"}),
        written(name, "f", {}),
        written(name, "f", {"x": 7, "q": 1}),
        written(name, "h", {"x": 7}),
    ):
        assert refused(name, grammar, wrong) and refused(name, grammar, following + wrong), wrong


@pytest.mark.parametrize("name", MAY_CALL)
def test_any_walk_from_the_head_of_a_strict_call_is_one(name: str) -> None:
    tools, found = strict(STRICT, *(one["function"]["name"] for one in STRICT)), 0
    grammar, call = strict_grammar(name, tools), written(name, "NAME", {})
    begun = ("" if name == "gpt-oss" else TEXT) + call[: call.index("NAME")]
    for seed in SEEDS:
        matcher = grammars_of(name).create_matcher(grammar)
        for token in tokenizer_of(name)[0].encode(begun, add_special_tokens=False).ids:
            matcher.accept_token(token)
        if (rest := walk(name, matcher, seed)) is not None:
            _, called = read(Parser(BY_NAME[name].fields, "", validated(tools)), begun + rest)
            assert called and all(fits(*one) for one in called), begun + rest
            found += 1
    assert found


@pytest.mark.parametrize("name", [name for name in THINKING if name in MAY_CALL])
def test_no_call_begins_within_an_open_thought(name: str) -> None:
    thought, call = BY_NAME[name].thinking_marks, written(name, "f", {"x": 7})
    assert thought is not None
    tools = strict([tool("f", INTEGER)], "f")
    if name == "gpt-oss":
        grammar, between = strict_grammar(name, tools, "<|channel|>analysis<|message|>H"), HEADS[1]
    else:
        grammar, between = strict_grammar(name, tools, thought[0] + "\n"), thought[1] + thought[2]
    assert refused(name, grammar, f"{TEXT}{between}{call}") is None
    assert refused(name, grammar, f"{TEXT}{call}")
    assert refused(name, strict_grammar(name, tools), between) is None or name == "gpt-oss"


@pytest.mark.parametrize("name", ["qwen3-coder", "minimax", "seed", "granite", "phi4"])
def test_a_second_way_to_begin_a_call_is_closed(name: str) -> None:
    """Of marks that are no tokens, in text and in thoughts; spelled out, those that are tokens begin no call."""
    calls = BY_NAME[name].calls
    assert calls is not None
    tools, thought = strict([tool("f", INTEGER)], "f"), BY_NAME[name].thinking_marks
    for turn in {"", thought[0] if thought is not None and name in THINKING else ""}:
        rest = refused(name, strict_grammar(name, tools, turn), f"{TEXT}{calls.openings[1]}x")
        assert rest is not None and rest.endswith("x") and len(rest) < 5
    tokenizer, matcher = tokenizer_of(name)[0], grammars_of(name).create_matcher(strict_grammar(name, tools))
    for letter in calls.openings[0] + "x":
        (token,) = tokenizer.encode(letter, add_special_tokens=False).ids
        assert token in allowed(matcher)
        matcher.accept_token(token)


def test_text_that_may_be_a_call_has_no_grammar() -> None:
    assert strict_tool_grammar(BY_NAME["llama3"], [], "", {}, [EOS]) is None
    assert strict_tool_grammar(BY_NAME["thinking"], [], "", {}, [EOS]) is None
