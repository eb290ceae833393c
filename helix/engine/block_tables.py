"""Block tables of running sequences: allocation, prefix hits, and pages kept for later sequences.

A sequence's life, on rank 0's host: `admit`; before each chunk of its prompt `advance`, after it `enter`; `grow` as it
draws tokens; `end` when it has ended, was aborted or preempted. A sequence that returns with the same tokens resumes
where it stopped. No cost grows with the context, except numpy passes over matched or entered tokens and over page
numbers.

One decision does these in the order end, grow, admit, advance, enter; a sequence that is preempted for one that grows
ends there. Ranks then write the changed columns, copy pages in the order of admissions, and compute. Pages that a
decision fills may be read and copied from the next decision on; columns that `enter` changed are written then.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import numpy as np

from helix.engine.prefix import Node, PrefixTree, path
from helix.engine.snapshots import StateSnapshots
from helix.placement import NO_PAGES


@dataclass(eq=False)
class BlockTable:
    """The pages of a running sequence.

    Attributes:
        start: kvp rank of its first block.
        pages: [n] int32, the same on every rank.
        known: tokens found in the cache at admission; prefill continues after them.
        copy_from, copy_to: pages to copy on every rank, in the order of admissions, before anything is computed.
        entered: tokens in whole stripes that are in the tree; other sequences may share their pages.
        node: the tree node at which these end.
    """

    salt: Hashable
    start: int
    pages: np.ndarray
    known: int = 0
    copy_from: np.ndarray = field(default_factory=lambda: NO_PAGES)
    copy_to: np.ndarray = field(default_factory=lambda: NO_PAGES)
    entered: int = 0
    node: Node | None = None


class BlockTables:
    """Allocator of pages to sequences, with prefix sharing.

    Args:
        tree: index of cached pages by their tokens.
        caching: whether pages are kept in the tree.
        most: most pages of all tables together, a shared page counted once per table; None: no limit.
        states: directory of snapshots of states; None: layers keep no states.
    """

    def __init__(
        self,
        tree: PrefixTree,
        caching: bool = True,
        most: int | None = None,
        states: StateSnapshots | None = None,
    ) -> None:
        self.tree, self.pool = tree, tree.pool
        self.states = states or StateSnapshots(0, 0, tree.stripes.tokens, lambda begin, end: 0.0)
        self._stripes, self._tokens = tree.stripes, tree.stripes.tokens
        self._caching = caching
        self._left = math.inf if most is None else most

    def admit(self, tokens: np.ndarray, reserved: int, start: int, salt: Hashable = None) -> BlockTable | None:
        """Allocates pages for `reserved` tokens of a sequence, cached ones included; returns None if they do not fit.

        Args:
            tokens: the prompt, int32 [n]; after a preemption, followed by the drawn tokens.
            start: kvp rank of the first block if nothing is cached.
            salt: only sequences of the same salt share pages.
        """
        hit = self.tree.match(tokens, salt)
        count = self._stripes.pages_for(reserved)
        fresh = count - self._stripes.columns(0, hit.shared).stop
        shared, source = self.tree.pages_of(hit)
        idle = self.pool.idle(shared)
        if fresh > self.pool.room - idle - self.pool.idle(source):
            hit, source = replace(hit, copied=0, source=None), NO_PAGES  # without the copy, it may fit
        if fresh > self.pool.room - idle or count > self._left:
            return None
        self._left -= count
        node = None if hit.node is None or not hit.shared else self.tree.ending(hit.node, hit.shared)
        self.pool.share(shared)
        self.pool.share(source)
        own = self._take(fresh)
        self.pool.release(source)
        if hit.source is not None:
            self.tree.queue_up(hit.source)
        return BlockTable(
            salt,
            start if hit.start is None else hit.start,
            np.concatenate((shared, own)),
            hit.tokens,
            source,
            own[: len(source)],
            hit.shared,
            node,
        )

    def advance(self, held: BlockTable, tokens: np.ndarray, done: int) -> tuple[int, range]:
        """Shares pages of a prompt that other sequences have computed since.

        Args:
            done: tokens in its pages.

        Returns:
            The tokens in its pages now, and the changed columns of its table.
        """
        node, at = self.tree.follow(self._node(held), tokens[:-1], held.entered)
        return (at, self._take_over(held, node, at)) if at > done else (done, range(0))

    def next_stripe(self, held: BlockTable, tokens: np.ndarray) -> Hashable:
        """Returns a key of the stripe that a prompt computes next; None if others cannot share that stripe."""
        stripe = tokens[:-1][held.entered : held.entered + self._tokens]
        if not self._caching or len(stripe) < self._tokens:
            return None
        return held.node or (held.salt, held.start), stripe.tobytes()

    def enter(self, held: BlockTable, tokens: np.ndarray) -> range:
        """Adds the whole stripes of `tokens` to the tree: all tokens, int32 [n], in the pages after this decision.

        Returns:
            The changed columns of its table: those of stripes that another sequence computed before.
        """
        whole = len(tokens) // self._tokens * self._tokens
        if not self._caching or whole <= held.entered:
            return range(0)
        node, at = self.tree.follow(self._node(held), tokens[:whole], held.entered)
        changed = self._take_over(held, node, at)
        if at < whole:
            held.node = self.tree.add(self._node(held), tokens[at:whole], held.pages[self._stripes.columns(at, whole)])
            held.entered = whole
        return changed

    def grow(self, held: BlockTable, reserved: int) -> np.ndarray | None:
        """Allocates further pages [n] int32, for `reserved` tokens in all; returns None if they do not fit."""
        count = max(self._stripes.pages_for(reserved) - len(held.pages), 0)
        if count > min(self.pool.room, self._left):
            return None
        self._left -= count
        more = self._take(count)
        held.pages = np.concatenate((held.pages, more))
        return more

    def end(self, held: BlockTable, tokens: np.ndarray) -> None:
        """Releases a sequence's pages when it ends, is aborted or preempted; their content stays in the tree.

        Args:
            tokens: all tokens in its pages, int32 [n].
        """
        self.enter(held, tokens)
        rest = tokens[held.entered :]
        if self._caching and len(rest):
            first = self._stripes.columns(0, held.entered).stop
            pages = held.pages[first : first + self._stripes.pages_for(len(rest))]
            self.tree.add_tail(self._node(held), rest, pages)
        self.pool.release(held.pages)
        self._left += len(held.pages)
        held.pages = NO_PAGES
        if held.node is not None:
            self.tree.touch(held.node)

    def _node(self, held: BlockTable) -> Node:
        """Returns the tree node at which a sequence's entered stripes end."""
        return self.tree.root(held.salt, held.start) if held.node is None else held.node

    def _take_over(self, held: BlockTable, node: Node, at: int) -> range:
        """Replaces a sequence's own pages of the first `at` tokens by the tree's, which end in `node`."""
        if at == held.entered:
            return range(0)
        node = self.tree.ending(node, at)
        columns = self._stripes.columns(held.entered, at)
        known = np.concatenate([n.pages for n in reversed([*path(node, held.node)])])
        self.pool.share(known)
        self.pool.release(held.pages[columns])
        held.pages[columns] = known
        held.node, held.entered = node, at
        return range(columns.start, columns.stop)

    def _take(self, count: int) -> np.ndarray:
        self.tree.evict(count)
        return self.pool.take(count)
