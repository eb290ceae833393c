"""Prompts that copy: a file, and the beginning of the same file with a name replaced, which the model goes on with."""

from __future__ import annotations

import re
from pathlib import Path

from launch.inputs.compose import ROOT

LINES, GIVEN = 100, 30  # of a file; of its edited copy


def copy_prompts(new_tokens: int, directory: Path = ROOT / "helix") -> list[dict[str, object]]:
    """Prompts that ask for each Python file in a directory of LINES lines or more, edited; lines of a prompt file."""
    files = {
        str(file.relative_to(directory)): file.read_text(encoding="utf-8").splitlines()
        for file in sorted(directory.rglob("*.py"))
    }
    return [
        {"id": name, "prompt": "".join(edited_copy(lines)), "max_tokens": new_tokens}
        for name, lines in files.items()
        if len(lines) >= LINES
    ]


def declared_names(lines: list[str]) -> list[str]:
    """Names that the first LINES lines declare with a type, sorted."""
    return sorted({*re.findall(r"\b([a-z]\w{3,}): [a-zA-Z]", "\n".join(lines[:LINES]))})


def edited_copy(lines: list[str]) -> tuple[str, str]:
    """The first LINES lines of a file, and what follows them: how they are edited, and the first GIVEN of the copy.

    The edit renames what the file declares with a type and mentions most.
    """
    before = "\n".join(lines[:LINES])
    name = max(declared_names(lines), key=lambda n: len(re.findall(rf"\b{n}\b", before)))
    after = re.sub(rf"\b{name}\b", f"new_{name}", "\n".join(lines[:GIVEN]))
    return before, f"\n\n\n# The same file with {name} renamed to new_{name}.\n{after}"
