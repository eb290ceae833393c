"""Readers of one call's text after its opening mark: they find where it ends, and parse it.

A mark that closes a call counts only outside of strings, or behind a closed argument. Each reader consumes its text as
it comes, so that the time for a call is linear in its length.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import regex

SEARCH_S = 0.25  # of an expression of a checkpoint's `response_template`; real marks take microseconds
SPACE = r"\s{0,64}"  # between marks; bounded, since text that may become a mark is held back


class ClosedCall(NamedTuple):
    """A call that has ended.

    Attributes:
        text: all of its text, with its marks.
        value: a call as a dict, or a list of them; None: it is not a call.
    """

    text: str
    value: Any


class Verbatim(str):
    """An argument whose markup says that it is text, whatever its schema."""


class CallBody:
    """Reads the text of one call.

    Args:
        syntax: patterns of the format, compiled once.
        head: the mark that opened the call, whose group `name`, if any, is the function.
    """

    Syntax: Any

    def __init__(self, syntax: Any, head: Any) -> None:
        self.head = head
        self._syntax = syntax
        self._read: list[str] = []  # text that was consumed

    def feed(self, window: str, last: bool, cut: bool) -> tuple[str, ClosedCall | None]:
        """Reads on; returns the text that is left, and the call once it has ended.

        Args:
            last: whether no more text follows.
            cut: whether the answer was cut off: a call that is open then is not a call.
        """
        raise NotImplementedError

    def _after(self, window: str, end: int, last: bool) -> int | None:
        """Returns where the marks around all calls end that follow one; None: more text decides."""
        mark = None if self._syntax.after is None else self._syntax.after.match(window, end, partial=not last)
        if mark is None:
            return end
        return None if mark.partial else int(mark.end())

    def given_up(self, window: str) -> ClosedCall:
        """Returns what was read of a call that is none after all.

        Args:
            window: text that was not consumed.
        """
        return self._closed(window, None)

    def _closed(self, mark: str, value: Any) -> ClosedCall:
        return ClosedCall("".join((self.head[0], *self._read, mark)), value)


class LimitedPattern:
    """A regular expression whose searches raise TimeoutError after `SEARCH_S`, which costs some microseconds each."""

    def __init__(self, pattern: Any) -> None:
        self.search = partial(pattern.search, timeout=SEARCH_S)
        self.match = partial(pattern.match, timeout=SEARCH_S)


def compile_pattern(field: Mapping[str, Any], expression: str, flags: int = 0) -> Any:
    """Compiles an expression of a field, which may be `limited`."""
    pattern = regex.compile(expression, flags)
    return LimitedPattern(pattern) if field.get("limited") else pattern


def _after_pattern(field: Mapping[str, Any]) -> Any:
    return regex.compile(SPACE + field["after_pattern"]) if "after_pattern" in field else None


class _BalancedSyntax:
    """Patterns for calls of nested brackets and strings.

    Attributes:
        outside: the next mark outside of strings: one that begins a string, a bracket, or the end of the call.
        inside: by the mark that begins a string, the next mark in it: an escaped character or its end.
        follows: after the outermost bracket: the end of the call, or more values.
    """

    def __init__(self, field: Mapping[str, Any]) -> None:
        close = field.get("close_pattern") or regex.escape(field.get("close", ""))
        strings, brackets, more = _BALANCED[field["content"]]
        self.closer = compile_pattern(field, close) if close else None
        quotes = "|".join(regex.escape(quote) for quote in strings)
        ends = f"|(?P<close>{close})" if close else ""
        self.outside = compile_pattern(field, f"(?P<quote>{quotes})|{brackets}{ends}")
        self.inside = {quote: regex.compile(end, regex.DOTALL) for quote, end in strings.items()}
        self.after = _after_pattern(field)
        more = "(?!)" if "(?P<name>" in field["open_pattern"] else more
        self.follows = compile_pattern(field, rf"{SPACE}(?:(?P<close>{close or '(?!)'})|{more})")


# By content: what ends a string by what begins it, brackets, and what begins another value of one call.
_BALANCED = {
    "json": ({'"': r'\\.|"'}, r"[{}\[\]]", rf";?{SPACE}(?=[{{\[])"),
    "gemma": ({'<|"|>': r'<\|"\|>'}, r"[{}\[\]]", "(?!)"),
    "python": ({'"': r'\\.|"', "'": r"\\.|'"}, r"[(){}\[\]]", r"(?=[\w.:-]{1,256}\()"),
}


class _BalancedBody(CallBody):
    Syntax = _BalancedSyntax

    def __init__(self, syntax: Any, head: Any) -> None:
        super().__init__(syntax, head)
        self._depth = 0
        self._quote = ""  # the mark that began the open string
        self._is_whole = False  # whether the outermost bracket was closed

    def feed(self, window: str, last: bool, cut: bool) -> tuple[str, ClosedCall | None]:
        syntax, at = self._syntax, 0
        while True:
            if self._is_whole:
                follows = syntax.follows.match(window, at, partial=not last)
                if follows is not None and follows.partial:
                    return self._consume(window, at), None
                if follows is None and cut and last and syntax.closer is not None:
                    break
                if follows is None:
                    return self._close(window, at, at)
                if follows["close"] is not None:
                    end = self._after(window, follows.end(), last)
                    return (self._consume(window, at), None) if end is None else self._close(window, at, end)
                self._is_whole, at = False, follows.end()
            pattern = syntax.inside[self._quote] if self._quote else syntax.outside
            mark = pattern.search(window, at, partial=not last)
            if mark is None or mark.partial:
                if last:
                    break
                return self._consume(window, len(window) if mark is None else mark.start()), None
            at = mark.end()
            if self._quote:
                self._quote = self._quote if mark[0][0] == "\\" else ""
            elif mark["quote"] is not None:
                self._quote = mark["quote"]
            elif mark[0] in "([{":
                self._depth += 1
            elif mark[0] in ")]}":
                self._depth -= 1
                self._is_whole = self._depth <= 0
            else:  # the end mark, before the value is whole
                end = self._after(window, at, last)
                if end is None:
                    return self._consume(window, mark.start()), None
                return self._close(window, mark.start(), end)
        return self._close_last(window, cut)

    def _consume(self, window: str, at: int) -> str:
        self._read.append(window[:at])
        return window[at:]

    def _close(self, window: str, at: int, end: int) -> tuple[str, ClosedCall]:
        self._read.append(window[:at])
        value = self._value("".join(self._read))
        return window[end:], self._closed(window[at:end], value)

    def _close_last(self, window: str, cut: bool) -> tuple[str, ClosedCall]:
        """Closes a call that the answer's end left open: at the first end mark in its strings, if it was not cut."""
        body = "".join((*self._read, window))
        mark = None if cut or self._syntax.closer is None else self._syntax.closer.search(body)
        if mark is not None:
            self._read = []
            return self._close(body, mark.start(), mark.end())
        self._read = [body]
        empty = not body.strip() and not cut
        return "", self._closed("", self._value("") if empty else None)

    def _value(self, body: str) -> Any:
        raise NotImplementedError

    @property
    def _name(self) -> str | None:
        name: str | None = self.head.groupdict().get("name")
        return name

    def _named(self, arguments: Any) -> Any:
        return {"name": self._name, "arguments": arguments}


