"""Figures in prose are those of a table or file that the text names, or say why they have none.

A block of text (a paragraph, a list, a table written by hand) has its figures from the tables of its page, of pages
that it links to, and of names in backticks; or from files that it names. A block with others ends with a comment,
`<!-- figures: SOURCE, ... -->`: tables, files, or one of `REASONS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from itertools import zip_longest
from typing import NamedTuple

import pytest

from benchmarks.papers.__main__ import PAPERS
from benchmarks.papers.items import lines_of
from benchmarks.records.tables import TABLES
from launch.inputs.compose import ROOT
from tests.unit.test_docs import DOCS, read

REASONS = {
    "set": "a setting, a target, a constant of the code",
    "computed": "arithmetic, or what the planner or the simulator says",
    "quoted": "published by others",
    "unrecorded": "measured here, and no record was kept",
}
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
UNIT = r"us|ms|s|x|times|%|TB/s|GB/s|tokens/s|TFLOP/s"
NUMBER = re.compile(rf"(?<![\w.=/*-])(\d[\d,]*(?:\.\d+)?)\s?(?:({UNIT})(?!\w| ?\d))?(?![\w/]|\.\w)")
RANGE = re.compile(r"\s*(?:to|and|or|instead of|,)\s*[-+]?")
TABLE = re.compile(r"<!-- table .*?<!-- end -->", re.S)
NO_FIGURES = re.compile(rf"{TABLE.pattern}|^```.*?^```", re.M | re.S)
VERSION = r"\b(?:Python|torch|vLLM|NCCL) [\d.]+(?: to [\d.]+)?|arXiv:[\d.]+"
NO_TEXT = re.compile(rf"`[^`]*`|\]\([^)]*\)|<!--.*?-->|{VERSION}", re.S)


class Figure(NamedTuple):
    """A number with its unit: `time` in seconds, `rate` or a share; `step`: of its last digit."""

    value: float
    unit: str
    step: float
    text: str

    @classmethod
    def of(cls, number: str, unit: str | None) -> Figure:
        scale = SECONDS.get(unit or "", 0.01 if unit == "%" else 1.0)
        kind = "time" if unit in SECONDS else unit if unit and "/" in unit else ""
        digits = len(number.partition(".")[2])
        return cls(float(number.replace(",", "")) * scale, kind, scale * 10**-digits, f"{number} {unit or ''}".strip())

    def is_in(self, known: Iterable[Figure]) -> bool:
        """Whether one of `known`, or what it is more or less than 1, rounds to this figure."""
        for other in known:
            values = (other.value, abs(other.value - 1), abs(1 - other.value)) if not self.unit else (other.value,)
            if self.unit == other.unit and any(abs(value - self.value) <= 0.501 * self.step for value in values):
                return True
        return False


def figures_in(text: str) -> list[Figure]:
    """Lists numbers with a unit, numbers before one in a range, and others with two decimals."""
    found, matches = [], list(NUMBER.finditer(text))
    for match, after in zip_longest(matches, matches[1:]):
        unit = match[2]
        if unit is None and after is not None and RANGE.fullmatch(text[match.end() : after.start()]):
            unit = after[2]
        if unit is not None or re.fullmatch(r"\d+\.\d\d+", match[1]):
            found.append(Figure.of(match[1], unit))
    return found


@cache
def known(source: str) -> list[Figure]:
    """Lists all numbers of a table, of a page's tables, or of a file; a record's by the unit in their field's name."""
    if source in TABLES or source in PAPERS:
        text = "\n".join(TABLES[source]() if source in TABLES else lines_of(PAPERS[source].items()))
    elif source in DOCS:
        text = "\n".join(TABLE.findall(read(source)))
    else:
        text = (ROOT / source).read_text(encoding="utf-8")
    fields = re.findall(r'_(us|ms|s)": (\d+(?:\.\d+)?)\b', text) if source.endswith(".jsonl") else []
    return [Figure.of(*found) for found in NUMBER.findall(text)] + [Figure.of(n, unit) for unit, n in fields]


def sources(page: str, block: str) -> list[str]:
    """Lists what a block may have its figures from: pages, files, and last whole tables, which take time."""
    links = [str((ROOT / page).parent.joinpath(link).resolve()) for link in re.findall(r"\]\((?!http)([^)#]+)", block)]
    links = [link.removeprefix(f"{ROOT}/") for link in links if re.search(r"\.(md|jsonl|txt)$", link)]
    named = [name for name in re.findall(r"`([\w/.-]+)`", block) if (ROOT / name).is_file()]
    tables = [name for each in (page, *links) for name in re.findall(r"<!-- table (\S+) -->", read(each))]
    tables += re.findall(r"`([\w.-]+)`", read(page))
    return [page, *links, *named, *(name for name in dict.fromkeys(tables) if name in TABLES)]


def untold(page: str, block: str) -> list[str]:
    """Lists a block's figures that no source has and that no reason excuses."""
    marks = [mark for text in re.findall(r"<!-- figures: (.*?) -->", block) for mark in text.split(", ")]
    if set(marks) & {*REASONS}:
        return []
    given = marks + sources(page, block)
    return [f.text for f in figures_in(NO_TEXT.sub("", block)) if not any(f.is_in(known(name)) for name in given)]


def blocks(page: str) -> list[str]:
    return [block for block in re.split(r"\n\s*\n", NO_FIGURES.sub("\n\n", read(page))) if block.strip()]


@pytest.mark.parametrize("page", [page for page in DOCS if page not in ("CHANGELOG.md", "docs/reference/config.md")])
def test_figures_in_prose_have_a_source_or_a_reason(page: str) -> None:
    found = {block: missing for block in blocks(page) if (missing := untold(page, block))}
    assert not found, "\n".join(f"{missing}: {block}" for block, missing in found.items())


def test_what_a_figure_is() -> None:
    text = "2 to 3 ms, 1.57 and 12%; 8 x 128K of 2 x 2 in 1,234.5 us, not v1.2.3 or k=8"
    assert [f.text for f in figures_in(text)] == ["2 ms", "3 ms", "1.57 %", "12 %", "1,234.5 us"]
    (ms,) = figures_in("1.2 ms")
    assert ms.is_in([Figure.of("1,234", "us")]) and not ms.is_in([Figure.of("1,260", "us")])
    (share,) = figures_in("12%")
    assert share.is_in([Figure.of("1.12", None)]) and not share.is_in([Figure.of("1.13", "x")])
