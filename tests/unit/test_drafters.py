"""The bench of drafters: times of random weights meet the acceptance of trained models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.records import draft_gains, draft_tables


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    monkeypatch.setattr(draft_gains, "ROOT", tmp_path)
    draft_gains.accepted.cache_clear()
    yield tmp_path / "benchmarks" / "results" / "acceptance.jsonl"
    draft_gains.accepted.cache_clear()


def kept(task: str, counts: list[int], **options: Any) -> str:
    row = {"model": "SmolLM2", "length": 8192, "task": task, "policy": "any", "gamma": len(counts), "iterations": 10}
    return json.dumps(row | {"kept": counts, "sparsity": 0.07, "reach": 8, "temperature": 0.0} | options) + "\n"


def test_tokens_of_an_iteration_are_measured_ones(records: Path) -> None:
    """They are those of the latest record of the drafter as it ships, with as many drafts or more."""
    records.write_text(
        kept("code", [1, 1, 1]) + kept("code", [9, 6, 3]) + kept("copy", [8]) + kept("copy", [5, 5], reach=0)
        + kept("facts", [5, 4], policy="window"), "utf-8",
    )  # fmt: skip
    assert draft_gains.accepted("any", 2) == {"SmolLM2 8K code": 2.5}
    assert draft_gains.accepted("any", 1) == {"SmolLM2 8K code": 1.9, "SmolLM2 8K copy": 1.8}
    assert draft_gains.accepted("any", 4) == {}


def test_a_gain_is_of_plain_steps_at_the_same_point(records: Path) -> None:
    records.write_text(kept("code", [10, 10]) + kept("code", [5, 5], length=16384), "utf-8")
    plain = {"batch": 4, "length": 99, "gamma": 0, "ttl_p50_us": 10.0, "drafter": "any"}
    row = plain | {"gamma": 2, "ttl_p50_us": 20.0}
    other = plain | {"batch": 1, "ttl_p50_us": 1.0}
    found = draft_gains.gains(row, [other, plain, row])
    assert found == {"step_over_plain": 2.0, "gain": {"SmolLM2 8K code": 1.5, "SmolLM2 16K code": 1.0}}
    assert draft_gains.gained(found, "SmolLM2") == 1.0 and draft_gains.gained(found, "SmolLM2", "copy") is None
    with pytest.raises(ValueError, match="99: times of commits b, a are compared"):
        draft_gains.gains(row | {"model": "demo", "commit": "b"}, [plain | {"commit": "a"}])
    failed = plain | {"failed": "no room"}
    assert [draft_gains.gains(r, [failed]) for r in (plain, failed, row)] == [{}] * 3


def test_drafters_compare_within_a_commit(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each commit has a line, with gains over its own plain step; a point that does not fit has one line."""
    records.write_text(kept("code", [10, 10]) + kept("code", [10, 10], policy="quest"), "utf-8")
    at = {"kind": "drafters", "model": "demo", "layout": "x", "batch": 4, "length": 8192, "gamma": 0}

    def job(commit: str, drafter: str, plain_us: float, us: float) -> list[dict[str, Any]]:
        own = at | {"commit": commit, "drafter": drafter}
        long = own | {"length": 1 << 20, "failed": "no room"}
        return [own | {"ttl_p50_us": plain_us}, own | {"gamma": 2, "ttl_p50_us": us}, long]

    rows = [*job("old", "any", 1000.0, 2000.0), *job("new", "quest", 1500.0, 2000.0)]
    monkeypatch.setattr(draft_tables, "results", lambda name, *key, **only: rows)
    assert draft_tables.beside("drafters", "SmolLM2")[2:] == [
        "| demo | 4 x 8K | old | 1.00 ms | 1.50 x (2) | - | - | - | - |",
        "| demo | 4 x 8K | new | 1.50 ms | - | - | - | 2.25 x (2) | - |",
        "| demo | 4 x 1M | - | does not fit | - | - | - | - | - |",
    ]
