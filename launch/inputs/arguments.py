"""Arguments of commands that run no config: `KEY=VALUE` as everywhere; `--help` prints the command's own text."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parents[2]  # the checkout, or where a wheel is installed
KINDS: dict[Any, str] = {int: "a whole number", float: "a number"}
MOST = 1 << 40  # of whole numbers: arrays hold 64 bits, of products, too


def boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("true or false")
    return text == "true"


def positive(text: str) -> int:
    if not text.lstrip("+").isdecimal() or int(text) < 1:
        raise ValueError("a whole number of at least 1")
    return int(text)


def one_of(*known: str) -> Callable[[str], str]:
    """Returns the kind of a value that is one of these words."""

    def kind(text: str) -> str:
        if text not in known:
            raise ValueError(f"one of {', '.join(known)}")
        return text

    return kind


def several(text: str) -> list[str]:
    """Splits a value at commas: `A,B`."""
    return text.split(",")


def whole_numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError("whole numbers, separated by commas") from None


def numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError("numbers, separated by commas") from None


def unknown(text: str, known: Collection[str]) -> str:
    """Returns the message for an unknown word, with the nearest known one."""
    near = get_close_matches(text, known, n=1)
    return f"{text} is unknown; known: {', '.join(known)}" + (f" (did you mean {near[0]}?)" if near else "")


def tokens(text: str) -> int:
    """Reads a number of tokens, such as 131072, 128K or 1M."""
    if (found := re.fullmatch(r"(\d+)([KM]?)", text)) is None:
        raise ValueError("a number of tokens, such as 131072, 128K or 1M")
    return int(found[1]) << {"": 0, "K": 10, "M": 20}[found[2]]


def parse(
    arguments: Sequence[str],
    kinds: Mapping[str, Callable[[str], Any]],
    needed: Collection[str] = (),
    words: Sequence[str] = (),
) -> dict[str, Any]:
    """Parses `KEY=VALUE` arguments to values by key.

    Args:
        kinds: by key, converts a value's text, or raises ValueError with what the value should be.
        needed: keys that must be given.
        words: keys of what stands without one, in order.

    Raises:
        ValueError: a key is unknown, given twice or missing, or a value is of the wrong kind.
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
            raise ValueError(unknown(key, kinds))
        if key in values:
            raise ValueError(f"{key} is given twice")
        if not text:
            raise ValueError(f"{key}= has no value")
        try:
            values[key] = kinds[key](text)
        except ValueError as error:
            raise ValueError(f"{argument} must be {KINDS.get(kinds[key]) or error}") from None
        if isinstance(values[key], int) and abs(values[key]) > MOST:
            raise ValueError(f"{argument} must be at most {MOST}")
    if missing := [key for key in needed if key not in values]:
        raise ValueError(f"{' and '.join(missing)} missing: add {' '.join(f'{key}=VALUE' for key in missing)}")
    return values


def helped(arguments: Sequence[str], text: str | None) -> bool:
    """Prints a command's text and ends the command if `--help` is among its arguments."""
    if wanted := not {"-h", "--help"}.isdisjoint(arguments):
        print(text)
    return wanted


def need_checkout(command: str) -> None:
    """Ends a command that needs files which a wheel lacks: records, pages, all sources, the demo model."""
    if not (HOME / "pyproject.toml").exists():
        sys.exit(f"error: {command} needs Helix's checkout, with its records, sources and demo model: {HOME} has none")
