"""Pages as rank 0 hands them out: one number is a page on every rank of the layout, so that admission is one count.

A sequence has one table of pages. Column i of it holds what is i-th of the sequence's local order on each kvp rank;
ranks that store fewer of its tokens leave the last columns empty. `helix.placement.Stripes` has the columns.
"""

from __future__ import annotations

import numpy as np


class PagePool:
    """Who has which page. Sequences that use a page are counted; the prefix cache keeps a page by a mark beside that.

    A page is free, cached (kept, and used by nobody: it can be freed at once) or used.

    Args:
        pages: of each rank; where ranks differ, the least.

    Attributes:
        free: how many are nobody's.
        cached: how many are kept and not used.
    """

    def __init__(self, pages: int) -> None:
        self.pages = self.free = pages
        self.cached = 0
        self._stack = np.arange(pages - 1, -1, -1, dtype=np.int32)  # the first `free` are; the last is taken first
        self._users = np.zeros(pages, dtype=np.int32)
        self._kept = np.zeros(pages, dtype=bool)

    @property
    def room(self) -> int:
        """How many are free or can be freed at once."""
        return self.free + self.cached

    @property
    def used(self) -> int:
        return self.pages - self.free - self.cached

    def users(self, page: int) -> int:
        """How many sequences use a page."""
        return int(self._users[page])

    def idle(self, pages: np.ndarray) -> int:
        """How many of these pages nobody uses."""
        return len(pages) - int(np.count_nonzero(self._users[pages]))

    def shared(self, pages: np.ndarray) -> int:
        """How many of these pages several sequences use."""
        return int(np.count_nonzero(self._users[pages] > 1))

    def take(self, count: int) -> np.ndarray:
        """Pages [count] int32 for a sequence that is their only user."""
        assert 0 <= count <= self.free, f"{count} pages wanted, {self.free} free: admission let too much in"
        pages = self._stack[self.free - count : self.free][::-1].copy()
        self.free -= count
        assert not self._users[pages].any() and not self._kept[pages].any(), "a page was free and in use"
        self._users[pages] = 1
        return pages

    def share(self, pages: np.ndarray) -> None:
        """Notes one more user of each page; none is free, and none occurs twice."""
        users = self._users[pages]
        assert (self._kept[pages] | (users > 0)).all(), "a free page was shared"
        self.cached -= len(pages) - int(np.count_nonzero(users))
        self._users[pages] = users + 1

    def release(self, pages: np.ndarray) -> None:
        """Takes one user off each page; what nobody uses then is cached where it is kept, and free elsewhere."""
        users = self._users[pages] - 1
        assert (users >= 0).all(), "a page was released by more than its users"
        self._users[pages] = users
        idle = pages[users == 0]
        kept = self._kept[idle]
        self.cached += int(np.count_nonzero(kept))
        self._push(idle[~kept])

    def keep(self, pages: np.ndarray) -> None:
        """Marks pages that are used: they outlive their users."""
        assert (self._users[pages] > 0).all() and not self._kept[pages].any(), "a page to keep is kept, or nobody's"
        self._kept[pages] = True

    def drop(self, pages: np.ndarray) -> None:
        """Takes the mark off pages; those that nobody uses are free then."""
        assert self._kept[pages].all(), "a page was dropped that was not kept"
        self._kept[pages] = False
        idle = pages[self._users[pages] == 0]
        self.cached -= len(idle)
        self._push(idle)

    def _push(self, pages: np.ndarray) -> None:
        self._stack[self.free : self.free + len(pages)] = pages[::-1]
        self.free += len(pages)
