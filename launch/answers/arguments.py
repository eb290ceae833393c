"""Arguments of calls that are written one by one, as texts or as JSON, by the schema of a function's parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MAX_REFERENCES = 16  # of a schema, one behind the other
# Types of a schema that a JSON value has.
_KINDS: dict[type, set[str]] = {
    str: {"string"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}


def enum_texts(schema: Any) -> list[str]:
    """Returns the texts of which an argument is one, by its schema; empty if it lists none, or other values too."""
    schema = schema if isinstance(schema, dict) else {}
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return listed if isinstance(listed, list) and all(isinstance(text, str) for text in listed) else []


def is_text(schema: Any) -> bool:
    """Returns whether an argument is written as a text, by its schema; others are JSON."""
    return bool(enum_texts(schema)) or (isinstance(schema, dict) and schema.get("type") == "string")


def read_arguments(texts: Mapping[str, Any], parameters: Any) -> dict[str, Any]:
    """Reads arguments by name: JSON where the schema of the parameters allows its value, else the text."""
    return {name: _value(text, _member(parameters, "properties", name), parameters) for name, text in texts.items()}


def _value(text: Any, schema: Any, root: Any) -> Any:
    """Returns the value that an argument's text stands for: JSON that its schema allows, or the text."""
    if not isinstance(text, str) or not isinstance(schema, dict) or is_text(schema):
        return text
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)  # a number may be too large
    except (ValueError, RecursionError):
        return text
    return value if _allows(schema, value, root, MAX_REFERENCES) else text


def _allows(schema: Any, value: Any, root: Any, depth: int) -> bool:
    """Returns whether a schema allows values of a value's kind, and this one where it lists them.

    Args:
        root: the schema in which references are looked up.
        depth: most references and alternatives inside each other; deeper ones allow anything.
    """
    if not isinstance(schema, dict) or depth == 0:
        return schema is not False
    types = schema.get("type")
    if isinstance(types, str | list) and not _KINDS[type(value)] & {*([types] if isinstance(types, str) else types)}:
        return False
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(listed, list) and not any(type(one) is type(value) and one == value for one in listed):
        return False
    for name, enough in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        inner = schema.get(name)
        if isinstance(inner, list) and not enough(_allows(one, value, root, depth - 1) for one in inner):
            return False
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref.startswith("#"):
        return _allows(_member(root, *ref.split("/")[1:]), value, root, depth - 1)
    return True


def _member(schema: Any, *path: str) -> Any:
    """Returns what lies at a path inside a schema; None if there is nothing."""
    for name in path:
        schema = schema.get(name) if isinstance(schema, dict) else None
    return schema
