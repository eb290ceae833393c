"""What a prefill step needs beside weights and KV cache, and how long a chunk it may have."""

from __future__ import annotations

import math

import torch

from helix.layout import HelixLayout
from helix.models import DecoderSpec

MOST = 16384  # tokens of a chunk: products, attention and messages of longer ones are no faster
SHARE = 16  # of the free memory, one part in so many at most
SLACK = 1.25  # what the allocator loses between buffers of several sizes


def token_buffers(spec: DecoderSpec, layout: HelixLayout, rank: int, dtype: torch.dtype) -> int:
    """Bytes that a token of a prefill step takes on a rank, its KV apart, where a layer needs most.

    Both halves of a layer have the residual stream beside what they need themselves.
    """
    attention = max(layer.mixer.buffers(layout, rank) for layer in spec.layers)
    ffn = max(layer.ffn.buffers(layout, rank, spec.hidden) for layer in spec.layers)
    return math.ceil(SLACK * (4 * spec.hidden + max(attention, ffn)) * dtype.itemsize)


def longest_chunk(token_bytes: int, free: int) -> int:
    """Tokens of a prefill step, a power of two, whose buffers leave most of `free` bytes to the KV cache."""
    return min(MOST, 1 << max(free // SHARE // token_bytes, 1).bit_length() - 1)