class JsonBody(_BalancedBody):
    """JSON: the arguments if the head has the function's name, else a call, or several."""

    def _value(self, body: str) -> Any:
        if self._name is not None and not body.strip():
            return self._named({})
        values, end = json_values(body, 0, ";")
        if values and not body[end:].strip():
            if self._name is None:
                return values if len(values) > 1 else values[0]
            return self._named(values[0])
        if self._name is not None and not values and is_malformed_json(body):
            return self._named(body.strip())  # clients report malformed arguments to the model
        return None


class GemmaBody(_BalancedBody):
    """Gemma 4's JSON: keys without quotes, and strings between `<|"|>`."""

    WORDS = regex.compile(r'<\|"\|>(?P<text>.*?)<\|"\|>|(?P<key>[^\s{}\[\],:"]+)(?=\s*:)', regex.DOTALL)

    def _value(self, body: str) -> Any:
        def quote(word: Any) -> str:
            return json.dumps(word["key"] if word["text"] is None else word["text"])

        values, _ = json_values(self.WORDS.sub(quote, body), 0, "")
        return self._named(values[0]) if len(values) == 1 and isinstance(values[0], dict) else None


class PythonBody(_BalancedBody):
    """Calls with keywords as in Python, one a line; true, false and null may be JSON's."""

    CALL = regex.compile(r"\s*(?P<name>[\w.:-]+)\(")
    KEY = regex.compile(r"""[\s,]*(?P<key>[^\s,()\[\]{}"'=<>!]+)\s*=\s*""")  # parameters may be named `$top`
    MARK = regex.compile(r"""(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|[(\[{]|[)\]}]|,""", regex.DOTALL)
    WORD = regex.compile(r"""(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|\b(?:true|false|null)\b""", regex.DOTALL)

    def _value(self, body: str) -> Any:
        try:
            return [*self._calls(body)] or None
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None

    def _calls(self, body: str) -> Iterator[dict[str, Any]]:
        at = 0
        while body[at:].strip():
            if (call := self.CALL.match(body, at)) is None:
                raise ValueError
            arguments: dict[str, Any] = {}
            at = call.end()
            while (key := self.KEY.match(body, at)) is not None:
                at = self._end_of_value(body, key.end())
                arguments[key["key"]] = self._literal(body[key.end() : at])
            if (end := regex.match(r"[\s,]*\)", body[at:])) is None:
                raise ValueError
            at += end.end()
            yield {"name": call["name"], "arguments": arguments}

    def _end_of_value(self, body: str, at: int) -> int:
        depth = 0
        while (mark := self.MARK.search(body, at)) is not None:
            if mark["text"] is None:
                depth += (mark[0] in "([{") - (mark[0] in ")]}")
                if depth < 0 or (mark[0] == "," and not depth):
                    return int(mark.start())
            at = mark.end()
        raise ValueError

    def _literal(self, text: str) -> Any:
        try:
            return json.loads(text, strict=False)
        except json.JSONDecodeError:
            words = {"true": "True", "false": "False", "null": "None"}
            python = self.WORD.sub(lambda word: words.get(word[0], word[0].replace("\n", "\\n")), text.strip())
            return ast.literal_eval(python)


