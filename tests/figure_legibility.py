"""Checks that a figure is legible as wide as a README on GitHub."""

from __future__ import annotations

from itertools import combinations
from typing import Any
from unittest import mock

from matplotlib.figure import Figure
from matplotlib.text import Text

from benchmarks.records.style import TEXT, WIDTH

MARGIN = 2  # pixels that neighbors may overlap


def illegible(figure: Figure) -> list[str]:
    """Returns texts that are too wide or small, overlap, or are cut off."""
    found: list[Text] = []  # drawn texts only: tick labels beyond an axis' range are not
    original = Text.draw

    def draw(text: Text, renderer: Any) -> None:
        found.append(text)
        original(text, renderer)

    with mock.patch.object(Text, "draw", draw):
        figure.canvas.draw()
    boxes = {text: text.get_window_extent() for text in found if text.get_visible() and text.get_text().strip()}
    problems = [] if figure.get_figwidth() <= WIDTH else [f"{figure.get_figwidth()} inches wide"]
    for text, box in boxes.items():
        if text.get_fontsize() < TEXT:
            problems.append(f"{text.get_text()}: {text.get_fontsize():g} points")
        if box.x0 < 0 or box.y0 < 0 or box.x1 > figure.bbox.x1 or box.y1 > figure.bbox.y1:
            problems.append(f"{text.get_text()}: past the edge")
    for (one, a), (other, b) in combinations(boxes.items(), 2):
        wide, high = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        if wide > MARGIN and high > MARGIN:
            problems.append(f"{one.get_text()}, {other.get_text()}: overlap")
    return problems
