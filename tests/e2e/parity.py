"""Runs the engine on a communicator's ranks and compares every token and logit with transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch

from comm.base import Communicator
from comm.loopback import LoopbackWorld, run_ranks
from comm.torch_dist import TorchDistCommunicator
from helix.attention.base import AttentionPolicy
from helix.attention.block_sparse import BlockSparseAttention
from helix.attention.offloaded import OffloadedAttention
from helix.config import Config, HopBChunks, KVConfig, ScheduleConfig, SpeculationConfig
from helix.engine.core import Engine
from helix.engine.request import Request
from helix.kv_placement import BlockBudget, KVPlacement
from helix.layers.specs import Formats, unquantized
from helix.layout import HelixLayout
from helix.models import DecoderSpec, spec_from_config
from helix.models.checkpoint import read_config
from helix.models.decoder import Decoder
from helix.models.draft_layer import DraftLayer
from helix.models.eagle3 import with_eagle3
from helix.models.loading import Checkpoint
from helix.setup.drafts import load_eagle3
from helix.setup.parts import make_eagle3
from helix.setup.prefix_store import make_slabs
from helix.speculation import DraftBudget, Drafter, DraftModel, LayerDrafter, ModelDrafter, SparseDrafter
from helix.worker.blocks import BlockLayout
from helix.worker.host_store import HostStore
from helix.worker.kv_cache import KVCache, snapshot_bytes, with_bounds
from helix.worker.kv_cache_spec import EngineSizes, dtype_name
from helix.worker.model_runner import ModelRunner
from helix.worker.offloaded_cache import OffloadedCache, OffloadMemory
from helix.worker.slabs import slab_bytes
from tests.sequences import generated_ids

# Maximum prompt chunks without decode steps in between, however slow the machine.
UNHURRIED = ScheduleConfig(max_prefill_stall_ms=60_000.0, decode_share=0.0)
# fp32 sums over 2 to 8 layers in different orders: differences of 1e-6 to 1e-5 in logits of size 1 to 20.
LOGIT_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Continuation:
    """Transformers' greedy continuation: tokens, and the logits [n, V] fp32 of each."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: torch.Tensor


@dataclass(frozen=True)
class Result:
    """Results of one rank: each request's tokens on rank 0, and the rank's rows of logits, by (id, output index)."""

    tokens: dict[int, tuple[int, ...]]
    logits: dict[tuple[int, int], torch.Tensor]


@dataclass(frozen=True)
class Sparse:
    """Settings of block-sparse steps; `choice` is local or global.

    Attributes:
        resident: resident blocks per KV head and layer with the cache in host memory; None: the cache is on the GPU.
        prefetch: prefetch a layer's blocks while the layer before it computes.
        chunks: chunks of a step's batch, see `ModelRunner`.
        policy: policy class for a cache on the GPU.
    """

    budget: BlockBudget
    choice: str = "global"
    resident: int | None = None
    prefetch: bool = False
    chunks: HopBChunks = "none"
    policy: type[BlockSparseAttention] = BlockSparseAttention


@dataclass(frozen=True)
class SelfDrafts:
    """Settings of self-speculation with sparse drafts."""

    limit: int
    budget: DraftBudget
    noise: str = "shared"

    def spec(self, target: DecoderSpec) -> DecoderSpec:
        return target.with_stored_selections() if self.budget.reuses(target) else target


def build_model(path: Path, layout: HelixLayout, comm: Communicator, dtype: torch.dtype) -> Decoder:
    """Loads one rank's shards of a checkpoint, without EOS: random models would stop anywhere."""
    return _built(Checkpoint(path), layout, comm, dtype, unquantized)


def _built(
    checkpoint: Checkpoint,
    layout: HelixLayout,
    comm: Communicator,
    dtype: torch.dtype,
    formats: Formats,
    with_layer: Callable[[DecoderSpec], DecoderSpec] = lambda spec: spec,
) -> Decoder:
    spec = with_layer(replace(checkpoint.as_stored(spec_from_config(read_config(checkpoint.path))), eos=()))
    model = Decoder(spec, layout, comm, dtype, comm.device, formats)
    checkpoint.check(model.weights.slices, spec.unused)
    checkpoint.load(model.weights)
    return model


Build = Callable[[Path, HelixLayout, Communicator, torch.dtype], Decoder]


@dataclass(frozen=True)
class ModelDrafts:
    """A draft model over the same ranks."""

    path: Path
    layout: HelixLayout
    comm: Communicator
    limit: int
    kind: type[ModelDrafter] = ModelDrafter