class _TagSyntax:
    """Patterns for calls whose arguments are written one by one.

    Attributes:
        argument: what begins an argument's value, with the group `key`, and `kind` where the markup tells text.
        value_end: the mark that ends a value.
        follows: what may follow it: another argument, or the end of the call.
        trims: whether the line breaks next to a value's marks are markup.
    """

    def __init__(self, field: Mapping[str, Any]) -> None:
        argument, close = field["argument_pattern"], field["close_pattern"]
        self.after = _after_pattern(field)
        self.value_end: str = field["argument_end"]
        self.trims: bool = field["trims"]
        either = rf"{SPACE}(?:(?P<argument>{argument})|(?P<close>{close}))"
        self.follows = regex.compile(either)
        after = f"(?:{self.after.pattern})?" if self.after else ""
        self.closer = regex.compile(rf"(?P<close>{close}{after})")
        self.early = regex.compile(rf"(?P<close>{close}{after}){SPACE}{field['open_pattern']}")


class TagBody(CallBody):
    """Arguments one by one, between tags; their values are texts, to be typed by the function's schema.

    A value ends at its mark if another argument follows, or the end of the call that no further mark of a value's end
    follows: all else is part of the value.
    """

    Syntax = _TagSyntax

    def __init__(self, syntax: Any, head: Any) -> None:
        super().__init__(syntax, head)
        self._arguments: dict[str, Any] = {}
        self._open: Any = None  # what began the open value
        self._value: list[str] = []

    def feed(self, window: str, last: bool, cut: bool) -> tuple[str, ClosedCall | None]:
        syntax = self._syntax
        follows = syntax.follows
        while True:
            if self._open is None:
                found = follows.match(window, partial=not last)
                if found is None:
                    return window, self._closed("", None)
                if found.partial:
                    return window, None
                if found["argument"] is not None:
                    window = self._begin(window, found)
                    continue
                after = self._after(window, found.end(), last)
                return (window, None) if after is None else (window[after:], self._call(window[:after]))
            end = window.find(syntax.value_end)
            if end < 0:
                if last:
                    return self._close_last(window, cut)
                keep = max(0, len(window) - len(syntax.value_end) + 1)
                self._value.append(window[:keep])
                return window[keep:], None
            behind = end + len(syntax.value_end)
            found = follows.match(window, behind, partial=not last)
            after = None
            if found is not None and found["argument"] is None and not found.partial:
                after = self._after(window, found.end(), last)
                rest = "" if after is None else window[after:].lstrip()
                if after is None or (not last and syntax.value_end.startswith(rest)):
                    return self._hold(window, end), None
                found = None if rest.startswith(syntax.value_end) else found
            elif found is not None and found.partial:
                return self._hold(window, end), None
            if found is None:
                self._value.append(window[:behind])
                window = window[behind:]
                continue
            value = "".join((*self._value, window[:end]))
            if (early := syntax.early.search(value)) is not None:  # the value was not closed, and another call follows
                return self._close_early(value, early, window[end:])
            self._read += [value, syntax.value_end]
            self._add(value)
            if after is not None:
                return window[after:], self._call(window[behind:after])
            window = self._begin(window[behind:], found)

    def _hold(self, window: str, end: int) -> str:
        self._value.append(window[:end])
        return window[end:]

    def _begin(self, window: str, found: Any) -> str:
        size = found.end() - found.start()
        self._read.append(window[:size])
        self._open, self._value = found, []
        return window[size:]

    def _add(self, value: str) -> None:
        if self._syntax.trims:
            value = value.removeprefix("\n").removesuffix("\n")
        match self._open.groupdict().get("kind"):
            case "true":
                value = Verbatim(value)
            case "false":
                values, end = json_values(value, 0, "")
                value = values[0] if len(values) == 1 and not value[end:].strip() else value
        self._arguments[self._open["key"].strip()] = value
        self._open, self._value = None, []

    def _call(self, mark: str) -> ClosedCall:
        return self._closed(mark, {"function": {"name": self.head["name"], "arguments": self._arguments}})

    def _close_early(self, value: str, mark: Any, window: str) -> tuple[str, ClosedCall]:
        self._read.append(value[: mark.start()])
        self._add(value[: mark.start()])
        return value[mark.end("close") :] + window, self._call(mark["close"])

    def _close_last(self, window: str, cut: bool) -> tuple[str, ClosedCall]:
        value = "".join((*self._value, window))
        mark = None if cut else self._syntax.closer.search(value)
        if mark is not None:
            return self._close_early(value, mark, "")
        self._read.append(value)
        return "", self._closed("", None)


BODIES: dict[str, type[CallBody]] = {"json": JsonBody, "gemma": GemmaBody, "python": PythonBody, "tags": TagBody}


def is_malformed_json(text: str) -> bool:
    """Returns whether a text is malformed JSON; JSON that is nested too deeply or has too long numbers is not."""
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        return isinstance(error, json.JSONDecodeError)
    return False


def json_values(text: str, at: int, between: str) -> tuple[list[Any], int]:
    """Parses consecutive JSON values from a position, up to an incomplete one; returns them and where they end.

    Line breaks in strings, which JSON forbids and models write, are part of the string.
    """
    decoder = json.JSONDecoder(strict=False)
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
