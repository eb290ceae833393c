"""Phases of a step: what each costs on the slowest rank, and how costs add up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from helix.planner.hardware import Array

Number = Any  # int, float or array


def pipelined(compute: Number, exchange: Number, chunks: Number) -> Number:
    """Returns the time of `chunks` pieces, each exchanged while the next is computed (HOP-B, figure 3)."""
    return np.maximum(chunks * compute + exchange, compute + chunks * exchange)


def experts_touched(experts: int, top_k: int, tokens: Number) -> Number:
    """Returns the expected number of distinct experts for `tokens`, each with `top_k` uniform ones."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


@dataclass(frozen=True)
class Phase:
    """Cost of one phase on the slowest rank, summed over layers, as arrays [n].

    Attributes:
        sent: bytes sent by the rank.
        launches: number of kernels and collectives.
        level: provenance, an index into hardware.PROVENANCE.
    """

    name: str
    seconds: Array
    bytes: Array
    flops: Array
    sent: Array
    launches: Array
    level: Array

    def arrays(self) -> tuple[Array, ...]:
        return self.seconds, self.bytes, self.flops, self.sent, self.launches, self.level

    def times(self, count: Number) -> Phase:
        *sums, level = self.arrays()
        return Phase(self.name, *[*(array * count for array in sums), level])

    def plus(self, other: Phase) -> Phase:
        *sums, level = self.arrays()
        *others, other_level = other.arrays()
        added = (a + b for a, b in zip(sums, others, strict=True))
        return Phase(self.name, *[*added, np.maximum(level, other_level)])

    def where(self, condition: Array, other: Phase) -> Phase:
        pairs = zip(self.arrays(), other.arrays(), strict=True)
        return Phase(self.name, *(np.where(condition, a, b) for a, b in pairs))


def ceil_div(a: Number, b: Number) -> Array:
    """Divides and rounds up."""
    return -(-a // b)


def cheaper(usual: list[Phase], other: list[Phase], allowed: Array) -> list[Phase]:
    """Returns the faster list at each point; `other` only where allowed."""
    better = allowed & faster(other, usual)
    return [b.where(better, a) for a, b in zip(usual, other, strict=True)]


def faster(some: list[Phase], than: list[Phase]) -> Array:
    """Returns at which points `some` take less time than others."""
    return np.asarray(sum(phase.seconds for phase in some) < sum(phase.seconds for phase in than))
