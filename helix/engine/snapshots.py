"""Snapshots of states on rank 0's host: after which tokens each was taken, and which are kept where.

A state is a summary of all tokens before it, and can be resumed only where a copy of it was taken: at the end of a
prompt, less what is no whole stripe. A prefix hit on such a model is the longest one behind which there is a snapshot.

Snapshots are taken on the GPU. Where there is no room, the one of least value moves to host memory, and from there the
one of least value goes: by greedy-dual as in `helix.engine.prefix`. A snapshot whose pages have gone is of no value.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np

from helix.engine.prefix import Node


@dataclass(eq=False, slots=True)
class Snapshot:
    """A copy of a sequence's states.

    Attributes:
        place: its place; those in host memory follow those on the GPU.
        salt: only prompts of the same salt find it.
        tokens: the tokens before it, int32 [n].
        node: node of the prefix tree that had the last of them.
        worth: value of the last one that had gone at its last use, plus the work of its tokens.
    """

    index: int
    cache_salt: Hashable
    tokens: np.ndarray
    node: Node | None
    worth: float = 0.0


class StateSnapshots:
    """Directory of snapshots.

    Args:
        places: number of snapshots that ranks have room for on the GPU.
        num_on_host: number of those that they have room for in host memory.
        tokens: tokens of a stripe.
        work: computes the work of a prompt's tokens `[begin, end)`, in any unit.
    """

    def __init__(self, num_on_gpu: int, num_on_host: int, tokens: int, work: Callable[[int, int], float]) -> None:
        self._tokens, self._work = tokens, work
        self._num_on_gpu = num_on_gpu
        self._free, self._free_on_host = [*range(num_on_gpu)], [*range(num_on_gpu, num_on_gpu + num_on_host)]
        self._snapshots: list[Snapshot] = []  # the one used last is the last
        self._evicted_value = 0.0  # value of the last one that went

    def find(self, tokens: np.ndarray, num_cached_tokens: int, cache_salt: Hashable) -> tuple[int, int]:
        """Finds the snapshot behind most of a prompt's first `num_cached_tokens` tokens; returns these, and its place
        or -1.
        """
        for s in sorted(self._snapshots, key=lambda s: -len(s.tokens)):
            if len(s.tokens) <= num_cached_tokens and self._precedes(s, tokens, cache_salt):
                self._touch(s)
                return len(s.tokens), s.index
        return 0, -1

    def end(self, tokens: np.ndarray) -> int:
        """Returns the number of a prompt's first tokens behind which a snapshot is to be taken; 0: behind none."""
        return (len(tokens) - 1) // self._tokens * self._tokens if self._num_on_gpu else 0

    def add(self, before: np.ndarray, cache_salt: Hashable, node: Node | None) -> tuple[int, int]:
        """Takes a snapshot behind the tokens `before`, the last of which is in `node`.

        Returns:
            Its place, -1 if there is one already; and the place to which the one that was there moves, -1 if it goes.
        """
        for s in self._snapshots:
            if len(s.tokens) == len(before) and self._precedes(s, before, cache_salt):
                s.node = node
                self._touch(s)
                return -1, -1
        index, moved = (self._free.pop(), -1) if self._free else self._evict()
        snapshot = Snapshot(index, cache_salt, before, node)
        self._snapshots.append(snapshot)
        self._touch(snapshot)
        return index, moved

    def _evict(self) -> tuple[int, int]:
        """Returns a place on the GPU, and the place to which the snapshot there moves, or -1."""
        victim = min((s for s in self._snapshots if s.index < self._num_on_gpu), key=_value)
        index = victim.index
        if self._free_on_host:
            victim.index = self._free_on_host.pop()
            return index, victim.index
        evicted = min((victim, *(s for s in self._snapshots if s.index >= self._num_on_gpu)), key=_value)
        self._snapshots.remove(evicted)
        self._evicted_value = max(self._evicted_value, _value(evicted))
        if evicted is victim:
            return index, -1
        victim.index = evicted.index
        return index, victim.index

    def _precedes(self, s: Snapshot, tokens: np.ndarray, cache_salt: Hashable) -> bool:
        """Returns whether a prompt of this salt begins with a snapshot's tokens; looks at the last stripe first."""
        depth = len(s.tokens)
        last = slice(max(depth - self._tokens, 0), depth)
        return (
            s.cache_salt == cache_salt
            and np.array_equal(s.tokens[last], tokens[last])
            and np.array_equal(s.tokens, tokens[:depth])
        )

    def _touch(self, s: Snapshot) -> None:
        self._snapshots.remove(s)
        self._snapshots.append(s)
        s.worth = self._evicted_value + self._work(0, len(s.tokens))


def _value(s: Snapshot) -> float:
    """Returns a snapshot's value: none if the tree has lost the pages of its last token."""
    node = s.node
    while node is not None and node.parent is not None and len(s.tokens) <= node.depth:
        node = node.parent  # it was split
    is_cached = node is not None and len(node.pages) > 0 and len(s.tokens) <= node.end
    return s.worth if is_cached else 0.0
