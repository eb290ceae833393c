"""How long chunks of prompts take, learned from those that have run.

Work is counted in tokens at the beginning of a context. A token behind others costs more, since it attends to them.
"""

from __future__ import annotations

import math


class PrefillTime:
    """Seconds of a chunk by its work, as chunks of a similar size have shown.

    Work of one size takes about the same time wherever it stands in a prompt. A small chunk takes longer for its work
    than a large one, as it reads all weights as well. So each power of two has a rate of its own, and a size that has
    not been seen is judged by the next one below: never faster than it will be.

    Args:
        doubling: depth in a context, in tokens, at which a token takes twice as long as the first one.
    """

    def __init__(self, doubling: float) -> None:
        self._doubling = doubling
        self._rates: dict[int, float] = {}  # seconds for a unit of work, by bits of the work

    def cost(self, depth: int) -> float:
        """Work of one token behind `depth` others."""
        return 1.0 + depth / self._doubling

    def work(self, begin: int, end: int) -> float:
        """Work of a prompt's tokens `[begin, end)`."""
        return (end - begin) * (1.0 + (begin + end) / (2.0 * self._doubling))

    def tokens(self, begin: int, work: float) -> int:
        """The most tokens of a prompt behind its first `begin` that are no more than so much finite work."""
        first = 1.0 + begin / self._doubling
        return int(2.0 * work / (first + math.sqrt(first * first + 2.0 * work / self._doubling)))

    def observe(self, work: float, seconds: float) -> None:
        """A chunk has run."""
        size, rate = int(work).bit_length(), seconds / work
        self._rates[size] = (self._rates.get(size, rate) + rate) / 2

    def seconds(self, work: float) -> float:
        """Seconds that a chunk takes; 0 where none has run."""
        size = int(work).bit_length()
        below = max((n for n in self._rates if n <= size), default=min(self._rates, default=None))
        return 0.0 if below is None else self._rates[below] * work

    def within(self, seconds: float) -> float:
        """The most work that a chunk of so many seconds does; 0 where none has run."""
        above = math.inf
        for size in sorted(self._rates, reverse=True):
            work, least = seconds / self._rates[size], float(1 << size >> 1)
            if work >= least:
                return min(work, above - 1.0)  # from there on it takes longer than this
            above = least
        return work if self._rates else 0.0
