"""Models, batches and lengths whose steps are timed, and the minimum time to read what a step reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch

from benchmarks import jobs
from benchmarks.cases import cases
from benchmarks.schema import compose_config
from benchmarks.timer import PRODUCT_CEILING, READ_CEILING
from helix.layers.specs import AttentionSpec, GatedDeltaSpec, MixerSpec, MLASpec, MoESpec
from helix.layout import HelixLayout
from helix.models import DecoderSpec
from helix.models.spec import LayerSpec
from helix.setup.parts import make_spec
from helix.worker.kv_cache_spec import KVCacheSpec
from launch.inputs.auto_layout import planner_options
from launch.inputs.compose import ROOT
from launch.inputs.shapes import spec_of

K, M = 1024, 1 << 20
Point = tuple[int, int]  # sequences, and tokens of each
SHAPES = tuple(sorted(file.stem for file in (ROOT / "conf" / "model").glob("*.yaml")))


@dataclass(frozen=True)
class Workload:
    """A timed batch and length of a model.

    Attributes:
        target: maximum TTL, in ideals, for the best layout with kvp of at least 2; None: no target.
        vllm_ms: TTL of vLLM 0.25.1 on eight H200 (TP=8; 4 where 8 does not divide the heads; DCP=4 where there are two
            KV heads), with its decode graphs' default of 32 splits. It was measured once, on the host that set the
            targets. There is no record, command or log of it, and tables say so.
    """

    model: str
    batch: int
    length: int
    target: float | None = None
    vllm_ms: float | None = None


WORKLOADS = [Workload(*case) for case in cases("step")]
BASELINES = [Workload(*case) for case in cases("baselines")]
BASELINES += [w for w in WORKLOADS if w.model in ("qwen3-30b-a3b", "gpt-oss-20b", "deepseek-r1")]


class Items(NamedTuple):
    """Bytes per element of matrices, by the planner's kinds, and of everything else.

    Attributes:
        weights: inputs of attention and of states.
    """

    weights: float = 2.0
    output: float = 2.0
    dense: float = 2.0
    experts: float = 2.0
    shared_experts: float = 2.0
    head: float = 2.0
    other: float = 2.0

    @classmethod
    def of(cls, overrides: Sequence[str]) -> Items:
        """Returns those of a job on GPUs, from its overrides."""
        config = compose_config(overrides)
        options = planner_options(config, make_spec(config))
        return cls(*(options.stored(kind).bytes for kind in cls._fields[:-1]))


BF16 = Items()


def floor_s(spec: DecoderSpec, batch: int, length: int, ranks: int, items: Items = BF16) -> float:
    """Returns the seconds that reading alone takes: each layer's matrices, the head, and all KV, each once.

    GEMMs may take longer: `attention_over_reading_s`. Routed experts count as the expected number under uniform
    routing; a sliding-window layer as its window; latents with an indexer as the selected ones. States are read and
    written.
    """
    touched = 0.0
    if (moe := spec.experts) is not None:
        touched = moe.experts * (1 - (1 - moe.top_k / moe.experts) ** batch)
    weights = sum(_layer_bytes(spec, layer, touched, items) for layer in spec.layers)
    weights += spec.vocab * spec.hidden * items.head
    whole, rank = HelixLayout.create(), 0
    cache_specs = spec.kv_cache_specs(whole, rank, "bfloat16")
    read = sum(
        _read_bytes(layer, cache_specs, length, items)
        for layer, cache_specs in zip(spec.layers, cache_specs, strict=True)
    )
    return (weights + batch * read) / ranks / READ_CEILING


def attention_over_reading_s(layers: Sequence[LayerSpec], batch: int, length: int, ranks: int) -> float:
    """Returns the seconds by which MLA's products outlast reading its latents, in all layers.

    Each bf16 latent is read once and multiplied twice by every head: with 128 heads that is 242 FLOP per byte, where
    the machine has 149.
    """
    over = 0.0
    for mixer in (layer.mixer for layer in layers):
        if isinstance(mixer, MLASpec):
            tokens = batch * min(mixer.topk or length, length) / ranks
            flops = 2 * tokens * mixer.q_heads * (2 * mixer.latent + mixer.rope)
            over += max(0.0, flops / PRODUCT_CEILING - 2 * tokens * (mixer.latent + mixer.rope) / READ_CEILING)
    return over


def _read_bytes(layer: LayerSpec, cache_specs: Sequence[KVCacheSpec], length: int, items: Items) -> float:
    """Bytes that a step reads of one sequence's cache in a layer, and writes of its state."""
    topk = getattr(layer.mixer, "topk", None)
    found = 0.0
    for each in cache_specs:
        if each.per == "slot":
            found += 2 * each.bytes
        elif each.per == "token":
            reach = topk if topk and not each.name.startswith("index") else each.window
            found += min(reach or length, length) * math.prod(each.entry) * items.other
    return found


def _layer_bytes(spec: DecoderSpec, layer: LayerSpec, experts: float, items: Items) -> float:
    output = spec.hidden * _output_width(layer.mixer)
    of = (layer.mixer.weights - output) * items.weights + output * items.output
    if isinstance(moe := layer.ffn, MoESpec):
        routed = 3 * experts * moe.width * items.experts
        return of + spec.hidden * (moe.experts * items.other + 3 * moe.shared_width * items.shared_experts + routed)
    return of + layer.ffn.multiplications(spec.hidden) * items.dense


