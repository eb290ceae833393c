"""Prefix cache: a radix tree of cached token prefixes, on rank 0's host only.

Sequences with an equal prefix share the pages of its whole stripes (`helix.kv_placement`). The rest, part of a stripe,
is copied page by page on every rank, because the new sequence appends after it. So hits count in tokens. Example:
stripes of 8 tokens; 21 tokens are cached, and a prompt begins with 19 of them:

    cached     [ 0 .. 7 ] [ 8 .. 15 ] [ 16 .. 20 )
    prompt     [ shared ] [ shared  ] [ 3 copied ) computed from token 19 on

The sequence's `start` decides which rank owns a token, so a hit takes over the `start`. The last token of a prompt is
always computed, for its logits.

A node is a run of whole stripes, or a tail: part of a stripe, without children. Keys, values and bounds belong to the
page and are shared; selections, scores and lengths belong to a sequence.

Eviction cuts the ends of unused runs, by GreedyDual: when a node is used, its value becomes that of the last evicted
node plus the cost of recomputing it (Cao and Irani, Cost-aware WWW proxy caching algorithms, 1997). With recurrent
states a hit ends at a snapshot (`helix.engine.snapshots`), so the stripes after the last one of a path go first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter

import numpy as np

from helix.engine.pages import PagePool
from helix.kv_placement import NO_PAGES, Stripes

HEAD = attrgetter("head")


@dataclass(eq=False, slots=True)
class Node:
    """A run of whole stripes after its parent's, or a tail.

    Attributes:
        head: bytes of the tokens of its first stripe, or of the tail.
        depth: number of tokens before it.
        pages: [n] int32; empty once it has left the tree.
        children: sorted by head; no head is a prefix of another.
        snapshots: those that end in it, ascending.
        base, tick: value of the last evicted node, and time, at its last use.
        root: salt and start; of roots only.
    """

    parent: Node | None
    head: bytes = b""
    depth: int = 0
    tokens: int = 0
    pages: np.ndarray = field(default_factory=lambda: NO_PAGES)
    children: list[Node] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    base: float = 0.0
    tick: int = 0
    queued: bool = False
    root: tuple[Hashable, int] | None = None

    @property
    def end(self) -> int:
        return self.depth + self.tokens


@dataclass(eq=False, slots=True)
class Snapshot:
    """A copy of a sequence's states and windows.

    Attributes:
        index: where it is stored; indices in host memory follow those on the GPU.
        tokens: number of tokens before it, whole stripes.
        node: the node that has the last of them; None once it is evicted.
        worth: value of the last dropped snapshot at its last use, plus the work of its tokens.
        is_stored: whether its tokens' pages are in host memory or on disk.
        is_dropped: it is not stored any more.
        users: moves in flight that copy it, which is neither moved nor overwritten meanwhile.
    """

    index: int
    tokens: int
    node: Node | None
    worth: float = 0.0
    is_stored: bool = False
    is_dropped: bool = False
    users: int = 0


@dataclass(frozen=True)
class PrefixHit:
    """Prefix hit of a prompt.

    Attributes:
        start: kvp rank of the first block, which the sequence takes over; None without a hit.
        shared: tokens in whole stripes, whose pages are shared.
        copied: tokens after these, whose pages are copied.
        node: node in which, or at the end of which, the whole stripes end.
        source: node with the tokens to copy, in its first stripe or in the next one of `node`.
    """

    start: int | None = None
    shared: int = 0
    copied: int = 0
    node: Node | None = None
    source: Node | None = None

    @property
    def tokens(self) -> int:
        return self.shared + self.copied


class PrefixTree:
    """Radix tree of the cached tokens, with the order of eviction.

    Args:
        cost: cost of computing a token at a depth, in any unit.
        min_copied_tokens: minimum tokens worth a copy and a given start. Prompts that only share a short template
            should not all start on one rank.
        needs_snapshots: hits end at snapshots.
    """

    def __init__(
        self,
        pool: PagePool,
        stripes: Stripes,
        cost: Callable[[int], float],
        min_copied_tokens: int = 16,
        needs_snapshots: bool = False,
    ) -> None:
        self.pool = pool
        self.stripes = stripes
        self._kvp, self._tokens, self._pages = stripes.layout.kvp, stripes.tokens, stripes.pages
        self._cost = cost
        self._min_copied_tokens = min_copied_tokens
        self._needs_snapshots = needs_snapshots
        self._stored_ids = np.empty((pool.pages, stripes.page_tokens), dtype=np.int32)  # by page of their stripe
        self._roots: dict[tuple[Hashable, int], Node] = {}
        self._queue: list[tuple[float, int, int, Node]] = []  # heap of leaves
        self._pushed = 0
        self._freed = 0.0  # value of the last evicted node
        self._ticks = 0

    def match(self, tokens: np.ndarray, cache_salt: Hashable = None) -> PrefixHit:
        """Finds the longest prefix hit of a prompt, int32 [n], over all starts; changes nothing."""
        assert tokens.dtype == np.int32, f"expected int32 tokens, got {tokens.dtype}"
        best, prompt = PrefixHit(), tokens[:-1]
        for start in range(self._kvp):
            root = self._roots.get((cache_salt, start))
            if root is None:
                continue
            node, at = self.follow(root, prompt, 0)
            near = [node] if at < node.end else self._neighbors(node, prompt[at : at + self._tokens])
            copies = [(self._common(other, at, prompt), other) for other in near]
            copied, source = max(copies, key=lambda copy: copy[0], default=(0, None))
            if copied < max(self._min_copied_tokens, 1):
                copied, source = 0, None
            if at + copied > best.tokens:
                best = PrefixHit(start, at, copied, node, source)
        return best

    # ---- lookup

    def follow(self, node: Node, tokens: np.ndarray, at: int) -> tuple[Node, int]:
        """Descends from `node`, which ends at token `at`, along whole stripes of `tokens`; returns node and token."""
        while at + self._tokens <= len(tokens):
            head = tokens[at : at + self._tokens].tobytes()
            index = self._child_index(node, head)
            if index == len(node.children) or node.children[index].head != head:
                break
            node = node.children[index]
            at += self._equal(node, tokens[at:])
            if at < node.end:
                break
        return node, at

    def _equal(self, node: Node, tokens: np.ndarray) -> int:
        """Counts equal tokens in whole stripes, the first of which is equal; reads few tokens beyond."""
        limit = min(node.tokens, len(tokens) // self._tokens * self._tokens)
        done, size = self._tokens, 8 * self._tokens
        while done < limit:
            size = min(size, limit - done)
            pages = node.pages[self.stripes.columns(done, done + size)]
            same = self._stored_ids.take(pages, axis=0).ravel() == tokens[done : done + size]
            if not same.all():
                return done + int(same.argmin()) // self._tokens * self._tokens
            done += size
            size *= 2
        return done

    def _common(self, node: Node, at: int, tokens: np.ndarray) -> int:
        """Counts the tokens after the first `at` that equal those of `node`'s stripe at that position."""
        stored = self._stripe(node, at - node.depth)
        rest = tokens[at : at + len(stored)]
        differ = np.flatnonzero(stored[: len(rest)] != rest)
        return int(differ[0]) if len(differ) else len(rest)

    def _neighbors(self, node: Node, tokens: np.ndarray) -> list[Node]:
        """Returns the children sorted before and after these tokens: no other child has a longer common prefix."""
        index = self._child_index(node, tokens.tobytes())
        return node.children[max(index - 1, 0) : index + 1]

    def _child_index(self, node: Node, head: bytes) -> int:
        return bisect_left(node.children, head, key=HEAD)

    def _stripe(self, node: Node, begin: int) -> np.ndarray:
        pages = node.pages[self.stripes.columns(begin, begin + self._tokens)]
        return self._stored_ids[pages].ravel()[: node.tokens - begin]

    # ---- insertion

    def root(self, cache_salt: Hashable, start: int) -> Node:
        """Returns the root for a salt and a start; it is in the tree while it has children."""
        return self._roots.get((cache_salt, start)) or Node(None, root=(cache_salt, start))

    def pages_of(self, hit: PrefixHit) -> tuple[np.ndarray, np.ndarray]:
        """Returns the shared pages of a hit, and the pages to copy."""
        shared, source = NO_PAGES, NO_PAGES
        if hit.node is not None:
            shared = np.concatenate([NO_PAGES, *reversed([n.pages for n in path(hit.node)])])
        if hit.source is not None:
            begin = (hit.shared - hit.source.depth) // self._tokens * self._pages
            source = hit.source.pages[begin : begin + self.stripes.pages_for(hit.copied)]
        return shared[self.stripes.columns(0, hit.shared)], source

    def add(self, parent: Node, tokens: np.ndarray, pages: np.ndarray) -> Node:
        """Adds new tokens after `parent`, whole stripes or a tail; returns the node that ends with them."""
        assert tokens.dtype == np.int32, f"expected int32 tokens, got {tokens.dtype}"
        self.pool.mark_cached(pages)
        rows = np.zeros((len(pages), self.stripes.page_tokens), dtype=np.int32)
        rows.ravel()[: len(tokens)] = tokens
        self._stored_ids[pages] = rows
        head = tokens[: self._tokens].tobytes()
        index = self._child_index(parent, head)
        tail = parent.children[index - 1] if index else None
        if tail is not None and head.startswith(tail.head):  # the new tokens replace the tail
            self.pool.unmark_cached(tail.pages)
            tail.pages, index = NO_PAGES, index - 1
            del parent.children[index]
        whole = len(tokens) >= self._tokens
        if whole and parent.parent is not None and not parent.children and self.pool.ref_count(parent.pages[-1]) == 1:
            parent.pages = np.concatenate((parent.pages, pages))  # no other sequence ends there
            parent.tokens += len(tokens)
            return parent
        if parent.root is not None:
            self._roots[parent.root] = parent
        node = Node(parent, head, parent.end, len(tokens), pages)
        parent.children.insert(index, node)
        return node

    def add_tail(self, parent: Node, tokens: np.ndarray, pages: np.ndarray) -> None:
        """Adds part of a stripe after `parent`, unless a child begins with the same tokens."""
        head = tokens.tobytes()
        index = self._child_index(parent, head)
        if not any(child.head.startswith(head) for child in parent.children[index : index + 1]):
            self.touch(self.add(parent, tokens, pages))

    def split_at(self, node: Node, at: int) -> Node:
        """Returns the node that ends at `at`: `node`, or a new parent of it with its first tokens."""
        if at == node.end:
            return node
        assert node.parent is not None and node.depth < at < node.end
        cut = self.stripes.columns(0, at - node.depth).stop
        upper = Node(node.parent, node.head, node.depth, at - node.depth, node.pages[:cut], [node])
        node.parent.children[self._child_index(node.parent, node.head)] = upper
        node.parent, node.depth, node.tokens, node.pages = upper, at, node.end - at, node.pages[cut:]
        node.head = self._stripe(node, 0).tobytes()
        for s in node.snapshots:
            s.node = upper if s.tokens <= at else node
        upper.snapshots, node.snapshots = ([s for s in node.snapshots if s.node is n] for n in (upper, node))
        return upper

    # ---- snapshots

    def last_snapshot(self, node: Node | None, tokens: int) -> Snapshot | None:
        """Returns the last snapshot within the first `tokens` tokens of the path to `node`."""
        found = (s for each in path(node) for s in reversed(each.snapshots) if s.tokens <= tokens)
        return next(found, None)

    def add_snapshot(self, node: Node, snapshot: Snapshot) -> None:
        snapshot.node = node
        node.snapshots.append(snapshot)
        node.snapshots.sort(key=attrgetter("tokens"))

    def drop_snapshot(self, snapshot: Snapshot) -> None:
        if (node := snapshot.node) is not None:
            snapshot.node = None
            node.snapshots.remove(snapshot)
            if self._needs_snapshots:
                node.queued = False  # its value is lower now: queue it again
                self.queue_up(node)

    # ---- eviction

    def evict(self, count: int) -> None:
        assert count <= self.pool.available, f"{count} pages wanted, {self.pool.available} available"
        evicted, missing = [NO_PAGES], count - self.pool.free
        while missing > 0:
            worth, tick, _, node = heappop(self._queue)
            node.queued = False
            if node.children or not len(node.pages) or self.pool.ref_count(node.pages[-1]):
                continue  # requeued when it can be evicted
            if (worth, tick) == self._worth(node):
                self._freed = max(self._freed, worth)
                evicted.append(self._cut(node, missing))
                missing -= self.pool.count_unused(evicted[-1])  # the source of a pending copy is still in use
            else:
                self.queue_up(node)
        self.pool.unmark_cached(np.concatenate(evicted))

    def touch(self, node: Node) -> None:
        self._ticks += 1
        node.base, node.tick = self._freed, self._ticks
        self.queue_up(node)

    def _worth(self, node: Node) -> tuple[float, int]:
        return 0.0 if self._useful_tokens(node) < node.end else node.base + self._cost(node.end), node.tick

    def _useful_tokens(self, node: Node) -> int:
        """Returns how many tokens of the path to `node` a hit can save."""
        if not self._needs_snapshots:
            return node.end
        snapshot = self.last_snapshot(node, node.end)
        return 0 if snapshot is None else snapshot.tokens

    def queue_up(self, node: Node) -> None:
        """Queues a node for eviction if it is a leaf and not queued yet."""
        if not node.queued and not node.children and len(node.pages):
            node.queued = True
            self._pushed += 1
            heappush(self._queue, (*self._worth(node), self._pushed, node))

    def _cut(self, node: Node, count: int) -> np.ndarray:
        """Removes at least `count` pages from a leaf's end, or all of the same value; returns them."""
        parent = node.parent
        assert parent is not None
        useful = max(self._useful_tokens(node) - node.depth, 0)
        kept = self.stripes.columns(0, useful).stop if useful < node.tokens else 0
        left = max(len(node.pages) - -(-count // self._pages) * self._pages, kept)
        evicted = node.pages[left:]
        if left:
            node.pages, node.tokens = node.pages[:left], left // self._pages * self._tokens
            node.snapshots = self._without_snapshots(node.snapshots, node.end)
            self.queue_up(node)
        else:
            del parent.children[self._child_index(parent, node.head)]
            node.pages, node.snapshots = NO_PAGES, self._without_snapshots(node.snapshots, 0)
            self.queue_up(parent)  # its value is lower than its child's, so it is next
            if parent.root is not None and not parent.children:
                del self._roots[parent.root]
        return evicted

    def _without_snapshots(self, snapshots: list[Snapshot], tokens: int) -> list[Snapshot]:
        """Returns those within the first `tokens` tokens; the others lose their node."""
        for s in snapshots:
            s.node = s.node if s.tokens <= tokens else None
        return [s for s in snapshots if s.node is not None]


def path(node: Node | None, until: Node | None = None) -> Iterator[Node]:
    """Yields a node and its ancestors, up to but without `until`."""
    while node is not None and node is not until:
        yield node
        node = node.parent