@dataclass(frozen=True)
class LayerDrafts:
    """Settings of drafts by an MTP or EAGLE-3 layer."""

    limit: int
    noise: str = "shared"
    kind: type[LayerDrafter] = LayerDrafter
    eagle3: SpeculationConfig | None = None

    def spec(self, target: DecoderSpec) -> DecoderSpec:
        return target.with_mtp() if self.eagle3 is None else with_eagle3(target, make_eagle3(self.eagle3, target))

    def layer(self, model: Decoder, layout: HelixLayout, comm: Communicator) -> DraftLayer:
        if self.eagle3 is not None:
            return load_eagle3(self.eagle3, model, layout, comm)
        assert model.next_token is not None
        return model.next_token


def build_engine(
    path: Path,
    layout: HelixLayout,
    comm: Communicator,
    append_block: int,
    *,
    page_size: int = 16,
    max_batch: int = 5,
    max_length: int = 512,
    prefill_chunk: int = 64,
    dtype: torch.dtype = torch.float32,
    drafter: Drafter | SelfDrafts | ModelDrafts | LayerDrafts | None = None,
    adaptive: bool = True,
    sparse: Sparse | None = None,
    pages: int | None = None,
    schedule: ScheduleConfig | None = None,
    prefix_cache: bool = True,
    timeout_s: float = 60.0,
    build: Build = build_model,
    kv: str = "auto",
    snapshots: int = 0,
    host_snapshots: int = 0,
    snapshot_every: int = 0,
    run_steps: int = 8,
    slabs: int = 0,
) -> Engine:
    """Makes an engine for one rank of a checkpoint, with short runs; uninitialized memory is NaN."""
    device = comm.device
    if isinstance(drafter, LayerDrafts | SelfDrafts):
        model = _built(Checkpoint(path), layout, comm, dtype, unquantized, drafter.spec)
    else:
        model = build(path, layout, comm, dtype)
    spec = model.spec
    placement = KVPlacement(layout, layout.kvp_rank(comm.rank), append_block, page_size)
    pages = pages or placement.stripes.pages_for_all(max_batch * max_length, max_batch)
    cache_specs = spec.kv_cache_specs(layout, comm.rank, dtype_name(dtype), kv)
    drafts = 0 if drafter is None else drafter.limit
    sizes = EngineSizes(max_batch, max_length, prefill_chunk, drafts, pages, snapshots, run_steps)
    quest = isinstance(drafter, SelfDrafts) and drafter.budget.policy == "quest"
    parts = sparse.budget.parts if sparse else 1
    policy: AttentionPolicy | None = None
    if sparse:
        over_all = comm if sparse.choice == "global" else None
        given = sparse.budget, placement, max_length, device, over_all
        offloaded = sparse.resident is not None
        policy = OffloadedAttention(*given) if offloaded else sparse.policy(*given)
        policy.prefetches = offloaded and sparse.prefetch
    size = max(snapshot_bytes(cache_specs, placement, sizes), 16)
    host_snapshot_store = HostStore((host_snapshots, size), torch.uint8, device) if host_snapshots else None
    if host_snapshot_store is not None:
        assert host_snapshot_store.tensor is not None
        host_snapshot_store.tensor.fill_(255)  # NaN in every dtype
    if isinstance(policy, OffloadedAttention):
        assert sparse is not None and sparse.resident is not None
        block = BlockLayout.of(cache_specs, page_size)
        store = HostStore((len(spec.full), pages * block.heads, block.words), torch.int32, device)
        offload_memory = OffloadMemory(store, sparse.resident, 4, host_snapshot_store)
        bounded = with_bounds(cache_specs, dtype_name(dtype), parts)
        cache: KVCache = OffloadedCache(bounded, placement, sizes, device, offload_memory)
        for tensor in cache.on_gpu:
            tensor.fill_(-1)  # NaN in every dtype
    else:
        cache_specs = with_bounds(cache_specs, dtype_name(dtype), parts) if sparse or quest else cache_specs
        cache = (sparse.policy.cache if sparse else KVCache)(cache_specs, placement, sizes, device, host_snapshot_store)
    for tensor in cache.tensors:
        tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
    if isinstance(drafter, SelfDrafts):
        drafter = SparseDrafter(model, cache, sizes, drafter.budget, drafter.noise)
        if drafter.scores is not None:
            drafter.scores.planes.fill_(torch.nan)
    if isinstance(drafter, LayerDrafts):
        drafter = drafter.kind(drafter.layer(model, layout, comm), model, cache, sizes, drafter.noise)
    if isinstance(drafter, ModelDrafts):
        draft_layout, draft_comm = drafter.layout, drafter.comm
        draft = DraftModel(build_model(drafter.path, draft_layout, draft_comm, torch.float32), draft_layout, draft_comm)
        drafter = drafter.kind(draft, spec.vocab, placement, sizes)
        for tensor in drafter.cache.tensors:
            tensor.fill_(torch.nan)
    runner = ModelRunner(model, cache, sizes, policy=policy, drafter=drafter, hopb=sparse.chunks if sparse else "none")
    if slabs:
        config = KVConfig(
            prefix_host_bytes=slabs * slab_bytes([*cache.paged_tensors, *runner.drafter.paged_tensors], 1)
        )
        runner.slabs = make_slabs(Config(kv=config), model, cache, runner.drafter, placement, comm)
    options = dict(adaptive=adaptive, prefix_cache=prefix_cache, snapshot_every=snapshot_every, timeout_s=timeout_s)
    return Engine(runner, schedule, **options)  # type: ignore[arg-type]


