"""Block tables of running sequences, on rank 0's host: allocation, prefix sharing, pages cached for later sequences.

Order of calls within one batch: `end`, also of preempted sequences, `grow`, `admit`, `rematch`, `insert`. Ranks then
write the changed columns, copy pages in the order of admissions, and compute. Pages that a batch fills may be read and
copied from the next batch on; columns that `insert` changed are sent then. No cost grows with the context, except numpy
passes over matched or inserted tokens and over page numbers.
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
        num_cached_tokens: prefix hit at admission; prefill continues after it.
        copy_from, copy_to: pages to copy on every rank, in the order of admissions, before anything is computed.
        num_inserted_tokens: tokens in whole stripes that are in the tree; other sequences may share their pages.
        node: tree node at which these end.
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
    """Allocates pages to sequences, with prefix sharing; a preempted sequence resumes from its cached pages.

    Args:
        max_pages: maximum pages of all tables together, shared pages counted once per table; None: no limit.
        snapshots: None if there is no room for any.
    """

    def __init__(
        self,
        tree: PrefixTree,
        enable_caching: bool = True,
        max_pages: int | None = None,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        self.tree, self.pool = tree, tree.pool
        self.snapshots = snapshots or StateSnapshots(tree, lambda begin, end: 0.0)
        self._stripes, self._tokens = tree.stripes, tree.stripes.tokens
        self._enable_caching = enable_caching
        self._pages_left = math.inf if max_pages is None else max_pages

    def admit(self, tokens: np.ndarray, reserved: int, start: int, cache_salt: Hashable = None) -> BlockTable | None:
        """Allocates pages for `reserved` tokens of a sequence, cached ones included; returns None if they do not fit.

        Args:
            tokens: the prompt, int32 [n]; after a preemption, followed by the generated tokens.
            start: kvp rank of the first block if nothing is cached.
            cache_salt: only sequences with equal salts share pages.
        """
        hit = self.tree.match(tokens, cache_salt)
        count = self._stripes.pages_for(reserved)
        fresh = count - self._stripes.columns(0, hit.shared).stop
        shared, source = self.tree.pages_of(hit)
        idle = self.pool.count_unused(shared)
        if fresh > self.pool.available - idle - self.pool.count_unused(source):
            hit, source = replace(hit, copied=0, source=None), NO_PAGES  # it may fit without the copy
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
        """Adds the whole stripes of `tokens` to the tree: int32 [n], all tokens in its pages after this batch.

        Returns:
            The changed columns of its table: stripes that another sequence computed first.
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
        """Allocates pages [n] int32 until there is room for `reserved` tokens; returns None if they do not fit."""
        count = max(self._stripes.pages_for(reserved) - len(table.pages), 0)
        if count > min(self.pool.available, self._pages_left):
            return None
        self._pages_left -= count
        more = self._allocate(count)
        table.pages = np.concatenate((table.pages, more))
        return more

    def end(self, table: BlockTable, tokens: np.ndarray) -> None:
        """Releases the pages of a sequence that finishes, is aborted or preempted; the tree keeps their content.

        Args:
            tokens: all tokens in its pages, int32 [n].
        """
        self._pages_left += len(table.pages)
        self.end_restore(table, tokens)

    def end_restore(self, table: BlockTable, tokens: np.ndarray) -> None:
        """Does the same for a restored prefix, whose pages do not count towards `max_pages`."""
        self.insert(table, tokens)
        rest = tokens[table.num_inserted_tokens :]
        if self._enable_caching and len(rest):
            first = self._stripes.columns(0, table.num_inserted_tokens).stop
            pages = table.pages[first : first + self._stripes.pages_for(len(rest))]
            self.tree.add_tail(self._node(table), rest, pages)
        self.pool.release(table.pages)
        table.pages = NO_PAGES
        if table.node is not None:
            self.tree.touch(table.node)

    def _node(self, table: BlockTable) -> Node:
        return self.tree.root(table.cache_salt, table.start) if table.node is None else table.node

    def _take_over(self, table: BlockTable, node: Node, at: int) -> range:
        """Replaces a sequence's pages of the first `at` tokens by the tree's, which end in `node`."""
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
