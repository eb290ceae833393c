"""Needs of an engine: of its cache, and of prefill steps besides weights and cache."""

from __future__ import annotations

import math

from helix.config import Config
from helix.layers.specs import MLASpec, max_gathered_tokens
from helix.layout import HelixLayout
from helix.models import DecoderSpec
from helix.worker.graph_keys import max_captured_size
from helix.worker.kv_cache_spec import ITEMSIZE

MAX_CHUNK_TOKENS = 16384  # tokens of a chunk: longer ones are not faster per token
SHARE = 16  # buffers take at most 1 / SHARE of the free memory,
EXPERTS_SHARE = 6  # and of models with experts 1 / EXPERTS_SHARE
MAX_SLOTS = 512  # of decode.max_batch=auto, and most tokens of its steps
MAX_SLOTS_CPU = 8  # of it on CPUs and over host memory, where steps of more rows are not cheaper for a row
SLACK = 1.25  # factor for the allocator's fragmentation
PIECE_TOKENS = 32768  # tokens before a prompt chunk that are fetched at once: the merge then takes 2% of attention


def token_buffers(spec: DecoderSpec, layout: HelixLayout, rank: int, dtype: str) -> int:
    """Counts the bytes per token of a prefill step on a rank, without KV, in the layer that needs most.

    Both halves of a layer hold the residual stream besides their own buffers; in mode dp a rank also holds rows that it
    gathers from all ranks, and as many parts of sums: most if all tokens are one rank's, and messages are padded.
    """
    gathered = 2 * layout.dp * spec.hidden if layout.dp > 1 else 0
    attention = max(layer.mixer.activations_per_token(layout, rank) for layer in spec.layers)
    ffn = max(layer.ffn.activations_per_token(layout, rank, spec.hidden) for layer in spec.layers)
    return math.ceil(SLACK * (4 * spec.hidden + gathered + max(attention, ffn)) * ITEMSIZE[dtype])


def gathered_bytes(spec: DecoderSpec, layout: HelixLayout, chunk: int, longest: int, dtype: str) -> int:
    """Counts the bytes of sequences that ranks gather for a prefill step of `chunk` tokens, of up to `longest` each.

    Latents and index keys of two layers are there at once, and beside them the latents that this rank gives. A captured
    chunk gathers as many as its depth has, at most twice what there are.
    """
    mixer = spec.attention
    if layout.kvp == 1 or not isinstance(mixer, MLASpec) or mixer.topk is None:
        return 0
    index = max((indexer.width for indexer in spec.indexers), default=0)
    given = -(-mixer.entry // layout.kvp)
    return min(2 * longest, max_gathered_tokens(mixer, chunk)) * (2 * (mixer.entry + index) + given) * ITEMSIZE[dtype]


def prompt_bytes(
    spec: DecoderSpec, layout: HelixLayout, rank: int, chunk: int, longest: int, dtype: str, captured: bool
) -> int:
    """Counts the bytes that prefill steps of up to `chunk` tokens, of sequences of up to `longest`, take on a rank.

    Args:
        captured: whether chunks are captured: these have memory of their own.
    """
    tokens = chunk + (max_captured_size(chunk, layout.world_size) if captured else 0)
    gathered = gathered_bytes(spec, layout, chunk, min(longest, spec.max_positions), dtype)
    return tokens * token_buffers(spec, layout, rank, dtype) + (1 + captured) * gathered


def max_chunk(token_bytes: int, free: int, experts: bool = False) -> int:
    """Returns the most tokens of a prefill step, a power of two, that leave most of `free` bytes to the KV cache.

    Args:
        experts: whether FFNs are experts, each of which has few of a chunk's rows: more buffers pay.
    """
    share = EXPERTS_SHARE if experts else SHARE
    return min(MAX_CHUNK_TOKENS, 1 << max(free // share // token_bytes, 1).bit_length() - 1)


def max_slots(config: Config, device: str) -> int:
    """Returns decode.max_batch, or the most that auto may choose on this type of device."""
    if config.decode.max_batch != "auto":
        return int(config.decode.max_batch)
    return MAX_SLOTS_CPU if device == "cpu" or config.kv.offload == "host" else MAX_SLOTS


def fitting_slots(free: int, page_bytes: int, slot_bytes: int) -> int:
    """Returns the most slots, a power of two, whose pages fit in `free` bytes, most of which are left to pages.

    Args:
        page_bytes: bytes of the pages that each slot should have.
        slot_bytes: bytes of a slot beside pages.
    """
    return 1 << max(free // max(page_bytes, SHARE * slot_bytes, 1), 1).bit_length() - 1
