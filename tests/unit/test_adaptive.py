"""The choice of drafts against planted step times and acceptance: what it costs, and what it gets."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from statistics import mean

import pytest

from helix.engine.draft_policy import Acceptance, DraftOutcome, DraftPolicy, draft_sizes, kv_bucket
from tests.pairwise import params

RUN_STEPS = 8
LIMIT = 16
SIZES = draft_sizes(LIMIT, True)

Seconds = Callable[[int], float]


def step_seconds(share: float) -> Seconds:
    """A step of 10 ms, to which each draft adds a share."""
    return lambda drafts: 0.01 * (1 + share * drafts)


class World:
    """Sequences whose drafts hold by chance, in steps that take planted times, and now and then one ten times that."""

    def __init__(self, rows: int, policy: DraftPolicy) -> None:
        self.rows = rows
        self.kv_tokens = 1000
        self.takes_drafts = dict.fromkeys(range(rows), True)
        self.policy = policy
        self.random = random.Random(0)
        self.drafts: list[int] = []  # of each step
        self.verified: list[list[int]] = [[] for _ in range(rows)]  # of each row, in steps with drafts

    def run(self, seconds: Seconds, chances: list[float], steps: int) -> float:
        """Tokens per second of a sequence over so many steps; `chances` of the sequences, in turn."""
        tokens, time, until = 0, 0.0, len(self.drafts) + steps
        while len(self.drafts) < until:
            pace = self.policy.plan_steps(self.rows, self.kv_tokens, self.takes_drafts)
            took, outcomes = [], []
            for _ in range(min(pace.steps or RUN_STEPS, RUN_STEPS)):
                usual = seconds(pace.drafts) * self.random.uniform(0.9, 1.1)
                took.append(usual * (10 if self.random.random() < 0.01 else 1))
                time += usual  # the hiccups belong to the machine, but are seen
                self.drafts.append(pace.drafts)
                for slot in range(self.rows):
                    tried = min(pace.drafts, self.policy.limit(slot))
                    chance = chances[slot % len(chances)]
                    accepted = next((i for i in range(tried) if self.random.random() >= chance), tried)
                    outcomes.append(DraftOutcome(slot, tried, accepted))
                    if tried:
                        self.verified[slot].append(tried)
            self.policy.observe(self.rows, self.kv_tokens, pace.drafts, took, outcomes)
            tokens += sum(1 + o.accepted for o in outcomes)
        return tokens / self.rows / time


def best_rate(seconds: Seconds, chances: list[float]) -> float:
    """Tokens per second of the best fixed count of drafts."""
    return max(mean(sum(c**i for i in range(n + 1)) for c in chances) / seconds(n) for n in SIZES)


def world(rows: int, timed: Seconds | None) -> World:
    times = {(rows, n): timed(n) for n in SIZES} if timed else {}
    return World(rows, DraftPolicy(SIZES, times))


CASES = [*product([0.0, 0.3, 0.6, 0.9, 1.0], [0.01, 0.1, 1.0], [1, 12], [True, False])]


@pytest.mark.parametrize("chance, share, rows, timed", params(CASES))
def test_a_constant_chance(chance: float, share: float, rows: int, timed: bool) -> None:
    """Timed beforehand at another length, where steps took three times as long, or not at all."""
    seconds = step_seconds(share)
    rate = world(rows, (lambda n: 3 * seconds(n)) if timed else None).run(seconds, [chance], 1500)
    assert rate * seconds(0) >= 0.97, "slower than without drafts"
    assert rate >= 0.9 * best_rate(seconds, [chance])


@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize("share", [0.02, 0.2])
def test_chances_and_times_change(share: float, rows: int) -> None:
    """Each stretch gets what it can: good drafts after bad ones are found, bad ones after good ones dropped."""
    w, seconds = world(rows, None), step_seconds(share)
    for chance, slower, steps in ((0.0, 1, 1500), (0.9, 1, 1500), (0.9, 4, 1500), (0.0, 4, 3000), (0.3, 1, 1500)):
        now: Seconds = lambda n, slower=slower: slower * seconds(n)  # type: ignore[misc] # noqa: E731
        rate = w.run(now, [chance], steps)
        assert rate * now(0) >= 0.97, (chance, slower)
        assert rate >= 0.9 * best_rate(now, [chance]), (chance, slower, rate / best_rate(now, [chance]))


@pytest.mark.parametrize("timed", [True, False], ids=["timed", "untimed"])
@pytest.mark.parametrize("slow", [4, 8, 16])
def test_a_slow_number_of_drafts_is_not_chosen(slow: int, timed: bool) -> None:
    """From `slow` drafts on verification takes three times as long: all drafts hold, and it does not pay."""

    def planted(drafts: int) -> float:
        return 0.01 * (3 if drafts >= slow else 1) * (1 + 0.02 * drafts) if drafts < 2 * slow else 1.0

    w = world(2, planted if timed else None)
    w.run(planted, [1.0], 200)
    w.drafts.clear()
    rate = w.run(planted, [1.0], 4000)
    assert sum(n >= slow for n in w.drafts) <= 0.01 * len(w.drafts), "only to be timed"
    assert rate >= 0.97 * slow / 2 / planted(slow // 2) * (1 + 2 / slow)


def test_kv_sizes_that_count_as_alike() -> None:
    assert [kv_bucket(n) for n in (0, 1, 8191)] == [0] * 3
    assert [kv_bucket(n) for n in (8192, 32767, 32768, 131071, 131072, 1 << 20)] == [1, 1, 2, 2, 3, 4]


def test_prices_of_other_lengths_are_no_prices() -> None:
    """Plain steps become slower with the keys that they read; what they took before is no reason to return to them."""
    w = World(1, DraftPolicy((0, 4), {}))
    cheap: Seconds = lambda n: 0.01 * (1 + n)  # noqa: E731
    w.run(cheap, [0.9], 400)
    assert set(w.drafts[-100:]) == {0}
    w.kv_tokens *= 64
    dear: Seconds = lambda n: 0.1 + 0.01 * n  # noqa: E731
    w.run(dear, [0.9], 400)
    assert w.drafts[-100:].count(4) > 95
    w.kv_tokens //= 64
    w.drafts.clear()
    w.run(cheap, [0.9], 100)
    assert w.drafts[:8] == [0] * 8, "known from before"


def test_a_row_with_poor_drafts_verifies_few() -> None:
    w, seconds, chances = world(4, None), step_seconds(0.02), [0.9, 0.0, 0.9, 0.9]
    rate = w.run(seconds, chances, 2000)
    assert rate >= 0.9 * best_rate(seconds, chances)
    assert mean(w.verified[1][-400:]) < 3 < 7 < mean(w.verified[0][-400:])
    w.policy.forget(1)
    assert w.policy.limit(1) == LIMIT, "the slot's next sequence starts anew"


def test_a_fixed_count_is_never_left() -> None:
    w = World(3, DraftPolicy(draft_sizes(4, False), {}))
    w.run(step_seconds(9.0), [0.0], 100)
    assert (
        set(w.drafts) == {4}
        and w.policy.plan_steps(3, 99).draft_limits == ()
        and w.policy.plan_steps(3, 99).steps is None
    )
    w = World(3, DraftPolicy(draft_sizes(0, True), {}))
    w.run(step_seconds(9.0), [0.0], 100)
    assert set(w.drafts) == {0}


def test_limits_are_sent_when_they_change() -> None:
    policy, known, sent = DraftPolicy(SIZES, {}), (), 0  # type: ignore[var-annotated]
    for _ in range(60):
        pace = policy.plan_steps(2, 99)
        sent += pace.draft_limits != ()
        if pace.drafts:
            known = pace.draft_limits or known
            assert known == (policy.limit(0), policy.limit(1))
        tried = min(pace.drafts, policy.limit(0))
        accepted = [DraftOutcome(0, tried, 0), DraftOutcome(1, pace.drafts, pace.drafts)]
        policy.observe(2, 99, pace.drafts, [0.01] * 4, accepted)
    assert known == (2, LIMIT) and 2 <= sent <= 6
    policy.forget(0)
    assert policy.plan_steps(4, 99).draft_limits == (LIMIT,) * 4


def test_who_takes_no_drafts() -> None:
    """The ranks are told when it comes, and when another one has its slot."""
    policy, takes_drafts = DraftPolicy(draft_sizes(LIMIT, adaptive=False), {}), {0: True, 1: False, 2: True}
    assert policy.plan_steps(3, 99).draft_limits == ()
    assert policy.plan_steps(3, 99, takes_drafts).draft_limits == (LIMIT, 0, LIMIT) and policy.limit(1) == 0
    assert policy.plan_steps(3, 99, takes_drafts).draft_limits == ()
    assert policy.plan_steps(3, 99, takes_drafts | {0: False}).draft_limits == (0, 0, LIMIT)
    assert policy.plan_steps(3, 99).draft_limits == (LIMIT,) * 3 and policy.limit(1) == LIMIT


def test_nothing_is_drafted_where_nobody_takes_drafts() -> None:
    """Once all sequences have grammars, however good the drafts of those before them were."""
    w, seconds = world(2, None), step_seconds(0.2)
    w.run(seconds, [0.9], 400)
    assert w.drafts[-100:].count(0) < 10
    for slots, chances in (([0], [0.0, 0.9]), ([0, 1], [0.0])):
        w.takes_drafts |= dict.fromkeys(slots, False)
        rate = w.run(seconds, chances, 1000)
        assert rate >= 0.95 * best_rate(seconds, chances)


def test_sizes() -> None:
    assert draft_sizes(0, True) == draft_sizes(0, False) == (0,)
    assert draft_sizes(1, True) == (0, 1) and draft_sizes(6, True) == (0, 1, 2, 4, 6) and draft_sizes(6, False) == (6,)
    assert draft_sizes(31, True) == (0, 1, 2, 4, 8, 16, 31)


def test_acceptance_is_conditional() -> None:
    acceptance = Acceptance(4)
    for tried, accepted in ((4, 4), (4, 2), (2, 2), (3, 0), (0, 0)):
        acceptance.add(DraftOutcome(0, tried, accepted))
    assert acceptance.verified == [4, 3, 2, 1] and acceptance.accepted == [3, 3, 1, 1]
    # One more try of each place, as good as the one before it: 3/5, 3.6/4, ..
    expected = acceptance.expected_tokens()
    assert expected[0] == 1 and expected[1] == pytest.approx(1.6) and expected[2] == pytest.approx(1.6 + 0.6 * 0.9)
