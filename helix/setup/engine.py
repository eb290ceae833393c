"""Builds an engine with its KV cache and drafter, sized to fit the memory of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from helix.attention.policies import budget_of, make_policy, policy_of
from helix.config import Config, SpeculationConfig
from helix.engine.core import Engine
from helix.errors import ConfigError
from helix.kv_placement import KVPlacement
from helix.layers.specs import MLASpec
from helix.layout import HelixLayout
from helix.models.decoder import Decoder
from helix.models.draft_layer import DraftLayer
from helix.setup.buffers import (
    MAX_SLOTS,
    fitting_slots,
    max_chunk,
    piece_bytes,
    prompt_bytes,
    sampling_bytes,
    token_buffers,
)
from helix.setup.offload import make_host_snapshots, make_offloaded_cache, make_offloaded_latents
from helix.setup.prefix_store import make_slabs
from helix.speculation import (
    DraftBudget,
    Drafter,
    DraftModel,
    LayerDrafter,
    ModelDrafter,
    NoDrafts,
    SparseDrafter,
    SuffixDrafter,
)
from helix.worker.graph_keys import max_captured_size
from helix.worker.kv_cache import KVCache, free_bytes, slot_bytes, snapshot_bytes, with_bounds, without_long_rings
from helix.worker.kv_cache_spec import (
    ITEMSIZE,
    MIN_SNAPSHOTS,
    SNAPSHOTS_PER_SLOT,
    SNAPSHOTS_SHARE,
    EngineSizes,
    KVCacheSpec,
    dtype_name,
    page_bytes,
)
from helix.worker.model_runner import ModelRunner

SLOT_TOKENS = 1024  # decode.max_batch=auto reserves pages for this many tokens per row


def draft_budget(config: SpeculationConfig) -> DraftBudget:
    """Returns the budget of speculation.drafter=sparse."""
    return DraftBudget(config.policy, config.sparsity, config.recent, config.reach, config.heads)


def make_drafter(
    config: SpeculationConfig, draft: DraftModel | DraftLayer | None, model: Decoder, cache: KVCache, sizes: EngineSizes
) -> Drafter:
    """Creates the drafter that a config names."""
    match config.drafter:
        case "suffix":
            return SuffixDrafter(
                config.gamma, config.prompt_lookup_max, config.suffix_pool_tokens, sizes.slots, cache.device
            )
        case "sparse":
            return SparseDrafter(model, cache, sizes, draft_budget(config), config.noise)
        case "mtp" | "eagle3":
            layer = model.next_token if config.drafter == "mtp" else draft
            assert layer is not None and not isinstance(layer, DraftModel), "make_spec and the loader create it"
            return LayerDrafter(layer, model, cache, sizes, config.noise)
        case "model":
            assert isinstance(draft, DraftModel), "loaded with the target"
            return ModelDrafter(draft, model.spec.vocab, cache.placement, sizes)
        case _:
            return NoDrafts()


def _cache_specs(config: Config, model: Decoder, layout: HelixLayout) -> list[tuple[KVCacheSpec, ...]]:
    dtype = dtype_name(model.weights.dtype)
    cache_specs = model.spec.kv_cache_specs(layout, model.comm.rank, dtype, config.kv.dtype)
    return cache_specs if config.kv.offload == "host" else without_long_rings(cache_specs)


def auto_slots(
    config: Config, model: Decoder, placement: KVPlacement, sizes: EngineSizes, capacity: int,
    draft: DraftModel | DraftLayer | None,
) -> int:  # fmt: skip
    """Returns the batch size of decode.max_batch=auto, at most `sizes.slots`; a collective call.

    Args:
        capacity: bytes available to the cache.
    """
    spec, comm = model.spec, model.comm
    cache_specs = _cache_specs(config, model, placement.layout)
    columns = len(placement.layout.vocab_rows(comm.rank, spec.vocab))

    def non_page_bytes(slots: int) -> int:
        sized = replace(sizes, slots=slots)
        total = slot_bytes(cache_specs, placement, sized)
        total += sampling_bytes(slots, sizes.queries, columns, comm.capturable)
        total += draft.slot_bytes(placement, sized) if isinstance(draft, DraftModel) else 0
        if config.speculation.drafter == "sparse":
            total += draft_budget(config.speculation).table_bytes(spec, placement, comm.rank, sized)
        return total + (slots * sized.length * torch.int32.itemsize if sized.drafts else 0)  # token ids for drafters

    page_cost = sum(page_bytes(layer_specs, placement.page_size) for layer_specs in cache_specs)
    slot_cost = placement.stripes.pages_for(min(SLOT_TOKENS, sizes.length)) * page_cost
    slots = fitting_slots(capacity, slot_cost, non_page_bytes(2) - non_page_bytes(1))
    return min(comm.all_gather_object(min(sizes.slots, max(MAX_SLOTS // sizes.queries, 1), slots)))


def auto_snapshots(config: Config, model: Decoder, placement: KVPlacement, sizes: EngineSizes, capacity: int) -> int:
    """Returns the number of snapshots of kv.snapshots=auto; a collective call.

    Args:
        capacity: bytes available to the cache.
    """
    one = snapshot_bytes(_cache_specs(config, model, placement.layout), placement, sizes)
    fitting = capacity // SNAPSHOTS_SHARE // max(one, 1)
    return max(MIN_SNAPSHOTS, min(model.comm.all_gather_object(min(SNAPSHOTS_PER_SLOT * sizes.slots, fitting))))


def make_cache(
    config: Config, model: Decoder, placement: KVPlacement, sizes: EngineSizes, capacity: int, draft_page: int = 0
) -> KVCache:
    """Creates a GPU cache with `sizes.pages` pages, or as many as fit; a collective call.

    Args:
        capacity: GPU bytes available to the cache.
        draft_page: bytes of a page of the draft model's cache, which has as many pages.

    Raises:
        ConfigError: kv.tokens does not fit, not even one page fits, or the host cannot pin kv.host_snapshots.
    """
    kv, spec, comm, dtype = config.kv, model.spec, model.comm, dtype_name(model.weights.dtype)
    sparse = config.attention.policy != "dense"
    quest = config.speculation.drafter == "sparse" and config.speculation.policy == "quest"
    cache_specs = spec.kv_cache_specs(placement.layout, comm.rank, dtype, kv.dtype)
    parts = budget_of(config.attention).parts if sparse else 1
    cache_specs = without_long_rings(with_bounds(cache_specs, dtype, parts) if sparse or quest else cache_specs)
    page_cost = sum(page_bytes(layer_specs, placement.page_size) for layer_specs in cache_specs) + draft_page
    non_page_bytes = slot_bytes(cache_specs, placement, sizes)
    tables = 0
    if config.speculation.drafter == "sparse":
        keys = draft_budget(config.speculation)
        page_cost += keys.page_bytes(spec, placement, comm.rank, sizes.drafts, dtype)
        tables = keys.table_bytes(spec, placement, comm.rank, sizes)
    fitting = max(0, (capacity - tables - non_page_bytes) // max(page_cost, 1))
    pages = min(comm.all_gather_object(min(fitting, sizes.pages)))
    beside = f"besides buffers for prefill chunks of {sizes.chunk} tokens"
    beside += f", {non_page_bytes} bytes of windows and states" if non_page_bytes else ""
    beside += f" and {tables} bytes of tables for sparse drafts" if tables else ""
    if kv.tokens is not None and pages < sizes.pages:
        raise ConfigError(
            f"kv.tokens={kv.tokens} needs {sizes.pages} pages of {page_cost} bytes on each rank, but "
            f"kv.memory_fraction={kv.memory_fraction} of the free memory holds {pages} {beside}: lower kv.tokens, or "
            "raise layout.kvp"
        )
    if pages == 0:
        raise ConfigError(
            f"kv.memory_fraction={kv.memory_fraction} of the free memory holds no page of {page_cost} bytes {beside}: "
            "raise it, lower decode.prefill_chunk, or set a layout with fewer weights per rank"
        )
    host_snapshots = (
        make_host_snapshots(kv.host_snapshots, cache_specs, placement, comm, sizes) if kv.host_snapshots else None
    )
    cache_class = policy_of(config.attention).cache if sparse else KVCache
    return cache_class(cache_specs, placement, replace(sizes, pages=pages), comm.device, host_snapshots)


def build_engine(
    layout: HelixLayout,
    model: Decoder,
    config: Config,
    max_batch: int,
    wanted_tokens: int,
    draft: DraftModel | DraftLayer | None = None,
    *,
    fewer: bool = False,
) -> Engine:
    """Creates an engine with KV for `wanted_tokens` tokens over all ranks, or as many as memory or kv.tokens allow.

    Reserves the buffers of the largest prefill chunk before it counts pages.

    Args:
        max_batch: sequences at a time, over all ranks.
        draft: the model of speculation.drafter=model, whose cache has as many pages; or the layer of eagle3.
        fewer: whether to reduce `max_batch` if memory has too few pages.

    Raises:
        ConfigError: kv.tokens does not fit, not even one page fits, or a host cannot pin the memory for
            kv.offload_host_bytes or kv.prefix_host_bytes.
    """
    spec, comm, kv = model.spec, model.comm, config.kv
    placement = KVPlacement(layout, layout.kvp_rank(comm.rank), *config.blocks)
    dtype = dtype_name(model.weights.dtype)
    drafts = 0 if config.speculation.drafter == "none" else config.speculation.gamma
    # In mode dp each rank has its own rows and pages.
    max_batch = -(-max_batch // layout.dp)
    wanted = -(-kv.tokens // layout.dp) if kv.tokens else wanted_tokens + drafts * max_batch
    pieces = piece_bytes(spec, model.weights.max_matrix_size, kv.dtype != "auto", dtype, comm.capturable)
    free = free_bytes(comm.device) - pieces
    if comm.device.type == "cpu":
        free -= int(kv.prefix_host_bytes)
    buffers = token_buffers(spec, layout, comm.rank, dtype)
    fixed, has_experts = config.decode.prefill_chunk, spec.experts is not None
    chunk = max_chunk(buffers, free, has_experts) if fixed == "auto" else int(fixed)
    chunk = min(comm.all_gather_object(chunk))
    prompts = prompt_bytes(spec, layout, comm.rank, chunk, wanted, dtype, comm.capturable)
    columns = len(layout.vocab_rows(comm.rank, spec.vocab))

    def room(slots: int) -> int:
        sampled = sampling_bytes(slots, drafts + 1, columns, comm.capturable)
        return min(int(free * kv.memory_fraction), free - prompts - sampled)

    capacity = room(1)
    layer = model.next_token if config.speculation.drafter == "mtp" else draft
    if comm.capturable and layer is not None and not isinstance(layer, DraftModel):
        captured = max_captured_size(chunk, layout.world_size)
        capacity -= captured * layer.target_width * ITEMSIZE[dtype]  # states that a captured chunk outputs
    if config.speculation.drafter == "suffix":
        capacity -= config.speculation.suffix_pool_tokens * 8
    longest = min(wanted, spec.max_positions)
    snapshots = MIN_SNAPSHOTS if kv.snapshots == "auto" else kv.snapshots
    sizes = EngineSizes(max_batch, longest, chunk, drafts, snapshots=snapshots * kv.prefix_cache)
    if fewer:
        sizes = replace(sizes, slots=auto_slots(config, model, placement, sizes, capacity, draft))
    capacity -= room(1) - room(sizes.slots)
    sizes = replace(sizes, pages=placement.stripes.pages_for_all(wanted, sizes.slots))
    if kv.snapshots == "auto" and kv.prefix_cache:
        sizes = replace(sizes, snapshots=auto_snapshots(config, model, placement, sizes, capacity))
    draft_page = 0
    if isinstance(draft, DraftModel):
        capacity -= draft.slot_bytes(placement, sizes)
        draft_page = draft.page_bytes(placement)
    make: Callable[..., KVCache] = make_cache
    if kv.offload == "host":
        make = make_offloaded_latents if isinstance(spec.attention, MLASpec) else make_offloaded_cache
    cache = make(config, model, placement, sizes, capacity, draft_page)
    budget = min(wanted, max(placement.stripes.tokens_in(cache.pages) - drafts, 1))  # drafts follow a sequence
    max_length = min(budget, spec.max_positions)
    if (limit := config.decode.max_length) is not None and limit < max_length:
        max_length, cache.remedy = limit, "raise decode.max_length"
    elif layout.dp > 1:
        cache.remedy = (
            "raise kv.tokens or kv.memory_fraction, or set layout.mode=helix (dp keeps a sequence on one rank)"
        )
    global_selection = config.attention.policy != "dense" and config.attention.choice == "global"
    sizes = replace(sizes, length=max_length, pages=cache.pages)
    drafter = make_drafter(config.speculation, draft, model, cache, sizes)
    runner = ModelRunner(
        model,
        cache,
        sizes,
        policy=make_policy(config.attention, placement, max_length, comm, kv),
        drafter=drafter,
        # A global selection communicates inside attention, which chunks would split.
        hopb="none" if global_selection else config.hopb.chunks,
        shared_prefix=config.attention.shared_prefix if kv.prefix_cache else "none",
        slabs=make_slabs(config, model, cache, drafter, placement, comm) if kv.prefix_host_bytes else None,
    )
    return Engine(
        runner,
        config.schedule,
        adaptive=config.speculation.adaptive,
        prefix_cache=kv.prefix_cache,
        snapshot_every=kv.snapshot_every,
        timeout_s=config.comm.timeout_s,
    )
