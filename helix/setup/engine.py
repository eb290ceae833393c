"""Construction of an engine, its cache and its drafter, in sizes that the memory of all ranks allows."""

from __future__ import annotations

from dataclasses import replace

import torch

from helix.attention.policies import budget_of, make_policy, policy_of
from helix.config import Config, SpeculationConfig
from helix.engine.core import Engine
from helix.errors import ConfigError
from helix.layers.indexer import SCORES
from helix.layers.mla import EXPANDED
from helix.layers.specs import MLASpec
from helix.layout import HelixLayout
from helix.models.decoder import Decoder
from helix.models.draft_layer import DraftLayer
from helix.placement import Placement
from helix.setup.buffers import MOST_SLOTS, fitting_slots, longest_chunk, prompt_bytes, token_buffers
from helix.setup.tiering import host_states, make_tiered
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
from helix.worker.graph_keys import longest_size
from helix.worker.keeps import ITEMSIZE, EngineSizes, dtype_name, page_bytes
from helix.worker.kv_cache import KVCache, free_bytes, slot_bytes, with_bounds, without_long_rings
from helix.worker.model_runner import ModelRunner
from kernels.attention.unpacked_prefill import PIECE_BYTES

SLOT_TOKENS = 1024  # for which each slot of decode.max_batch=auto has pages


def draft_budget(config: SpeculationConfig) -> DraftBudget:
    """Returns the selection of the keys that drafts read with speculation.drafter=sparse."""
    return DraftBudget(config.policy, config.sparsity)


def make_drafter(
    config: SpeculationConfig, draft: DraftModel | DraftLayer | None, model: Decoder, cache: KVCache, sizes: EngineSizes
) -> Drafter:
    """Creates the drafter that a config names."""
    match config.drafter:
        case "suffix":
            return SuffixDrafter(config.gamma, config.longest, config.remembered, sizes.slots, cache.device)
        case "sparse":
            return SparseDrafter(model, cache, sizes, draft_budget(config), config.noise)
        case "mtp" | "eagle3":
            layer = model.next_token if config.drafter == "mtp" else draft
            assert layer is not None and not isinstance(layer, DraftModel), "make_spec and the loader have it"
            return LayerDrafter(layer, model, cache, sizes, config.noise)
        case "model":
            assert isinstance(draft, DraftModel), "loaded with the model that it drafts for"
            return ModelDrafter(draft, model.spec.vocab, cache.placement, sizes)
        case _:
            return NoDrafts()


