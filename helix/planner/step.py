"""Cost of a decode step of a whole model: time, speed for a user and for a GPU, memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import reduce

import numpy as np

from helix.layers.specs import GatedDeltaSpec, MLASpec
from helix.models import DecoderSpec
from helix.planner import cost
from helix.planner.hardware import INTERPOLATED, PROVENANCE, Array, Hardware
from helix.planner.layer import SCORE_BYTES, SLOT_BYTES, Layer, Phase, token_numbers
from helix.planner.points import LayerDrafts, Options, Points, check, check_points
from helix.setup.buffers import PIECE_TOKENS
from helix.worker.keeps import LISTS, RING_MOST

MORE_KERNELS = 8  # in a run of a layer that drafts: positions, norms, its part of the sampling
NUMBER_BYTES = 4  # of an entry that maps blocks to places
RUN_ENDS = 2  # pages that a run of tokens touches besides those it fills
CHUNK_TOKENS = 8192  # tokens of a prompt chunk, besides two pieces of the tokens before it


@dataclass(frozen=True)
class Memory:
    """Memory on the fullest rank, in bytes, as arrays [n] over points.

    Attributes:
        kv_bytes: KV on the GPU.
        largest_batch: most sequences per stage that fit; 0 if even the weights do not fit.
        host_bytes: keys and values in host memory.
    """

    weight_bytes: Array
    kv_bytes: Array
    largest_batch: Array
    host_bytes: Array

    def __getitem__(self, chosen: Array) -> Memory:
        return Memory(*(getattr(self, field.name)[chosen] for field in fields(self)))


@dataclass(frozen=True)
class StepCost:
    """Predicted cost of decode steps, as arrays [n] over points.

    Attributes:
        phases: cost of each phase over all layers.
        step_s: seconds of a step; of a pipeline, the seconds of a sequence through all stages.
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
    def user(self) -> Array:
        """Tokens/s of one user: interactivity."""
        return 1 / self.ttl_s

    @property
    def gpu(self) -> Array:
        """Tokens/s of one GPU: throughput."""
        return self.points.users / self.ttl_s / self.points.gpus

    @property
    def fits(self) -> Array:
        return self.points.batch <= self.memory.largest_batch

    def provenance(self, i: int) -> str:
        return PROVENANCE[self.level[i]]

    def __getitem__(self, chosen: Array) -> StepCost:
        phases = [phase[chosen] for phase in self.phases]
        arrays = (array[chosen] for array in (self.step_s, self.ttl_s, self.level))
        return StepCost(self.points[chosen], self.memory[chosen], phases, *arrays)


def predict(spec: DecoderSpec, hardware: Hardware, points: Points, length: int, options: Options) -> StepCost:
    """Predicts every point's decode step, with `length` tokens of each sequence in the cache, even if it does not fit.

    Raises:
        ValueError: a layout breaks a rule or needs too many GPUs, or a combination is not modelled.
    """
    memory = memory_of(spec, hardware, points, length, options)
    phases, step_s = _pass(Layer(spec, hardware, points, length, options))
    ttl_s = step_s
    if (s := options.speculation) is not None:
        if s.sparsity is not None and s.gamma:
            layer = Layer(spec, hardware, points, length, options, drafting=True)
            own, draft_s = _pass(layer)
            drafts = replace(reduce(Phase.plus, own).times(s.gamma), name="drafts", seconds=s.gamma * draft_s)
            phases += [drafts, layer.choosing()]
            step_s = step_s + sum(phase.seconds for phase in phases[-2:])
        if s.layer is not None and s.gamma:
            phases.append(_layer_drafts(s.layer, hardware, points, length, options))
            step_s = step_s + phases[-1].seconds
        ttl_s = (step_s + s.gamma * s.draft_s) / cost.tokens_per_step(s.gamma, s.acceptance)
    level = np.maximum(INTERPOLATED, np.max([phase.level for phase in phases], axis=0))
    return StepCost(points, memory, phases, step_s, ttl_s, level)


def _pass(layer: Layer) -> tuple[list[Phase], Array]:
    """Computes the phases of a forward pass, from embedding to token, and its seconds."""
    total: dict[str, Phase] = {}
    for window, count in Counter(layer.spec.windows).items():
        _add(total, layer.attention(window), count)
    for mixer, count in states_of(layer.spec).items():
        _add(total, layer.recurrent(mixer), count)
    for ffn, count in Counter(of.ffn for of in layer.spec.layers).items():
        _add(total, layer.ffn(ffn), count)
    _add(total, layer.indexing(), len(layer.spec.indexers))
    guesses, busy = layer.ahead()
    _add(total, guesses, 1)
    if guesses:
        late = np.maximum(0.0, busy - sum(phase.seconds for phase in total.values()))
        _add(total, [replace(total["fetch"].times(0), name="wait for the link", seconds=late)], 1)
    # The stage with the most layers determines the pace of all stages.
    seconds = sum(phase.seconds for phase in total.values()) * _stretch(layer.spec, layer.points)
    ends = _ends(layer)
    _add(total, ends, 1)
    return list(total.values()), seconds + sum(phase.seconds for phase in ends)


