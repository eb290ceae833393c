"""What a policy changes: statistics against closed formulas, and forced steps against what they must be."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helix.kv_cache import BlockBudget
from launch import fidelity
from launch.fidelity import compare, measure, policies, wilson
from launch.measure.forced import Policy


@given(st.integers(0, 500), st.integers(1, 500))
def test_the_range_of_a_share(hits: int, count: int) -> None:
    """Its ends are the shares from which the one that was seen is 1.96 standard deviations away."""
    hits = min(hits, count)
    low, high = wilson(hits, count)
    seen = hits / count
    assert 0 <= low <= seen + 1e-12 and seen - 1e-12 <= high <= 1
    for end in (low, high):
        if 1e-9 < end < 1 - 1e-9:
            assert abs(seen - end) == pytest.approx(1.96 * math.sqrt(end * (1 - end) / count), rel=1e-6)


def test_comparison() -> None:
    """Two steps of two tokens: one agrees, one does not though dense attention was sure."""
    dense = torch.tensor([[[2.0, 0.0], [0.0, 1.5]]])
    ours = torch.tensor([[[3.0, 0.0], [1.0, 0.0]]])
    found = compare(ours, dense, torch.tensor([[0, 1]]))

    def p(x: float) -> float:
        return 1 / (1 + math.exp(-x))  # of the first of two tokens whose logits differ by x

    def kl(a: float, b: float) -> float:
        return a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))

    assert found["agrees"] == 0.5 and found["sure_steps"] == 2 and found["sure"] == 0.5
    assert found["margins_of_misses"] == [1.5] and found["agrees_by_window"] == [0.5]
    assert found["kl"] == pytest.approx((kl(p(2), p(3)) + kl(p(-1.5), p(1))) / 2)
    assert found["tv"] == pytest.approx((abs(p(2) - p(3)) + abs(p(-1.5) - p(1))) / 2)
    assert found["perplexity"] == pytest.approx(math.exp(-(math.log(p(3)) + math.log(1 - p(1))) / 2))


@pytest.fixture(autouse=True)
def few_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity, "SOURCES", [fidelity.ROOT / "helix" / "layers"])


def values(**more: Any) -> dict[str, Any]:
    return {"model": "demo", "length": 400, "steps": 4, "windows": 2} | more


def test_policies_over_one_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget of everything changes nothing, one choice is the same on one rank and on two, and a window loses."""
    budgets = {topk: BlockBudget(1, 2, topk, 0) for topk in (0, 3, 40)}
    small = [
        Policy("dense"), Policy("all", budgets[40], 16), Policy("few", budgets[3], 16),
        Policy("window", budgets[0], 16), Policy("means", budgets[3], 16, "mean"),
    ]  # fmt: skip
    monkeypatch.setattr(fidelity, "policies", lambda: small)
    dense, everything, few, window, means = measure(values())
    assert everything["kl"] == pytest.approx(0, abs=1e-9) and everything["agrees"] == 1
    assert 0 < few["kl"] < window["kl"] and few["kl"] != means["kl"]
    assert dense["blocks_read"] is None and few["blocks_read"] == 6 and window["blocks_read"] == 3
    assert dense["perplexity"] == pytest.approx(everything["perplexity"])
    _, over_two = measure(values(policies=["few"], choice="global", kvp=2))
    assert over_two["blocks_read"] == 6 and over_two["kl"] == pytest.approx(few["kl"], abs=1e-4)


@pytest.mark.parametrize(
    "more, words",
    [
        ({"policies": ["bounds"]}, "policies: bounds is unknown"),
        ({"length": 40000}, "length=40000 must be"),
        ({"length": 32768, "windows": 99}, "99 texts of 32768 tokens are more than"),
        ({"model": "/nowhere"}, "nowhere"),
    ],
)
def test_what_cannot_be_compared(more: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, OSError), match=words):
        measure(values(**more))


def test_every_policy_has_a_name_of_its_own() -> None:
    names = [policy.name for policy in policies()]
    assert len({*names}) == len(names) and names[0] == "dense"
    assert {p.keys for p in policies() if p.name in ("bounds-32", "window-4736")} == {4736}