def _output_width(mixer: MixerSpec) -> int:
    if isinstance(mixer, GatedDeltaSpec):
        return mixer.value_heads * mixer.value_dim
    assert isinstance(mixer, AttentionSpec | MLASpec)
    return mixer.q_heads * (mixer.value if isinstance(mixer, MLASpec) else mixer.head_dim)


def fitting_layers(spec: DecoderSpec, ranks: int, memory: int, items: Items = BF16, kv: float = 0.0) -> int:
    """Returns how many of a model's first layers fit on GPUs of `memory` bytes each, with a fifth left for the rest.

    Weights are spread evenly; MLA weights that a kvp group replicates have to fit into that fifth too.

    Args:
        kv: bytes of KV per layer on each GPU.
    """
    experts = 0 if spec.experts is None else spec.experts.experts
    left = 0.8 * ranks * memory - 2 * 2 * spec.vocab * spec.hidden
    for index, layer in enumerate(spec.layers):
        left -= _layer_bytes(spec, layer, experts, items) + ranks * kv
        if left < 0:
            return index
    return len(spec.layers)


def fitting_spec(model: str, ranks: int, *overrides: str) -> tuple[DecoderSpec, list[str]]:
    """Returns a model cut to the layers that fit on this machine's GPUs, and the overrides; whole on a CPU."""
    spec = spec_of(model)
    if torch.cuda.is_available():
        items = Items.of([*named(model), *overrides])
        layers = fitting_layers(spec, ranks, torch.cuda.get_device_properties(0).total_memory, items)
        if layers < len(spec.layers):
            print(f"{model}: only the first {layers} of {len(spec.layers)} layers fit")
            cut = [f"model.config.num_hidden_layers={layers}"]
            return spec_of(model, *cut), cut
    return spec, []


def named(model: str) -> list[str]:
    """Returns the overrides of a model: its checkpoint if it has one, else random weights."""
    has_weights = compose_config([f"model={model}"]).model.path is not None
    return [f"model={model}", *([] if has_weights else ["model.load=random"])]


def layouts(spec: DecoderSpec, ranks: int, baselines: bool) -> list[HelixLayout]:
    """Returns the grids to time: helix ones with kvp of at least 2, or the baselines and the helix ones of largest kvp.

    For MoE models: one tpf x ep grid for each, and all others for the last attention grid.
    """
    helix = [HelixLayout.create("helix", ranks // tpa, tpa) for tpa in range(1, ranks + 1) if ranks % tpa == 0]
    found = [layout for layout in helix if spec.attention.kv_heads % layout.tpa == 0]
    split = [layout for layout in found if layout.kvp > 1]
    if not baselines:
        selected = split or found
        experts = 1 if spec.experts is None else spec.experts.experts
        eps = [ep for ep in range(2, min(ranks, experts) + 1) if ranks % ep == 0]
        last = selected[-1]
        return [*selected, *(HelixLayout.create("helix", last.kvp, last.tpa, ep=ep) for ep in eps)]
    tp = HelixLayout.create("tp", 1, ranks)
    return [tp, *(HelixLayout.create("medha", layout.kvp, layout.tpa) for layout in split[-1:]), *split[-2:]]


def widest(spec: DecoderSpec, ranks: int) -> HelixLayout:
    """Returns the grid with the widest tpa that splits the KV."""
    return [grid for grid in layouts(spec, ranks, baselines=False) if grid.ep == 1][-1]


def decoding(
    model: str,
    layout: HelixLayout,
    points: Sequence[Point],
    gammas: Sequence[int],
    steps: int,
    acceptance: float,
    *more: str,
) -> list[str]:
    """Returns the overrides of a job that times decode steps with and without drafts, at a fixed acceptance rate."""
    return [
        *named(model), f"layout.kvp={layout.kvp}", f"layout.tpa={layout.tpa}", f"layout.ep={layout.ep}",
        "hopb=off", "decode.stream=false", "bench=decode", f"bench.gammas={[*gammas]}",
        f"bench.points=[{','.join(f'{batch}x{length}' for batch, length in points)}]", f"bench.steps={steps}",
        f"bench.acceptance={acceptance}", *more,
    ]  # fmt: skip


def drafted(
    model: str,
    layout: HelixLayout,
    points: Sequence[Point],
    gammas: Sequence[int],
    steps: int,
    acceptance: float,
    *more: str,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Runs such a job; returns its backend, if it ran, and the row of each point and gamma."""
    try:
        record = jobs.measure(layout.world_size, decoding(model, layout, points, gammas, steps, acceptance, *more))
    except jobs.JobError as error:
        return {}, failed(points, gammas, error)
    return {"backend": record["backend"]}, record["points"]


def over_plain(row: dict[str, Any], points: Sequence[dict[str, Any]]) -> float:
    """Returns the time of a step relative to a plain step at the same point."""
    at = row["batch"], row["length"], 0
    plain = next(p for p in points if (p["batch"], p["length"], p["gamma"]) == at)
    return float(row["ttl_p50_us"] / plain["ttl_p50_us"])


def failed(points: Sequence[Point], gammas: Sequence[int], error: object) -> list[dict[str, Any]]:
    """Returns the rows of a job that failed as a whole."""
    of = product(points, gammas)
    return [{"batch": batch, "length": length, "gamma": n, "failed": str(error)} for (batch, length), n in of]
