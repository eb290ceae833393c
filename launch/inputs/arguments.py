"""`KEY=VALUE` arguments of commands without a config; `--help` prints the command's docstring."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_origin

from helix.packages import ROOT
from helix.schema import parse_value, unknown_message


def parse(
    arguments: Sequence[str], kinds: Mapping[str, Any], needed: Collection[str] = (), words: Sequence[str] = ()
) -> dict[str, Any]:
    """Parses `KEY=VALUE` arguments to values by key.

    Args:
        kinds: types by key, as in `helix.schema`; a list takes comma-separated values.
        needed: required keys.
        words: keys of positional arguments, in order.

    Raises:
        ValueError: a key is unknown, repeated or missing, or a value has the wrong type.
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
            raise ValueError(f"{key} is given twice: leave one out")
        if not text:
            raise ValueError(f"{key}= has no value: add one, or leave it out")
        values[key] = parse_value(key, text.split(",") if get_origin(kinds[key]) is list else text, kinds[key])
    if missing := [key for key in needed if key not in values]:
        raise ValueError(f"{' and '.join(missing)} missing: add {' '.join(f'{key}=VALUE' for key in missing)}")
    return values


def handle_help(arguments: Sequence[str], text: str | None) -> bool:
    """Prints a command's help if `--help` is among its arguments; returns whether it did."""
    if wanted := not {"-h", "--help"}.isdisjoint(arguments):
        print(text)
    return wanted


def need_checkout(command: str) -> None:
    """Exits if the command needs files that a wheel does not have: records, docs, all sources, the demo model."""
    if not (ROOT / "pyproject.toml").exists():
        sys.exit(
            f"error: {command} needs a checkout of Helix (records, sources, demo model), but {ROOT} is not one: clone "
            "the repository"
        )
