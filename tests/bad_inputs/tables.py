"""Tables of invalid inputs, one case per line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def lines(name: str) -> list[Any]:
    """Returns the cases of a file: the words of the input, and words of the message."""
    rows = [line.split(" -> ") for line in (Path(__file__).parent / name).read_text().splitlines() if line[0] != "#"]
    return [pytest.param(typed.split(), words, id=typed) for typed, words in rows]
