"""A mistake that is planted, and the tests that have to notice it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """Text of a file that is replaced by other text.

    Attributes:
        old: occurs once in the file.
        tests: pytest's names of tests, of which one fails with the fault, and none without.
        deadline_s: of a test that would hang; None for the usual one.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    deadline_s: float | None = None
