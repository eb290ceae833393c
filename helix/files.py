"""Files that somebody else wrote, read once they are known to be files, and refused by name where they cannot be."""

from __future__ import annotations

import errno
import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_file(path: Path) -> None:
    """Raises OSError unless `path` is, or links to, a regular file that may be read; nothing else is opened."""
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind != stat.S_IFREG:  # to open a FIFO is to wait for who writes it
        raise OSError(errno.EINVAL, f"it is {KINDS.get(kind, 'something else')}, and has to be a regular file")
    path.open("rb").close()


def read_text(path: Path) -> str:
    """Raises ValueError where a file cannot be read or is not UTF-8."""
    try:
        check_file(path)
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: byte {error.start + 1} is no part of a character") from error


def parse_json(text: str, constant: Callable[[str], float] = float) -> Any:
    """What a JSON text holds, `constant` taking NaN, Infinity and -Infinity, which Python writes.

    Raises:
        ValueError: it is no JSON, or none that can be held.
    """
    try:
        return json.loads(text, parse_constant=constant)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""
        raise ValueError(f"not JSON: {error.msg} at {line}character {error.colno}") from error
    except ValueError as error:  # an integer of thousands of digits, with advice to programmers behind a semicolon
        raise ValueError(f"a number cannot be read: {str(error).partition(';')[0]}") from error
    except RecursionError:
        raise ValueError("nested too deep to be read") from None


def read_json(path: Path) -> dict[str, Any]:
    """Raises ValueError unless a file holds a JSON object without NaN."""
    text = read_text(path)
    try:
        content = parse_json(text, _no_nan)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected a JSON object")
    return content


def _no_nan(name: str) -> float:
    if name == "NaN":
        raise ValueError("it is NaN")
    return float(name)
