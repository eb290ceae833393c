"""Rules and literals of grammars in Lark's syntax, and JSON in them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from launch.answers.json_schemas import COERCED, supported_schema

MAX_GRAMMAR_BYTES = 1 << 19  # of all parts as JSON
# Space between JSON tokens: one space, or a line break with indentation. Without a bound, some models never stop.
SPACES = {"whitespace_pattern": r"( |\n[ \t]{0,64})?"}
# Without no_forcing, llguidance looks ahead for forced tokens, and the time of a mask grows with the forced text.
LARK_HEADER = '%llguidance {"no_forcing": true}\n'
SPECIAL = re.compile(r"([\\.+*?()|\[\]{}^$#&~/-])")  # characters to escape in a regular expression
ANY_TEXT = "/(?s:.*)/"


class Rules:
    """Builds rules and literals in Lark's syntax.

    Args:
        added: ids of the tokenizer's added tokens by text.
    """

    def __init__(self, added: Mapping[str, int]) -> None:
        self.added = added
        self._pattern = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))) or "(?!)")
        self._rules: list[str] = []
        self._names: dict[str, str] = {}  # by options and body
        self._count = 0
        self._budget = MAX_GRAMMAR_BYTES

    def __str__(self) -> str:
        return "".join(f"{rule}\n" for rule in self._rules)

    def add(self, body: str, options: str = "") -> str:
        """Adds a rule, unless there is an equal one; returns its name."""
        if (name := self._names.get(options + body)) is None:
            name = self._names[options + body] = self.reserve()
            self.define(f"{name}{options}", body)
        return name

    def reserve(self) -> str:
        """Returns a name to define later, for rules that refer to themselves."""
        self._count += 1
        return f"r{self._count - 1}"

    def define(self, name: str, body: str) -> None:
        """Adds a rule with a given name.

        Raises:
            ValueError: the grammar becomes too large, since shared definitions are repeated for each argument.
        """
        self._budget -= len(body)
        if self._budget < 0:
            raise ValueError(f"its grammar has more than {MAX_GRAMMAR_BYTES} characters")
        self._rules.append(f"{name}: {body}")

    def text(self, text: str) -> str:
        """Converts a text to literals and ids of the tokenizer's added tokens."""
        return " ".join(self._pieces(text)) or '""'

    def any_text_until(self, end: str) -> str:
        """Returns any text up to and with an end, which is text or has added tokens."""
        if (token := self._pattern.search(end)) is None:
            return self.add(ANY_TEXT, f"[suffix={json.dumps(end, ensure_ascii=False)}]")
        before, rest = end[: token.start()], end[token.start() :]
        return f"{self.add(f'/(?s:.*){_escaped(before)}/')} {self.text(rest)}"

    def text_without(self, marks: Sequence[str], tokens: Collection[int]) -> str:
        """Returns any text without tokens and marks: of a mark with added tokens, its first is excluded."""
        return " ".join(self._text_without(marks, tokens))

    def text_and_mark(self, marks: Sequence[str], tokens: Collection[int]) -> tuple[str, int]:
        """Returns a text as `text_without` up to and with the first mark.

        The second value is how many characters of the mark it includes: those up to its first added token, or all.
        """
        before, text = self._text_without(marks, tokens)
        mark, *others = marks
        if (token := self._pattern.search(mark)) is not None:
            return f"{before} {text} <[{self.added[token[0]]}]>", token.end()
        ending = self._terminal(f"/(?s:.*){_escaped(mark)}/", [one for one in others if not self.added_in(one)])
        return f"{before} {self.add(ending, '[lazy]')}", len(mark)

    def _text_without(self, marks: Sequence[str], tokens: Collection[int]) -> tuple[str, str]:
        texts = [mark for mark in marks if not self.added_in(mark)]
        excluded = {*tokens, *(token for mark in marks for token in self.added_in(mark)[:1])}
        if not texts:
            return "", f"<[^{_ids(excluded)}]>*"
        others, text = {*self.added.values()} - excluded, self._terminal(ANY_TEXT, texts)
        return f"({text} <[{_ids(others)}]>)*" if others else "", text  # no added token is text to llguidance

    def _terminal(self, body: str, without: Sequence[str]) -> str:
        """Returns the name of a terminal that matches a regular expression, and contains none of some texts."""
        body += f" & ~/(?s:.*)({'|'.join(map(_escaped, without))})(?s:.*)/" if without else ""
        if (name := self._names.get(body)) is None:
            name = self._names[body] = self.reserve().upper()
            self.define(name, body)
        return name

    def added_in(self, text: str) -> list[int]:
        """Returns the ids of the added tokens in a text, in order."""
        return [self.added[found[0]] for found in self._pattern.finditer(text)]

    def _pieces(self, text: str) -> Iterator[str]:
        end = 0
        for found in self._pattern.finditer(text):
            yield from self._literal(text[end : found.start()])
            yield f"<[{self.added[found[0]]}]>"
            end = found.end()
        yield from self._literal(text[end:])

    def _literal(self, text: str) -> Iterator[str]:
        if text:
            yield json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return SPECIAL.sub(r"\\\1", text).replace("\n", r"\n")


def _ids(tokens: Collection[int]) -> str:
    return ",".join(map(str, sorted(tokens)))


def json_rule(schema: Mapping[str, Any]) -> str:
    """Returns JSON with a schema, as a part of a rule."""
    return f"%json {json.dumps(json_grammar(schema, SPACES))}"


def json_grammar(schema: Mapping[str, Any], spaces: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema for llguidance, with its options for spaces between JSON tokens.

    Raises:
        ValueError: the schema has a keyword that cannot be enforced.
    """
    return {"x-guidance": {**COERCED, **spaces}} | supported_schema(schema)
