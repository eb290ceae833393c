"""Names of classes: one name is one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = "benchmarks", "comm", "helix", "kernels", "launch"


def test_one_name_is_one_class() -> None:
    files: defaultdict[str, list[str]] = defaultdict(list)
    for file in (file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(str(file.relative_to(ROOT)))
    assert len(files) > 300
    assert {name: found for name, found in files.items() if len(found) > 1} == {}
