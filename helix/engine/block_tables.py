"""Block tables of running sequences: allocation, prefix hits, and pages kept for later sequences.

A sequence's life, on rank 0's host: `admit`; before each chunk of its prompt `rematch`, after it `insert`; `grow` as it
draws tokens; `end` when it has ended, was aborted or preempted. A sequence that returns with the same tokens resumes
where it stopped. No cost grows with the context, except numpy passes over matched or entered tokens and over page
numbers.

One decision does these in the order end, grow, admit, advance, enter; a sequence that is preempted for one that grows
ends there. Ranks then write the changed columns, copy pages in the order of admissions, and compute. Pages that a
decision fills may be read and copied from the next decision on; columns that `insert` changed are written then.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import numpy as np

from helix.engine.prefix import Node, PrefixTree, path
from helix.engine.snapshots import StateSnapshots
from helix.kv_placement import NO_PAGES


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

    cache_salt: Hashable
    start: int
    pages: np.ndarray
    num_cached_tokens: int = 0
    copy_from: np.ndarray = field(default_factory=lambda: NO_PAGES)
    copy_to: np.ndarray = field(default_factory=lambda: NO_PAGES)
    num_inserted_tokens: int = 0
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
        enable_caching: bool = True,
        max_pages: int | None = None,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        self.tree, self.pool = tree, tree.pool
        self.snapshots = snapshots or StateSnapshots(0, 0, tree.stripes.tokens, lambda begin, end: 0.0)
        self._stripes, self._tokens = tree.stripes, tree.stripes.tokens
        self._enable_caching = enable_caching
        self._pages_left = math.inf if max_pages is None else max_pages

    def admit(self, tokens: np.ndarray, reserved: int, start: int, cache_salt: Hashable = None) -> BlockTable | None:
        """Allocates pages for `reserved` tokens of a sequence, cached ones included; returns None if they do not fit.

        Args:
            tokens: the prompt, int32 [n]; after a preemption, followed by the drawn tokens.
            start: kvp rank of the first block if nothing is cached.
            salt: only sequences of the same salt share pages.
        """
        hit = self.tree.match(tokens, cache_salt)
        count = self._stripes.pages_for(reserved)
        fresh = count - self._stripes.columns(0, hit.shared).stop
        shared, source = self.tree.pages_of(hit)
        idle = self.pool.count_unused(shared)
        if fresh > self.pool.available - idle - self.pool.count_unused(source):
            hit, source = replace(hit, copied=0, source=None), NO_PAGES  # without the copy, it may fit
        if fresh > self.pool.available - idle or count > self._pages_left:
            return None
        self._pages_left -= count
        node = None if hit.node is None or not hit.shared else self.tree.split_at(hit.node, hit.shared)
        self.pool.share(shared)
        self.pool.share(source)
        new_pages = self._allocate(fresh)
        self.pool.release(source)
        if hit.source is not None:
            self.tree.queue_up(hit.source)
        return BlockTable(
            cache_salt,
            start if hit.start is None else hit.start,
            np.concatenate((shared, new_pages)),
            hit.tokens,
            source,
            new_pages[: len(source)],
            hit.shared,
            node,
        )

    def rematch(self, table: BlockTable, tokens: np.ndarray, num_computed_tokens: int) -> tuple[int, range]:
        """Shares pages of a prompt that other sequences have computed since.

        Args:
            done: tokens in its pages.

        Returns:
            The tokens in its pages now, and the changed columns of its table.
        """
        node, at = self.tree.follow(self._node(table), tokens[:-1], table.num_inserted_tokens)
        return (at, self._take_over(table, node, at)) if at > num_computed_tokens else (num_computed_tokens, range(0))

    def next_stripe(self, table: BlockTable, tokens: np.ndarray) -> Hashable:
        """Returns a key of the stripe that a prompt computes next; None if others cannot share that stripe."""
        stripe = tokens[:-1][table.num_inserted_tokens : table.num_inserted_tokens + self._tokens]
        if not self._enable_caching or len(stripe) < self._tokens:
            return None
        return table.node or (table.cache_salt, table.start), stripe.tobytes()

    def insert(self, table: BlockTable, tokens: np.ndarray) -> range:
        """Adds the whole stripes of `tokens` to the tree: all tokens, int32 [n], in the pages after this decision.

        Returns:
            The changed columns of its table: those of stripes that another sequence computed before.
        """
        whole = len(tokens) // self._tokens * self._tokens
        if not self._enable_caching or whole <= table.num_inserted_tokens:
            return range(0)
        node, at = self.tree.follow(self._node(table), tokens[:whole], table.num_inserted_tokens)
        changed = self._take_over(table, node, at)
        if at < whole:
            table.node = self.tree.add(
                self._node(table), tokens[at:whole], table.pages[self._stripes.columns(at, whole)]
            )
            table.num_inserted_tokens = whole
        return changed

    def grow(self, table: BlockTable, reserved: int) -> np.ndarray | None:
        """Allocates further pages [n] int32, for `reserved` tokens in all; returns None if they do not fit."""
        count = max(self._stripes.pages_for(reserved) - len(table.pages), 0)
        if count > min(self.pool.available, self._pages_left):
            return None
        self._pages_left -= count
        more = self._allocate(count)
        table.pages = np.concatenate((table.pages, more))
        return more

    def end(self, table: BlockTable, tokens: np.ndarray) -> None:
        """Releases a sequence's pages when it ends, is aborted or preempted; their content stays in the tree.

        Args:
            tokens: all tokens in its pages, int32 [n].
        """
        self.insert(table, tokens)
        rest = tokens[table.num_inserted_tokens :]
        if self._enable_caching and len(rest):
            first = self._stripes.columns(0, table.num_inserted_tokens).stop
            pages = table.pages[first : first + self._stripes.pages_for(len(rest))]
            self.tree.add_tail(self._node(table), rest, pages)
        self.pool.release(table.pages)
        self._pages_left += len(table.pages)
        table.pages = NO_PAGES
        if table.node is not None:
            self.tree.touch(table.node)

    def _node(self, table: BlockTable) -> Node:
        """Returns the tree node at which a sequence's entered stripes end."""
        return self.tree.root(table.cache_salt, table.start) if table.node is None else table.node

    def _take_over(self, table: BlockTable, node: Node, at: int) -> range:
        """Replaces a sequence's own pages of the first `at` tokens by the tree's, which end in `node`."""
        if at == table.num_inserted_tokens:
            return range(0)
        node = self.tree.split_at(node, at)
        columns = self._stripes.columns(table.num_inserted_tokens, at)
        cached_pages = np.concatenate([n.pages for n in reversed([*path(node, table.node)])])
        self.pool.share(cached_pages)
        self.pool.release(table.pages[columns])
        table.pages[columns] = cached_pages
        table.node, table.num_inserted_tokens = node, at
        return range(columns.start, columns.stop)

    def _allocate(self, count: int) -> np.ndarray:
        self.tree.evict(count)
        return self.pool.allocate(count)
