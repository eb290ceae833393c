"""Snapshots of recurrent states, on rank 0's host: after which tokens each was taken, and where it is stored.

A state summarizes all tokens before it, so it can only be resumed where a copy was taken: after the last whole stripe
of a prompt. A prefix hit therefore ends at the longest snapshot that it covers. Snapshots are taken on the GPU. When
there is no room, the least valuable one moves to host memory, and when that is full, too, the least valuable one is
dropped, by GreedyDual as in `helix.engine.prefix`. A snapshot without its pages is worthless.
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
        index: where it is stored; indices in host memory follow those on the GPU.
        tokens: the tokens before it, int32 [n].
        node: node of the prefix tree that had the last of them.
        worth: value of the last dropped snapshot at its last use, plus the work of its tokens.
    """

    index: int
    cache_salt: Hashable
    tokens: np.ndarray
    node: Node | None
    worth: float = 0.0


class StateSnapshots:
    """Directory of snapshots.

    Args:
        num_on_gpu, num_on_host: room for snapshots on each rank.
        tokens: tokens of a stripe.
        work: work of a prompt's tokens `[begin, end)`, in any unit.
    """

    def __init__(self, num_on_gpu: int, num_on_host: int, tokens: int, work: Callable[[int, int], float]) -> None:
        self._tokens, self._work = tokens, work
        self._num_on_gpu = num_on_gpu
        self._free, self._free_on_host = [*range(num_on_gpu)], [*range(num_on_gpu, num_on_gpu + num_on_host)]
        self._snapshots: list[Snapshot] = []  # least recently used first
        self._evicted_value = 0.0  # value of the last dropped one

    def find(self, tokens: np.ndarray, num_cached_tokens: int, cache_salt: Hashable) -> tuple[int, int]:
        """Finds the longest snapshot within a prompt's first `num_cached_tokens` tokens.

        Returns:
            Its number of tokens and index; (0, -1) if there is none.
        """
        for s in sorted(self._snapshots, key=lambda s: -len(s.tokens)):
            if len(s.tokens) <= num_cached_tokens and self._precedes(s, tokens, cache_salt):
                self._touch(s)
                return len(s.tokens), s.index
        return 0, -1

    def end(self, tokens: np.ndarray) -> int:
        """Returns after how many tokens of a prompt to take a snapshot; 0: never."""
        return (len(tokens) - 1) // self._tokens * self._tokens if self._num_on_gpu else 0

    def add(self, before: np.ndarray, cache_salt: Hashable, node: Node | None) -> tuple[int, int]:
        """Takes a snapshot after the tokens `before`, the last of which is in `node`.

        Returns:
            Its index, -1 if that snapshot exists; and the index to which the one that was there moves, -1 if it is
            dropped.
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
        """Returns an index on the GPU, and the one to which the snapshot there moves, or -1."""
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
    """Returns a snapshot's value: 0 if the tree has evicted the page of its last token."""
    node = s.node
    while node is not None and node.parent is not None and len(s.tokens) <= node.depth:
        node = node.parent  # the node was split
    is_cached = node is not None and len(node.pages) > 0 and len(s.tokens) <= node.end
    return s.worth if is_cached else 0.0
