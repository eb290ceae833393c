"""Snapshots of states on rank 0's host: after which tokens each was taken.

A state is a summary of all tokens before it, and can be resumed only where a copy of it was taken: at the end of a
prompt, less what is no whole stripe. A prefix hit on such a model is the longest one behind which there is a snapshot.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import numpy as np


class StateSnapshots:
    """Directory of snapshots, of which the one that was used least recently goes first.

    Args:
        places: number of snapshots that ranks have room for.
        tokens: tokens of a stripe.
    """

    def __init__(self, places: int, tokens: int) -> None:
        self._tokens = tokens
        self._free = [*range(places)]
        self._taken: OrderedDict[int, tuple[Hashable, np.ndarray]] = OrderedDict()  # place -> salt, tokens before it

    def find(self, tokens: np.ndarray, known: int, salt: Hashable) -> tuple[int, int]:
        """Finds the snapshot behind most of a prompt's first `known` tokens; returns these, and its place or -1."""
        best, place = 0, -1
        for at, (of, before) in self._taken.items():
            depth = len(before)
            if of == salt and best < depth <= known and np.array_equal(before, tokens[:depth]):
                best, place = depth, at
        if place >= 0:
            self._taken.move_to_end(place)
        return best, place

    def end(self, tokens: np.ndarray) -> int:
        """Returns the number of a prompt's first tokens behind which a snapshot is to be taken; 0: behind none."""
        return (len(tokens) - 1) // self._tokens * self._tokens if self._free or self._taken else 0

    def take(self, before: np.ndarray, salt: Hashable) -> int:
        """Returns the place of a new snapshot behind these tokens; -1 if there is one."""
        for at, (of, known) in self._taken.items():
            if of == salt and np.array_equal(known, before):
                self._taken.move_to_end(at)
                return -1
        place = self._free.pop() if self._free else self._taken.popitem(last=False)[0]
        self._taken[place] = salt, before
        return place
