"""Keys of captured CUDA graphs, for decode steps and prefill chunks. No torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from helix.sampling_params import SamplingParams

SIZES = *(n << i for i in range(7) for n in ((96, 128) if i else (128,))), 16384  # 128, 192, 256, .. 6144, 8192
LONG = 8192  # tokens: longer chunks hide their launches on a single rank; several ranks wait for each other's launches
SEQUENCES = 2, 34  # of a captured chunk, padding included: one prompt, or all that a batch admits and one more
LAUNCHED = 1024  # tokens up to which launches bound a chunk, so that padding is free
PADDING = 8  # longer chunks are padded by at most 1/8 of their tokens
DEEP = 16 << 10  # keys of a sequence from which on attention uses other kernels
SHARED_PREFIXES = 0, 1, 2, 4  # of a decode step; fewer are padded with empty ones
FILTERED_ELEMENTS = 1 << 24  # logits that top-k and top-p look at at once
ALIGNED = 16  # tokens: kernels are specialized for multiples


@dataclass(frozen=True, order=True)
class DecodeGraphKey:
    """Key of a decode step's captured graph.

    Attributes:
        rows: the step has slots [0, rows): a power of two, or all slots, so that few graphs suffice.
        stochastic: any sequence has a temperature above 0.
        filtered: any sequence has top-k, top-p or min-p.
        process_logits: any sequence changes its logits or requests log-probabilities.
        sparse: attention reads a selection of keys: any sequence is long enough.
        chunks: batch chunks whose attention overlaps the exchange of the chunk before (HOP-B).
        shared_prefixes: how many shared prefixes attention reads once for all their sequences, of SHARED_PREFIXES.
    """

    rows: int = 0
    drafts: int = 0
    stochastic: bool = False
    filtered: bool = False
    process_logits: bool = False
    sparse: bool = False
    chunks: int = 1
    shared_prefixes: int = 0

    @classmethod
    def of(cls, sampling: Collection[SamplingParams], **more: Any) -> DecodeGraphKey:
        """Creates the key of a step that samples with all of these parameters; `more` has the other attributes."""
        return cls(
            stochastic=any(not s.is_greedy for s in sampling),
            filtered=any(s.is_filtered for s in sampling),
            process_logits=any(s.needs_logits_processor for s in sampling),
            **more,
        )

    @property
    def up_to_logits(self) -> DecodeGraphKey:
        """Key of the step's part up to its logits, which does not depend on sampling unless drafts are sampled."""
        return self if self.drafts else replace(self, stochastic=False, filtered=False, process_logits=False)


class ContextBucket(NamedTuple):
    """Graphs of chunks of at least `min_tokens` tokens, whose sequences have fewer than `below` keys.

    They are launched as if for `keys` keys.
    """

    below: float
    keys: int
    min_tokens: int = 0


CONTEXT_BUCKETS = ContextBucket(DEEP, 8 << 10), ContextBucket(math.inf, 128 << 10)
UNPACKED_BUCKETS = (ContextBucket(DEEP, DEEP),)  # for e4m3 keys: a chunk unpacks as many as it is launched for


def max_captured_size(chunk: int, ranks: int) -> int:
    """Returns the tokens of the largest captured chunk of `ranks` ranks, if chunks have up to `chunk` tokens."""
    max_tokens = min(chunk, LONG) if ranks == 1 else chunk
    return max((size for size in SIZES if size <= max_tokens), default=SIZES[0])


def selection_buckets(topk: int, kvp: int, max_keys: int, longest: int) -> tuple[ContextBucket, ...]:
    """Returns the context buckets for queries that select `topk` tokens over `kvp` ranks.

    The first bucket is for sequences that read all keys. Long chunks select in several passes over their rows, fewer
    rows per pass the more keys they are launched for, so they have a bucket in between. The largest chunks may gather
    as many keys as they are launched for (`helix.worker.row_shard`), so their buckets double.

    Args:
        max_keys: maximum keys of a sequence on a rank.
        longest: tokens of the largest captured chunk.
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
    """Returns the context buckets of a sequence whose latents are expanded, launched for at most twice its keys.

    Arguments as in `selection_buckets`. Only chunks of `longest` tokens are captured in every bucket.
    """
    first = max(LONG // kvp, 1)
    doubled = [first << i for i in range(1, max_keys.bit_length()) if first << i < max_keys]
    return ContextBucket(first + 1, first), *(
        ContextBucket(keys + 1, keys, longest) for keys in (*doubled, max_keys) if keys > first
    )


@dataclass(frozen=True, order=True)
class PrefillGraphKey:
    """Sizes of a prefill step, which decide its launches.

    Attributes:
        tokens: padding included.
        sequences: padding tokens belong to the sequence after the last prompt and read no keys; further ones are empty.
        max_tokens: maximum tokens of a sequence.
        keys: upper bound of the keys of a sequence on this rank; if captured, `ContextBucket.keys`.
        expands: latents are expanded, see `Step`.
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

    `keys` is the maximum of a sequence on a rank, `longest` the tokens of the largest captured chunk.
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

    Buckets that only the largest chunks have are captured in pauses: these take longer than their launches. `room` is
    the maximum of keys of a sequence on a rank.
    """
    sizes = [size for size in reversed(SIZES) if size <= max_tokens]
    one = []
    for size in sizes:
        beyond = 0.0  # keys that the previous bucket of this size covers
        for bucket in (bucket for bucket in buckets if bucket.min_tokens <= size and bucket.min_tokens < sizes[0]):
            if beyond <= room:
                one.append(PrefillGraphKey(size, SEQUENCES[0], size, bucket.keys, True))
            beyond = bucket.below
    min_tokens = max(LAUNCHED, buckets[0].min_tokens)
    several = [PrefillGraphKey(size, SEQUENCES[1], size, buckets[0].keys, True) for size in sizes if min_tokens <= size]
    return sorted([*one, *several], reverse=True)
