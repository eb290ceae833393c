"""Text of others on a terminal."""

from __future__ import annotations

import re

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def harmless(text: str) -> str:
    """Returns a text without the control characters that a terminal would obey; tabs and line breaks stay."""
    return CONTROL.sub("", text)
