"""Writes `docs/reference/config.md` from the schemas and their groups: `python -m benchmarks.reference`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from benchmarks.schema import SETTINGS, BenchConfig
from helix.config import Config

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "config.md"
HEAD = """\
# Configuration

<!-- Written by `python -m benchmarks.reference` from `helix/config.py`, `conf/` and `benchmarks/`; a test compares. -->

Set any key on the command line, as in `layout.kvp=4 decode.max_new_tokens=128`. `GROUP=OPTION` takes a file of
`conf/GROUP/`. Unknown keys and values out of range are refused before anything starts.

| key | default | meaning |
|---|---|---|
"""
LABORATORY = """
## Benchmarks

`python -m benchmarks.entry` takes these beside all others.

| key | default | meaning |
|---|---|---|
"""
GROUPS = """
## Groups

| group | options |
|---|---|
"""


def meanings(schema: type) -> dict[str, str]:
    """The text of each attribute in a dataclass's docstring; attributes that share a text have it each."""
    section = inspect.cleandoc((schema.__doc__ or "").partition("Attributes:")[2])
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        if start := re.match(r"(\w+(?:, \w+)*): (.*)", line):
            names = start[1].split(", ")
            texts |= dict.fromkeys(names, start[2])
        else:  # indented: the last attribute's text goes on
            texts |= {name: f"{texts[name]} {line.strip()}" for name in names}
    return texts


def keys(schema: type = Config, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Key, default and meaning of everything that can be set."""
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
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def page() -> str:
    ours, theirs = [*keys(Config)], [*keys(BenchConfig, "bench.")]
    tables = (
        "".join(f"| `{key}` | {default} | {meaning} |\n" for key, default, meaning in part) for part in (ours, theirs)
    )
    options: dict[str, set[str]] = {}
    for file in (file for directory in SETTINGS.directories for file in directory.glob("*/*.yaml")):
        options.setdefault(file.parent.name, set()).add(f"`{file.stem}`")
    groups = "".join(f"| `{name}` | {', '.join(sorted(found))} |\n" for name, found in sorted(options.items()))
    return HEAD + LABORATORY.join(tables) + GROUPS + groups


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
