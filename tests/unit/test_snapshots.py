"""The directory of snapshots: what is found, what moves to host memory, what goes first."""

from __future__ import annotations

import random

import numpy as np

from helix.engine.prefix import Node
from helix.engine.snapshots import StateSnapshots

TEXT = np.arange(100, dtype=np.int32)
HERE = Node(None, tokens=1 << 20, pages=np.zeros(1, dtype=np.int32))  # a path in the tree that holds everything


def directory(places: int, on_host: int = 0) -> StateSnapshots:
    return StateSnapshots(places, on_host, 8, lambda begin, end: float(end - begin))


def text(number: int, depth: int) -> np.ndarray:
    return np.full(depth, number, dtype=np.int32)


def test_the_longest_one_within_a_hit_is_found() -> None:
    states = directory(3)
    assert states.end(TEXT[:17]) == 16 and states.end(TEXT[:16]) == 8 and states.end(TEXT[:8]) == 0
    places = [states.add(TEXT[:depth], None, HERE)[0] for depth in (16, 40)]
    other = TEXT.copy()
    other[20] = -1
    assert states.find(TEXT, 99, None) == (40, places[1])
    assert states.find(TEXT, 39, None) == (16, places[0])
    assert states.find(other, 99, None) == (16, places[0]) and states.find(TEXT, 15, None) == (0, -1)
    assert states.find(TEXT, 99, "other") == (0, -1)
    assert states.add(TEXT[:40], None, HERE) == (-1, -1), "there is one"
    assert states.add(TEXT[:40], "other", HERE)[0] not in places


def test_of_equal_ones_the_one_used_least_recently_goes_first() -> None:
    states = directory(2)
    first, second = (states.add(text(i, 16), None, HERE)[0] for i in range(2))
    assert states.find(text(0, 99), 16, None) == (16, first)
    assert states.add(text(2, 16), None, HERE) == (second, -1)
    assert states.find(text(0, 99), 16, None) == (16, first)
    assert states.find(text(1, 99), 16, None) == (0, -1)


def test_the_one_that_saves_least_goes_first_until_it_is_old() -> None:
    """The long one stays while short ones come and go, and goes once so much has gone."""
    states = directory(2)
    assert states.add(text(0, 80), None, HERE)[0] >= 0
    seen = []
    for i in range(1, 20):
        states.add(text(i, 8), None, HERE)
        seen.append(states._snapshots[0].tokens[0] == 0)
    assert seen[:8] == [True] * 8 and not seen[-1]


def test_what_leaves_the_gpu_moves_to_the_host() -> None:
    states = directory(1, 2)
    assert states.add(text(0, 24), None, HERE) == (0, -1)
    assert states.add(text(1, 16), None, HERE) == (0, 2)
    assert states.find(text(0, 99), 30, None) == (24, 2), "a hit in host memory"
    assert states.add(text(2, 8), None, HERE) == (0, 1)
    assert states.add(text(3, 40), None, HERE) == (0, -1), "of all the one on the GPU is worth least"
    assert states.find(text(2, 99), 30, None) == (0, -1)
    assert states.add(text(4, 40), None, HERE) == (0, 1), "of all one in host memory is worth least"
    assert states.find(text(1, 99), 30, None) == (0, -1)
    assert states.find(text(3, 99), 40, None) == (40, 1) and states.find(text(4, 99), 40, None) == (40, 0)


def test_what_has_lost_its_pages_goes_first() -> None:
    states = directory(2)
    lost = Node(HERE, depth=64, tokens=8, pages=np.zeros(1, dtype=np.int32))
    split = Node(HERE, depth=64, tokens=8, pages=np.zeros(1, dtype=np.int32))
    assert states.add(text(0, 72), None, lost)[0] >= 0
    assert states.add(text(1, 8), None, split)[0] >= 0, "the node was split since, and its parent has the tokens"
    lost.pages = lost.pages[:0]
    assert states.add(text(2, 8), None, HERE)[0] >= 0
    assert states.find(text(0, 99), 99, None) == (0, -1)
    assert states.find(text(1, 99), 99, None)[0] == 8


def test_without_places_there_are_none() -> None:
    states = directory(0)
    assert states.end(TEXT) == 0 and states.find(TEXT, 99, None) == (0, -1)


def test_places_are_never_shared_and_content_follows() -> None:
    """Against what ranks would have in each place, over random takes and finds."""
    for seed in range(20):
        rng = random.Random(seed)
        places, on_host = rng.randint(1, 3), rng.randint(0, 4)
        states, content = directory(places, on_host), dict[int, tuple[int, int]]()
        for _ in range(200):
            number, depth = rng.randint(0, 9), 8 * rng.randint(1, 9)
            if rng.random() < 0.6:
                place, moves = states.add(text(number, depth), None, HERE)
                if moves >= 0:
                    assert places <= moves < places + on_host
                    content[moves] = content[place]
                if place >= 0:
                    assert place < places
                    content[place] = number, depth
            else:
                known, place = states.find(text(number, 99), depth, None)
                assert place < 0 or (content[place] == (number, known) and known <= depth)
        assert len({s.index for s in states._snapshots}) == len(states._snapshots) <= places + on_host
