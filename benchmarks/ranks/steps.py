"""Times decode steps over a cache of random data, so that long contexts need no prefill."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.ranks.phases import STEPS as PHASED
from benchmarks.ranks.phases import phase_us
from benchmarks.ranks.points import at_each, engine_at, gammas, limit, used
from benchmarks.ranks.request_allocator import RequestAllocator
from benchmarks.ranks.synthetic import repeat_selected_blocks
from benchmarks.ranks.traces import trace
from benchmarks.ranks.variants import variants
from benchmarks.schema import LabConfig, lab
from benchmarks.timer import in_a_row, slowest
from comm.base import Communicator
from helix.attention.block_sparse import BlockSparseAttention
from helix.attention.policies import make_policy
from helix.engine.draft_policy import Acceptance, DraftOutcome
from helix.engine.timings import Timings
from helix.models.decoder import Decoder
from helix.models.draft_layer import DraftLayer
from helix.speculation import DraftModel, ModelDrafter
from helix.worker.cuda_graphs import StepGraphs
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.model_runner import ModelRunner
from helix.worker.offloaded_cache import OffloadedCache
from helix.worker.step import PLACEHOLDER_TOKEN_ID
from helix.worker.warmup import choose_chunks
from launch.inputs.preflight import CheckedRun
from launch.job.report import Console, summary
from launch.job.task import JobResult, Task

WARM_UP = 4
UNTIMED = WARM_UP + 1 + PHASED  # the traced step, and those whose phases are timed


def run(task: Task) -> JobResult:
    """Times `bench.steps` decode steps at each of `bench.points`, for each of `bench.variants` and `bench.gammas`.

    Raises:
        ConfigError: the only point exceeds the model's context, or its cache does not fit.
    """
    plan, comm = task.plan, task.comm
    limit(plan.config, comm.device)
    model, draft = task.load()
    found: list[dict[str, Any]] = []
    for row in at_each(plan, comm, partial(_time_point, plan, comm, model, draft, task.console)):
        every = [(label, gamma) for label in variants(lab(plan.config)) for gamma in gammas(lab(plan.config))]
        found += [row | {"variant": label, "gamma": gamma} for label, gamma in every] if "failed" in row else [row]
    return {"points": found}, 0


def _time_point(
    plan: CheckedRun,
    comm: Communicator,
    model: Decoder,
    draft: DraftModel | DraftLayer | None,
    console: Console,
    batch: int,
    length: int,
) -> list[dict[str, Any]]:
    config = lab(plan.config)
    layout = plan.layout
    dp_slots = [range(home, batch, layout.dp) for home in range(layout.dp)]  # sequences of each rank in mode dp
    mine = len(dp_slots[layout.dp_rank(comm.rank)])
    engine, reserved = engine_at(plan, comm, model, batch, length, UNTIMED + config.bench.steps, draft=draft)
    fill(engine.runner, mine, length, reserved, config.seed + comm.rank)
    choose_chunks(engine.runner, len(dp_slots[0]))
    tokens = [
        sum(layout.local_length(reserved, k, config.blocks.append, slot % layout.kvp) for slot in range(len(slots)))
        for slots in dp_slots
        for k in range(layout.kvp)
    ]
    shared = {
        "batch": batch,
        "length": length,
        "captured": comm.capturable,
        "weight_bytes_per_rank": comm.all_gather_object(model.weights.bytes),
    }
    sparsity = config.speculation.sparsity if config.speculation.drafter == "sparse" else None
    found = []
    for (label, variant), gamma in product(variants(config).items(), gammas(config)):
        if config.bench.variants:
            _attend_as(engine.runner, variant)
        rewind(engine.runner, mine, length)
        drafts = f", {gamma} drafts" * (gamma > 0) + f", {label}" * bool(label)
        with torch.inference_mode(), console.progress(f"{batch} x {length:,}{drafts}", config.bench.steps) as advance:
            timings, traced = _time_drafts(engine.runner, comm, batch, length, gamma, config.bench.steps)
            advance(config.bench.steps)
        timings.kv_tokens = tokens
        memory = torch.cuda.max_memory_allocated() if comm.device.type == "cuda" else None
        measured = summary(plan.layout, timings, comm.all_gather_object(engine.runner.cache.bytes_per_token))
        measured |= {"variant": label, "gamma": gamma, "sparsity": sparsity if gamma else None, **shared, **traced}
        measured["hopb_chunks"] = engine.runner.chunks(len(dp_slots[0]))
        measured["max_allocated_bytes_per_rank"] = comm.all_gather_object(memory)
        measured["used_bytes_per_gpu"] = comm.all_gather_object(used(comm.device))
        console.finish(f"{batch} x {length:,} tokens of random KV{drafts}", measured)
        found.append(measured)
    engine.close()
    return found


def _attend_as(runner: ModelRunner, config: LabConfig) -> None:
    runner.close()
    policy = make_policy(config.attention, runner.placement, runner.sizes.length, runner.comm, config.kv)
    runner.policy = policy or runner.dense
    repeat_selected_blocks(runner, config.bench.repeat)
    if runner.graphs is not None:
        runner.graphs = StepGraphs()


def _time_drafts(
    runner: ModelRunner, comm: Communicator, batch: int, length: int, gamma: int, steps: int
) -> tuple[Timings, dict[str, Any]]:
    """Times steps with `gamma` drafts, and breaks one of them down.

    A step counts as its slowest rank; no rank waits for its host between steps.
    """
    outcomes: list[Tensor] = []
    rows = -(-batch // runner.layout.dp)
    kind = DecodeGraphKey(rows, gamma, sparse=runner.sparse_at(length))

    def step() -> None:
        tokens = runner.decode(kind)
        if gamma:
            outcomes.append(tokens.clone())

    for _ in range(WARM_UP):
        step()
    outcomes.clear()
    policy = runner.policy
    if isinstance(policy, BlockSparseAttention):
        policy.counted.zero_()
    if isinstance(runner.cache, OffloadedCache):
        runner.cache.fetch_counts.zero_()
        runner.cache.prefetch_counts.zero_()
    comm.barrier()
    seconds = in_a_row(step, steps, comm.device)
    read = blocks_read(runner, comm) if kind.sparse else {}
    if isinstance(runner.cache, OffloadedCache):
        read |= blocks_fetched(runner.cache, comm, steps)
    traced = read | trace(partial(runner.decode, kind), len(runner.model.spec.layers), comm)
    if gamma:
        traced["phase_us"] = phase_us(runner, comm, DecodeGraphKey(rows, gamma))
    comm.check()
    timings = Timings(acceptance=Acceptance(gamma))
    accepted = [((t != PLACEHOLDER_TOKEN_ID).sum(1) - 1).tolist() for t in outcomes] or [[0] * batch] * steps
    for step_s, accepted_by_row in zip(slowest(comm, seconds), accepted, strict=True):
        timings.step(step_s, gamma, [DraftOutcome(slot, gamma, count) for slot, count in enumerate(accepted_by_row)])
    return timings, traced


def blocks_read(runner: ModelRunner, comm: Communicator) -> dict[str, Any]:
    """Returns the blocks that a query read per KV head and layer, on each rank, counted on the device.

    Raises:
        RuntimeError: no query selected blocks: the timed steps were dense.
    """
    assert isinstance(runner.policy, BlockSparseAttention)
    read = runner.policy.blocks_read()
    if read is None:
        raise RuntimeError("block-sparse steps read all blocks: no query selected any")
    return {"blocks_read_per_rank": comm.all_gather_object(read)}


def blocks_fetched(cache: OffloadedCache, comm: Communicator, steps: int) -> dict[str, Any]:
    """Returns each rank's link bytes per step, prefetches included, and its hit rate."""
    (hits, misses), (_, prefetched) = cache.fetch_counts.tolist(), cache.prefetch_counts.tolist()
    block = cache.gpu_blocks[0, 0].numel() * cache.gpu_blocks.itemsize
    return {
        "resident_share_per_rank": comm.all_gather_object(hits / max(hits + misses, 1)),
        "link_bytes_per_step_per_rank": comm.all_gather_object((misses + prefetched) * block // steps),
        "prefetch_bytes_per_step_per_rank": comm.all_gather_object(prefetched * block // steps),
        "host_bytes_per_rank": comm.all_gather_object(cache.store.bytes),
    }


def fill(runner: ModelRunner, batch: int, length: int, reserved: int, seed: int) -> None:
    """Fills the cache with random keys and values for `batch` sequences of `length` tokens."""
    randomize(runner, seed)
    allocator = RequestAllocator(runner)
    for slot in range(batch):
        runner.admit(allocator.new_request(slot, reserved))
    rewind(runner, batch, length)
    lengths = runner.state.lengths[:batch]
    runner.cache.fold(runner.state.span(batch, torch.zeros_like(lengths), lengths, length))


def randomize(runner: ModelRunner, seed: int) -> None:
    """Fills the cache, and a draft model's, with random numbers."""
    generator = torch.Generator(runner.device).manual_seed(seed)
    caches = [runner.cache, *([runner.drafter.cache] if isinstance(runner.drafter, ModelDrafter) else [])]
    for name, tensor in (named for cache in caches for group in cache.groups for named in group.tensors.items()):
        for layer in tensor:
            if name.endswith("_scales"):
                layer.fill_(1)
            elif layer.dtype == torch.int32:
                layer.zero_()  # what the last step selected: warm-up steps write it
            elif layer.dtype == torch.float8_e4m3fn:  # torch has no random numbers in FP8
                for pages in layer.split(1024):
                    pages.copy_(torch.randn(pages.shape, generator=generator, device=pages.device))
            else:
                layer.normal_(generator=generator)


def rewind(runner: ModelRunner, batch: int, length: int) -> None:
    """Rewinds the first `batch` sequences to `length` tokens; later steps overwrite what was appended."""
    slots = torch.arange(batch, device=runner.device)
    runner.state.activate(slots, torch.zeros_like(slots), torch.full_like(slots, length))
    if runner.drafter.observes_step(DecodeGraphKey(batch, runner.sizes.drafts)):
        runner.drafter.catch_up(runner.state)
