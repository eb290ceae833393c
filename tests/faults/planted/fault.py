"""A planted fault, and the tests that have to catch it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """Text that replaces other text of a file.

    Attributes:
        old: occurs once in the file.
        tests: pytest names; one fails with the fault, none without.
        deadline_s: for a test that would hang; None: the default.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    deadline_s: float | None = None
