"""Predicts the time of prefill chunks from those that have run.

The unit of work is a token at the start of a context; later tokens cost more, since they attend to earlier ones.
"""

from __future__ import annotations

import math

import numpy as np

from helix.models import DecoderSpec

RECENT_S = 2.0  # seconds of recent chunks that the average rate covers


class PrefillTime:
    """Seconds of a chunk as a function of its work, interpolated linearly between measurements per power of two.

    Equal work takes about the same time anywhere in a prompt, but small chunks take longer per work: each reads all
    weights and is launched kernel by kernel.

    Args:
        doubling: position, in tokens, at which a token takes twice as long as the first one.
    """

    def __init__(self, doubling: float) -> None:
        self._doubling = doubling
        self._seen: dict[int, tuple[float, float]] = {}  # (work, seconds) by bits of the work
        self._recent = 0.0, 0.0  # work and seconds of recent chunks of any size

    def cost(self, depth: int) -> float:
        return 1.0 + depth / self._doubling

    def work(self, begin: int, end: int) -> float:
        return (end - begin) * (1.0 + (begin + end) / (2.0 * self._doubling))

    def tokens(self, begin: int, work: float) -> int:
        """Computes how many tokens from `begin` on fit into `work`, which is finite."""
        first = 1.0 + begin / self._doubling
        return int(2.0 * work / (first + math.sqrt(first * first + 2.0 * work / self._doubling)))

    def observe(self, work: float, seconds: float) -> None:
        """Records a chunk that has run; one slower than before counts half, since it may have waited."""
        recent, elapsed = self._recent[0] + work, self._recent[1] + seconds
        share = min(1.0, RECENT_S / elapsed) if elapsed else 1.0
        self._recent = recent * share, elapsed * share
        size = int(work).bit_length()
        before = self._seen.get(size, (work, seconds))
        if seconds * before[0] <= before[1] * work:
            before = work, seconds
        self._seen[size] = (before[0] + work) / 2, (before[1] + seconds) / 2

    def seconds(self, work: float) -> float:
        """Predicts the seconds of a chunk, at least those of the smallest chunk that has run; 0 if none has."""
        if not self._seen:
            return 0.0
        sizes, times = self._line()
        return float(np.interp(work, sizes, times)) * max(work / sizes[-1], 1.0)

    def max_work(self, seconds: float) -> float:
        """Predicts the maximum work of a chunk that takes `seconds`; 0 if none has run.

        If even the smallest chunk that has run takes longer, its work is scaled down in proportion.
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

    def max_idle_work(self, seconds: float) -> float:
        """Predicts the maximum work of a chunk that takes `seconds` while nothing decodes; 0 if none has run.

        Uses the better of `max_work` and the recent rate: after one slow chunk, `max_work` alone would keep later ones
        below that size and never measure it again.
        """
        work, elapsed = self._recent
        return max(self.max_work(seconds), work * seconds / elapsed) if elapsed else 0.0

    def _line(self) -> tuple[list[float], list[float]]:
        """Returns work and seconds of chunks that have run, both ascending: more work never takes less time."""
        sizes, times = zip(*sorted(self._seen.values()), strict=True)
        return list(sizes), np.minimum.accumulate(times[::-1])[::-1].tolist()


def doubling_depth(spec: DecoderSpec) -> float:
    """Computes the position at which attention takes as many multiplications as the weights do.

    Layers with a sliding window cost the same at any position; infinite if all layers have one.
    """
    weights = sum(layer.mixer.weights + layer.ffn.multiplications(spec.hidden) for layer in spec.layers)
    per_key = sum(spec.layers[index].mixer.multiplications for index in spec.full)
    return weights / per_key if per_key else math.inf
