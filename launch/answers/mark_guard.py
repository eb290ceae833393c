"""Tells marks that are added tokens from the same text spelled out in ordinary tokens, which is no mark."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

GUARD = "\ufdd0"  # a code point that no text contains


def marks_of(fields: Mapping[str, Any], added: Mapping[str, int]) -> dict[int, str]:
    """Returns the added tokens that are marks of a chat format, by id."""
    patterns = "\n".join(_texts(fields))
    return {token: text for text, token in added.items() if text in patterns or re.escape(text) in patterns}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)


class MarkGuard:
    """Breaks the marks in the text of ordinary tokens with `GUARD`, piece by piece; `restored` takes it out again.

    Args:
        marks: see `marks_of`.
    """

    def __init__(self, marks: Mapping[int, str]) -> None:
        self._marks = marks
        self._ends = {text[-1] for text in marks.values()}
        self._longest = max(map(len, marks.values()), default=0)
        self._tail = ""  # the last ordinary text

    def guarded(self, token: int, text: str) -> str:
        """Returns the text that a token has released, in which only the token itself may be a mark."""
        mark = self._marks.get(token, "")
        if mark and text.endswith(mark):
            text = self._broken(text[: len(text) - len(mark)]) + mark
            self._tail = ""
            return text
        return self._broken(text)

    def _broken(self, text: str) -> str:
        tail, self._tail = self._tail, (self._tail + text)[-self._longest :]
        if not any(end in text for end in self._ends):
            return text
        whole = tail + text
        ends = {at + len(mark) for mark in self._marks.values() for at in _positions(whole, mark, len(tail))}
        for end in sorted(ends, reverse=True):
            whole = whole[: end - 1] + GUARD + whole[end - 1 :]
        return whole[len(tail) :]


def _positions(text: str, mark: str, begin: int) -> Iterator[int]:
    """Yields where a mark begins that ends after a position."""
    at = text.find(mark, max(0, begin - len(mark) + 1))
    while at >= 0:
        yield at
        at = text.find(mark, at + 1)


def restored(text: str) -> str:
    """Returns a text without guards."""
    return text.replace(GUARD, "") if GUARD in text else text
