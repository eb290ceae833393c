"""AnswerReader: an answer is read alike however it is cut into pieces, and in time linear in its length."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.answers.answer_parser import JsonCallParser, Parser
from tests.serving.transcripts import BY_NAME, KNOWN, TOOLS, TRANSCRIPTS, Transcript, text_of

Outcome = list[tuple[str, Any]]


def outcome(name: str, turn: str, pieces: list[str], cut: bool = False, tools: bool = True, many: bool = True) -> Any:
    """Thoughts, content and calls in order; of plain JSON too, behind a thought."""
    fields = BY_NAME[name].fields
    parsers = [Parser(fields, turn, TOOLS if tools else [], many)]
    parsers += [JsonCallParser(fields, turn, function) for function in (None, "get_time")]
    return [joined([part for piece in pieces for part in p.feed(piece)] + p.finish(cut)) for p in parsers]


def joined(parts: list[Any]) -> Outcome:
    found: Outcome = []
    for part in parts:
        if part.kind != "call" and found and found[-1][0] == part.kind:
            found[-1] = (part.kind, found[-1][1] + part.text)
        else:
            found.append((part.kind, (part.name, part.text) if part.kind == "call" else part.text))
    return found


@pytest.mark.parametrize("script", TRANSCRIPTS, ids=lambda script: script.id)
def test_transcripts_are_read_alike_in_pieces(script: Transcript) -> None:
    name, turn, answer = script.dialect.name, script.turn, script.answer
    whole = outcome(name, turn, [answer])
    for at in range(len(answer) + 1):
        assert outcome(name, turn, [answer[:at], answer[at:]]) == whole, at
    for size in (1, 2, 3, 7):
        assert outcome(name, turn, [answer[at : at + size] for at in range(0, len(answer), size)]) == whole, size


MARKS, TEXTS = KNOWN["marks"], KNOWN["texts"]


@st.composite
def answers(draw: Any) -> tuple[str, str, str]:
    """A dialect, a turn, and an answer: marks, texts and JSON, of which parts are missing."""
    name = draw(st.sampled_from(sorted(MARKS)))
    piece = st.sampled_from(MARKS[name]) | st.sampled_from(TEXTS)
    whole = st.builds(lambda parts, a, n: "".join(parts)[:a] + "".join(parts)[a + n :], st.lists(piece, max_size=12),
                      st.integers(0, 80), st.integers(0, 3))  # fmt: skip
    return name, draw(st.just("") | whole), draw(whole)


@settings(max_examples=400, deadline=None)
@given(
    answer=answers(), size=st.sampled_from([1, 4, 5, 30]), cut=st.booleans(), tools=st.booleans(), many=st.booleans()
)
def test_answers_of_any_kind_are_read_alike_in_pieces(
    answer: tuple[str, str, str], size: int, cut: bool, tools: bool, many: bool
) -> None:
    name, turn, text = answer
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert outcome(name, turn, pieces, cut, tools, many) == outcome(name, turn, [text], cut, tools, many)


CODE = 'def f(x):\n    return "a < b" if x else {"k": [1, 2]}  # </p>\n'
LONG = CODE * (200_000 // len(CODE))
ARGUMENTS = json.dumps({"zone": LONG})
LONG_CALLS = {
    "glm": f"<tool_call>get_time<arg_key>zone</arg_key><arg_value>{LONG}</arg_value></tool_call>",
    "qwen3-coder": f"<tool_call><function=get_time><parameter=zone>\n{LONG}\n</parameter></function></tool_call>",
    "qwen": f'<tool_call>{{"name": "get_time", "arguments": {ARGUMENTS}}}</tool_call>',
    "mistral": f"[TOOL_CALLS]get_time[ARGS]{ARGUMENTS}",
    "gemma4": f'<|tool_call>call:get_time{{zone:<|"|>{LONG}<|"|>}}<tool_call|>',
    "pythonic": f"<function_calls>get_time(zone={json.dumps(LONG)})</function_calls>",
}


@pytest.mark.parametrize("name", LONG_CALLS)
def test_a_long_call_takes_linear_time(name: str) -> None:
    """200 KB in pieces of four characters take 0.1 s here; a reader that reads them again takes 2 s and more."""
    answer, begin = LONG_CALLS[name], time.process_time()
    parser = Parser(BY_NAME[name].fields, "", TOOLS)
    parts = [part for at in range(0, len(answer), 4) for part in parser.feed(answer[at : at + 4])] + parser.finish()
    seconds = time.process_time() - begin
    assert [json.loads(part.text) for part in parts] == [{"zone": LONG}] and text_of(parts, "content") == ""
    assert seconds < 0.5
