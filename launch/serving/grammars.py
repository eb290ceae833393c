"""What an answer has to look like, as llguidance reads it: JSON by a schema, or calls of tools in a model's dialect."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher

from launch.serving.dialects import Calls, Dialect
from launch.serving.errors import ApiError
from launch.serving.frames import MOST_GRAMMAR, Ready
from launch.serving.schemas import Tool

COMPILE_S = 2.0
# Between the parts of JSON: a space, or the beginning of a line. Unbounded, some models write spaces for ever.
SPACES = {"x-guidance": {"whitespace_pattern": r"( |\n[ \t]{0,64})?"}}
NO_PARAMETERS = {"properties": {}, "additionalProperties": False}


def of_schema(schema: dict[str, Any]) -> str:
    """The grammar of JSON that follows a schema."""
    return str(LLMatcher.grammar_from_json_schema(json.dumps(SPACES | schema)))


def of_calls(
    dialect: Dialect,
    tools: Sequence[Tool],
    many: bool,
    prompt: str,
    added: Mapping[str, int],
    eos: Collection[int],
) -> str:
    """The grammar of an answer that calls tools and says nothing else, behind what it thinks.

    Args:
        many: whether it may call more than once, where the dialect can.
        prompt: the conversation's text, whose end tells whether the answer begins within a thought.
        added: the tokenizer's own tokens, by their texts.
        eos: the model's own ends, which no thought holds.
    """
    calls = dialect.calls
    assert calls is not None, "checked by whoever wants calls"
    rules = _Rules(added)
    one = rules.add(" | ".join(_call(rules, calls, tool) for tool in tools))
    several = f"{one} ({rules.text(calls.between)} {one})*" if many and calls.between is not None else one
    start = f"{rules.text(calls.before)} {several} {rules.text(calls.after)}"
    if calls.thought is not None and (close := added.get(calls.thought[1])) is not None:
        begin, end, behind = calls.thought
        thought = f"<[^{','.join(map(str, sorted({close, *eos})))}]>* <[{close}]> {rules.text(behind)}"
        turn = prompt.rpartition(dialect.template["start_anchor"])[2]
        if end not in turn:
            start = f"{thought} {start}" if begin in turn else f"({rules.text(begin)} {thought})? {start}"
    return str(LLMatcher.grammar_from_lark(f"start: {start}\n{rules}"))


async def check(grammar: str, param: str, ready: Ready) -> None:
    """Checks a grammar that comes of a field.

    Raises:
        ApiError: 400, it is too long, it cannot be followed, or nobody knows within COMPILE_S.
    """
    if len(grammar) > MOST_GRAMMAR:
        what = f"{param} makes a grammar of {len(grammar)} characters, and it may have {MOST_GRAMMAR}"
        raise ApiError(400, what, param=param, code="too_large")
    if not ready.guided:
        what = f"no answer of this model can be made to follow {param}, for its tokens do not spell their text"
        raise ApiError(400, f"{what}: leave {param} out", param=param)
    try:
        async with asyncio.timeout(COMPILE_S):
            mistake = str(await asyncio.to_thread(LLMatcher.validate_grammar, grammar))
    except TimeoutError:
        mistake = f"it takes more than {COMPILE_S:g} s to compile"
    if mistake:
        raise ApiError(400, f"{param} cannot be followed: {' '.join(mistake.split()):.300}", param=param)


class _Rules:
    """Rules of a grammar in Lark's syntax, and texts as it writes them."""

    def __init__(self, added: Mapping[str, int]) -> None:
        self._added = added
        self._pattern = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))) or "(?!)")
        self._rules: list[str] = []

    def __str__(self) -> str:
        return "".join(f"{rule}\n" for rule in self._rules)

    def add(self, body: str, options: str = "") -> str:
        """The name of a new rule."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def text(self, text: str) -> str:
        """A text, in which the tokenizer's own tokens stand for themselves."""
        return " ".join(self._pieces(text)) or '""'

    def _pieces(self, text: str) -> Iterator[str]:
        end = 0
        for found in self._pattern.finditer(text):
            yield from self._literal(text[end : found.start()])
            yield f"<[{self._added[found[0]]}]>"
            end = found.end()
        yield from self._literal(text[end:])

    def _literal(self, text: str) -> Iterator[str]:
        if text:
            yield json.dumps(text, ensure_ascii=False)


def _call(rules: _Rules, calls: Calls, tool: Tool) -> str:
    """The name of the rule of a tool's calls."""
    function = tool.function
    parameters = (NO_PARAMETERS if function.parameters is None else function.parameters) | {"type": "object"}
    arguments = _json(parameters) if calls.argument is None else _arguments(rules, calls.argument, parameters)
    before, after = calls.call.replace("NAME", function.name).split("ARGUMENTS")
    return rules.add(f"{rules.text(before)} {arguments} {rules.text(after)}")


def _arguments(rules: _Rules, argument: str, parameters: dict[str, Any]) -> str:
    """Arguments that are written one by one, in the order of the schema; texts as they are, all else as JSON."""
    shared = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
    written = []
    for name, schema in parameters.get("properties", {}).items():
        before, after = argument.replace("KEY", name).split("VALUE")
        schema = schema if isinstance(schema, dict) else {}
        texts = schema.get("enum", ())
        if texts and all(isinstance(text, str) for text in texts):
            value = "(" + " | ".join(map(rules.text, texts)) + f") {rules.text(after)}"
        elif schema.get("type") == "string":
            value = rules.add("/(?s:.*)/", f"[suffix={json.dumps(after)}]")
        else:
            value = f"{_json(schema | shared)} {rules.text(after)}"
        one = rules.add(f"{rules.text(before)} {value}")
        written.append(one if name in parameters.get("required", ()) else f"{one}?")
    return " ".join(written) or '""'


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps(SPACES | schema)}"