def generate(engine: Engine, wanted: Sequence[Continuation]) -> Result:
    """Decodes the reference's prompts and records tokens and logits."""
    logits: dict[tuple[int, int], torch.Tensor] = {}

    def observe(slots: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> None:
        for slot, position, row in zip(slots.tolist(), positions.tolist(), rows.cpu(), strict=True):
            new_request = engine.runner.requests[slot]
            logits[int(new_request.id), position - new_request.length] = row.clone()

    engine.runner.logits_hook = observe
    requests = [Request(i, c.prompt, len(c.tokens)) for i, c in enumerate(wanted)]
    tokens = generated_ids(engine, requests)
    return Result(tokens, logits)


def check(results: Sequence[Result], wanted: Sequence[Continuation], tolerance: float = LOGIT_TOLERANCE) -> None:
    """Checks that all tokens are equal and all logits within `tolerance`; in mode dp one rank has whole rows."""
    for i, c in enumerate(wanted):
        assert results[0].tokens[i] == c.tokens, f"prompt {i} of {len(c.prompt)} tokens"
        shards = [[r.logits[i, n] for r in results if (i, n) in r.logits] for n in range(len(c.tokens))]
        ours = torch.stack([torch.cat(parts) for parts in shards])
        worst = (ours - c.logits).abs().max().item()
        assert worst <= tolerance, f"prompt {i} of {len(c.prompt)} tokens: logits off by {worst}"


T = TypeVar("T")


def on_loopback(
    path: Path, layout: HelixLayout, append_block: int, run: Callable[[Engine], T], device: str = "cpu", **options: Any
) -> list[T]:
    """Returns each rank's result of `run` on its engine; ranks are threads of this process."""

    def body(world: LoopbackWorld, rank: int) -> T:
        comm = world.communicator(rank, layout.kvp_group(rank))
        return run(build_engine(path, layout, comm, append_block, **options))

    return run_ranks(layout.world_size, body, timeout_s=240.0, device=device)


def loopback(
    path: Path,
    layout: HelixLayout,
    append_block: int,
    wanted: Sequence[Continuation],
    tamper: Callable[[Engine], None] = lambda engine: None,
    **options: Any,
) -> list[Result]:
    """Decodes the reference's prompts on ranks that are threads."""

    def run(engine: Engine) -> Result:
        tamper(engine)
        return generate(engine, wanted)

    return on_loopback(path, layout, append_block, run, **options)


def distributed_rank(
    rank: int, world_size: int, path: Path, layout: HelixLayout, block: int, wanted: list[Continuation], device: str
) -> Result:
    """Runs one rank of an initialized process group; a worker pool's task.

    Steps with observed logits are eager; captured ones have to sample the same tokens.
    """
    home = torch.device(device, rank) if device == "cuda" else torch.device(device)
    comm = TorchDistCommunicator(layout.kvp_groups(), home, timedelta(seconds=60))
    engine = build_engine(path, layout, comm, block, adaptive=False)
    result = generate(engine, wanted)
    if comm.capturable:
        engine.runner.logits_hook = None
        for _ in range(2):
            requests = [Request(i, c.prompt, len(c.tokens)) for i, c in enumerate(wanted)]
            assert generated_ids(engine, requests) == result.tokens
    engine.close()
    comm.close()
    return result
