"""The README's figures are those of the recorded results, and its files are there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_figures_are_the_recorded_ones() -> None:
    shown = subprocess.run([sys.executable, "benchmarks/show.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    for page, table in zip(("README.md", "docs/kernels.md"), shown.stdout.split("\n\n"), strict=True):
        assert table.strip() in (ROOT / page).read_text(), "paste what `python benchmarks/show.py` prints"


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "docs/features.md"):
        links = re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text())
        assert all((page.parent / link).exists() for link in links), links
