"""Predicts a decode step of a whole model: latency, throughput per user and per GPU, and memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from helix.layers.specs import GatedDeltaSpec, MLASpec
from helix.models import DecoderSpec
from helix.planner.hardware import INTERPOLATED, PROVENANCE, Array, Hardware
from helix.planner.layer import SCORE_BYTES, SLOT_BYTES, Layer
from helix.planner.offload import blocks_on_gpu, fetch_latents, fetched_bytes
from helix.planner.phases import Phase
from helix.planner.points import LayerDrafts, Options, Points, check, check_points
from helix.worker.kv_cache_spec import MAX_RING_TOKENS, MIN_SNAPSHOTS, SNAPSHOTS_PER_SLOT, SNAPSHOTS_SHARE

DRAFT_STEP_KERNELS = 8  # small kernels per run of a draft layer: positions, norms, sampling


@dataclass(frozen=True)
class Memory:
    """Memory on the fullest rank, in bytes, as arrays [n] over points.

    Attributes:
        kv_bytes: KV on the GPU.
        largest_batch: most sequences per stage that fit; 0 if the weights do not fit.
        host_bytes: keys and values in host memory.
        prefix_bytes: what pages hold of one sequence, which host memory and disks keep of a prefix.
    """

    weight_bytes: Array
    kv_bytes: Array
    largest_batch: Array
    host_bytes: Array
    prefix_bytes: Array


@dataclass(frozen=True)
class StepCost:
    """Predicted cost of decode steps, as arrays [n] over points.

    Attributes:
        phases: cost of each phase over all layers.
        step_s: seconds of a step, through all pipeline stages.
        ttl_s: token-to-token latency of a sequence; with speculation, the expected one.
        level: provenance, an index into hardware.PROVENANCE.
    """

    points: Points
    memory: Memory
    phases: list[Phase]
    step_s: Array
    ttl_s: Array
    level: Array

    @property
    def tokens_per_s_user(self) -> Array:
        return 1 / self.ttl_s

    @property
    def tokens_per_s_gpu(self) -> Array:
        return self.points.users / self.ttl_s / self.points.gpus

    @property
    def fits(self) -> Array:
        return self.points.batch <= self.memory.largest_batch

    def provenance(self, i: int) -> str:
        return PROVENANCE[self.level[i]]


def predict(spec: DecoderSpec, hardware: Hardware, points: Points, length: int, options: Options) -> StepCost:
    """Predicts the decode step of every point, with `length` cached tokens per sequence, even if it does not fit.

    Raises:
        ValueError: a layout breaks a rule or needs too many GPUs, or a combination is not modeled.
    """
    memory = memory_of(spec, hardware, points, length, options)
    layer = Layer(spec, hardware, points, length, options)
    phases, step_s = _forward(layer)
    s, ttl_s = options.speculation, step_s
    if s is not None:
        drafts: list[Phase] = []
        if s.gamma and s.sparsity is not None:
            one = Layer(spec, hardware, points, length, options, drafting=True)
            drafts = [replace(_forward_phase(one).times(s.gamma), name="drafts"), one.key_selection()]
        elif s.gamma and s.layer is not None:
            drafts = [_layer_drafts(layer, s.layer, s.gamma)]
        phases += drafts
        step_s = step_s + sum(phase.seconds for phase in drafts)
        ttl_s = step_s / s.tokens
    level = np.maximum(INTERPOLATED, np.max([phase.level for phase in phases], axis=0))
    return StepCost(points, memory, phases, step_s, ttl_s, level)


def _forward(layer: Layer) -> tuple[list[Phase], Array]:
    # Phases of a forward pass, from embedding to token, and its seconds.
    total: dict[str, Phase] = {}

    def add(phases: list[Phase], count: int = 1) -> None:
        for phase in phases:
            counted = phase.times(count)
            total[phase.name] = total[phase.name].plus(counted) if phase.name in total else counted

    for of, count in layer.attentions:
        add(of.attention(of.mixer.window), count)
    for mixer, count in _states(layer.spec).items():
        add(layer.recurrent(mixer), count)
    for ffn, count in Counter(of.ffn for of in layer.spec.layers).items():
        add(layer.ffn(ffn), count)
    add(layer.indexing(), len(layer.spec.indexers))
    prefetch, link_s = layer.prefetch()
    add(prefetch)
    if prefetch:
        exposed_s = np.maximum(0.0, link_s - sum(phase.seconds for phase in total.values()))
        add([replace(total["fetch"].times(0), name="wait for the link", seconds=exposed_s)])
    if layer.options.offload is not None and layer.spec.indexers:
        add(fetch_latents(layer, np.sum([phase.seconds for phase in total.values()], axis=0)))
    # The stage with the most layers sets the pace.
    seconds = sum(phase.seconds for phase in total.values()) * _stage_imbalance(layer)
    outer = _outer_phases(layer)
    add(outer)
    return list(total.values()), seconds + sum(phase.seconds for phase in outer)


def _forward_phase(layer: Layer) -> Phase:
    phases, seconds = _forward(layer)
    return replace(reduce(Phase.plus, phases), seconds=seconds)


def _outer_phases(layer: Layer) -> list[Phase]:
    # LM head, sampling, and messages between pipeline stages.
    spec, p, ranks = layer.spec, layer.points, layer.vocabulary_ranks
    rows = np.where(layer.gathered, layer.rows, layer.all_rows)
    send = layer.collective("send", "send", np.where(p.pp > 1, 2, 1), layer.row_bytes(rows))
    return [
        layer.kernel("head", -(-spec.vocab // ranks) * spec.hidden, rows, kind="head"),
        layer.collective("sampling", "all_gather", ranks, rows * ranks * 8.0),  # a score and an id per rank
        send.times(p.pp - 1),
    ]


def _draft_layer(model: Layer, drafts: LayerDrafts, spec: DecoderSpec | None = None) -> Layer:
    alone = replace(model.options, speculation=None, sparse=None, hopb=False, matrices=drafts.matrices)
    return Layer(spec or drafts.spec, model.hardware, model.points, model.length, alone)


def _layer_drafts(model: Layer, drafts: LayerDrafts, gamma: int) -> Phase:
    # The run that writes the KV of verified tokens is also the next step's first draft. Its projections have more rows,
    # but few rows are bound by reading weights anyway.
    first = next_draft = _draft_layer(model, drafts)
    if drafts.spec.nextn_shared_topk:
        next_draft = _draft_layer(model, drafts, drafts.spec.without_indexers())

    def runs(layer: Layer, times: int) -> Phase:
        run, more_s = _forward_phase(layer), DRAFT_STEP_KERNELS * layer.hardware.kernel_s.value
        run = replace(run, seconds=run.seconds + more_s, launches=run.launches + DRAFT_STEP_KERNELS)
        return run.times(times)

    total = runs(first, 1).plus(runs(next_draft, gamma - 1))
    for width, times in ((drafts.input_width, 1), (drafts.next_input_width, gamma - 1)):
        for phase in first.input_projection(width):
            total = total.plus(phase.times(times))
    return replace(total, name="drafts")


def memory_of(spec: DecoderSpec, hardware: Hardware, points: Points, length: int, options: Options) -> Memory:
    """Returns the memory of every point; ValueError as in `predict`."""
    check(spec, options)
    check_points(spec, points)
    if (points.gpus > hardware.gpus).any():
        i = int(np.argmax(points.gpus))
        gpus = f"{points.gpus[i]} GPUs of one NVLink domain"
        raise ValueError(f"{points.describe(i)} needs {gpus}; {hardware.name} has {hardware.gpus}")
    if length < 1:
        raise ValueError(f"length={length} must be at least 1")
    p, layer = points, Layer(spec, hardware, points, length, options)
    drafts = options.speculation.layer if options.speculation is not None else None
    weight_bytes = _weight_bytes(layer, drafts)
    free = np.maximum(hardware.memory_bytes.value - weight_bytes, 0) * options.memory_fraction

    cycle = options.append_block * p.kvp
    local = -(-(length + options.step_tokens) // cycle) * options.append_block  # tokens on the fullest rank
    paged = -(-local // options.page_size) * options.page_size
    # A stage holds its layers' KV of all batches in flight: in total ceil(layers / pp) * pp layers of one batch.
    imbalance, sparse, offload = _stage_imbalance(layer), options.sparse, options.offload
    # Per sequence, the part of it that snapshots copy, for prompt chunks in windows, and per token in pages.
    fixed_size, copied_size, chunk_bytes, full, windowed, bounded = (np.zeros(len(p)) for _ in range(6))
    for of, count in layer.attentions:
        plain_bytes, window = count * of.token_numbers() * of.item["plain_kv"], of.mixer.window
        if window is not None and (window <= MAX_RING_TOKENS or offload):
            copied_size = copied_size + _ring_tokens(layer, window) * plain_bytes
            fixed_size = fixed_size + _chunk_tokens(layer, 0, 1) * plain_bytes
            chunk_bytes = chunk_bytes + _chunk_tokens(layer, options.prompt_chunk or 0, 0) * plain_bytes
            continue
        bounded = bounded + plain_bytes
        if window is None:
            full = full + count * of.token_numbers() * of.item["kv"]
        else:
            windowed = windowed + plain_bytes
    for states, count in _states(spec).items():
        convolved, updates = layer.recent_bytes(states)
        copied_size = copied_size + count * (layer.state_bytes(states) + convolved)
        fixed_size = fixed_size + count * updates
    fixed_size = (fixed_size + copied_size) * imbalance
    if (snapshots := options.snapshots) is None:
        fitting = free // (SNAPSHOTS_SHARE * np.maximum(copied_size * imbalance, 1))
        snapshots = np.maximum(MIN_SNAPSHOTS, np.minimum(SNAPSHOTS_PER_SLOT * layer.sequences, fitting))
    chunk_bytes = (chunk_bytes + snapshots * copied_size) * imbalance
    beside_bytes = paged * sum(map(layer.index_bytes, spec.indexers))
    if drafts is not None:  # all tokens are paged, whatever its window
        draft_layer = _draft_layer(layer, drafts)
        beside_bytes = beside_bytes + paged * draft_layer.token_numbers() * draft_layer.item["kv"]
        beside_bytes = beside_bytes + paged * sum(map(draft_layer.index_bytes, drafts.spec.indexers))
    if offload is not None:
        host_bytes, fixed_bytes = paged * full, chunk_bytes
        if spec.indexers:
            sequence_bytes = beside_bytes + fetched_bytes(layer)
        else:
            prompts, sequence_bytes = blocks_on_gpu(layer, paged / options.page_size)
            fixed_bytes = fixed_bytes + prompts
        room = free if offload.gpu_bytes is None else np.minimum(free, offload.gpu_bytes)
        prefix_bytes = host_bytes
    else:
        host_bytes, fixed_bytes, room = np.zeros(len(p)), chunk_bytes, free
        sequence_bytes = paged * imbalance * (full + windowed)
        if sparse is not None:  # two vectors per block or subblock; a key and a value per token
            sequence_bytes = sequence_bytes + paged * imbalance * bounded * sparse.bounds_per_block / sparse.block
        sequence_bytes = sequence_bytes + beside_bytes
        prefix_bytes = sequence_bytes
        if layer.self_drafts is not None:
            columns = layer.draft_keys() + layer.self_drafts.tail  # one rank may hold the whole tail
            scores = paged * layer.num_score_planes() * SCORE_BYTES + columns * SLOT_BYTES
            if layer.topk is None:
                sequence_bytes = sequence_bytes + scores * layer.kv * len(spec.full)
            else:  # slots that each row selected, and their number
                rows = options.step_tokens * (layer.topk + 1)
                sequence_bytes = sequence_bytes + rows * SLOT_BYTES * len(spec.indexers)
    sequence_bytes = sequence_bytes + fixed_size
    largest = np.maximum(np.floor((room - fixed_bytes) / sequence_bytes), 0)
    if offload is not None:
        largest = np.minimum(largest, np.floor(offload.host_bytes / host_bytes))
    sequences = layer.sequences
    kv_bytes, largest = sequences * sequence_bytes + fixed_bytes, largest.astype(np.int64) * p.dp
    return Memory(weight_bytes, kv_bytes, largest, sequences * host_bytes, prefix_bytes)


def _weight_bytes(model: Layer, drafts: LayerDrafts | None) -> Array:
    spec, p = model.spec, model.points
    # Embedding and head are in different stages of a pipeline.
    vocabulary = -(-spec.vocab // model.vocabulary_ranks) * spec.hidden
    embedding, head = (model.weight_bytes(kind, vocabulary) for kind in ("other", "head"))
    outer = np.where((p.pp > 1) | spec.tied, np.maximum(embedding, head), embedding + head)
    total = _layer_weight_bytes(model) * _stage_imbalance(model) / p.pp + outer
    if drafts is None:
        return total
    draft_layer = _draft_layer(model, drafts)
    head = 0 if drafts.shared_head else drafts.spec.vocab
    extra_numbers = (max(drafts.input_width, drafts.next_input_width) + head) * drafts.spec.hidden
    extra = draft_layer.weight_bytes("other", -(-extra_numbers // p.ranks))
    return total + _layer_weight_bytes(draft_layer) + extra


def _layer_weight_bytes(layer: Layer) -> Array:
    spec, mixer = layer.spec, layer.mixer
    total = np.sum([count * of.attention_bytes() for of, count in layer.attentions], axis=0)
    for states, count in _states(spec).items():
        total = total + count * layer.recurrent_bytes(states)
    for ffn, count in Counter(of.ffn for of in spec.layers).items():
        total = total + count * layer.ffn_bytes(ffn)
    q_rank = (mixer.q_rank if isinstance(mixer, MLASpec) else None) or 0
    return total + layer.weight_bytes("weights", sum(of.weights(spec.hidden, q_rank) for of in spec.indexers))


def _states(spec: DecoderSpec) -> Counter[GatedDeltaSpec]:
    return Counter(layer.mixer for layer in spec.layers if isinstance(layer.mixer, GatedDeltaSpec))


def _ring_tokens(layer: Layer, window: int) -> Array:
    # Tokens of a row's ring buffer on a rank; see `helix.worker.kv_cache.ring`.
    options = layer.options
    cycle = options.append_block * layer.points.kvp
    touched = -(-((window + options.step_tokens - 1) // cycle + 1) * options.append_block // options.page_size) + 1
    return touched * options.page_size


def _chunk_tokens(layer: Layer, tokens: int, sequences: int) -> Array:
    # Tokens of prompt chunks in a layer with a ring; see `helix.kv_placement.KVPlacement.chunk_pages`.
    block, page = layer.options.append_block, layer.options.page_size
    return -(-tokens // (layer.points.kvp * block)) * block + sequences * (block + 2 * page)


def _stage_imbalance(layer: Layer) -> Array:
    # Layers of the fullest stage, times the stages, over the model's layers.
    layers, pp = len(layer.spec.layers), layer.points.pp
    return -(-layers // pp) * pp / layers
