"""The time of the next decision: before what runs has ended, by as much as the decision and its launch take."""

from __future__ import annotations

import time
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import pytest

from helix.engine.core import AHEAD_S, Engine, Run


def engine(chunk_s: float, step_s: float, launch_s: float, steps: int, in_chunk: bool = True) -> Engine:
    """A loop whose device runs a chunk of so many seconds, if it is not read yet, and so many steps behind it."""
    made: Any = object.__new__(Engine)
    made._scheduler = SimpleNamespace(expects_chunk=True)
    made._times = SimpleNamespace(work=lambda begin, end: end - begin, seconds=lambda work: work / 1e3)
    made._policy = SimpleNamespace(seconds=lambda rows, drafts: step_s)
    made.timings = SimpleNamespace(step=lambda *args: None, queries=Counter())
    segment, kind = SimpleNamespace(begin=0, end=round(chunk_s * 1e3)), SimpleNamespace(rows=1, drafts=0)
    plan: Any = SimpleNamespace(prefill=[segment], kind=kind)
    unread: deque[Any] = deque(SimpleNamespace(there=False) for _ in range(in_chunk + steps))
    made._runs = deque([Run(plan, {}, unread, (), time.perf_counter(), False, in_chunk)])
    made._chunk_launch_s, made._came = launch_s, 0.0
    loop: Engine = made
    return loop


IDLE: Any = SimpleNamespace(pending=False)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_before_a_chunk_ends(steps: int) -> None:
    """However many short steps stand behind it; the bounds allow for a busy machine."""
    loop, begin = engine(4.0, 0.005, 3.8, steps), time.perf_counter()
    assert not loop._is_early(IDLE)
    assert 4.0 - 3.8 - AHEAD_S - 0.02 < time.perf_counter() - begin < 3.0


def test_a_chunk_is_read_if_steps_behind_it_outlast_a_launch() -> None:
    begin = time.perf_counter()
    assert engine(4.0, 0.5, 1.0, 4)._is_early(IDLE) and time.perf_counter() - begin < 0.5


def test_a_chunk_that_ends_sooner_is_read() -> None:
    loop = engine(60.0, 0.005, 0.01, 1)
    loop._runs[0].steps[0].there = True  # type: ignore[misc]
    assert loop._is_early(IDLE)


def test_steps_are_read_as_they_come() -> None:
    loop = engine(0.0, 10.0, 0.5, 2, in_chunk=False)
    assert loop._is_early(IDLE)
    loop = engine(0.0, 0.1, 0.5, 2, in_chunk=False)
    assert not loop._is_early(IDLE), "a launch takes longer than both"


def test_time_counts_from_the_devices_end_not_from_the_hosts_reading() -> None:
    """A launch kept the host: what it reads late was there after as long as it took."""

    class Late:
        seconds, busy_seconds, came = 0.01, 0.01, 0.0

        def read(self) -> list[tuple[int, int]]:
            Late.came = time.perf_counter()
            return []

    loop, begin = engine(0.0, 0.01, 0.0, 0, in_chunk=False), time.perf_counter()
    run = loop._runs[0]
    run.begin = begin - 5.0
    run.steps += [Late(), Late()]  # type: ignore[list-item]
    assert loop._read() == []
    assert loop._came == pytest.approx(begin - 4.99) and Late.came >= begin
