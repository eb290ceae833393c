"""Times decode steps of whole models: `python -m launch.bench step | baselines`.

Every point is a job of its own (`bench=decode`): random weights of the real shape, a KV cache full of random data,
over all GPUs of this machine. TTL stands beside its floor: all weights that a step reads and all KV, each once, over
all GPUs at the measured read ceiling, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from rich.console import Console
from rich.table import Table

from helix.layout import HelixLayout
from helix.models import DecoderSpec
from launch import jobs
from launch.bench_kernels import READ_CEILING
from launch.command import ROOT, as_config
from launch.preflight import make_spec

K, M = 1024, 1 << 20
STEPS = 32


@dataclass(frozen=True)
class Workload:
    """Attributes:
    bar: the most that TTL should be, in floors, for the best layout with kvp of at least 2; None: no bar is set.
    vllm_ms: TTL of vLLM 0.25.1 on eight H200 in its best configuration (TP=8; 4 where heads do not go on 8; DCP=4 where
        there are two KV heads), measured on the host that set the bars.
    """

    model: str
    batch: int
    length: int
    bar: float | None = None
    vllm_ms: float | None = None


WORKLOADS = [
    Workload("qwen2.5-7b", 1, 128 * K, 2.5, 3.61),
    Workload("qwen2.5-7b", 1, M, 1.5, 10.37),
    Workload("qwen2.5-7b", 8, 128 * K, 1.5, 6.24),
    Workload("qwen2.5-7b", 8, M, 1.12),
    Workload("qwen2.5-3b", 1, 128 * K, vllm_ms=4.03),
    Workload("qwen2.5-3b", 1, M, vllm_ms=6.38),
    Workload("qwen2.5-3b", 8, 128 * K, vllm_ms=5.37),
    Workload("llama-3.1-8b", 1, 128 * K, 2.2, 3.47),
    Workload("llama-3.1-8b", 1, M, 1.3, 11.20),
    Workload("llama-3.1-8b", 8, 128 * K, 1.3, 6.48),
    Workload("llama-3.1-70b", 1, 128 * K, 1.6),
    Workload("llama-3.1-70b", 1, M, 1.25),
    Workload("llama-3.1-70b", 8, 128 * K, 1.25),
    *[
        Workload(model, batch, length)
        for model in ("qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite", "deepseek-r1")
        for batch, length in ((1, 128 * K), (1, M), (8, 128 * K), (8, M))
    ],
]
# Models of 2, 4, 8 KV heads, and of one latent; batches up to what memory holds, for the curve of users against GPUs.
BASELINES = [
    Workload(model, batch, length)
    for model in ("qwen2.5-3b", "qwen2.5-7b", "llama-3.1-8b", "deepseek-v2-lite")
    for length, batches in ((128 * K, (1, 8, 32)), (M, (1, 2, 4, 8)))
    for batch in batches
] + [w for w in WORKLOADS if w.model in ("qwen3-30b-a3b", "gpt-oss-20b", "deepseek-r1")]
BUDGETS_MS = (5, 10, 20, 50)  # of TTL
ON_CPU = Workload("demo", 1, K)


def spec_of(model: str, *overrides: str) -> DecoderSpec:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return make_spec(as_config(compose("config", [f"model={model}", *overrides])))


def floor_s(spec: DecoderSpec, batch: int, length: int, ranks: int, item: int = 2) -> float:
    """Seconds that reading takes: a layer's matrices and the head, and the KV of all sequences, each once.

    Of the routed experts, those that tokens who choose evenly touch; of a sliding window's layer, its window.
    """
    touched = 0.0
    if spec.moe is not None:
        touched = spec.moe.experts * (1 - (1 - spec.moe.top_k / spec.moe.experts) ** batch)
    weights = sum(_layer_weights(spec, i, touched) for i in range(spec.layers)) + spec.vocab * spec.hidden
    stored = 2 * spec.kv_heads * spec.head_dim if spec.mla is None else spec.mla.entry
    kv = stored * batch * sum(min(window or length, length) for window in spec.windows)
    return (weights + kv) * item / ranks / READ_CEILING


def _layer_weights(spec: DecoderSpec, index: int, experts: float) -> float:
    """Numbers in the matrices of a layer, with so many of its routed experts."""
    attention = 2 * (spec.q_heads + spec.kv_heads) * spec.head_dim * spec.hidden
    if spec.mla is not None:
        attention = spec.mla.weights
    if (moe := spec.moe) is not None and spec.moe_layers[index]:
        return attention + spec.hidden * (moe.experts + 3 * moe.shared_width + 3 * experts * moe.width)
    return attention + 3.0 * spec.hidden * spec.ffn


def fitting_layers(spec: DecoderSpec, ranks: int, memory: int) -> int:
    """How many of a model's first layers fit on GPUs of `memory` bytes each, a fifth of it left to everything else.

    Weights in bf16, spread evenly: of MLA's, a kvp group's ranks hold some alike, which the fifth has to take as well.
    """
    experts = spec.moe.experts if spec.moe is not None else 0
    left = 0.8 * ranks * memory - 2 * 2 * spec.vocab * spec.hidden
    for index in range(spec.layers):
        left -= 2 * _layer_weights(spec, index, experts)
        if left < 0:
            return index
    return spec.layers


def layouts(spec: DecoderSpec, ranks: int, baselines: bool) -> list[HelixLayout]:
    """The grids to time: helix ones with kvp of at least 2, or one of each mode beside the deepest helix ones.

    Of a model with experts, those with one tpf x ep grid, and all others behind the last attention grid.
    """
    helix = [HelixLayout.create("helix", ranks // tpa, tpa) for tpa in range(1, ranks + 1) if ranks % tpa == 0]
    found = [layout for layout in helix if spec.kv_heads % layout.tpa == 0]
    split = [layout for layout in found if layout.kvp > 1]
    if not baselines:
        chosen = split or found
        experts = spec.moe.experts if spec.moe is not None else 1
        eps = [ep for ep in range(2, min(ranks, experts) + 1) if ranks % ep == 0]
        last = chosen[-1]
        return [*chosen, *(HelixLayout.create("helix", last.kvp, last.tpa, ep=ep) for ep in eps)]
    tp = HelixLayout.create("tp", 1, ranks)
    return [tp, *(HelixLayout.create("medha", layout.kvp, layout.tpa) for layout in split[-1:]), *split[-2:]]


def measure(works: list[Workload], layout: HelixLayout, overrides: list[str]) -> list[dict[str, Any]]:
    """One job for workloads of one model; what it measured at each, or why it failed (for want of memory, mostly).

    Raises:
        KeyboardInterrupt: it was interrupted, and no other shall start.
    """
    points = ",".join(f"{w.batch}x{w.length}" for w in works)
    try:
        found = jobs.measure(
            layout.world_size,
            [
                f"model={works[0].model}", f"layout={layout.mode}", f"layout.kvp={layout.kvp}",
                f"layout.tpa={layout.tpa}", f"layout.ep={layout.ep}", "bench=decode", f"bench.points=[{points}]",
                "kv.page_size=64", *overrides, f"bench.steps={STEPS if torch.cuda.is_available() else 3}",
            ],
        )  # fmt: skip
    except jobs.JobError as error:
        found = {"points": [{"failed": str(error)}] * len(works)}
    shared = {k: found[k] for k in ("backend",) if k in found}
    return [
        {
            "model": w.model,
            "batch": w.batch,
            "length": w.length,
            "bar": w.bar,
            "vllm_ms": w.vllm_ms,
            "layout": str(layout),
            **shared,
            **point,
        }
        for w, point in zip(works, found["points"], strict=True)
    ]


def run(ranks: int, baselines: bool, models: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """All workloads (on a CPU a tiny one), of `models` only if given, over all their layouts, and a table of them."""
    workloads = (BASELINES if baselines else WORKLOADS) if torch.cuda.is_available() else [ON_CPU]
    rows = []
    item = 2 if torch.cuda.is_available() else 4
    for model in dict.fromkeys(w.model for w in workloads if models is None or w.model in models):
        spec, overrides = spec_of(model), []
        if torch.cuda.is_available():
            layers = fitting_layers(spec, ranks, torch.cuda.get_device_properties(0).total_memory)
            if layers < spec.layers:
                overrides = [f"model.config.num_hidden_layers={layers}"]
                print(f"{model}: the first {layers} of {spec.layers} layers, which is what fits")
                spec = spec_of(model, *overrides)
        works = [w for w in workloads if w.model == model]
        for layout in layouts(spec, ranks, baselines):
            for row in measure(works, layout, overrides):
                floor_us = 1e6 * floor_s(spec, row["batch"], row["length"], ranks, item)
                rows.append(row | {"layers": spec.layers, "floor_us": floor_us})
                yield rows[-1]
    table = Table(
        "model",
        "batch",
        "length",
        "layout",
        "TTL p50",
        "floor",
        "x floor",
        "bar",
        "vLLM on 8",
        "tok/s/user",
        "tok/s/rank",
    )
    for r in rows:
        cells = ["failed", *["-"] * 6]
        if "failed" not in r:
            times = r["ttl_p50_us"] / r["floor_us"]
            cells = [
                f"{r['ttl_p50_us'] / 1e3:.2f} ms", f"{r['floor_us'] / 1e3:.2f} ms", f"{times:.2f}",
                str(r["bar"] or "-"), f"{r['vllm_ms']:.2f} ms" if r["vllm_ms"] else "-",
                f"{r['tokens_per_s_user']:.1f}", f"{r['tokens_per_s_gpu']:.1f}",
            ]  # fmt: skip
        table.add_row(r["model"], str(r["batch"]), f"{r['length'] // K}K", r["layout"], *cells)
    Console(width=130).print(table)
    if baselines:
        Console(width=130).print(_within_budgets(rows))


def largest_batch(rows: list[dict[str, Any]], budget_us: float) -> int | None:
    """The largest batch among measured `rows` of one layout whose TTL is within the budget; None: not one of them."""
    return max((r["batch"] for r in rows if "failed" not in r and r["ttl_p50_us"] <= budget_us), default=None)


def _within_budgets(rows: list[dict[str, Any]]) -> Table:
    """The largest measured batch that each layout serves within a TTL."""
    table = Table(
        "model", "length", "layout", *(f"<= {ms} ms" for ms in BUDGETS_MS), title="largest batch within a TTL"
    )
    for model, length, layout in dict.fromkeys((r["model"], r["length"], r["layout"]) for r in rows):
        same = [r for r in rows if (r["model"], r["length"], r["layout"]) == (model, length, layout)]
        found = [largest_batch(same, 1e3 * ms) for ms in BUDGETS_MS]
        table.add_row(model, f"{length // K}K", layout, *(str(batch or "-") for batch in found))
    return table
