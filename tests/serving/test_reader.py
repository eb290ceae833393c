"""AnswerReader: its events are those of transformers' ResponseParser, with the same rules for the ends of calls."""

from __future__ import annotations

import json
import re
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.content_parsers import process_field

from launch.answers.answer_reader import CALLS, SENTINEL, Event, is_malformed_json, json_values
from launch.answers.chat_formats import JsonCallParser, Parser
from tests.serving.transcripts import BY_NAME, KNOWN, TOOLS, TRANSCRIPTS, Transcript

CAPTURED = {"function": {"name": "{name}", "arguments": "{content}"}}


class CallReader(ResponseParser):
    """Transformers' parser, changed where it would lose or move text."""

    _cut = False
    _buffer: str
    _pos: int

    def end(self, cut: bool) -> list[dict[str, Any]]:
        """Returns the last events."""
        events: list[dict[str, Any]] = []
        if cut:  # a mark that could have grown is one if anything else follows
            events, self._cut = self.feed(SENTINEL), True
            self._buffer = self._buffer.removesuffix(SENTINEL)
            self._pos = min(self._pos, len(self._buffer))
            for event in events:
                event["text"] = event.get("text", "").removesuffix(SENTINEL)
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
        values, end = json_values(text, 0, ";")
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
            values, end = json_values(body, 0, ";")
            if values and not body[end:].strip():
                value = values if name is None and len(values) > 1 else values[0]
            elif name is not None and closed and not values and is_malformed_json(body):
                value = body.strip()  # clients tell the model of it
        return value if name is None or value is None else {"name": name, "arguments": value}


class TheirReader:
    """An `AnswerReader` by transformers' parser."""

    def __init__(self, fields: dict[str, Any], turn: str) -> None:
        given_ = {}
        for name, field in fields.items():
            given_[name] = field = dict(field)
            if "(?P<name>" in field.get("open_pattern", ""):
                field["transform"] = CAPTURED
            if "argument_pattern" in field:
                tags = {"tag_pattern": field.pop("argument_pattern"), "end": field.pop("argument_end")}
                field |= {"content": "xml-inline", "content_args": tags}
        self._reader = CallReader({"start_anchor": SENTINEL, "fields": given_}, prefix=turn)
        self.turn_events = events_of(self._reader.initial_events)

    def feed(self, text: str) -> list[Event]:
        return events_of(self._reader.feed(text))

    def end(self, cut: bool) -> list[Event]:
        return events_of(self._reader.end(cut))


def events_of(theirs: list[dict[str, Any]]) -> list[Event]:
    kinds = {"region_open": "open", "region_chunk": "text", "region_close": "close"}
    found = []
    for event in theirs:
        kind, is_call_end = kinds[event["type"]], event["field"] == CALLS and event["type"] == "region_close"
        if kind == "text" or event["field"] != "content":
            more = (event["text"], event["head"], event["value"]) if is_call_end else (event.get("text", ""),)
            found.append(Event(kind, event["field"], *more))
    return found


def outcome(name: str, turn: str, pieces: list[str], cut: bool = False, tools: bool = True, many: bool = True) -> Any:
    """Parts that each piece completes; of plain JSON too, behind a thought."""
    read: list[Any] = []
    template = BY_NAME[name].template
    parsers = [Parser(template, turn, TOOLS if tools else [], many)]
    parsers += [JsonCallParser(template, turn, function) for function in (None, "get_time")]
    for parser in parsers:
        for parts in (*map(parser.feed, pieces), parser.finish(cut)):
            read.append([(part.kind, part.text, part.name) for part in parts])
        read.append(parser.calls)
    return read


def compare(*args: Any, **more: Any) -> None:
    with mock.patch("launch.answers.chat_formats.AnswerReader", TheirReader):
        theirs = outcome(*args, **more)
    assert outcome(*args, **more) == theirs


@pytest.mark.parametrize("script", TRANSCRIPTS, ids=lambda script: script.id)
def test_transcripts_are_read_alike_in_two_pieces(script: Transcript) -> None:
    name, turn, answer = script.dialect.name, script.turn, script.answer
    for at in range(len(answer) + 1):
        compare(name, turn, [answer[:at], answer[at:]], tools=at % 8 != 0)
        compare(name, turn, [answer[:at]], True, many=at % 2 == 0)
    compare(name, turn, list(answer))


MARKS, TEXTS = KNOWN["marks"], KNOWN["texts"]


@st.composite
def answers(draw: Any) -> tuple[str, str, list[str]]:
    """A dialect, a turn, and an answer in pieces: marks, texts and JSON, of which parts are missing."""
    name = draw(st.sampled_from(sorted(MARKS)))
    piece = st.sampled_from(MARKS[name]) | st.sampled_from(TEXTS)
    whole = st.builds(lambda parts, a, n: "".join(parts)[:a] + "".join(parts)[a + n :], st.lists(piece, max_size=12),
                      st.integers(0, 80), st.integers(0, 3))  # fmt: skip
    turn, answer = draw(st.just("") | whole).replace(SENTINEL, ""), draw(whole)
    size = draw(st.sampled_from([1, 4, 5, 30]))
    return name, turn, [answer[at : at + size] for at in range(0, len(answer), size)]


@settings(max_examples=400, deadline=None)
@given(answer=answers(), cut=st.booleans(), tools=st.booleans(), many=st.booleans())
def test_answers_of_any_kind_are_read_alike(
    answer: tuple[str, str, list[str]], cut: bool, tools: bool, many: bool
) -> None:
    compare(*answer, cut=cut, tools=tools, many=many)
