"""Planted faults, as patches: one file per folder.

A fault has a name, a file and an optional deadline in seconds; the tests that have to catch it (`@`), the fastest
available; the lines it replaces (`-`), which occur once in the file, and the new ones (`+`).
"""

from __future__ import annotations

from pathlib import Path

from tests.faults.planted.fault import Fault


def parsed(text: str) -> list[Fault]:
    """Parses faults."""
    found: list[Fault] = []
    for part in text.split("\n== ")[1:]:
        head, *lines = part.split("\n")
        name, file, *deadline = head.split(" | ")
        old, new, tests = ([line[1:] for line in lines if line[:1] == sign] for sign in "-+@")
        deadline_s = float(deadline[0]) if deadline else None
        found.append(Fault(name, file, "\n".join(old), "\n".join(new), tuple(tests), deadline_s))
    return found


FAULTS = [fault for path in sorted(Path(__file__).parent.glob("*.txt")) for fault in parsed("\n" + path.read_text())]
