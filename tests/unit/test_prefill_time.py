"""What chunks take, as predicted from those that have run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helix.engine.prefill_time import PrefillTime

SEEN = st.dictionaries(st.floats(1, 1e6), st.floats(1e-4, 10), min_size=1, max_size=6)


@given(st.integers(0, 1_000_000), st.integers(1, 100_000), st.floats(10, 1e6))
def test_work_is_the_sum_over_tokens(begin: int, count: int, doubling: float) -> None:
    times = PrefillTime(doubling)
    middle = begin + count // 2
    whole = times.work(begin, begin + count)
    assert whole == pytest.approx(times.work(begin, middle) + times.work(middle, begin + count))
    assert times.work(begin, begin + 1) == pytest.approx(times.cost(begin), rel=0.05 + 1 / doubling)


@given(st.integers(0, 1_000_000), st.floats(0, 1e6), st.floats(10, 1e6))
def test_so_many_tokens_are_no_more_work(begin: int, work: float, doubling: float) -> None:
    times = PrefillTime(doubling)
    count = times.tokens(begin, work)
    assert times.work(begin, begin + count) <= work * 1.000001
    assert times.work(begin, begin + count + 2) > work


@given(SEEN, st.floats(1e-3, 1.0))
def test_what_fits_is_predicted_to_fit(seen: dict[float, float], seconds: float) -> None:
    times = PrefillTime(1000)
    for work, took in seen.items():
        times.observe(work, took)
    assert times.seconds(times.max_work(seconds)) <= max(seconds, times.seconds(0)) * 1.000001


@given(SEEN, st.lists(st.floats(0, 1e7), min_size=2, max_size=2))
def test_more_work_takes_no_less(seen: dict[float, float], works: list[float]) -> None:
    times = PrefillTime(1000)
    for work, took in seen.items():
        times.observe(work, took)
    less, more = sorted(works)
    assert times.seconds(0) <= times.seconds(less) <= times.seconds(more) * 1.000001


def test_a_prediction_lies_between_what_was_seen() -> None:
    """A small chunk takes longer for its work, and none less than the smallest."""
    times = PrefillTime(1000)
    assert times.seconds(100) == times.max_work(0.05) == 0
    times.observe(64, 0.010)
    times.observe(1024, 0.040)
    assert times.seconds(64) == times.seconds(1) == pytest.approx(0.010) and times.seconds(1024) == pytest.approx(0.040)
    assert times.seconds(544) == pytest.approx(0.025) and times.max_work(0.025) == pytest.approx(544)
    assert times.seconds(4096) == pytest.approx(0.160)
    assert times.max_work(0.05) == pytest.approx(1280) and times.max_work(0.005) == pytest.approx(32)


def test_what_was_held_up_once_is_forgotten_at_once() -> None:
    """The first chunk loads kernels; and of two alike, the faster one had the GPU for itself."""
    times = PrefillTime(1000)
    times.observe(1000, 1.4)
    times.observe(900, 0.45)
    assert times.seconds(900) == pytest.approx(0.45)
    times.observe(900, 0.55)
    assert times.seconds(900) == pytest.approx(0.5)


def test_one_token_deep_in_a_context_does_not_make_chunks_small() -> None:
    """It takes as long as its launch: in proportion, 50 ms would be 6 tokens, and 1K would take a second."""
    times = PrefillTime(32_768)
    times.observe(5, 0.040)
    times.observe(16_384, 0.600)
    assert 250 < times.max_work(0.050) < 350
    times.observe(1024, 0.0505)
    assert 950 < times.max_work(0.050) < 1024


def test_it_follows_what_chunks_take_now() -> None:
    times = PrefillTime(1000)
    times.observe(1000, 0.1)
    for _ in range(6):
        times.observe(1000, 0.2)
    assert times.seconds(1000) == pytest.approx(0.2, rel=0.02)


def test_one_slow_chunk_does_not_keep_later_ones_short() -> None:
    """By size alone, chunks would stay below the one that was held up, and never see what it takes now."""
    times = PrefillTime(1000)
    assert times.max_idle_work(2.0) == 0
    times.observe(512, 0.01)
    times.observe(16_384, 10.0)
    for _ in range(5):
        work = min(times.max_idle_work(2.0), 16_384)
        times.observe(work, work * 2e-5)
    assert times.max_idle_work(2.0) > 16_384