def _of_layer(layer: LayerDrafts, hardware: Hardware, points: Points, length: int, options: Options) -> Layer:
    """Returns the layer that drafts, in runs of one token a sequence."""
    alone = replace(options, speculation=None, sparse=None, hopb=False)
    return Layer(layer.spec, hardware, points, length, alone)


def _layer_drafts(drafts: LayerDrafts, hardware: Hardware, points: Points, length: int, options: Options) -> Phase:
    """Computes the cost of all drafts of a step by a layer.

    The run that writes the keys of verified tokens is that of the next step's first draft. Its projections have more
    rows, which few rows of weights' time do not show.
    """
    layer = _of_layer(drafts, hardware, points, length, options)
    s = options.speculation
    assert s is not None

    def runs(of: Layer, times: int) -> Phase:
        phases, seconds = _pass(of)
        run, more = reduce(Phase.plus, phases), MORE_KERNELS
        run = replace(run, seconds=seconds + more * hardware.kernel_s.value, launches=run.launches + more)
        return run.times(times)

    again = layer
    if drafts.spec.brought_choice:
        again = _of_layer(replace(drafts, spec=drafts.spec.without_indexers()), hardware, points, length, options)
    total = runs(layer, 1).plus(runs(again, s.gamma - 1))
    for joined, times in ((drafts.joined, 1), (drafts.joined_again, s.gamma - 1)):
        for phase in layer.join(joined):
            total = total.plus(phase.times(times))
    return replace(total, name="drafts")


