"""Incremental reader of an answer's text: finds the regions that the marks of a chat format open and close."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import regex

CALLS, TEXT = "tool_calls", "content"  # fields of a response template; text outside of all others is content
SENTINEL = "\0"  # stands for further text that is not part of a mark
START = r"\A"  # prefix of patterns that match only at the start of an answer


class Event(NamedTuple):
    """A step of reading.

    Attributes:
        kind: `open` or `close` of a region, or `text` in one.
        field: the region's field.
        text: of a `text` event; of a closed call, the whole call with its marks.
        head: the mark that opened a call.
        value: parsed content of a call; None if it is not a call.
    """

    kind: str
    field: str
    text: str = ""
    head: str = ""
    value: Any = None


class _Field:
    """A field of a response template: patterns of its marks, and how to parse its content."""

    def __init__(self, name: str, field: Mapping[str, Any]) -> None:
        self.name = name
        self.opens, self.opens_literally = _pattern(field, "open")
        self.closes, self.closes_literally = _pattern(field, "close")
        self.begins_answer = field.get("open_pattern", "").startswith(START)
        self.json = field.get("content") == "json"
        self.argument = regex.compile(field["argument_pattern"], regex.DOTALL) if "argument_pattern" in field else None
        self.argument_end: str = field.get("argument_end", "")


def _pattern(field: Mapping[str, Any], mark: str) -> tuple[Any, bool]:
    """Returns the pattern of a mark, and whether it is literal text, which further text cannot extend."""
    if mark in field:
        return regex.compile(regex.escape(field[mark])), True
    pattern = field.get(f"{mark}_pattern")
    return None if pattern is None else regex.compile(pattern, regex.DOTALL), False


class AnswerReader:
    """Reads one answer piece by piece; text that may become a mark is held back until more text decides.

    A call ends at a closing mark that is not part of its arguments. Its content is JSON, or arguments one by one.

    Args:
        fields: of a response template, by name: `open` and `close` are texts, `open_pattern` and `close_pattern`
            regular expressions, whose group `name` is the function of a call. The `content` of a call is `json`, or
            else its `argument_pattern` finds arguments, with groups `key` and `value`; they end with `argument_end`.
        turn: text of the assistant's message before the answer.

    Attributes:
        turn_events: events of the turn.
    """

    def __init__(self, fields: Mapping[str, Mapping[str, Any]], turn: str) -> None:
        self._fields = [_Field(name, field) for name, field in fields.items() if name != TEXT]
        self._buffer = ""  # what may begin a mark, or the open call
        self._at = 0  # events for the text before it were returned
        self._at_start = True  # whether the buffer still begins with the answer
        self._cut = False
        self._field: _Field | None = None  # of the open region; None: content
        self._head: Any = None  # the mark that opened the region
        self._early: Any = None  # the first closing mark that did not close the call
        self.turn_events = self.feed(turn)

    def feed(self, text: str) -> list[Event]:
        self._buffer += text
        events, hold = self._read(False)
        self._emit_text(events, hold)
        if self._field is None or self._field.name != CALLS:
            self._buffer, self._at_start, self._at = self._buffer[self._at :], self._at_start and not self._at, 0
        return events

    def end(self, cut: bool) -> list[Event]:
        """Returns the last events.

        Args:
            cut: whether the answer was cut off: a mark that more text could extend counts if any text could follow it.
        """
        events: list[Event] = []
        if cut:
            events, self._cut = [e._replace(text=e.text.removesuffix(SENTINEL)) for e in self.feed(SENTINEL)], True
            self._buffer = self._buffer.removesuffix(SENTINEL)
            self._at = min(self._at, len(self._buffer))
        last, _ = self._read(True)
        self._emit_text(last, len(self._buffer))
        if self._field is not None:
            self._close(last, None)
        return events + last

    def _read(self, last: bool) -> tuple[list[Event], int]:
        """Returns the events up to the last certain mark, and where an uncertain one begins; `last`: no more text."""
        events: list[Event] = []
        while True:
            if self._field is not None and self._field.name == CALLS:
                field, mark, hold = self._find_end(self._field, last)
            else:
                field, mark, hold = self._find(last)
            if field is None:
                return events, hold
            self._emit_text(events, mark.start())
            self._at = mark.end()
            if self._field is not None:
                self._close(events, mark)
            else:
                events.append(Event("open", field.name))
                self._field, self._head, self._early = field, mark, None

    def _find(self, last: bool) -> tuple[_Field | None, Any, int]:
        """Finds the next mark: its field, its match, and where a mark begins that more text may complete or extend.

        Of marks at one position the longest wins, then the first by field name.
        """
        begins = self._at_start and self._at == 0
        best: tuple[Any, ...] = ()
        hold = len(self._buffer)
        for field in self._fields if self._field is None else [self._field]:
            if self._field is None:
                pattern, literal = field.opens, field.opens_literally
            else:
                pattern, literal = field.closes, field.closes_literally
            if pattern is None or (self._field is None and field.begins_answer and not begins):
                continue
            mark = pattern.search(self._buffer, self._at, partial=not last)
            if mark is None:
                continue
            grows = mark.end() == len(self._buffer) and (mark.start() == mark.end() or not literal)
            if not last and (mark.partial or grows):
                hold = min(hold, mark.start())
                continue
            key = mark.start(), mark.start() - mark.end(), field.name
            if not best or key < best[0]:
                best = key, field, mark
        return (best[1], best[2], hold) if best and best[2].start() < hold else (None, None, hold)

    def _find_end(self, field: _Field, last: bool) -> tuple[_Field | None, Any, int]:
        """Finds the mark that closes the open call, as `_find`; text after a mark may decide whether it closes."""
        found: _Field | None = None
        mark: Any = None
        hold = len(self._buffer)
        while True:
            if not (last and self._cut):
                found, mark, hold = self._find(last)
            if found is None:
                mark = self._closed_without_mark(field) if last else None
                return None if mark is None else field, mark, hold
            closes = self._closes(field, mark, last)
            if closes is None:
                return None, None, min(hold, mark.start())
            if closes:
                return field, mark if closes is True else closes, hold
            self._early = self._early or mark
            self._at = max(mark.end(), mark.start() + 1)

    def _closes(self, field: _Field, mark: Any, last: bool) -> Any:
        """Returns whether a mark closes the call, or an earlier mark that does; None: further text decides."""
        early, body = self._early, self._buffer[self._head.end() : mark.start()]
        if field.json:
            try:
                json.loads(body)
            except ValueError as error:  # inside a string the mark is part of it
                return False if str(error).startswith("Unterminated string") else early or True
            except RecursionError:
                pass
            return True
        end = field.argument_end
        if body.strip() and not body.rstrip().endswith(end):
            return False
        if early is not None and field.opens.match(self._buffer[early.end() :].lstrip()):
            return early  # the next call begins after it
        rest = self._buffer[mark.end() :].lstrip()
        if end and not last and end.startswith(rest):
            return None
        return not (end and rest.startswith(end))

    def _closed_without_mark(self, field: _Field) -> Any:
        """Returns the end of a call that is not closed: a mark that came too early, or the end of its JSON."""
        if self._early is not None and not self._cut:
            return self._early
        if not field.json:
            return None
        begin = self._head.end()
        values, end = json_values(self._buffer[begin:], 0, ";")
        return regex.compile("").match(self._buffer, begin + end) if values else None

    def _emit_text(self, events: list[Event], end: int) -> None:
        if end > self._at:
            events.append(
                Event("text", TEXT if self._field is None else self._field.name, self._buffer[self._at : end])
            )
            self._at = end

    def _close(self, events: list[Event], mark: Any) -> None:
        """Closes the open region at a mark; None: at the end of the answer."""
        field, self._field = self._field, None
        assert field is not None
        if field.name != CALLS:
            events.append(Event("close", field.name))
            return
        body = self._buffer[self._head.end() : len(self._buffer) if mark is None else mark.start()]
        text = self._head[0] + body + ("" if mark is None else mark[0])
        value = self._value(field, body, bool(mark))
        events.append(Event("close", CALLS, text, self._head[0], value))

    def _value(self, field: _Field, body: str, closed: bool) -> Any:
        name = self._head.groupdict().get("name")
        if field.argument is not None:
            found = field.argument.finditer(body) if closed else ()
            arguments = {one["key"]: one["value"] for one in found}
            return {"function": {"name": name, "arguments": arguments}} if closed else None
        value: Any = None
        if name is not None and not body.strip() and (closed or not self._cut):
            value = {}
        else:
            values, end = json_values(body, 0, ";")
            if values and not body[end:].strip():
                value = values if name is None and len(values) > 1 else values[0]
            elif name is not None and closed and not values and is_malformed_json(body):
                value = body.strip()  # keep malformed arguments: clients report them to the model
        return value if name is None or value is None else {"name": name, "arguments": value}


def is_malformed_json(text: str) -> bool:
    """Returns whether a text is malformed JSON; JSON that is nested too deeply or has too long numbers is not."""
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        return isinstance(error, json.JSONDecodeError)
    return False


def json_values(text: str, at: int, between: str) -> tuple[list[Any], int]:
    """Parses consecutive JSON values from a position, up to an incomplete one; returns them and where they end."""
    decoder = json.JSONDecoder()
    found: list[Any] = []
    end = at
    while True:
        at += len(text[at:]) - len(text[at:].lstrip())
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return found, end
        found.append(value)
        end = at
        at += len(text[at:]) - len(text[at:].lstrip().removeprefix(between.strip()))