def auto_slots(
    config: Config, model: Decoder, placement: Placement, sizes: EngineSizes, room: int,
    draft: DraftModel | DraftLayer | None,
) -> int:  # fmt: skip
    """Returns the slots of decode.max_batch=auto, at most those of `sizes`; a collective call.

    Args:
        room: bytes available to the cache.
    """
    spec, comm = model.spec, model.comm
    keeps = spec.keeps(placement.layout, comm.rank, dtype_name(model.weights.dtype), config.kv.dtype)

    def beside_pages(slots: int) -> int:
        of = replace(sizes, slots=slots)
        taken = slot_bytes(keeps, placement, of)
        taken += draft.slot_bytes(placement, of) if isinstance(draft, DraftModel) else 0
        if config.speculation.drafter == "sparse":
            taken += draft_budget(config.speculation).table_bytes(spec, placement, comm.rank, of)
        return taken + (slots * of.length * torch.int32.itemsize if of.drafts else 0)  # the text that drafters read

    of_page = sum(page_bytes(kept, placement.page_size) for kept in keeps)
    of_tokens = placement.stripes.pages_for(min(SLOT_TOKENS, sizes.length)) * of_page
    slots = fitting_slots(room, of_tokens, beside_pages(2) - beside_pages(1))
    return min(comm.all_gather_object(min(sizes.slots, max(MOST_SLOTS // sizes.queries, 1), slots)))


def make_cache(
    config: Config, model: Decoder, placement: Placement, sizes: EngineSizes, room: int, draft_page: int = 0
) -> KVCache:
    """Creates a cache on the GPU with the pages of `sizes`, or as many as its memory allows; a collective call.

    Args:
        room: bytes of the GPU available to the cache.
        draft_page: bytes of a draft model's page, of which there are as many.

    Raises:
        ConfigError: kv.tokens does not fit, or not even one page; or the host cannot pin kv.host_snapshots.
    """
    kv, spec, comm, dtype = config.kv, model.spec, model.comm, dtype_name(model.weights.dtype)
    sparse = config.attention.policy != "dense"
    quest = config.speculation.drafter == "sparse" and config.speculation.policy == "quest"
    keeps = spec.keeps(placement.layout, comm.rank, dtype, kv.dtype)
    parts = budget_of(config.attention).parts if sparse else 1
    keeps = without_long_rings(with_bounds(keeps, dtype, parts) if sparse or quest else keeps)
    of_page = sum(page_bytes(kept, placement.page_size) for kept in keeps) + draft_page
    beside_pages = slot_bytes(keeps, placement, sizes)
    tables = 0
    if config.speculation.drafter == "sparse":
        keys = draft_budget(config.speculation)
        of_page += keys.page_bytes(spec, placement, comm.rank, sizes.drafts, dtype)
        tables = keys.table_bytes(spec, placement, comm.rank, sizes)
    fitting = max(0, (room - tables - beside_pages) // max(of_page, 1))
    pages = min(comm.all_gather_object(min(fitting, sizes.pages)))
    beside = f"beside the buffers of prefill chunks of {sizes.chunk} tokens"
    beside += f", {beside_pages} bytes of windows and states" if beside_pages else ""
    beside += f" and {tables} bytes of tables of what drafts read" if tables else ""
    if kv.tokens is not None and pages < sizes.pages:
        raise ConfigError(
            f"kv.tokens={kv.tokens} needs {sizes.pages} pages of {of_page} bytes on each rank, but "
            f"kv.memory_fraction={kv.memory_fraction} of the free memory holds {pages} {beside}: "
            "take fewer tokens, or a larger layout.kvp"
        )
    if pages == 0:
        raise ConfigError(
            f"kv.memory_fraction={kv.memory_fraction} of the free memory holds no page of {of_page} bytes {beside}: "
            "raise it, set a smaller decode.prefill_chunk, or take a layout whose ranks hold fewer weights"
        )
    of_host = host_states(kv.host_snapshots, keeps, placement, comm, sizes) if kv.host_snapshots else None
    kind = policy_of(config.attention).cache if sparse else KVCache
    return kind(keeps, placement, replace(sizes, pages=pages), comm.device, of_host)


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

    The buffers of its longest prefill chunk are reserved before pages are counted.

    Args:
        max_batch: sequences at a time, over all ranks.
        fewer: whether they may be fewer, where memory has no pages for so many.
        draft: the model of speculation.drafter=model, whose cache has as many pages; or the layer of eagle3.

    Raises:
        ConfigError: kv.tokens does not fit, or not even one page; or a host cannot pin kv.host_bytes.
    """
    spec, comm, kv = model.spec, model.comm, config.kv
    placement = Placement(layout, layout.kvp_rank(comm.rank), *config.blocks)
    dtype = dtype_name(model.weights.dtype)
    drafts = 0 if config.speculation.drafter == "none" else config.speculation.gamma
    # In mode dp each rank has its own slots and pages, of sequences that come to any of the ranks.
    max_batch = -(-max_batch // layout.dp)
    wanted = -(-kv.tokens // layout.dp) if kv.tokens else wanted_tokens + drafts * max_batch
    # Halves of a chunk that take turns unpack a matrix of few bits each, and a piece of keys, or hold scores of tokens.
    piece = 0 if kv.dtype == "auto" else PIECE_BYTES
    if isinstance(spec.attention, MLASpec) and spec.attention.topk is None:
        piece = 2 * EXPANDED  # keys and values, and the latents of these, in order and not
    apart = model.weights.largest * ITEMSIZE[dtype] + (SCORES * torch.float32.itemsize if spec.indexers else 0)
    halves = 4 if comm.capturable else 2  # those of captured chunks have memory of their own
    free = free_bytes(comm.device) - halves * (apart + piece)
    buffers = token_buffers(spec, layout, comm.rank, dtype)
    fixed, has_experts = config.decode.prefill_chunk, spec.experts is not None
    chunk = longest_chunk(buffers, free, has_experts) if fixed == "auto" else int(fixed)
    chunk = min(comm.all_gather_object(chunk))
    prompts = prompt_bytes(spec, layout, comm.rank, chunk, wanted, dtype, comm.capturable)
    room = min(int(free * kv.memory_fraction), free - prompts)
    layer = model.next_token if config.speculation.drafter == "mtp" else draft
    if comm.capturable and layer is not None and not isinstance(layer, DraftModel):
        captured = longest_size(chunk, layout.world_size)
        room -= captured * layer.read * ITEMSIZE[dtype]  # states that a captured chunk leaves to it
    if config.speculation.drafter == "suffix":
        room -= config.speculation.remembered * 8
    longest = min(wanted, spec.max_positions)
    sizes = EngineSizes(max_batch, longest, chunk, drafts, snapshots=kv.snapshots * kv.prefix_cache)
    if fewer:
        sizes = replace(sizes, slots=auto_slots(config, model, placement, sizes, room, draft))
    sizes = replace(sizes, pages=placement.stripes.pages_for_all(wanted, sizes.slots))
    draft_page = 0
    if isinstance(draft, DraftModel):
        room -= draft.slot_bytes(placement, sizes)
        draft_page = draft.page_bytes(placement)
    make = make_tiered if kv.tier == "host" else make_cache
    cache = make(config, model, placement, sizes, room, draft_page)
    budget = min(wanted, max(placement.stripes.tokens_in(cache.pages) - drafts, 1))  # drafts lie behind a sequence
    most = min(budget, spec.max_positions)
    if (limit := config.decode.max_length) is not None and limit < most:
        most, cache.remedy = limit, "raise decode.max_length"
    elif layout.dp > 1:
        cache.remedy = (
            "raise kv.tokens or kv.memory_fraction, or use layout.mode=helix: dp keeps a sequence on one rank"
        )
    together = config.attention.policy != "dense" and config.attention.choice == "global"
    sizes = replace(sizes, length=most, pages=cache.pages)
    runner = ModelRunner(
        model,
        cache,
        sizes,
        policy=make_policy(config.attention, placement, most, comm, kv),
        drafter=make_drafter(config.speculation, draft, model, cache, sizes),
        # One choice over all ranks is itself an exchange inside attention, which chunks would split.
        hopb="none" if together else config.hopb.chunks,
    )
    return Engine(
        runner,
        config.schedule,
        adaptive=config.speculation.adaptive,
        prefix_cache=kv.prefix_cache,
        timeout_s=config.comm.timeout_s,
    )
