"""Parses tool arguments that are written one by one, as text or as JSON, by the schema of the function."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any

from launch.answers.call_bodies import Verbatim

MAX_REFERENCES = 16  # nested references in a schema
MAX_ALTERNATIVES = 64  # of a function's parameters
MAX_PYTHON = 1 << 16  # characters of a value that is no JSON, to read as Python's
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


def allows_text(schema: Any, root: Any, depth: int = MAX_REFERENCES) -> bool:
    """Returns whether a schema allows any string, or is too nested to tell."""
    if not isinstance(schema, dict) or depth == 0:
        return schema is not False
    if ("enum" in schema or "const" in schema) and (enum_texts(schema) or not is_text(schema)):
        return False
    types = schema.get("type", "string")
    if "string" not in ([types] if isinstance(types, str) else types if isinstance(types, list) else ()):
        return False
    if "type" not in schema and schema.keys() & {"properties", "items", "additionalProperties"}:
        return False
    if isinstance(ref := schema.get("$ref"), str) and not allows_text(resolve(ref, root), root, depth - 1):
        return False
    for name, enough in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        inner = schema.get(name)
        if isinstance(inner, list) and not enough(allows_text(one, root, depth - 1) for one in inner):
            return False
    return True


def resolve(ref: str, root: Any) -> Any:
    """Returns the schema that a reference names; True, which allows anything, if there is none."""
    if not ref.startswith("#"):
        return True
    found = root
    for name in ref.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return True if found is None else found


def objects_of(schema: Any, root: Any = None) -> list[tuple[dict[str, Any], set[str], Any]]:
    """Returns the alternatives of an object: its properties, the required ones, and the schema of others.

    Others are None where the schema does not ask for any: models then send the named ones alone.
    """
    return [*_objects(schema, schema if root is None else root, MAX_REFERENCES)][:MAX_ALTERNATIVES]


def _objects(schema: Any, root: Any, depth: int) -> Iterator[tuple[dict[str, Any], set[str], Any]]:
    schema = schema if isinstance(schema, dict) and depth else {}
    properties, required = schema.get("properties"), schema.get("required")
    extra = schema.get("additionalProperties")
    found: list[tuple[dict[str, Any], set[str], Any]] = [
        (
            properties if isinstance(properties, dict) else {},
            {name for name in required if isinstance(name, str)} if isinstance(required, list) else set(),
            extra if isinstance(extra, dict) else {} if extra is True else None,
        )
    ]
    groups = [[resolve(schema["$ref"], root)]] if isinstance(schema.get("$ref"), str) else []
    groups += [[one] for one in inner] if isinstance(inner := schema.get("allOf"), list) else []
    groups += [inner for name in ("anyOf", "oneOf") if isinstance(inner := schema.get(name), list) and inner]
    for group in groups:
        ways = [way for one in group for way in _objects(one, root, depth - 1)]
        found = [
            (mine | theirs, needed | more, extra if rest is None else rest)
            for mine, needed, extra in found
            for theirs, more, rest in ways
        ][:MAX_ALTERNATIVES]
    yield from found


def read_arguments(texts: Mapping[str, Any], parameters: Any) -> dict[str, Any]:
    """Parses arguments by name: JSON if the schema allows the value, else text."""
    ways = objects_of(parameters)
    return {name: _value(text, _argument_schema(name, ways), parameters) for name, text in texts.items()}


def _argument_schema(name: str, ways: list[tuple[dict[str, Any], set[str], Any]]) -> Any:
    schemas = [properties.get(name, extra) for properties, _, extra in ways]
    schemas = [one for one in schemas if one is not None]
    return {"anyOf": schemas} if len(schemas) > 1 else schemas[0] if schemas else None


def _value(text: Any, schema: Any, root: Any) -> Any:
    """Returns the value of an argument: parsed JSON if its schema allows that, else the text."""
    if not isinstance(text, str) or isinstance(text, Verbatim) or not isinstance(schema, dict) or is_text(schema):
        return text
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)  # raises if a number is too large
    except (ValueError, RecursionError):
        return text if allows_text(schema, root) else _python_value(text, schema, root)
    return value if _allows(schema, value, root, MAX_REFERENCES) else text


def _python_value(text: str, schema: Any, root: Any) -> Any:
    """Reads a value in Python's words, such as True, where the schema allows no text."""
    try:
        value = ast.literal_eval(text.strip()) if len(text) <= MAX_PYTHON else text
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text
    known = type(value) in _KINDS and _allows(schema, value, root, MAX_REFERENCES)
    return value if known else text


def _allows(schema: Any, value: Any, root: Any, depth: int) -> bool:
    """Returns whether a schema allows the type of a value, and the value itself if it lists values.

    Args:
        root: schema in which to resolve references.
        depth: maximum nesting of references and alternatives; beyond it, anything is allowed.
    """
    if not isinstance(schema, dict) or depth == 0:
        return schema is not False
    types = schema.get("type")
    types = [types] if isinstance(types, str) else types
    if isinstance(types, list) and not any(kind in types for kind in _KINDS[type(value)]):
        return False
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(listed, list) and not any(type(one) is type(value) and one == value for one in listed):
        return False
    for name, enough in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        inner = schema.get(name)
        if isinstance(inner, list) and not enough(_allows(one, value, root, depth - 1) for one in inner):
            return False
    ref = schema.get("$ref")
    return not isinstance(ref, str) or _allows(resolve(ref, root), value, root, depth - 1)
