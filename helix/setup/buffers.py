"""Memory that prefill steps need besides weights and KV cache, and the batch and chunk sizes that follow."""

from __future__ import annotations

import math

from helix.config import Config
from helix.layers.specs import MAX_DEQUANTIZED_BYTES, MAX_EXPANDED_BYTES, MAX_SCORES, MLASpec, max_gathered_tokens
from helix.layout import HelixLayout
from helix.models import DecoderSpec
from helix.worker.graph_keys import FILTERED_ELEMENTS, max_captured_size
from helix.worker.kv_cache_spec import ITEMSIZE

MAX_CHUNK_TOKENS = 16384  # longer chunks are not faster per token
SHARE = 16  # buffers take at most 1 / SHARE of the free memory
EXPERTS_SHARE = 6  # the same for MoE models
MAX_SLOTS = 512  # of decode.max_batch=auto, in tokens per step
MAX_SLOTS_CPU = 8  # the same on CPUs and with kv.offload=host, where larger batches are not cheaper per row
SLACK = 1.25  # for fragmentation of the allocator
# Of a logit that filters look at: its key and mass, and what making or summing these takes besides, of 8 bytes each.
FILTERED_BYTES = 56
PIECE_TOKENS = 32768  # offloaded tokens before a prompt chunk to fetch at once: merging then takes 2% of attention


def token_buffers(spec: DecoderSpec, layout: HelixLayout, rank: int, dtype: str) -> int:
    """Returns the bytes per token of a prefill step on a rank, without KV, in the largest layer.

    Attention and FFN both hold the residual stream besides their buffers. In mode dp a rank also holds the gathered
    rows of all ranks and as many partial sums; the worst case is padding when one rank has all tokens.
    """
    gathered = 2 * layout.dp * spec.hidden if layout.dp > 1 else 0
    attention = max(layer.mixer.activations_per_token(layout, rank) for layer in spec.layers)
    ffn = max(layer.ffn.activations_per_token(layout, rank, spec.hidden) for layer in spec.layers)
    return math.ceil(SLACK * (4 * spec.hidden + gathered + max(attention, ffn)) * ITEMSIZE[dtype])


def piece_bytes(spec: DecoderSpec, matrix: int, quantized_kv: bool, dtype: str, captured: bool) -> int:
    """Returns a rank's bytes for what prefill steps compute piece by piece, whatever their tokens.

    Each micro-batch unpacks a quantized matrix, and a piece of keys and values, or holds an indexer's scores.

    Args:
        matrix: elements of the rank's largest quantized matrix; 0: there is none.
        captured: whether chunks are captured in CUDA graphs, which have their own memory.
    """
    keys = MAX_DEQUANTIZED_BYTES if quantized_kv else 0
    if isinstance(spec.attention, MLASpec) and spec.attention.topk is None:
        keys = 2 * MAX_EXPANDED_BYTES  # keys and values, and their latents, before and after reordering
    scores = MAX_SCORES * ITEMSIZE["float32"] if spec.indexers else 0
    return (4 if captured else 2) * (matrix * ITEMSIZE[dtype] + keys + scores)


def gathered_bytes(spec: DecoderSpec, layout: HelixLayout, chunk: int, longest: int, dtype: str) -> int:
    """Returns the bytes that a row-sharded prefill step of `chunk` tokens gathers, for sequences of up to `longest`.

    Latents and index keys of two layers are live at once, plus this rank's own latents. A captured chunk gathers up to
    its context bucket, at most twice the tokens needed.
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
    """Returns a rank's bytes for prefill steps of up to `chunk` tokens, of sequences of up to `longest` tokens.

    Args:
        captured: whether chunks are captured in CUDA graphs, which have their own memory.
    """
    tokens = chunk + (max_captured_size(chunk, layout.world_size) if captured else 0)
    gathered = gathered_bytes(spec, layout, chunk, min(longest, spec.max_positions), dtype)
    return tokens * token_buffers(spec, layout, rank, dtype) + (1 + captured) * gathered


def sampling_bytes(slots: int, queries: int, columns: int, captured: bool) -> int:
    """Returns a rank's bytes to sample steps of `slots` sequences and `queries` tokens of each, from its `columns`.

    Logits are held in three copies: as they are computed, in fp32, and changed as requests ask. Requests' changes have
    8 bytes per sequence and column.

    Args:
        captured: whether steps are captured in CUDA graphs, which have their own memory.
    """
    logits = slots * queries * columns
    pieces = min(logits, FILTERED_ELEMENTS) * FILTERED_BYTES
    return 8 * slots * columns + (1 + captured) * (3 * ITEMSIZE["float32"] * logits + pieces)


def max_chunk(token_bytes: int, free: int, experts: bool = False) -> int:
    """Returns the largest chunk, a power of two, that leaves most of `free` bytes to the KV cache.

    Args:
        experts: whether the model is MoE: each expert gets few of a chunk's rows, so larger chunks pay off.
    """
    share = EXPERTS_SHARE if experts else SHARE
    return min(MAX_CHUNK_TOKENS, 1 << max(free // share // token_bytes, 1).bit_length() - 1)


def max_slots(config: Config, device: str) -> int:
    """Returns decode.max_batch, or auto's limit on this type of device."""
    if config.decode.max_batch != "auto":
        return int(config.decode.max_batch)
    return MAX_SLOTS_CPU if device == "cpu" or config.kv.offload == "host" else MAX_SLOTS


def fitting_slots(free: int, page_bytes: int, slot_bytes: int) -> int:
    """Returns the largest batch, a power of two, that fits in `free` bytes and leaves most of them to pages.

    Args:
        page_bytes: pages of a row.
        slot_bytes: everything else of a row.
    """
    return 1 << max(free // max(page_bytes, SHARE * slot_bytes, 1), 1).bit_length() - 1
