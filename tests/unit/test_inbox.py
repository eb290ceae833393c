"""What comes for an engine from other threads."""

from __future__ import annotations

import time
from threading import Timer

import pytest

from helix.engine.inbox import Abort, Inbox
from helix.engine.request import Request


def test_things_come_out_in_order_and_once() -> None:
    inbox = Inbox()
    first, second = (Request(i, (1,), 1) for i in range(2))
    for item in (first, second):
        inbox.submit(item)
    inbox.abort(0)
    assert inbox.drain() == [first, second, Abort(0)] and inbox.drain() == []


def test_whoever_sleeps_on_it_wakes() -> None:
    for wake in (lambda inbox: inbox.abort(0), lambda inbox: inbox.close()):
        inbox = Inbox()
        assert not inbox.wait(0.01)
        timer = Timer(0.01, wake, [inbox])
        timer.start()
        assert inbox.wait(60.0)
        timer.join()


def test_one_that_is_closed_does_not_wake() -> None:
    """Else an engine that waits for copies would keep Python's lock from the thread that copies."""
    begin = time.perf_counter()
    assert not Inbox.of([]).wait(0.05) and time.perf_counter() - begin > 0.04
    assert Inbox.of([Request(0, (1,), 1)]).wait(60.0)


def test_what_was_submitted_before_it_was_closed_comes_out() -> None:
    inbox = Inbox.of([Request(0, (1,), 1)])
    assert not inbox.ended
    with pytest.raises(RuntimeError, match="cannot submit request 'late', the inbox is closed"):
        inbox.submit(Request("late", (1,), 1))
    inbox.abort(0)
    assert len(inbox.drain()) == 2 and inbox.ended
