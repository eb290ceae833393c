"""Parses tool arguments that are written one by one, as text or as JSON, by the schema of the function."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MAX_REFERENCES = 16  # nested references in a schema
# JSON schema types of Python types.
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
    """Returns the strings that the schema allows, if it lists only strings; else empty."""
    schema = schema if isinstance(schema, dict) else {}
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return listed if isinstance(listed, list) and all(isinstance(text, str) for text in listed) else []


def is_text(schema: Any) -> bool:
    """Returns whether an argument with this schema is written as text; others are JSON."""
    return bool(enum_texts(schema)) or (isinstance(schema, dict) and schema.get("type") == "string")


def read_arguments(texts: Mapping[str, Any], parameters: Any) -> dict[str, Any]:
    """Parses arguments by name: JSON if the schema allows the value, else text."""
    return {name: _value(text, _member(parameters, "properties", name), parameters) for name, text in texts.items()}


def _value(text: Any, schema: Any, root: Any) -> Any:
    """Returns the value of an argument: parsed JSON if its schema allows that, else the text."""
    if not isinstance(text, str) or not isinstance(schema, dict) or is_text(schema):
        return text
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)  # raises if a number is too large
    except (ValueError, RecursionError):
        return text
    return value if _allows(schema, value, root, MAX_REFERENCES) else text


def _allows(schema: Any, value: Any, root: Any, depth: int) -> bool:
    """Returns whether a schema allows the type of a value, and the value itself if it lists values.

    Args:
        root: schema in which to resolve references.
        depth: maximum nesting of references and alternatives; beyond it, anything is allowed.
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
    for name in path:
        schema = schema.get(name) if isinstance(schema, dict) else None
    return schema
