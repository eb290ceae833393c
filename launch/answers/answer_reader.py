"""Incremental reader of an answer's text: finds the regions that the marks of a chat format open and close."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import regex

from launch.answers.call_bodies import BODIES, CallBody, compile_pattern

LOG = logging.getLogger(f"helix.{__name__}")
CALLS, TEXT = "tool_calls", "content"  # fields of a response template; text outside of all others is content
START = r"\A"  # prefix of patterns that match only at the start of an answer


class Event(NamedTuple):
    """A step of reading.

    Attributes:
        kind: `open` or `close` of a region, or `text` in one.
        field: the region's field.
        text: of a `text` event; of a closed call, the whole call with its marks.
        head: the mark that opened a call.
        value: parsed content of a call; None if it is not a call.
        call_id: the model's own id of the call.
    """

    kind: str
    field: str
    text: str = ""
    head: str = ""
    value: Any = None
    call_id: str | None = None


class _Field:
    """A field of a response template: patterns of its marks, and how to parse its content."""

    def __init__(self, name: str, field: Mapping[str, Any]) -> None:
        self.name = name
        self.opens, self.opens_literally = _pattern(field, "open")
        self.is_blank = field.get("blank", False)
        self.begins_text = field.get("open_pattern", "").startswith(START)
        self.begins_answer = self.begins_text and not self.is_blank
        if name == CALLS:
            self.body: type[CallBody] = BODIES[field["content"]]
            self.syntax = self.body.Syntax(field)
        else:
            self.closes, self.closes_literally = _pattern(field, "close")


def _pattern(field: Mapping[str, Any], mark: str) -> tuple[Any, bool]:
    """Returns the pattern of a mark, and whether it is literal text, which further text cannot extend."""
    if mark in field:
        return regex.compile(regex.escape(field[mark])), True
    pattern = field.get(f"{mark}_pattern")
    return None if pattern is None else compile_pattern(field, pattern, regex.DOTALL), False


class AnswerReader:
    """Reads one answer piece by piece; text that may become a mark is held back until more text decides.

    Args:
        fields: of a response template, by name: `open` and `close` are texts, `open_pattern` and `close_pattern`
            regular expressions, whose groups `name` and `id` are of a call. The `content` of calls is a name in
            `BODIES`, whose reader finds the end of a call. A field that is `blank` opens only before any content; one
            that is `limited` has expressions that may take forever, after which the rest of the answer is text.
        turn: text of the assistant's message before the answer.

    Attributes:
        turn_events: events of the turn.
    """

    def __init__(self, fields: Mapping[str, Mapping[str, Any]], turn: str) -> None:
        self._fields = [_Field(name, field) for name, field in fields.items() if name != TEXT]
        self._window = ""  # text that was not read yet: it may begin a mark
        self._before = ""  # the character before it, which `\b`, `^` and the like look at
        self._at_start = True  # whether the window still begins with the answer
        self._is_blank = True  # whether there was no content yet
        self._field: _Field | None = None  # of the open region; None: content
        self._call: CallBody | None = None
        self.turn_events = self.feed(turn)

    def feed(self, text: str) -> list[Event]:
        self._window += text
        return self._read(last=False, cut=False)

    def end(self, cut: bool) -> list[Event]:
        """Returns the last events.

        Args:
            cut: whether the answer was cut off: an open call then is not a call.
        """
        events = self._read(last=True, cut=cut)
        if self._field is not None:
            events.append(Event("close", self._field.name))
        return events

    def _read(self, last: bool, cut: bool) -> list[Event]:
        events: list[Event] = []
        try:
            self._read_marks(events, last, cut)
        except TimeoutError:
            LOG.warning(
                "an expression of the model's response_template takes too long: the answer is passed on as text"
            )
            if self._call is not None:
                events.append(Event("close", CALLS, self._call.given_up(self._window).text, self._call.head[0]))
            elif self._window:
                events.append(Event("text", TEXT if self._field is None else self._field.name, self._window))
            self._fields, self._call, self._field, self._window = [], None, None, ""
        return events

    def _read_marks(self, events: list[Event], last: bool, cut: bool) -> None:
        while True:
            if self._call is not None:
                self._window, closed = self._call.feed(self._window, last, cut)
                if closed is None:
                    return
                head = self._call.head
                events.append(Event("close", CALLS, closed.text, head[0], closed.value, head.groupdict().get("id")))
                self._call = self._field = None
                self._before = closed.text[-1:]
            field, mark, hold = self._find(last)
            self._emit_text(events, hold)
            if field is None:
                return
            self._skip(mark.end() - mark.start())
            if self._field is not None:
                self._field = None
                events.append(Event("close", field.name))
                continue
            events.append(Event("open", field.name))
            self._field = field
            if field.name == CALLS:
                self._is_blank = False
                self._call = field.body(field.syntax, mark)

    def _find(self, last: bool) -> tuple[_Field | None, Any, int]:
        """Finds the next mark: its field, its match, and where it begins, or where more text may complete a mark.

        Of marks at one position the longest wins, then the first by field name.
        """
        best: tuple[Any, ...] = ()
        size = hold = len(self._window)
        for field in self._fields if self._field is None else [self._field]:
            if self._field is None:
                pattern, literal = field.opens, field.opens_literally
            else:
                pattern, literal = field.closes, field.closes_literally
            if pattern is None:
                continue
            if self._field is None and (
                (field.begins_answer and not self._at_start) or (field.is_blank and not self._is_blank)
            ):
                continue
            before = "" if self._field is None and field.begins_text else self._before
            mark = pattern.search(before + self._window, len(before), partial=not last)
            if mark is None:
                continue
            start, end = (at - len(before) for at in mark.span())
            if not last and (mark.partial or (end == size and (start == end or not literal))):
                hold = min(hold, start)
                continue
            key = start, start - end, field.name
            if not best or key < best[0]:
                best = key, field, mark
        return (best[1], best[2], best[0][0]) if best and best[0][0] < hold else (None, None, hold)

    def _emit_text(self, events: list[Event], end: int) -> None:
        if end:
            self._is_blank = self._is_blank and (self._field is not None or not self._window[:end].strip())
            events.append(Event("text", TEXT if self._field is None else self._field.name, self._window[:end]))
            self._skip(end)

    def _skip(self, size: int) -> None:
        self._before = self._window[:size][-1:] or self._before
        self._window = self._window[size:]
        self._at_start = self._at_start and not size
