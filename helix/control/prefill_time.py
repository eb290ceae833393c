"""How long chunks of prompts take, learned from those that have run.

Work is counted in tokens at the beginning of a context. A token behind others costs more, since it attends to them.
"""

from __future__ import annotations

import math

import numpy as np

from helix.models import DecoderSpec


class PrefillTime:
    """Seconds of a chunk by its work, as chunks of a similar size have shown.

    Work of one size takes about the same time wherever it stands in a prompt. However small a chunk is, it reads all
    weights and is launched kernel by kernel: so times are kept by powers of two of the work, and between two that were
    seen the time lies on a line.

    Args:
        doubling: depth in a context, in tokens, at which a token takes twice as long as the first one.
    """

    def __init__(self, doubling: float) -> None:
        self._doubling = doubling
        self._seen: dict[int, tuple[float, float]] = {}  # (work, seconds) by bits of the work

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
        """A chunk has run: one that was held up says less than one that was not."""
        size = int(work).bit_length()
        before = self._seen.get(size, (work, seconds))
        if seconds * before[0] <= before[1] * work:
            before = work, seconds
        self._seen[size] = (before[0] + work) / 2, (before[1] + seconds) / 2

    def seconds(self, work: float) -> float:
        """Seconds that a chunk takes, at least those of the smallest one that has run; 0 where none has."""
        if not self._seen:
            return 0.0
        sizes, times = self._line()
        return float(np.interp(work, sizes, times)) * max(work / sizes[-1], 1.0)

    def within(self, seconds: float) -> float:
        """The most work that a chunk of so many seconds does; 0 where none has run.

        Where the smallest one that has run takes longer, less work than it has, in proportion.
        """
        if not self._seen:
            return 0.0
        sizes, times = self._line()
        if seconds < times[0]:
            return sizes[0] * seconds / times[0]
        if seconds >= times[-1]:
            return sizes[-1] * seconds / times[-1]
        after = int(np.searchsorted(times, seconds, side="right"))
        return float(np.interp(seconds, times[after - 1 : after + 1], sizes[after - 1 : after + 1]))

    def _line(self) -> tuple[list[float], list[float]]:
        """Work and seconds of chunks that have run, both ascending: who does more has taken no less."""
        sizes, times = zip(*sorted(self._seen.values()), strict=True)
        return list(sizes), np.minimum.accumulate(times[::-1])[::-1].tolist()


def doubling_depth(spec: DecoderSpec) -> float:
    """Tokens of context behind which attention is as many operations as products with weights: a token costs twice.

    A layer with a sliding window costs the same at any depth; infinite where all have one.
    """
    weights = sum(layer.mixer.weights + layer.ffn.multiplications(spec.hidden) for layer in spec.layers)
    of_key = sum(spec.layers[index].mixer.multiplications for index in spec.full)
    return weights / of_key if of_key else math.inf
