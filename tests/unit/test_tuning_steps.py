"""The search for sparsity and gamma, on planted curves."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ranks.tuning_steps import DraftSource, Measured, Tuned, TuningGrid, levels_at, run

SPARSITIES = (0.01, 0.02, 0.05, 0.1, 0.2)
GAMMAS = (1, 2, 3, 4, 6, 8, 11)
CANDIDATES = TuningGrid(SPARSITIES, GAMMAS, 11)


def curve(*tokens: float, noise: float = 0.0, prompts: int = 8) -> list[Measured]:
    """Tokens an iteration at one sparsity after the other, prompts apart by far more than sparsities are."""
    draw = random.Random(0)
    of_prompts = [draw.uniform(-1, 1) for _ in range(prompts)]
    return [
        Measured(DraftSource("sparse", 11, s), tuple(t + p + draw.gauss(0, noise) for p in of_prompts), 1.0)
        for s, t in zip(SPARSITIES, tokens, strict=False)
    ]


@pytest.mark.parametrize(
    "tokens, at",
    [
        ((3.0, 5.0, 6.0, 6.05, 6.1), 2),  # less than 2% more, twice
        ((3.0, 5.0, 6.0, 6.1, 6.2), 3),  # 3% in two parts count
        ((6.0, 6.0, 6.0), 0),
        ((3.0, 4.0, 5.0, 6.0, 7.0), 4),
        ((5.0, 4.0, 6.0, 6.0), 2),  # a dip does not end it
        ((5.0,), 0),
    ],
)
def test_tokens_level_off_where_nothing_behind_is_better(tokens: tuple[float, ...], at: int) -> None:
    assert levels_at(curve(*tokens)) == at


def test_what_lies_within_the_interval_is_no_gain() -> None:
    gains = (0.9, -0.5, 0.6, -0.2, 0.4, 0.0)  # 0.2 more on average, 4%, and as likely none
    few = Measured(DraftSource("sparse", 11, 0.01), (5.0,) * 6, 1.0)
    many = Measured(DraftSource("sparse", 11, 0.02), tuple(5 + gain for gain in gains), 1.0)
    sure = Measured(DraftSource("sparse", 11, 0.02), (5.2,) * 6, 1.0)
    assert levels_at([few, many]) == 0 and levels_at([few, sure]) == 1
    # Prompts may differ as they like: what counts is what each one gains.
    assert levels_at(curve(4.0, 4.5, 4.5)) == 1


def world(keys_us: float = 100.0, draft_us: float = 800.0, level: float = 0.05) -> Callable[[DraftSource], Measured]:
    """A machine: a plain step of 3 ms; drafts kept at 0.9 from `level` on, at less below."""

    def measure(way: DraftSource) -> Measured:
        if way.drafter == "none":
            return Measured(way, (1.0,) * 4, 3e-3)
        if way.drafter == "ngram":
            kept, draft_s = 0.3, 0.0
        else:
            assert way.sparsity is not None
            kept = 0.9 * min(1.0, (way.sparsity / level) ** 0.2)
            draft_s = 1e-6 * (draft_us + 100 * keys_us * way.sparsity)
        tokens = sum(kept**i for i in range(way.gamma + 1))
        return Measured(way, tuple(tokens * spread for spread in (0.9, 1.0, 1.0, 1.1)), 3.2e-3 + way.gamma * draft_s)

    return measure


def asked(candidates: TuningGrid, measure: Callable[[DraftSource], Measured]) -> tuple[Tuned, list[DraftSource]]:
    ways: list[DraftSource] = []

    def noted(way: DraftSource) -> Measured:
        ways.append(way)
        return measure(way)

    return run(candidates, noted), ways


def test_the_three_steps() -> None:
    measure = world()
    found, ways = asked(CANDIDATES, measure)
    assert found.level == 0.05 and found.levelled
    assert ways[0] == DraftSource("none") and ways[1:6] == [DraftSource("sparse", 11, s) for s in SPARSITIES]
    best = max((measure(DraftSource("sparse", g, s)) for g in GAMMAS for s in SPARSITIES), key=lambda m: m.rate)
    assert found.sparse.rate >= 0.98 * best.rate and found.chosen == found.sparse
    assert len(ways) == len(set(ways)), "nothing is measured twice"
    assert len([way for way in ways if way.drafter == "sparse"]) < len(GAMMAS) * len(SPARSITIES) / 2


def test_fewer_keys_are_taken_where_they_are_faster_in_the_end() -> None:
    found, _ = asked(CANDIDATES, world(keys_us=2000.0, level=0.2))
    assert found.level == 0.2 and not found.levelled
    assert found.sparse.way.sparsity is not None and found.sparse.way.sparsity < found.level


def test_more_keys_are_tried_where_fewer_are_slower() -> None:
    flat = world(keys_us=0.0)

    def measure(way: DraftSource) -> Measured:
        found = flat(way)
        better = {0.1: 1.1, 0.2: 1.2}.get(way.sparsity or 0, 1.0) if way.gamma < 11 else 1.0
        return Measured(way, tuple(better * tokens for tokens in found.tokens), found.seconds)

    found, ways = asked(CANDIDATES, measure)
    assert found.level == 0.05 and found.sparse.way.sparsity == 0.2
    gamma = found.sparse.way.gamma
    assert DraftSource("sparse", gamma, 0.02) in ways, "fewer are tried first"


def test_plain_decoding_and_ngram_may_be_faster() -> None:
    slow, _ = asked(CANDIDATES, world(draft_us=3000.0))
    assert slow.chosen == slow.ngram and slow.chosen.way.drafter == "ngram"

    def useless(way: DraftSource) -> Measured:
        found = world(draft_us=3000.0)(way)
        return Measured(way, (1.0,) * 4, found.seconds) if way.drafter == "ngram" else found

    plain, _ = asked(CANDIDATES, useless)
    assert plain.chosen == plain.plain and plain.sparse.rate < plain.plain.rate


@given(st.integers(0, 30))
def test_a_second_start_goes_on_and_finds_the_same(interrupted: int) -> None:
    whole, ways = asked(CANDIDATES, world())
    lines = [world()(way).row() for way in ways[:interrupted]]
    known = {found.way: found for found in map(Measured.of, lines)}
    measured: list[DraftSource] = []

    def measure(way: DraftSource) -> Measured:
        if way in known:
            return known[way]
        measured.append(way)
        return world()(way)

    again = run(CANDIDATES, measure)
    assert measured == ways[interrupted:]
    assert again.chosen.way == whole.chosen.way and math.isclose(again.chosen.rate, whole.chosen.rate)
