"""Keys of captured graphs: the kind of a decode step, the size of a prompt chunk; no torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from helix.sampling_params import SamplingParams

SIZES = *(n << i for i in range(7) for n in ((96, 128) if i else (128,))), 16384  # 128, 192, 256, .. 6144, 8192
LONG = 8192  # tokens of a chunk that takes a rank alone longer than its launch: several ranks wait for each other's
SEQUENCES = 2, 34  # of a captured chunk, the padding's included: as many as a decision admits, and one that goes on
LAUNCHED = 1024  # tokens up to which a chunk takes as long as its launch: padding costs nothing
PADDING = 8  # a longer chunk is padded by at most this part of its tokens
DEEP = 16 << 10  # keys of a sequence from which on other kernels attend
ALIGNED = 16  # tokens: kernels are compiled for numbers that this divides


@dataclass(frozen=True, order=True)
class DecodeGraphKey:
    """Kind of a decode step: the key of its captured graph.

    Attributes:
        rows: slots [0, rows) take part: a power of two, or all slots, so that few graphs suffice.
        drafts: tokens that the step verifies for each sequence.
        stochastic: any sequence has a temperature above 0.
        filtered: any sequence has top-k, top-p or min-p.
        shaped: any sequence changes its logits or requests log-probabilities.
        sparse: attention reads a selection of keys: any sequence is long enough.
        chunks: batch chunks whose attention overlaps the exchange of the chunk before (HOP-B).
    """

    rows: int = 0
    drafts: int = 0
    stochastic: bool = False
    filtered: bool = False
    process_logits: bool = False
    sparse: bool = False
    chunks: int = 1

    @classmethod
    def of(cls, sampling: Collection[SamplingParams], **more: Any) -> DecodeGraphKey:
        """Creates the kind of a step that draws with all of these parameters; `more` has the other attributes."""
        return cls(
            stochastic=any(not s.is_greedy for s in sampling),
            filtered=any(s.is_filtered for s in sampling),
            process_logits=any(s.needs_logits_processor for s in sampling),
            **more,
        )


class ContextBucket(NamedTuple):
    """Captured chunks from `min_tokens` tokens on, of sequences with fewer than `below` keys: launched as if of
    `keys`.
    """

    below: float
    keys: int
    min_tokens: int = 0


CONTEXT_BUCKETS = ContextBucket(DEEP, 8 << 10), ContextBucket(math.inf, 128 << 10)
UNPACKED_BUCKETS = (
    ContextBucket(DEEP, DEEP),
)  # of keys in e4m3, unpacked up to the number that a chunk is launched with


def max_captured_size(chunk: int, ranks: int) -> int:
    """Returns the tokens of the longest captured chunk of `ranks` ranks, if chunks have up to `chunk`."""
    max_tokens = min(chunk, LONG) if ranks == 1 else chunk
    return max((size for size in SIZES if size <= max_tokens), default=SIZES[0])


def selection_buckets(topk: int, kvp: int, max_keys: int, longest: int) -> tuple[ContextBucket, ...]:
    """Returns the depths where queries choose `topk` tokens over `kvp` ranks: of sequences that read all, and others.

    Long chunks choose for some rows after the others: for the fewer at once, the more keys they are launched with. So
    these have a depth between. The longest may gather as many keys as they are launched with
    (`helix.worker.row_shard`), and have depths each of which is twice the one before.

    Args:
        most: most keys of a sequence on a rank.
        longest: tokens of the longest captured chunk.
    """
    selected = topk // kvp
    whole = [ContextBucket(selected + 1, selected)] if selected else []
    between = [ContextBucket(DEEP, DEEP, LAUNCHED + 1)] if selected < DEEP < max_keys else []
    if kvp > 1 and longest > LAUNCHED:
        doubled = (LONG // kvp << i for i in range(max_keys.bit_length()))
        between += [
            ContextBucket(keys + 1, keys, longest) for keys in doubled if selected < keys < max_keys and keys != DEEP
        ]
    return (*whole, *sorted(between), ContextBucket(math.inf, max_keys))


def expansion_buckets(kvp: int, max_keys: int, longest: int) -> tuple[ContextBucket, ...]:
    """Returns the depths of a sequence whose latents are expanded: a chunk is launched with twice as many at most.

    Args:
        most: most keys of a sequence on a rank.
        longest: tokens of the longest captured chunk, the only one that is captured at any depth.
    """
    first = max(LONG // kvp, 1)
    doubled = [first << i for i in range(1, max_keys.bit_length()) if first << i < max_keys]
    return ContextBucket(first + 1, first), *(
        ContextBucket(keys + 1, keys, longest) for keys in (*doubled, max_keys) if keys > first
    )


@dataclass(frozen=True, order=True)
class PrefillGraphKey:
    """Sizes of a prefill step, which decide what is launched.

    Attributes:
        tokens: number of tokens, padding included.
        sequences: number of sequences. Padding belongs to the one after the last prompt and reads no keys; further ones
            are empty.
        most: most tokens of a sequence.
        keys: keys of the longest sequence on this rank: an upper bound, or where it is captured those of its
            `ContextBucket`.
        captured: whether it is one of the few sizes of captured chunks.
        expands: whether latents are expanded, see `Step`.
    """

    tokens: int
    sequences: int
    max_tokens: int
    keys: int
    captured: bool = False
    expands: bool = False


def padded_size(
    counts: list[int],
    keys: int,
    longest: int,
    buckets: Sequence[ContextBucket] = CONTEXT_BUCKETS,
    expands: bool = False,
) -> PrefillGraphKey:
    """Returns the size for prompts with `counts` tokens: a captured one if its padding costs little.

    Args:
        keys: most keys of a sequence on a rank.
        longest: tokens of the longest captured chunk.
    """
    tokens, sequences = sum(counts), len(counts) + 1
    size = next((size for size in SIZES if tokens <= size <= longest), None)
    bucket = next((bucket for bucket in buckets if keys < bucket.below and bucket.min_tokens <= (size or 0)), None)
    graph_sequences = next((n for n in SEQUENCES if n >= sequences), None)
    close = size is not None and (tokens <= LAUNCHED or PADDING * (size - tokens) <= tokens)
    if bucket is not None and size is not None and graph_sequences is not None and close:
        return PrefillGraphKey(size, graph_sequences, size, bucket.keys, True, expands)
    return PrefillGraphKey(-(-tokens // ALIGNED) * ALIGNED, sequences, max(counts), keys, False, expands)


def sizes_to_capture(
    max_tokens: int, room: int, buckets: Sequence[ContextBucket] = CONTEXT_BUCKETS
) -> list[PrefillGraphKey]:
    """Returns the sizes to capture before the first request, the largest first: they share their memory.

    Depths of the longest chunks alone are left to pauses: their launches take no longer than they do.

    Args:
        most: tokens of the longest captured chunk.
        room: most keys of a sequence on a rank.
    """
    sizes = [size for size in reversed(SIZES) if size <= max_tokens]
    one = []
    for size in sizes:
        beyond = 0.0  # keys that shallower chunks of this size have
        for bucket in (bucket for bucket in buckets if bucket.min_tokens <= size and bucket.min_tokens < sizes[0]):
            if beyond <= room:
                one.append(PrefillGraphKey(size, SEQUENCES[0], size, bucket.keys, True))
            beyond = bucket.below
    min_tokens = max(LAUNCHED, buckets[0].min_tokens)
    several = [PrefillGraphKey(size, SEQUENCES[1], size, buckets[0].keys, True) for size in sizes if min_tokens <= size]
    return sorted([*one, *several], reverse=True)
