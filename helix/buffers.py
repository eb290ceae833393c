"""What a prefill step needs beside weights and KV cache, how long a chunk it may have, and what depth costs."""

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

    Attention has QKV, the queries, partial outputs of all heads, and those again as messages that leave and arrive.
    An FFN has gate and up and their product, of every chosen expert. Both have the residual stream beside them.
    """
    heads = rank, spec.q_heads, spec.kv_heads
    q = len(layout.q_heads(*heads))
    lanes = layout.kvp * max(layout.head_shares(*heads)) if layout.kvp > 1 else 0
    copies = 3 if layout.kvp > 1 else 1  # of what a rank makes, sends and receives
    if spec.mla is not None:
        query, entry, latent = spec.mla.query, spec.mla.entry, spec.mla.latent
        attention = (spec.mla.q_rank or 0) + entry + q * (query + copies * entry + latent) + 2 * lanes * latent
    else:
        rows = (q + 2 * len(layout.kv_heads(rank, spec.kv_heads))) * spec.head_dim
        attention = copies * rows + 2 * (q + lanes) * spec.head_dim
    ffn = 3 * len(layout.ffn_columns(rank, spec.ffn))
    if spec.moe is not None:
        # Of all pairs of token and expert, wherever the expert is.
        routed = spec.moe.top_k * (len(layout.expert_columns(rank, spec.moe.width)) + spec.hidden)
        ffn = max(ffn, routed + spec.moe.experts + 3 * len(layout.ffn_columns(rank, spec.moe.shared_width)))
    return math.ceil(SLACK * (4 * spec.hidden + max(attention, ffn)) * dtype.itemsize)


def longest_chunk(token_bytes: int, free: int) -> int:
    """Tokens of a prefill step, a power of two, whose buffers leave most of `free` bytes to the KV cache."""
    return min(MOST, 1 << max(free // SHARE // token_bytes, 1).bit_length() - 1)


def doubling_depth(spec: DecoderSpec) -> float:
    """Tokens of context behind which attention is as many operations as products with weights: a token costs twice.

    A layer with a sliding window costs the same at any depth; infinite where all have one.
    """
    if spec.mla is not None:
        attention, of_key = spec.mla.weights, spec.q_heads * (spec.mla.entry + spec.mla.latent)
    else:
        attention = spec.hidden * spec.head_dim * 2 * (spec.q_heads + spec.kv_heads)
        of_key = spec.q_heads * 2 * spec.head_dim
    ffn = spec.ffn * (spec.layers - sum(spec.moe_layers))
    if spec.moe is not None:
        ffn += (spec.moe.top_k * spec.moe.width + spec.moe.shared_width) * sum(spec.moe_layers)
    weights = spec.layers * attention + 3 * spec.hidden * ffn
    full = sum(window is None for window in spec.windows)
    return weights / (full * of_key) if full else math.inf
