"""Tables of what users get wrong: a case a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def lines(name: str) -> list[Any]:
    """Cases of a table in a file: what is typed or written, word by word, and words of the answer."""
    rows = [line.split(" -> ") for line in (Path(__file__).parent / name).read_text().splitlines() if line[0] != "#"]
    return [pytest.param(typed.split(), words, id=typed) for typed, words in rows]
