"""The scripts in `examples/` run on CPUs, with the demo model, and say what they are to show."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from tests.e2e.checkpoints import DEMO
from tests.e2e.cli import ROOT, Job

SAYS = {
    "batch": r"length: 'def read_json.*\nlength: 'import os",
    "chat": r"> def read_json\(path\):\n.*\n> def write_json",
    "long_document": r"^0 of \d+ prompt tokens.*\n[1-9]\d{2,} of \d+ prompt tokens.*\n[1-9]\d{2,} of",
    "vegas": r"without drafts: .*\nspeculation=sparse .*: .*\nthe same text\n",
    "block_sparse": r"all keys: ' 99346\..*\nattention=block_sparse .*: ' 99346\.",
    "json_schema": r"\{'name': '(read|write)', 'binary': (True|False)\}",
}
FAST = "json_schema"


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == FAST else pytest.mark.slow) for n in SAYS])
def test_an_example_shows_what_it_is_for(name: str, tmp_path: Path) -> None:
    ended = Job([sys.executable, "-m", f"examples.{name}", str(DEMO)], log=tmp_path / "log").wait(240)
    assert ended.code == 0 and re.search(SAYS[name], ended.output, re.S if name == "chat" else re.M), ended.output


def test_examples_are_short_and_all_here() -> None:
    scripts = {file.stem: file.read_text() for file in (ROOT / "examples").glob("*.py")}
    assert scripts.keys() == SAYS.keys()
    for name, text in scripts.items():
        assert len(text.splitlines()) < 30
        assert f"python -m examples.{name} [DIR]" in str(ast.get_docstring(ast.parse(text)))
