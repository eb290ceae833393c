"""The pages' figures are those of the recorded results, and their files are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.show import PAGES, with_tables

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", PAGES)
def test_the_figures_are_the_recorded_ones(page: str) -> None:
    assert with_tables(page) == (ROOT / page).read_text(), "run `python benchmarks/show.py`"


@pytest.mark.parametrize("page", [*PAGES, "docs/features.md"])
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / page).read_text())
    assert all(((ROOT / page).parent / link).exists() for link in links), links
