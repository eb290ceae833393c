"""Snapshots of sequences' states and windows, on rank 0's host: after which tokens each was taken, and where it is.

A state summarizes all tokens before it, so it can only be resumed where a copy was taken: with recurrent states a
prefix hit ends at a snapshot. Layers with a window can compute the tokens before a hit again, and a snapshot saves
that. All snapshots end with a whole stripe of a prompt:

- where it leaves the cached tokens of others (a junction), if no snapshot is there;
- where a waiting prompt parts from it;
- where its last message begins, since agents edit and repeat the last turn;
- every `kv.snapshot_every` tokens;
- at its end.

Snapshots are taken on the GPU. When there is no room, the least valuable one moves to host memory, and when that is
full, too, the least valuable one is dropped, by GreedyDual as in `helix.engine.prefix`. A snapshot without its pages is
worthless; those may come back from host memory (`helix.engine.prefix_moves`), and so may snapshots.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from helix.engine.prefix import Node, PrefixTree, Snapshot


class StateSnapshots:
    """Directory of snapshots.

    Args:
        tree: has the snapshots' tokens.
        work: work of a prompt's tokens `[begin, end)`, in any unit.
        num_on_gpu, num_on_host: room for snapshots on each rank.
        every: distance of snapshots in a prompt, in tokens; 0: none.
    """

    def __init__(
        self,
        tree: PrefixTree,
        work: Callable[[int, int], float],
        num_on_gpu: int = 0,
        num_on_host: int = 0,
        every: int = 0,
    ) -> None:
        self._tree, self._tokens, self._work = tree, tree.stripes.tokens, work
        self._every = every and max(every, self._tokens)
        self._num_on_gpu = num_on_gpu
        self._free, self._free_on_host = [*range(num_on_gpu)], [*range(num_on_gpu, num_on_gpu + num_on_host)]
        self._snapshots: list[Snapshot] = []  # least recently used first
        self._evicted_value = 0.0  # value of the last dropped one

    def find(self, node: Node | None, tokens: int) -> tuple[int, int]:
        """Finds the last snapshot within the first `tokens` tokens of the path to `node`.

        Returns:
            Its number of tokens and index; (0, -1) if there is none.
        """
        if (s := self._tree.last_snapshot(node, tokens)) is None:
            return 0, -1
        self._touch(s)
        return s.tokens, s.index

    def ends(self, length: int, known: int, last_message: int) -> list[int]:
        """Returns after how many tokens of a prompt to take snapshots, ascending.

        Args:
            length: tokens of the prompt.
            known: tokens of it that were cached when it was admitted.
            last_message: tokens before its last message; 0: unknown.
        """
        if not self._num_on_gpu:
            return []
        regular = range(self._every, length, self._every) if self._every else ()
        ends = {end // self._tokens * self._tokens for end in (known, last_message, *regular, length - 1)}
        return sorted(end for end in ends if 0 < end < length)

    def fork(self, tokens: np.ndarray, other: np.ndarray) -> int:
        """Returns after how many tokens to take a snapshot of the prompt `other` that the prompt `tokens` can use."""
        count = min(len(tokens), len(other)) - 1
        if not self._num_on_gpu:
            return 0
        differ = np.flatnonzero(tokens[:count] != other[:count])
        return (int(differ[0]) if len(differ) else count) // self._tokens * self._tokens

    def add(self, node: Node | None, tokens: int) -> tuple[int, int]:
        """Takes a snapshot after the first `tokens` tokens of the path to `node`.

        Returns:
            Its index, -1 if that snapshot exists or all others are in use; and the index to which the one that was
            there moves, -1 if it is dropped.
        """
        while node is not None and node.depth >= tokens:
            node = node.parent
        assert node is not None and node.depth < tokens <= node.end, "a snapshot of tokens that are not cached"
        for s in node.snapshots:
            if s.tokens == tokens:
                self._touch(s)
                return -1, -1
        index, moved = (self._free.pop(), -1) if self._free else self._evict()
        if index < 0:
            return -1, -1
        snapshot = Snapshot(index, tokens, node)
        self._tree.add_snapshot(node, snapshot)
        self._snapshots.append(snapshot)
        self._touch(snapshot)
        return index, moved

    def reserve(self, tokens: int) -> Snapshot | None:
        """Returns a snapshot on the GPU that a move fills, and that nothing finds until `PrefixTree.add_snapshot`."""
        index = self._free.pop() if self._free else self._evict(moves=False)[0]
        if index < 0:
            return None
        snapshot = Snapshot(index, tokens, None, users=1)
        self._snapshots.append(snapshot)
        self._touch(snapshot)
        return snapshot

    def cancel(self, snapshot: Snapshot) -> None:
        """Frees a reserved snapshot that could not be filled."""
        self._snapshots.remove(snapshot)
        self._free.append(snapshot.index)
        snapshot.is_dropped = True

    @property
    def are_taken(self) -> bool:
        return self._num_on_gpu > 0

    def is_on_gpu(self, snapshot: Snapshot) -> bool:
        return snapshot.index < self._num_on_gpu and not snapshot.is_dropped

    def _evict(self, moves: bool = True) -> tuple[int, int]:
        """Returns an index on the GPU, -1 if all are in use; and the one to which the snapshot there moves, or -1."""
        unused = (s for s in self._snapshots if s.index < self._num_on_gpu and not s.users)
        if (victim := min(unused, key=_value, default=None)) is None:
            return -1, -1
        index = victim.index
        if not moves:
            self._drop(victim)
            return index, -1
        if self._free_on_host and _value(victim):
            victim.index = self._free_on_host.pop()
            return index, victim.index
        evicted = min((victim, *(s for s in self._snapshots if s.index >= self._num_on_gpu)), key=_value)
        self._drop(evicted)
        if evicted is victim:
            return index, -1
        victim.index = evicted.index
        return index, victim.index

    def _drop(self, evicted: Snapshot) -> None:
        self._snapshots.remove(evicted)
        self._evicted_value = max(self._evicted_value, _value(evicted))
        self._tree.drop_snapshot(evicted)
        evicted.is_dropped = True

    def _touch(self, s: Snapshot) -> None:
        self._snapshots.remove(s)
        self._snapshots.append(s)
        s.worth = self._evicted_value + self._work(0, s.tokens)


def _value(s: Snapshot) -> float:
    """Returns a snapshot's value: 0 if the pages of its last token are lost."""
    return s.worth if s.node is not None or s.is_stored else 0.0
