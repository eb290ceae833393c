"""Counter-based random numbers in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

# Streams: draws for one (seed, position) that must be independent use different streams. A position that is drafted
# again after an earlier rejection has new numbers: see `helix.speculation.drawing`.
TARGET = 0  # the target's own token, also after accepted drafts
DRAFT = 1
ACCEPT = 2
RECOVER = 3  # the token in place of a rejected one

# splitmix64: the increment, and the multipliers of its finaliser (Stafford's mix 13), as int64 writes them.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def uniform(seed: Tensor, position: Tensor, stream: Tensor | int, index: Tensor | int) -> Tensor:
    """Draws random numbers as a pure function of four counters: independent if one of them differs.

    The first three are hashed into the start of a splitmix64 sequence; `index` picks one of its outputs.

    Args:
        seed, position: int64, broadcast against each other and the others.
        stream: purpose of the number, one of the constants above.
        index: for instance a token id.

    Returns:
        fp64 in the open interval (0, 1): odd multiples of 2^-53, exact.

    Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
    """
    start = mix((seed + 1) * GOLDEN)
    for counter in (position, stream, index):
        if not isinstance(counter, Tensor):  # an int would not wrap as a tensor does; `full` can be captured
            counter = torch.full((), counter, dtype=torch.int64, device=seed.device)
        start = mix(start + counter * GOLDEN)
    # 52 bits and a half: with one more bit, the largest would round to 1.
    return (_shift(start, 12).double() + 0.5) * 2.0**-52


def gumbel(seed: Tensor, position: Tensor, stream: Tensor | int, index: Tensor | int) -> Tensor:
    """Draws Gumbel noise from `uniform`: the argmax of log-weights plus noise is a sample by the weights."""
    return -(-uniform(seed, position, stream, index).log()).log()


def mix(x: Tensor) -> Tensor:
    """Applies the finaliser of splitmix64: a bijection of 64-bit words, in wrapping int64."""
    x = (x ^ _shift(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _shift(x, 27)) * _MULTIPLIERS[1]
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    """Shifts right logically; int64's own shift extends the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)
