"""Mistakes that are planted, as patches: one file a room.

A fault is its name, its file and maybe a deadline in seconds; the tests that have to notice it (`@`), the quickest that
there are; the lines that it replaces (`-`), which occur once in the file, and those in their place (`+`).
"""

from __future__ import annotations

from pathlib import Path

from tests.faults.planted.fault import Fault


def parsed(text: str) -> list[Fault]:
    found: list[Fault] = []
    for part in text.split("\n== ")[1:]:
        head, *lines = part.split("\n")
        name, file, *deadline = head.split(" | ")
        old, new, tests = ([line[1:] for line in lines if line[:1] == sign] for sign in "-+@")
        deadline_s = float(deadline[0]) if deadline else None
        found.append(Fault(name, file, "\n".join(old), "\n".join(new), tuple(tests), deadline_s))
    return found


FAULTS = [fault for path in sorted(Path(__file__).parent.glob("*.txt")) for fault in parsed("\n" + path.read_text())]
