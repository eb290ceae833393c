"""Sizes of prompt chunks: those that are captured, and those that share compiled kernels."""

from __future__ import annotations

from dataclasses import dataclass

SIZES = tuple(n << i for i in range(7) for n in ((96, 128) if i else (128,)))  # 128, 192, 256, 384, .. 8192 tokens
SEQUENCES = 2, 20  # of a captured chunk, the padding's included: each adds programs that end at once
LAUNCHED = 1024  # tokens up to which a chunk takes as long as its launch: padding costs nothing
PADDING = 8  # a longer chunk is padded by at most this part of its tokens
DEEP = 16 << 10  # keys of a sequence from which on other kernels attend
KEYS = 8 << 10, 128 << 10  # estimates for the two
ALIGNED = 16  # tokens: kernels are compiled for numbers that this divides


@dataclass(frozen=True, order=True)
class ChunkSize:
    """Sizes of a prefill step, which decide what is launched.

    Attributes:
        tokens: number of tokens, padding included.
        sequences: number of sequences. Padding belongs to the one after the last prompt and reads no keys; further ones
            are empty.
        most: most tokens of a sequence.
        keys: keys of the longest sequence on this rank: an upper bound, or where it is captured an estimate.
    """

    tokens: int
    sequences: int
    most: int
    keys: int

    @property
    def captured(self) -> bool:
        """True for one of the few sizes of captured chunks."""
        return self.tokens in SIZES and self.most == self.tokens and self.keys in KEYS


def padded(counts: list[int], keys: int) -> ChunkSize:
    """Returns the size for prompts with `counts` tokens: a captured one if its padding costs little.

    Args:
        keys: most keys of a sequence on a rank.
    """
    tokens, sequences = sum(counts), len(counts) + 1
    size = next((size for size in SIZES if size >= tokens), None)
    of_graph = next((n for n in SEQUENCES if n >= sequences), None)
    if size is not None and of_graph is not None and (tokens <= LAUNCHED or PADDING * (size - tokens) <= tokens):
        return ChunkSize(size, of_graph, size, KEYS[keys >= DEEP])
    return ChunkSize(-(-tokens // ALIGNED) * ALIGNED, sequences, max(counts), keys)


def captured_first(most: int, room: int) -> list[ChunkSize]:
    """Returns the sizes to capture before the first request, the largest first: they share their memory.

    Args:
        most: tokens of the longest chunk.
        room: most keys of a sequence on a rank.
    """
    sizes = [size for size in reversed(SIZES) if size <= most]
    one = [ChunkSize(size, SEQUENCES[0], size, keys) for keys in KEYS[: 1 + (room >= DEEP)] for size in sizes]
    several = [ChunkSize(size, SEQUENCES[1], size, KEYS[0]) for size in sizes if size >= LAUNCHED]
    return sorted([*one, *several], reverse=True)
