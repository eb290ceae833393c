"""The page on architecture lists every file that a run passes through."""

from __future__ import annotations

import re

import pytest

from benchmarks.route import BEGIN, END, PAGE, ROOT, lines, traced

TABLE = PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]
FILES = [
    f"{room}/{name}.py"
    for room, names in re.findall(r"^\| `([^`]+)/` \| ([^|]+) \|", TABLE, re.MULTILINE)
    for name in names.split(", ")
]


def test_the_files_are_there_and_counted() -> None:
    """Lines change: those on the page may be a twentieth off."""
    files, all_lines, *_ = (int(n.replace(",", "")) for n in re.findall(r"([\d,]+) (?:files|lines)", TABLE)[:2])
    assert files == len(FILES) + 1 and all_lines == pytest.approx(lines([*FILES, "torchrun_entry.py"]), rel=0.05)
    assert all((ROOT / file).is_file() for file in FILES)


def test_every_file_of_a_run_is_listed() -> None:
    files = traced()
    assert len(files) > 60 and sorted(set(files) - {*FILES, "torchrun_entry.py"}) == []
