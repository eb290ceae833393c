"""Copy prompts: a file, and the beginning of the same file with a name replaced, for the model to continue."""

from __future__ import annotations

import re
from pathlib import Path

from launch.inputs.compose import ROOT

LINES, GIVEN = 100, 30  # lines of a file, and of its edited copy


def copy_prompts(new_tokens: int, directory: Path = ROOT / "helix") -> list[dict[str, object]]:
    """Returns prompt-file lines that ask for an edited copy of each Python file with at least LINES lines."""
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
    """Returns the names that the first LINES lines declare with a type, sorted."""
    return sorted({*re.findall(r"\b([a-z]\w{3,}): [a-zA-Z]", "\n".join(lines[:LINES]))})


def edited_copy(lines: list[str]) -> tuple[str, str]:
    """Returns the first LINES lines of a file, and what follows them: the edit, and the first GIVEN lines of the copy.

    The edit renames the typed name that occurs most.
    """
    before = "\n".join(lines[:LINES])
    name = max(declared_names(lines), key=lambda n: len(re.findall(rf"\b{n}\b", before)))
    after = re.sub(rf"\b{name}\b", f"new_{name}", "\n".join(lines[:GIVEN]))
    return before, f"\n\n\n# The same file with {name} renamed to new_{name}.\n{after}"
