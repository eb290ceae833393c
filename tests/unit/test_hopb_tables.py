"""Tables of HOP-B from planted records."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.ranks.hopb import PEER_MEMORY
from benchmarks.records import hopb_tables

SLOW, LAYOUT = "host memory", "helix kvp=8 tpa=1"


def row(model: str, link: str | None, chunks: int, on_us: float, auto_us: float = 1000.0) -> dict[str, Any]:
    found = {
        "kind": "ttl", "model": model, "backend": "nccl", "layout": LAYOUT, "batch": 64, "length": 32768,
        "chunks": chunks, "off_us": 1000.0, "on_us": on_us, "without_us": 800.0, "exchange_us": 200.0, "layers": 3,
        "hidden": (1000.0 - on_us) / 200.0, "auto_us": auto_us, "auto_chunks": chunks,
    }  # fmt: skip
    return found if link is None else found | {"link": link}


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "hopb": [row("qwen2.5-7b", None, 2, 1100.0), row("llama-3.1-405b", SLOW, 2, 950.0)],
        "hopb.emulated-8": [
            row("llama-3.1-405b", SLOW, 2, 930.0, 925.0),
            row("llama-3.1-405b", SLOW, 4, 880.0, 1004.0),
            row("llama-3.1-405b", PEER_MEMORY, 2, 1010.0),
        ],
    }
    monkeypatch.setattr(hopb_tables, "results", lambda name, *key, **only: found.get(name, []))


@pytest.mark.usefixtures("records")
def test_the_ablation_has_the_best_of_each_link() -> None:
    lines = hopb_tables.ablation()
    assert sum("| paper, GB200 |" in line for line in lines) == 2
    emulated = "measured, 8 emulated ranks"
    there = "64 x 32K, helix kvp=8 tpa=1"
    measured = [line for line in lines if "measured" in line]
    assert measured == [
        f"| llama-3.1-405b | measured, {SLOW}, nccl | 5.0% | {there}, 2 chunks | 25% | 0.0% |",
        f"| llama-3.1-405b | {emulated}, {SLOW}, nccl | 12.0% | {there}, 4 chunks | 60% | 0.4% |",
        f"| llama-3.1-405b | {emulated}, {PEER_MEMORY}, nccl | -1.0% | {there}, 2 chunks | -5% | 0.0% |",
    ]


@pytest.mark.usefixtures("records")
def test_other_models_and_links_stay_out_of_the_first_table() -> None:
    assert len(hopb_tables.hopb()) == 2 + 1 and len(hopb_tables.links()) == 2 + 4