def memory_of(spec: DecoderSpec, hardware: Hardware, points: Points, length: int, options: Options) -> Memory:
    """Computes the memory of every point.

    Raises:
        ValueError: as in `predict`.
    """
    check(spec, options)
    check_points(spec, points)
    if (points.gpus > hardware.gpus).any():
        i = int(np.argmax(points.gpus))
        gpus = f"{points.gpus[i]} GPUs of one NVLink domain"
        raise ValueError(f"{points.describe(i)} needs {gpus}; {hardware.name} has {hardware.gpus}")
    if length < 1:
        raise ValueError(f"length={length} must be at least 1")
    p = points
    layer = Layer(spec, hardware, p, length, options)
    numbers = len(spec.windows) * layer.attention_bytes()
    for mixer, count in states_of(spec).items():
        numbers = numbers + count * layer.recurrent_bytes(mixer)
    for ffn, count in Counter(of.ffn for of in spec.layers).items():
        numbers = numbers + count * layer.ffn_bytes(ffn)
    drafts = options.speculation.layer if options.speculation is not None else None
    indexers = [*spec.indexers, *(drafts.spec.indexers if drafts is not None else ())]
    q_rank = spec.attention.q_rank if isinstance(spec.attention, MLASpec) else None
    numbers = numbers + sum(of.weights(spec.hidden, q_rank or 0) for of in indexers) * layer.item["weights"]
    # Embedding and head are in different stages of a pipeline.
    vocabulary = -(-spec.vocab // p.ranks) * spec.hidden * np.where((p.pp > 1) | spec.tied, 1, 2)
    weight_bytes = numbers * _stretch(spec, p) / p.pp + vocabulary * layer.item["other"]
    of_drafts = None if drafts is None else _of_layer(drafts, hardware, p, length, options)
    if drafts is not None and of_drafts is not None:
        (own,) = drafts.spec.layers
        weight_bytes = weight_bytes + of_drafts.attention_bytes() + of_drafts.ffn_bytes(own.ffn)
        head = 0 if drafts.shared_head else drafts.spec.vocab
        beside = (max(drafts.joined, drafts.joined_again) + head) * drafts.spec.hidden
        weight_bytes = weight_bytes + -(-beside // p.ranks) * of_drafts.item["other"]

    cycle = options.append_block * p.kvp
    local = -(-(length + options.step_tokens) // cycle) * options.append_block  # tokens on the fullest rank
    paged = -(-local // options.page_size) * options.page_size
    # A stage holds its layers' KV of all batches in flight: together ceil(layers / pp) * pp layers of one batch.
    numbers, kv, plain = token_numbers(spec, p) * _stretch(spec, p), layer.item["kv"], layer.item["plain_kv"]
    short = [window for window in spec.windows if window is not None and (window <= RING_MOST or options.tier)]
    long = sum(window is not None for window in spec.windows) - len(short)  # windows in pages
    each = paged * numbers * ((len(spec.windows) - len(short) - long) * kv + long * plain)
    if drafts is not None and of_drafts is not None:  # whatever its window
        each = each + paged * token_numbers(drafts.spec, p) * of_drafts.item["kv"]
    if (sparse := options.sparse) is not None:  # two vectors per block or part, a key and a value per token
        each = each + paged * numbers * (len(spec.windows) - len(short)) * plain * sparse.kept / sparse.block
    each = each + paged * sum(map(layer.index_bytes, indexers))
    windows = sum(_ring_tokens(window, p, options) for window in short) * numbers * plain
    each = each + windows
    states = sum(count * layer.state_bytes(mixer) * _stretch(spec, p) for mixer, count in states_of(spec).items())
    each = each + states
    if layer.self_drafts is not None:
        columns = layer.draft_keys() + layer.self_drafts.tail  # of a table; a rank may hold the whole tail
        own = paged * layer.planes() * SCORE_BYTES + columns * SLOT_BYTES
        each = each + own * layer.kv * len(spec.full)
    free = np.maximum(hardware.memory_bytes.value - weight_bytes, 0) * options.memory_fraction
    fixed, on_host, room = np.zeros(len(p)), np.zeros(len(p)), free
    if (tier := options.tier) is not None and sparse is not None:
        on_host = paged * token_numbers(spec, p) * len(spec.full) * kv
        fixed, each = _on_gpu(layer, paged / options.page_size)
        each = each + windows + states
        room = free if tier.gpu_bytes is None else np.minimum(free, tier.gpu_bytes)
    largest = np.maximum(np.floor((room - fixed) / each), 0)
    if tier is not None and sparse is not None:
        largest = np.minimum(largest, np.floor(tier.host_bytes / on_host))
    sequences = -(-p.batch // p.dp)
    return Memory(weight_bytes, sequences * each + fixed, largest.astype(np.int64) * p.dp, sequences * on_host)


def states_of(spec: DecoderSpec) -> Counter[GatedDeltaSpec]:
    """Counts the layers with states, by kind."""
    return Counter(layer.mixer for layer in spec.layers if isinstance(layer.mixer, GatedDeltaSpec))


def _ring_tokens(window: int, p: Points, options: Options) -> Array:
    """Computes the tokens in a slot's ring on a rank, for a layer with a window; see `helix.worker.kv_cache.ring`."""
    cycle = options.append_block * p.kvp
    touched = -(-((window + options.step_tokens - 1) // cycle + 1) * options.append_block // options.page_size) + 1
    return touched * options.page_size


def _on_gpu(layer: Layer, pages: Array) -> tuple[Array, Array]:
    """Computes the least GPU bytes of a cache in host memory: for prompts, and for each sequence of `pages` pages.

    The formula is that of `helix.setup.tiering.tiered_bytes`.
    """
    layers, sparse, item = len(layer.spec.full), layer.options.sparse, layer.item
    assert sparse is not None
    block = 2 * sparse.block * layer.head_dim * item["kv"]  # a page of one head
    page = layers * layer.kv * (2 * layer.head_dim * item["plain_kv"] * sparse.kept + NUMBER_BYTES)
    place = layer.kv * (layers * (block + 4 * NUMBER_BYTES) + LISTS * 2 * NUMBER_BYTES)
    drafts = layer.options.step_tokens - 1
    whole = replace(sparse, topk=sparse.touched, parts=1)
    places = whole.blocks(layer.points.kvp) + RUN_ENDS + drafts * -(-sparse.touched // layer.points.kvp)
    prompts = (2 * PIECE_TOKENS + CHUNK_TOKENS) / sparse.block * layer.kv * block
    return prompts, pages * page + layers * layer.kv * block + places * place


def _stretch(spec: DecoderSpec, p: Points) -> Array:
    """Computes the layers of the fullest stage, times the stages, over the model's layers."""
    return -(-len(spec.layers) // p.pp) * p.pp / len(spec.layers)


def _ends(layer: Layer) -> list[Phase]:
    """Lists the phases outside layers: the head with sampling, and messages between pipeline stages."""
    spec, p = layer.spec, layer.points
    rows = layer.all_rows
    send = layer.collective("send", "send", np.where(p.pp > 1, 2, 1), rows * spec.hidden * layer.item["messages"])
    return [
        layer.kernel("head", -(-spec.vocab // p.ranks) * spec.hidden, rows, kind="other"),
        layer.collective("sampling", "all_gather", p.ranks, rows * p.ranks * 8.0),  # a score and an id of each rank
        send.times(p.pp - 1),
    ]


def _add(total: dict[str, Phase], phases: list[Phase], count: int) -> None:
    for phase in phases:
        counted = phase.times(count)
        total[phase.name] = total[phase.name].plus(counted) if phase.name in total else counted
