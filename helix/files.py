"""Reads users' files: opens only regular files, and names the file in errors."""

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
    """Raises OSError unless `path` is, or links to, a readable regular file; opens nothing else."""
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind != stat.S_IFREG:  # opening a FIFO would wait for its writer
        raise OSError(errno.EINVAL, f"it is {KINDS.get(kind, 'something else')}, but must be a regular file")
    path.open("rb").close()


def is_directory(path: Path) -> bool:
    """Returns whether a path is a directory; raises ValueError if the system refuses to say."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def read_text(path: Path) -> str:
    """Reads a text file; raises ValueError if it cannot be read or is not UTF-8."""
    try:
        check_file(path)
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: byte {error.start + 1} is not part of a character") from error


def parse_json(text: str, constant: Callable[[str], float] = float) -> Any:
    """Parses JSON; `constant` converts NaN, Infinity and -Infinity, which Python's json writes.

    Raises:
        ValueError: it is not JSON, has a number that is too long, or is nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=constant)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""
        raise ValueError(f"not JSON: {error.msg} at {line}character {error.colno}") from error
    except ValueError as error:  # an integer of thousands of digits; Python appends advice after a semicolon
        raise ValueError(f"a number cannot be read: {str(error).partition(';')[0]}") from error
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file; raises ValueError unless it holds one without NaN."""
    text = read_text(path)
    try:
        content = parse_json(text, _no_nan)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must have a JSON object, not a {type(content).__name__}")
    return content


def _no_nan(name: str) -> float:
    if name == "NaN":
        raise ValueError("it is NaN")
    return float(name)
