"""Lists all keys of a schema: default, meaning (from the schema's docstrings) and values."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from helix.schema import describe_type, field_types, format_value, leaves


def meanings(schema: type) -> dict[str, str]:
    """Reads the text of each attribute from the docstrings of a dataclass and its bases."""
    sections = (inspect.cleandoc((kind.__doc__ or "").partition("Attributes:")[2]) for kind in schema.__mro__)
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in "\n".join(sections).splitlines():
        if start := re.match(r"(\w+(?:, \w+)*): (.*)", line):
            names = start[1].split(", ")
            texts |= dict.fromkeys(names, start[2])
        else:  # indented: continues the last attribute
            texts |= {name: f"{texts[name]} {line.strip()}" for name in names}
    return texts


def keys(schema: type, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yields key, default, meaning and possible values of everything that can be set."""
    for key, kind, default in leaves(schema):
        holder = schema
        *path, name = key.split(".")
        for part in path:
            holder = field_types(holder)[part]
        unset = "unset" if default is None else "[]" if default == [] else format_value(default)
        yield prefix + key, unset, meanings(holder)[name], describe_type(kind).removesuffix(", or null")
