"""The scripts in `examples/` run on CPUs, with the demo model, and say what they are to show."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.e2e.checkpoints import DEMO
from tests.e2e.command_line import ROOT, Job, torchrun

SAYS = {
    "batch": r"length: 'def read_json.*\nlength: 'import os",
    "chat": r"> def read_json\(path\):\n.*\n> def write_json",
    "long_document": r"^0 of \d+ prompt tokens.*\n[1-9]\d{2,} of \d+ prompt tokens.*\n[1-9]\d{2,} of",
    "vegas": r"without drafts: .*\nspeculation=sparse .*: .*\nthe same text\n",
    "block_sparse": r"all keys: ' 99346\..*\nattention=block_sparse .*: ' 99346\.",
    "json_schema": r"\{'name': '(read|write)', 'binary': (True|False)\}",
}


def test_ranks_of_torchrun_are_those_of_an_example(tmp_path: Path) -> None:
    ended = Job([*torchrun(2)[:-1], "-m", "examples.batch"], log=tmp_path / "log").wait()
    lines = [line for line in ended.output.splitlines() if line.startswith("length: ")]
    assert ended.code == 0 and len(lines) == 2, ended.output  # rank 0 alone has outputs
    assert '"""Read a JSON file from a JSON file.' in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(file.stem for file in (ROOT / "examples").glob("*.py")))
def test_an_example_shows_what_it_is_for(name: str, tmp_path: Path) -> None:
    ended = Job([sys.executable, "-m", f"examples.{name}", str(DEMO)], log=tmp_path / "log").wait(240)
    assert ended.code == 0 and re.search(SAYS[name], ended.output, re.S if name == "chat" else re.M), ended.output
