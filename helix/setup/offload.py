"""Builds a KV cache in host memory, sized to fit host and GPU memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from comm.base import Communicator
from helix.attention.offloaded import OffloadedAttention
from helix.attention.policies import budget_of, make_policy
from helix.config import Config
from helix.errors import ConfigError
from helix.kv_placement import KVPlacement
from helix.layers.specs import AttentionSpec, MLASpec
from helix.models import DecoderSpec
from helix.models.decoder import Decoder
from helix.setup.buffers import PIECE_TOKENS
from helix.worker.blocks import BlockLayout
from helix.worker.host_store import HostStore, host_store
from helix.worker.kv_cache import slot_bytes, snapshot_bytes, with_bounds
from helix.worker.kv_cache_spec import (
    LISTS,
    EngineSizes,
    KVCacheSpec,
    dtype_name,
    keys_and_values,
    page_bytes,
    token_bytes,
)
from helix.worker.offloaded_cache import OffloadedCache, OffloadMemory, ring_pages
from helix.worker.offloaded_latents import (
    FetchBuffer,
    OffloadedLatents,
    host_page_bytes,
    latents_of,
    with_latents_on_host,
)

# FLOPs of a chunk's attention per byte of the link: a chunk of 4,096 takes 2.4 times as long as fetching its prefix,
# for Qwen2.5-7B on an H200 with PCIe 5.
FLOPS_PER_BYTE = 12_000


@dataclass(frozen=True)
class OffloadBytes:
    """GPU bytes of an offloaded cache on one rank.

    Attributes:
        fixed: rings, prompt chunks and the pieces before them.
        page: per page: its key bounds, and the map of its resident blocks.
        resident_block: one resident block for every KV head, in all layers.
    """

    fixed: int
    page: int
    resident_block: int


def offload_bytes(
    cache_specs: Sequence[tuple[KVCacheSpec, ...]], placement: KVPlacement, sizes: EngineSizes
) -> OffloadBytes:
    """Returns the GPU bytes; `cache_specs` include key bounds (`with_bounds`)."""
    block, page = BlockLayout.of(cache_specs, placement.page_size), placement.page_size
    page_specs = [k for layer_specs in cache_specs for k in layer_specs if k.per == "page"]
    heads, layers = block.heads, sum(k.name == "bounds" for k in page_specs)
    prompts = placement.chunk_pages(sizes.chunk, sizes.slots) + piece_pages(page)
    rings = layers * sizes.slots * ring_pages(page, sizes.queries)
    number = torch.int32.itemsize
    return OffloadBytes(
        (rings + prompts) * heads * block.bytes + slot_bytes(cache_specs, placement, sizes),
        sum(k.bytes for k in page_specs) + layers * heads * number,
        heads * (layers * (block.bytes + 4 * number) + LISTS * 2 * number),
    )


def make_host_snapshots(
    count: int,
    cache_specs: Sequence[tuple[KVCacheSpec, ...]],
    placement: KVPlacement,
    comm: Communicator,
    sizes: EngineSizes,
) -> HostStore:
    """Allocates host memory for `count` state snapshots; a collective call.

    Raises:
        ConfigError: the host cannot pin it.
    """
    size = max(snapshot_bytes(cache_specs, placement, sizes), 16)  # also on a rank without heads
    return host_store((count, size), torch.uint8, comm, "kv.host_snapshots")


def piece_pages(page_size: int) -> int:
    """Returns the pages of two pieces: one is fetched while the other is read."""
    return 2 * -(-PIECE_TOKENS // page_size)


def make_offloaded_cache(
    config: Config, model: Decoder, placement: KVPlacement, sizes: EngineSizes, capacity: int, draft_page: int = 0
) -> OffloadedCache:
    """Creates a cache with `sizes.pages` pages, or as many as fit in both memories; a collective call.

    Pages take host memory, their key bounds GPU memory. The rest of the GPU's share holds resident blocks, at least
    those that a full batch selects in a step.

    Args:
        capacity: GPU bytes available to the cache, unless kv.offload_gpu_bytes is set.
        draft_page: bytes of a page of the draft model's cache, which has as many pages.

    Raises:
        ConfigError: either memory is too small, or the host cannot pin it.
    """
    kv, spec, comm, dtype = config.kv, model.spec, model.comm, dtype_name(model.weights.dtype)
    parts = budget_of(config.attention).parts
    cache_specs = with_bounds(spec.kv_cache_specs(placement.layout, comm.rank, dtype, kv.dtype), dtype, parts)
    assert kv.offload_host_bytes is not None
    block = BlockLayout.of(cache_specs, placement.page_size)
    page_bytes = len(spec.full) * block.heads * block.bytes
    stripes = placement.stripes
    on_host = min(comm.all_gather_object(min(int(kv.offload_host_bytes) // page_bytes, sizes.pages)))
    if on_host == 0:
        raise ConfigError(
            f"kv.offload_host_bytes={kv.offload_host_bytes:.0f} holds no page of {page_bytes} bytes: set at least "
            f"{page_bytes}"
        )
    if kv.tokens is not None and on_host < sizes.pages:
        raise ConfigError(
            f"kv.tokens={kv.tokens} needs {sizes.pages} pages of {page_bytes} bytes on each rank, but "
            f"kv.offload_host_bytes={kv.offload_host_bytes:.0f} holds {on_host}: set at least "
            f"{sizes.pages * page_bytes}, or lower kv.tokens"
        )
    longest = min(sizes.length, on_host * stripes.page_tokens)
    policy = make_policy(config.attention, placement, longest, comm, kv)
    assert isinstance(policy, OffloadedAttention)
    size = offload_bytes(cache_specs, placement, sizes)
    gpu_page_bytes = size.page + draft_page
    capacity = capacity if kv.offload_gpu_bytes is None else int(kv.offload_gpu_bytes)
    min_resident = sizes.slots * policy.min_resident_blocks(sizes.drafts)
    min_bytes = size.fixed + min_resident * size.resident_block
    pages = min(comm.all_gather_object(min(on_host, (capacity - min_bytes) // gpu_page_bytes)))
    one = stripes.pages_for(min(longest, stripes.tokens))
    if pages < one or (kv.tokens is not None and pages < sizes.pages):
        min_pages = sizes.pages if kv.tokens is not None else one
        enough = min_bytes + min_pages * gpu_page_bytes
        share = f"kv.memory_fraction={kv.memory_fraction}" if kv.offload_gpu_bytes is None else "kv.offload_gpu_bytes"
        raise ConfigError(
            f"{share} gives {capacity} bytes of the GPU, but the blocks that decode.max_batch={sizes.slots} sequences "
            f"select in a step, prompt chunks of {sizes.chunk} tokens and {min_pages} pages take {enough}: set at "
            "least that, or lower decode.max_batch, attention.num_blocks or attention.from_tokens"
        )
    num_resident = (capacity - size.fixed - pages * gpu_page_bytes) // size.resident_block
    memory = OffloadMemory(
        host_store((len(spec.full), pages * block.heads, block.words), torch.int32, comm),
        min(num_resident, max(pages, min_resident)),
        piece_pages(placement.page_size),
        make_host_snapshots(kv.host_snapshots, cache_specs, placement, comm, sizes) if kv.host_snapshots else None,
    )
    cache = OffloadedCache(cache_specs, placement, replace(sizes, pages=pages), comm.device, memory)
    page_limits = (int(kv.offload_host_bytes) // page_bytes, (capacity - min_bytes) // gpu_page_bytes)
    on_host, on_gpu = (min(comm.all_gather_object(pages)) * stripes.page_tokens for pages in page_limits)
    cache.remedy = _remedy(kv.offload_host_bytes, capacity, on_host, on_gpu)
    return cache


def make_offloaded_latents(
    config: Config, model: Decoder, placement: KVPlacement, sizes: EngineSizes, capacity: int, draft_page: int = 0
) -> OffloadedLatents:
    """Creates a cache with its latents in host memory; arguments and errors as in `make_offloaded_cache`.

    Index keys, and latents of a draft layer, take GPU memory.
    """
    kv, spec, comm, mixer = config.kv, model.spec, model.comm, model.spec.attention
    assert isinstance(mixer, MLASpec) and mixer.topk is not None and kv.offload_host_bytes is not None
    cache_specs = spec.kv_cache_specs(placement.layout, comm.rank, dtype_name(model.weights.dtype), kv.dtype)
    cache_specs = with_latents_on_host(cache_specs, len(spec.layers))
    host_page = host_page_bytes(cache_specs, placement.page_size)
    gpu_page = sum(page_bytes(specs, placement.page_size) for specs in cache_specs) + draft_page
    queries = sizes.slots * sizes.queries
    fixed = FetchBuffer.bytes(latents_of(cache_specs), spec.most_sharing_layers, queries, mixer.topk)
    fixed += slot_bytes(cache_specs, placement, sizes)
    capacity = capacity if kv.offload_gpu_bytes is None else int(kv.offload_gpu_bytes)
    limits = int(kv.offload_host_bytes) // host_page, max(capacity - fixed, 0) // gpu_page
    on_host, on_gpu = (min(pages) for pages in zip(*comm.all_gather_object(limits), strict=True))
    pages, wanted = min(on_host, on_gpu, sizes.pages), sizes.pages if kv.tokens is not None else 1
    if on_host < wanted:
        raise ConfigError(
            f"kv.offload_host_bytes={kv.offload_host_bytes:.0f} holds the latents of {on_host} pages of {host_page} "
            f"bytes: set at least {wanted * host_page}"
        )
    if on_gpu < wanted:
        share = f"kv.memory_fraction={kv.memory_fraction}" if kv.offload_gpu_bytes is None else "kv.offload_gpu_bytes"
        raise ConfigError(
            f"{share} gives {capacity} bytes of the GPU, but the latents that decode.max_batch={sizes.slots} sequences "
            f"select in a step, and the index keys of {wanted} pages, take {fixed + wanted * gpu_page}: set at least "
            "that, or lower decode.max_batch"
        )
    store = host_store((pages * host_page,), torch.uint8, comm)
    sizes = replace(sizes, pages=pages)
    cache = OffloadedLatents(cache_specs, placement, sizes, comm.device, store, spec.selecting_layers, mixer.topk)
    tokens = [limit * placement.stripes.page_tokens for limit in (on_host, on_gpu)]
    cache.remedy = _remedy(kv.offload_host_bytes, capacity, *tokens)
    return cache


def _remedy(host_bytes: float, gpu_bytes: int, host_tokens: int, gpu_tokens: int) -> str:
    return (
        f"kv.offload_host_bytes={host_bytes:.0f} has room for {host_tokens} tokens, and the GPU's share of {gpu_bytes} "
        f"bytes for {gpu_tokens}: raise the smaller one, or layout.kvp"
    )


def min_chunk(spec: DecoderSpec, dtype: str, kv: str) -> int:
    """Returns the chunk size, in tokens, whose attention takes as long as fetching the tokens before it."""
    mixer = spec.attention
    assert isinstance(mixer, AttentionSpec), "latents cannot be offloaded"
    group, width = mixer.q_heads / mixer.kv_heads, mixer.head_dim
    number = token_bytes(keys_and_values(1, width, dtype, kv, None)) / (2 * width)  # bytes
    return math.ceil(FLOPS_PER_BYTE * number / (2 * group))


def short_chunk_warning(spec: DecoderSpec, dtype: str, kv: str, chunk: int) -> str | None:
    """Returns a warning if chunks are so short that prefill waits for the link with this kv.dtype; else None.

    Not for latents: how long a chunk of them takes depends on the FFN more than on attention.
    """
    if isinstance(spec.attention, MLASpec) or chunk >= (needed := min_chunk(spec, dtype, kv)):
        return None
    return (
        f"warning: prompt chunks of {chunk:,} tokens wait for earlier tokens to arrive from host memory: set "
        f"decode.prefill_chunk={needed} or more to hide the transfer"
    )
