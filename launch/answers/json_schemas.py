"""Rewrites JSON schemas to what llguidance supports: annotations go, equivalent keywords are replaced."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any

# Formats that llguidance enforces; JSON Schema says that others are annotations.
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
UNSUPPORTED = (
    *("if", "then", "else", "not", "dependentRequired", "dependentSchemas", "dependencies", "contains"),
    *("minContains", "maxContains", "unevaluatedProperties", "unevaluatedItems", "propertyNames"),
)
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "schemas")
LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
SCHEMAS = ("items", "additionalProperties", "additionalItems", "components")  # OpenAPI's `components` hold `schemas`
LOOK_AROUND = ("(?=", "(?!", "(?<=", "(?<!")
PATTERN_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)  # an escape, a class of characters, or one
COERCED = {"coerce_one_of": True}  # an answer may fit several alternatives of `oneOf`


def supported_schema(schema: Mapping[str, Any], path: str = "$") -> dict[str, Any]:
    """Returns a schema that llguidance supports; it allows more than the given one where `unenforced` finds a keyword.

    Args:
        path: of the schema, for messages.

    Raises:
        ValueError: the schema has a keyword that cannot be enforced.
    """
    found = dict(schema)
    if "format" in found and found["format"] not in FORMATS:
        del found["format"]
    found.pop("uniqueItems", None)
    if found.get("unevaluatedProperties") in (True, {}):
        del found["unevaluatedProperties"]
    if isinstance(pattern := found.get("pattern"), str):
        found["pattern"] = _without_look_around(pattern)
    _replace_property_names(found)
    for name in UNSUPPORTED:
        if name in found:
            raise ValueError(f"{path} has {name}, which cannot be enforced: leave it out")
    _rewrite_inner(found, path, supported_schema)
    return found


def closed_schema(schema: Mapping[str, Any], path: str = "$") -> dict[str, Any]:
    """Returns a schema whose objects allow only the properties that they name."""
    found = dict(schema)
    if found.keys() & {"properties", "patternProperties"}:
        found.setdefault("additionalProperties", False)
    _rewrite_inner(found, path, closed_schema)
    return found


def _rewrite_inner(found: dict[str, Any], path: str, rewrite: Callable[[dict[str, Any], str], dict[str, Any]]) -> None:
    found |= {name: copy(found[name]) for name in (*SCHEMAS_BY_NAME, *LISTS_OF_SCHEMAS) if name in found}
    for holder, key, below in _inner_schemas(found, path):
        if isinstance(holder[key], dict):
            holder[key] = rewrite(holder[key], below)


def unenforced(schema: Any, field: str, path: str = "$") -> list[str]:
    """Returns the keywords of a supported schema that are not enforced, as `FIELD:PATH`."""
    if not isinstance(schema, dict):
        return []
    pattern = schema.get("pattern")
    found = [
        *(["uniqueItems"] if schema.get("uniqueItems") is True else []),
        *(["pattern"] if isinstance(pattern, str) and _without_look_around(pattern) != pattern else []),
        *(["oneOf"] if isinstance(schema.get("oneOf"), list) and len(schema["oneOf"]) > 1 else []),
    ]
    names = [f"{field}:{path}.{name}" for name in found]
    for holder, key, below in _inner_schemas(schema, path):
        names += unenforced(holder[key], field, below)
    return names


def _inner_schemas(schema: dict[str, Any], path: str) -> Iterator[tuple[Any, Any, str]]:
    """Yields what holds each schema in a schema, its key or index there, and its path."""
    for name in SCHEMAS_BY_NAME:
        if isinstance(inner := schema.get(name), dict):
            yield from ((inner, key, f"{path}.{name}.{key}") for key in inner)
    for name in LISTS_OF_SCHEMAS:
        if isinstance(inner := schema.get(name), list):
            yield from ((inner, index, f"{path}.{name}[{index}]") for index in range(len(inner)))
    yield from ((schema, name, f"{path}.{name}") for name in SCHEMAS if name in schema)


def _without_look_around(pattern: str) -> str:
    kept: list[str] = []
    groups: list[int | None] = []  # of the open groups: where one with look-around begins in `kept`
    for part in PATTERN_PART.finditer(pattern):
        if part[0] == "(":
            groups.append(len(kept) if pattern.startswith(LOOK_AROUND, part.start()) else None)
        kept.append(part[0])
        if part[0] == ")" and groups and (begin := groups.pop()) is not None:
            del kept[begin:]
    return "".join(kept)


def _replace_property_names(schema: dict[str, Any]) -> None:
    """Replaces names that are listed or that follow a pattern, if the schema itself names no properties."""
    names = schema.get("propertyNames")
    if not isinstance(names, dict):
        return
    rest = schema.get("additionalProperties", {})
    rules = names.keys() - {"type", "title", "description"}
    if not rules:
        del schema["propertyNames"]
    elif "properties" not in schema and "patternProperties" not in schema:
        if rules == {"enum"} and isinstance(names["enum"], list):
            listed = {name: rest for name in names["enum"] if isinstance(name, str)}
            schema |= {"properties": listed, "additionalProperties": False}
            del schema["propertyNames"]
        elif rules == {"pattern"} and isinstance(names["pattern"], str):
            schema |= {"patternProperties": {names["pattern"]: rest}, "additionalProperties": False}
            del schema["propertyNames"]
