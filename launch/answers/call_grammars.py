"""Grammar rules of tool calls, in the syntax of each chat format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from launch.answers.arguments import MAX_REFERENCES, allows_text, enum_texts, is_text, objects_of, resolve
from launch.answers.chat_formats import ToolCallFormat
from launch.answers.grammar_rules import Rules, json_rule

NO_PARAMETERS = {"properties": {}, "additionalProperties": False}
INDEX = "/[0-9]{1,6}/"
ANY_TYPE = ["string", "number", "boolean", "null", "array", "object"]
GEMMA_QUOTE = '<|"|>'
DEFINITIONS = ("$defs", "definitions")
# Rules of arguments contain what follows them; llguidance recurses into rules, and 1,000 of them overflow its stack.
MAX_NESTED = 200
Ways = list[tuple[str, str]]  # ends of a value, each with the rule of what follows it


def call_rule(rules: Rules, calls: ToolCallFormat, tool: Mapping[str, Any]) -> str:
    """Adds the rule of one call of a tool; returns its name."""
    name, parameters = tool["function"]["name"], tool["function"].get("parameters", NO_PARAMETERS) | {"type": "object"}
    head, tail = calls.call.split("ARGUMENTS")
    start = f" {INDEX} ".join(rules.text(text.replace("NAME", name)) for text in head.split("INDEX"))
    if calls.argument is not None:
        return rules.add(f"{start} ({_Arguments(rules, calls, tail, parameters).rule()})")
    if calls.values == "gemma":
        arguments = _GemmaValues(rules, parameters).rule(parameters)
    else:
        arguments = json_rule(parameters)
    return rules.add(f"{start} {arguments} {rules.text(tail)}")


class _Arguments:
    """Arguments that are written one by one, in the schema's order.

    Strings are unquoted, and of their constraints only `enum` is enforced. An unquoted value ends where its mark is
    followed by the next argument or the end of the call, so the rule of a value includes what follows it.

    Args:
        tail: text after all arguments.
    """

    def __init__(self, rules: Rules, calls: ToolCallFormat, tail: str, parameters: Mapping[str, Any]) -> None:
        assert calls.argument is not None, "checked by the caller"
        self._rules, self._parameters = rules, parameters
        self._is_text = calls.values == "text"
        self._defined = _refs([parameters.get(name) for name in DEFINITIONS])
        self._key_open, self._key_end, value_end = re.split("KEY|VALUE", calls.argument)
        self._end, self._between = value_end + tail, value_end + calls.separator + self._key_open
        self._tail, self._value_end, self._separator = tail, value_end, calls.separator

    def rule(self) -> str:
        """Returns alternatives of all arguments and the tail."""
        ways: dict[str, None] = {}
        for properties, required, extra in objects_of(self._parameters):
            if len(properties) > MAX_NESTED:
                ways |= {self._flat(properties, required): None}
                continue
            keys, ends = (None if extra is None else self._any_key(extra)), True
            for name, schema in reversed(properties.items()):
                key = self._key(self._rules.text(name), schema, self._ways(keys, ends))
                if name in required:
                    keys, ends = key, False
                else:
                    keys = key if keys is None else self._rules.add(f"{key} | {keys}")
            ways |= {f"{self._rules.text(self._key_open)} {keys}": None} if keys is not None else {}
            ways |= {self._rules.text(self._tail): None} if ends else {}
        return " | ".join(ways)

    def _any_key(self, schema: Any) -> str:
        name = self._rules.reserve()
        self._rules.define(name, self._key(self._rules.add(r"/[\w.-]{1,64}/"), schema, self._ways(name, True)))
        return name

    def _flat(self, properties: dict[str, Any], required: set[str]) -> str:
        """Returns many arguments one after another, whose texts end at the first mark of an end."""
        if self._separator:
            raise ValueError(f"it has {len(properties)} properties; at most {MAX_NESTED} are supported")
        found = []
        for name, schema in properties.items():
            key = self._key(self._rules.text(self._key_open + name), schema, [(self._value_end, "")])
            found.append(key if name in required else f"{key}?")
        return f"{' '.join(found)} {self._rules.text(self._tail)}"

    def _ways(self, following: str | None, ends: bool) -> Ways:
        ways = [(self._between, following)] if following is not None else []
        return ways + ([(self._end, "")] if ends else [])

    def _key(self, key: str, schema: Any, ways: Ways) -> str:
        schema = schema if isinstance(schema, dict) else {}
        free = self._is_text and allows_text(schema, self._parameters)
        if "KIND" not in self._key_end:
            return self._rules.add(f"{key} {self._rules.text(self._key_end)} ({self._value(schema, free, ways)})")
        listed = self._is_text and bool(enum_texts(schema))
        kinds = [("true", free)] * (free or listed) + [("false", False)] * (not is_text(schema))
        texts = [
            f"{self._rules.text(self._key_end.replace('KIND', kind))} ({self._value(schema, text, ways)})"
            for kind, text in kinds
        ]
        return self._rules.add(f"{key} ({' | '.join(texts)})")

    def _value(self, schema: dict[str, Any], free: bool, ways: Ways) -> str:
        texts = enum_texts(schema) if self._is_text else []
        if free and not texts:
            return " | ".join(f"{self._rules.any_text_until(end)} {rest}" for end, rest in ways)
        if texts:
            value = "(" + " | ".join(map(self._rules.text, texts)) + ")"
        else:
            value = self._rules.add(json_rule(_with_definitions(schema, self._parameters, self._defined)))
        return f"{value} ({' | '.join(f'{self._rules.text(end)} {rest}' for end, rest in ways)})"


def _with_definitions(schema: dict[str, Any], root: Mapping[str, Any], defined: set[str]) -> dict[str, Any]:
    """Returns a part of a schema that stands alone: with the definitions, or the whole root, that it refers to.

    Args:
        defined: what the definitions refer to.
    """
    refs = {ref.split("/")[1] if "/" in ref else "" for ref in _refs(schema) | defined}
    if not refs - set(DEFINITIONS):
        return schema | {name: root[name] for name in DEFINITIONS if name in root}
    return _moved(schema) | {"$defs": {"root": _moved(dict(root))}}


def _refs(schema: Any) -> set[str]:
    found: set[str] = set()
    stack = [schema]
    while stack:
        one = stack.pop()
        if isinstance(one, dict):
            found |= {one["$ref"]} if isinstance(one.get("$ref"), str) else set()
            stack += one.values()
        elif isinstance(one, list):
            stack += one
    return found


def _moved(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_moved(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(one) for name, one in schema.items()}
    ref = schema.get("$ref")
    return moved | {"$ref": f"#/$defs/root{ref[1:]}"} if isinstance(ref, str) and ref.startswith("#") else moved


class _GemmaValues:
    """Gemma 4's values: JSON with unquoted keys in sorted order, and strings between `<|"|>`."""

    def __init__(self, rules: Rules, root: Mapping[str, Any]) -> None:
        self._rules, self._root = rules, root
        self._references: dict[str, str] = {}
        self._nested = 0  # properties of the objects around

    def rule(self, schema: Any, depth: int = 0) -> str:
        """Returns the rule of values with a schema.

        Raises:
            ValueError: the schema is nested too deeply.
        """
        if depth > 8 * MAX_REFERENCES:
            raise ValueError("the parameters are nested too deeply")
        schema = schema if isinstance(schema, dict) else {}
        listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(listed, list):
            return "(" + " | ".join(self._rules.text(_gemma_text(value)) for value in listed) + ")"
        if isinstance(ref := schema.get("$ref"), str) and depth:
            return self._defined(ref, resolve(ref, self._root), depth)
        for name in ("anyOf", "oneOf", "allOf"):
            if isinstance(ways := schema.get(name), list) and ways and depth:
                ways = ways[:1] if name == "allOf" else ways
                return f"({' | '.join(self.rule(one, depth + 1) for one in ways)})"
        types = schema.get("type", [] if depth else "object")
        types = types if not types or isinstance(types, list) else [types]
        if not types:
            types = ["object"] if "properties" in schema else ["array"] if "items" in schema else []
        if not types:  # any value
            return self._defined("", {"type": ANY_TYPE, "additionalProperties": True}, depth)
        return "(" + " | ".join(self._of_type(kind, schema, depth) for kind in types) + ")"

    def _of_type(self, kind: Any, schema: dict[str, Any], depth: int) -> str:
        match kind:
            case "string":
                quote = self._rules.text(GEMMA_QUOTE)
                return self._rules.add(f"{quote} {self._rules.any_text_until(GEMMA_QUOTE)}")
            case "array":
                item = self.rule(schema.get("items"), depth + 1)
                return f'"[" ({item} ("," {item})*)? "]"'
            case "object":
                return "(" + " | ".join(self._objects(schema if depth else dict(self._root), depth)) + ")"
        return self._rules.add(json_rule(schema | {"type": kind}))

    def _objects(self, schema: dict[str, Any], depth: int) -> Iterator[str]:
        for properties, required, extra in objects_of(schema, self._root):
            self._nested += len(properties)
            if self._nested > MAX_NESTED:
                raise ValueError(f"nested objects have more than {MAX_NESTED} properties")
            rest, ends = '"}"', True  # what may follow a value, and whether no value is needed
            first: list[str] = []
            if extra is not None:
                more = self._rules.reserve()
                pair = f'{self._rules.add("/[A-Za-z0-9_-]{1,64}/")} ":" {self.rule(extra, depth + 1)}'
                self._rules.define(more, f'"}}" | "," {pair} {more}')
                rest, first = more, [f"{pair} {more}"]
            for name, one in sorted(properties.items(), reverse=True):
                pair = self._rules.add(f"{self._rules.text(name + ':')} {self.rule(one, depth + 1)} {rest}")
                is_required = name in required
                rest = self._rules.add(f'"," {pair}' + ("" if is_required else f" | {rest}"))
                first, ends = ([pair], False) if is_required else ([pair, *first], ends)
            self._nested -= len(properties)
            yield '"{" (' + " | ".join([*first, *(['"}"'] if ends else [])]) + ")"

    def _defined(self, ref: str, schema: Any, depth: int) -> str:
        """Returns the name of the rule of a schema that may contain itself."""
        if ref not in self._references:
            self._references[ref] = name = self._rules.reserve()
            self._rules.define(name, self.rule(schema, depth + 1))
        return self._references[ref]


def _gemma_text(value: Any) -> str:
    match value:
        case str():
            return f"{GEMMA_QUOTE}{value}{GEMMA_QUOTE}"
        case list():
            return f"[{','.join(map(_gemma_text, value))}]"
        case dict():
            return "{" + ",".join(f"{name}:{_gemma_text(one)}" for name, one in sorted(value.items())) + "}"
    return json.dumps(value)
