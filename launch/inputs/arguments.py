"""Arguments of commands that run no config: `KEY=VALUE` as everywhere; `--help` prints the command's own text."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_origin

from helix.schema import parse_value, unknown_message

HOME = Path(__file__).resolve().parents[2]  # the checkout, or where a wheel is installed


def parse(
    arguments: Sequence[str], kinds: Mapping[str, Any], needed: Collection[str] = (), words: Sequence[str] = ()
) -> dict[str, Any]:
    """Parses `KEY=VALUE` arguments to values by key.

    Args:
        kinds: annotations by key, as `helix.schema` reads them; a list is several values with commas.
        needed: keys that must be given.
        words: keys of what stands without one, in order.

    Raises:
        ValueError: a key is unknown, given twice or missing, or a value is not of its type.
    """
    values: dict[str, Any] = {}
    unnamed = [*words]
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if unnamed and not equals and not argument.startswith("-"):
            key, equals, text = unnamed.pop(0), "=", argument
        if argument.startswith("-") or not equals:
            near = get_close_matches(key.lstrip("-"), kinds, n=1)
            hint = f"; did you mean {near[0]}=VALUE?" if near else ""
            raise ValueError(f"{argument}: arguments are KEY=VALUE, with keys {', '.join(kinds)}{hint} (see --help)")
        if key not in kinds:
            raise ValueError(unknown_message(key, kinds))
        if key in values:
            raise ValueError(f"{key} is given twice")
        if not text:
            raise ValueError(f"{key}= has no value")
        values[key] = parse_value(key, text.split(",") if get_origin(kinds[key]) is list else text, kinds[key])
    if missing := [key for key in needed if key not in values]:
        raise ValueError(f"{' and '.join(missing)} missing: add {' '.join(f'{key}=VALUE' for key in missing)}")
    return values


def handle_help(arguments: Sequence[str], text: str | None) -> bool:
    """Prints a command's text and ends the command if `--help` is among its arguments."""
    if wanted := not {"-h", "--help"}.isdisjoint(arguments):
        print(text)
    return wanted


def need_checkout(command: str) -> None:
    """Ends a command that needs files which a wheel lacks: records, pages, all sources, the demo model."""
    if not (HOME / "pyproject.toml").exists():
        sys.exit(f"error: {command} needs Helix's checkout, with its records, sources and demo model: {HOME} has none")
