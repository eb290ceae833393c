"""Construction of a cache in host memory, in sizes that both memories allow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from comm.base import Communicator
from helix.attention.policies import budget_of, make_policy
from helix.attention.tiered import TieredAttention
from helix.config import Config
from helix.errors import ConfigError
from helix.layers.specs import AttentionSpec
from helix.models import DecoderSpec
from helix.models.decoder import Decoder
from helix.placement import Placement
from helix.setup.buffers import PIECE_TOKENS
from helix.worker.blocks import BlockShape
from helix.worker.host_store import HostStore, host_store
from helix.worker.keeps import LISTS, EngineSizes, Keeps, dtype_name, keys_and_values, token_bytes
from helix.worker.kv_cache import slot_bytes, snapshot_bytes, with_bounds
from helix.worker.tiered_cache import HostTier, TieredCache, ring_pages

# FLOPs of a chunk's attention in the time of a byte over the link: a chunk of 4,096 takes 2.4 times as long as fetching
# its prefix, at Qwen2.5-7B's shape on an H200 with PCIe 5.
FLOPS_A_BYTE = 12_000


@dataclass(frozen=True)
class TieredBytes:
    """Bytes of a cache in host memory on one rank's GPU.

    Attributes:
        fixed: bytes of rings, of prompt chunks and of pieces before them.
        page: bytes per page: its key bounds, and the places of its blocks.
        place: bytes of one hot place for every KV head, in all layers.
    """

    fixed: int
    page: int
    place: int


def tiered_bytes(keeps: Sequence[tuple[Keeps, ...]], placement: Placement, sizes: EngineSizes) -> TieredBytes:
    """Counts the bytes on the GPU, for layers that keep key bounds beside keys and values (`with_bounds`)."""
    block, page = BlockShape.of(keeps, placement.page_size), placement.page_size
    of_pages = [k for kept in keeps for k in kept if k.per == "page"]
    heads, layers = block.heads, sum(k.name == "bounds" for k in of_pages)
    prompts = placement.chunk_pages(sizes.chunk, sizes.slots) + piece_pages(page)
    rings = layers * sizes.slots * ring_pages(page, sizes.queries)
    number = torch.int32.itemsize
    return TieredBytes(
        (rings + prompts) * heads * block.bytes + slot_bytes(keeps, placement, sizes),
        sum(k.bytes for k in of_pages) + layers * heads * number,
        heads * (layers * (block.bytes + 4 * number) + LISTS * 2 * number),
    )


def host_states(
    count: int, keeps: Sequence[tuple[Keeps, ...]], placement: Placement, comm: Communicator, sizes: EngineSizes
) -> HostStore:
    """Creates the host memory of `count` snapshots of states; a collective call.

    Raises:
        ConfigError: the host cannot pin it.
    """
    size = max(snapshot_bytes(keeps, placement, sizes), 16)  # of a rank without heads as well
    return host_store((count, size), torch.uint8, comm, "kv.host_snapshots")


def piece_pages(page_size: int) -> int:
    """Counts the pages of two pieces: one is fetched while the other is read."""
    return 2 * -(-PIECE_TOKENS // page_size)


def make_tiered(
    config: Config, model: Decoder, placement: Placement, sizes: EngineSizes, room: int, draft_page: int = 0
) -> TieredCache:
    """Creates a cache with the pages of `sizes`, or as many as both memories allow; a collective call.

    Every page takes host memory, and its key bounds take GPU memory. The rest of the GPU's share holds hot blocks, at
    least those that the sequences of all slots choose at once.

    Args:
        room: bytes of the GPU available to the cache, if the config has no number.
        draft_page: bytes of a draft model's page, of which there are as many.

    Raises:
        ConfigError: either memory is too small, or the host cannot pin it.
    """
    kv, spec, comm, dtype = config.kv, model.spec, model.comm, dtype_name(model.weights.dtype)
    parts = budget_of(config.attention).parts
    keeps = with_bounds(spec.keeps(placement.layout, comm.rank, dtype, kv.dtype), dtype, parts)
    assert kv.host_bytes is not None
    block = BlockShape.of(keeps, placement.page_size)
    of_page = len(spec.full) * block.heads * block.bytes
    stripes = placement.stripes
    on_host = min(comm.all_gather_object(min(int(kv.host_bytes) // of_page, sizes.pages)))
    if on_host == 0:
        raise ConfigError(f"kv.host_bytes={kv.host_bytes:.0f} holds no page of {of_page} bytes: set at least {of_page}")
    if kv.tokens is not None and on_host < sizes.pages:
        raise ConfigError(
            f"kv.tokens={kv.tokens} needs {sizes.pages} pages of {of_page} bytes on each rank, but kv.host_bytes="
            f"{kv.host_bytes:.0f} holds {on_host}: set at least {sizes.pages * of_page}, or take fewer tokens"
        )
    longest = min(sizes.length, on_host * stripes.page_tokens)
    policy = make_policy(config.attention, placement, longest, comm, kv)
    assert isinstance(policy, TieredAttention)
    size = tiered_bytes(keeps, placement, sizes)
    of_gpu = size.page + draft_page
    room = room if kv.gpu_bytes is None else int(kv.gpu_bytes)
    least = sizes.slots * policy.least_places(sizes.drafts)
    taken = size.fixed + least * size.place
    pages = min(comm.all_gather_object(min(on_host, (room - taken) // of_gpu)))
    one = stripes.pages_for(min(longest, stripes.tokens))
    if pages < one or (kv.tokens is not None and pages < sizes.pages):
        least_pages = sizes.pages if kv.tokens is not None else one
        enough = taken + least_pages * of_gpu
        share = f"kv.memory_fraction={kv.memory_fraction}" if kv.gpu_bytes is None else "kv.gpu_bytes"
        raise ConfigError(
            f"{share} gives {room} bytes of the GPU, but what decode.max_batch={sizes.slots} sequences choose in a "
            f"step, prompts in chunks of {sizes.chunk} and {least_pages} pages take {enough}: set at least "
            "that, or decode.max_batch, attention.topk or attention.from_tokens lower"
        )
    hot = (room - size.fixed - pages * of_gpu) // size.place
    tier = HostTier(
        host_store((len(spec.full), pages * block.heads, block.words), torch.int32, comm),
        min(hot, max(pages, least)),
        piece_pages(placement.page_size),
        host_states(kv.host_snapshots, keeps, placement, comm, sizes) if kv.host_snapshots else None,
    )
    cache = TieredCache(keeps, placement, replace(sizes, pages=pages), comm.device, tier)
    rooms = (int(kv.host_bytes) // of_page, (room - taken) // of_gpu)
    on_host, on_gpu = (min(comm.all_gather_object(pages)) * stripes.page_tokens for pages in rooms)
    cache.remedy = (
        f"kv.host_bytes={kv.host_bytes:.0f} has room for {on_host} tokens, the GPU's share of {room} bytes for "
        f"{on_gpu}: raise the lesser, or use a larger layout.kvp"
    )
    return cache


def least_chunk(spec: DecoderSpec, dtype: str, kv: str) -> int:
    """Computes the tokens of a prompt chunk whose attention takes as long as fetching the tokens before it."""
    mixer = spec.attention
    assert isinstance(mixer, AttentionSpec), "latents are not kept in host memory"
    group, width = mixer.q_heads / mixer.kv_heads, mixer.head_dim
    number = token_bytes(keys_and_values(1, width, dtype, kv, None)) / (2 * width)  # bytes
    return math.ceil(FLOPS_A_BYTE * number / (2 * group))


def of_short_chunks(spec: DecoderSpec, dtype: str, kv: str, chunk: int) -> str | None:
    """Returns a warning if chunks are so short that prompts wait for the link with this kv.dtype; else None."""
    if chunk >= (least := least_chunk(spec, dtype, kv)):
        return None
    return (
        f"warning: prompts in chunks of {chunk:,} tokens wait for what lies before them to come from host memory: with "
        f"decode.prefill_chunk={least} or more, computing takes as long"
    )
