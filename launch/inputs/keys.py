"""Every key of a schema, its default and what it means, as the schema's docstrings say it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_type_hints


def meanings(schema: type) -> dict[str, str]:
    """Reads the text of each attribute in the docstrings of a dataclass and its bases; some share one."""
    sections = (inspect.cleandoc((kind.__doc__ or "").partition("Attributes:")[2]) for kind in schema.__mro__)
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in "\n".join(sections).splitlines():
        if start := re.match(r"(\w+(?:, \w+)*): (.*)", line):
            names = start[1].split(", ")
            texts |= dict.fromkeys(names, start[2])
        else:  # indented: the last attribute's text goes on
            texts |= {name: f"{texts[name]} {line.strip()}" for name in names}
    return texts


def keys(schema: type, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Lists key, default and meaning of everything that can be set."""
    texts, kinds = meanings(schema), get_type_hints(schema)
    for field in fields(schema):
        if is_dataclass(kinds[field.name]):
            yield from keys(kinds[field.name], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, _default(field), texts[field.name]


def _default(field: Field[Any]) -> str:
    value = field.default if field.default_factory is MISSING else field.default_factory()
    if value is None:
        return "unset"
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
