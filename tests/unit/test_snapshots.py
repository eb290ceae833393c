"""The directory of snapshots: what is found, what goes first."""

from __future__ import annotations

import numpy as np

from helix.control.snapshots import StateSnapshots

TEXT = np.arange(100, dtype=np.int32)


def test_the_longest_one_within_a_hit_is_found() -> None:
    states = StateSnapshots(3, 8)
    assert states.end(TEXT[:17]) == 16 and states.end(TEXT[:16]) == 8 and states.end(TEXT[:8]) == 0
    places = [states.take(TEXT[:depth], None) for depth in (16, 40)]
    other = TEXT.copy()
    other[20] = -1
    assert states.find(TEXT, 99, None) == (40, places[1])
    assert states.find(TEXT, 39, None) == (16, places[0])
    assert states.find(other, 99, None) == (16, places[0]) and states.find(TEXT, 15, None) == (0, -1)
    assert states.find(TEXT, 99, "other") == (0, -1)
    assert states.take(TEXT[:40], None) == -1, "there is one"
    assert states.take(TEXT[:40], "other") not in places


def test_the_one_used_least_recently_goes_first() -> None:
    states = StateSnapshots(2, 8)
    first, second = (states.take(TEXT[:depth], None) for depth in (16, 40))
    assert states.find(TEXT, 16, None) == (16, first)
    assert states.take(TEXT[:64], None) == second
    assert states.find(TEXT, 63, None) == (16, first)


def test_without_places_there_are_none() -> None:
    states = StateSnapshots(0, 8)
    assert states.end(TEXT) == 0 and states.find(TEXT, 99, None) == (0, -1)
