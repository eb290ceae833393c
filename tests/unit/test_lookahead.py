"""The time of the next decision: before what runs has ended, by as much as the decision and its launch take."""

from __future__ import annotations

from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import pytest

from helix.engine import core
from helix.engine.core import LEAD_S, POLL_S, Engine, InFlightBatch

IDLE: Any = SimpleNamespace(pending=False)


class Clock:
    """A clock that goes on while somebody sleeps."""

    now = 100.0

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-6)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(core, "perf_counter", lambda: made.now)
    monkeypatch.setattr(core, "time", made)
    return made


def engine(chunk_s: float, step_s: float, launch_s: float, steps: int, in_chunk: bool = True) -> Engine:
    """A loop whose device runs a chunk of so many seconds, if it is not read yet, and so many steps behind it."""
    made: Any = object.__new__(Engine)
    made._scheduler = SimpleNamespace(expects_chunk=True)
    made._times = SimpleNamespace(work=lambda begin, end: end - begin, seconds=lambda work: work / 1e3)
    made._policy = SimpleNamespace(seconds=lambda rows, drafts: step_s)
    made.timings = SimpleNamespace(step=lambda *args: None, queries=Counter())
    segment, kind = SimpleNamespace(begin=0, end=round(chunk_s * 1e3)), SimpleNamespace(rows=1, drafts=0)
    plan: Any = SimpleNamespace(prefill_chunks=[segment], kind=kind)
    unread: deque[Any] = deque(SimpleNamespace(ready=False) for _ in range(in_chunk + steps))
    made._batches = deque([InFlightBatch(plan, {}, unread, (), Clock.now, False, in_chunk)])
    made._chunk_launch_s, made._read_at = launch_s, 0.0
    loop: Engine = made
    return loop


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_before_a_chunk_ends(steps: int, clock: Clock) -> None:
    """However many short steps stand behind it."""
    assert not engine(4.0, 0.005, 3.0, steps)._is_early(IDLE)
    assert clock.now == pytest.approx(Clock.now + 4.0 + steps * 0.005 - 3.0 - LEAD_S, abs=2 * POLL_S)


def test_a_chunk_is_read_if_steps_behind_it_outlast_a_launch(clock: Clock) -> None:
    assert engine(4.0, 0.5, 1.0, 4)._is_early(IDLE) and clock.now == Clock.now


def test_a_chunk_that_ends_sooner_is_read(clock: Clock) -> None:
    loop = engine(60.0, 0.005, 0.01, 1)
    loop._batches[0].steps[0].ready = True  # type: ignore[misc]
    assert loop._is_early(IDLE) and clock.now == Clock.now


@pytest.mark.parametrize("step_s, early", [(10.0, True), (0.1, False)])
def test_steps_are_read_as_they_come(step_s: float, early: bool, clock: Clock) -> None:
    """But where a launch takes longer than both."""
    assert engine(0.0, step_s, 0.5, 2, in_chunk=False)._is_early(IDLE) == early


def test_time_counts_from_the_devices_end_not_from_the_hosts_reading(clock: Clock) -> None:
    """A launch kept the host: what it reads late was there after as long as it took."""

    class Late:
        seconds, busy_seconds, read_at = 0.01, 0.01, 0.0

        def read(self) -> list[tuple[int, int]]:
            Late.read_at = clock.now
            return []

    loop = engine(0.0, 0.01, 0.0, 0, in_chunk=False)
    loop._batches[0].steps += [Late(), Late()]  # type: ignore[list-item]
    clock.now += 5.0
    assert loop._read() == []
    assert loop._read_at == pytest.approx(Clock.now + 0.01) and Late.read_at == Clock.now + 5.0
