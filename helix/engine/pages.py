"""Page allocation on rank 0.

A page number means that page on every rank of the layout, so one count decides admission. Column i of a block table is
the i-th page of the sequence's local tokens on each kvp rank; ranks that store fewer of its tokens leave the last
columns empty. `helix.kv_placement.Stripes` computes the columns.
"""

from __future__ import annotations

import numpy as np


class PagePool:
    """Reference-counted pages: in use, cached (unused but marked by the prefix cache, evictable) or free.

    Args:
        pages: number of pages of a rank; if ranks differ, the minimum.
    """

    def __init__(self, pages: int) -> None:
        self.pages = self.free = pages
        self.evictable = 0
        self._stack = np.arange(pages - 1, -1, -1, dtype=np.int32)  # the first `free` entries are free
        self._ref_counts = np.zeros(pages, dtype=np.int32)
        self._cached = np.zeros(pages, dtype=bool)

    @property
    def available(self) -> int:
        """Number of pages that are free or evictable."""
        return self.free + self.evictable

    @property
    def used(self) -> int:
        return self.pages - self.free - self.evictable

    def ref_count(self, page: int) -> int:
        return int(self._ref_counts[page])

    def count_unused(self, pages: np.ndarray) -> int:
        return len(pages) - int(np.count_nonzero(self._ref_counts[pages]))

    def count_shared(self, pages: np.ndarray) -> int:
        return int(np.count_nonzero(self._ref_counts[pages] > 1))

    def allocate(self, count: int) -> np.ndarray:
        """Allocates pages [count] int32 with one user each."""
        assert 0 <= count <= self.free, f"{count} pages wanted, {self.free} free"
        pages = self._stack[self.free - count : self.free][::-1].copy()
        self.free -= count
        assert not self._ref_counts[pages].any() and not self._cached[pages].any(), "a free page is in use or cached"
        self._ref_counts[pages] = 1
        return pages

    def share(self, pages: np.ndarray) -> None:
        """Adds a user to each page; none is free, and none occurs twice."""
        users = self._ref_counts[pages]
        assert (self._cached[pages] | (users > 0)).all(), "a free page cannot be shared"
        self.evictable -= len(pages) - int(np.count_nonzero(users))
        self._ref_counts[pages] = users + 1

    def release(self, pages: np.ndarray) -> None:
        """Removes a user from each page; unused pages become cached if they are marked, else free."""
        users = self._ref_counts[pages] - 1
        assert (users >= 0).all(), "a page was released more often than it was shared"
        self._ref_counts[pages] = users
        idle = pages[users == 0]
        cached = self._cached[idle]
        self.evictable += int(np.count_nonzero(cached))
        self._push(idle[~cached])

    def mark_cached(self, pages: np.ndarray) -> None:
        """Marks pages in use as cached, so that they outlive their users."""
        assert (self._ref_counts[pages] > 0).all() and not self._cached[pages].any(), (
            "a page to cache is unused or cached already"
        )
        self._cached[pages] = True

    def unmark_cached(self, pages: np.ndarray) -> None:
        """Removes the mark of cached pages; unused ones become free."""
        assert self._cached[pages].all(), "a page to evict is not cached"
        self._cached[pages] = False
        idle = pages[self._ref_counts[pages] == 0]
        self.evictable -= len(idle)
        self._push(idle)

    def _push(self, pages: np.ndarray) -> None:
        self._stack[self.free : self.free + len(pages)] = pages[::-1]
        self.free += len(pages)
