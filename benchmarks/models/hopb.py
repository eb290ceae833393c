"""Times steps with and without HOP-B, one job per backend, model and grid: `helix bench hopb`.

Models are cut to the layers that fit, and to MAX_LAYERS: more layers only make a step longer. One or
two GPUs emulate `ranks=8` or 16: a rank then has the shapes of that many, and sends all its messages over the one
link. With NCCL_P2P_DISABLE=1 that link goes through host memory:

  helix bench hopb ranks=8 models=llama-3.1-405b,deepseek-r1
  NCCL_P2P_DISABLE=1 helix bench hopb ranks=8 models=llama-3.1-405b,deepseek-r1
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks import jobs
from benchmarks.models.workloads import Items, fitting_layers, named
from benchmarks.ranks.hopb import PEER_MEMORY, STEPS, link
from benchmarks.runner import BenchContext, Row
from helix.layout import HelixLayout
from launch.inputs.shapes import spec_of

K = 1024
POINTS = [(batch, length) for length in (8 * K, 32 * K, 128 * K) for batch in (8, 16, 32, 64)]
ON_CPU = [(4, 64)]  # one sequence cannot be cut into chunks
MAX_LAYERS = 12
FP8 = {"llama-3.1-405b": ("model.weights=fp8",)}  # in place of the paper's FP4; deepseek-r1 is published in FP8


@dataclass(frozen=True)
class Case:
    """A job: a model, a backend and a grid."""

    model: str
    backend: str
    layout: HelixLayout


def cases(ctx: BenchContext) -> list[tuple[Case]]:
    """Returns one job per model, backend and grid with an exchange; on a CPU the smallest.

    Raises:
        ValueError: there is one rank.
    """
    if ctx.ranks < 2:
        raise ValueError("HOP-B needs at least two ranks: use two GPUs or more")
    gpu_backends = ("symm_mem", "nccl") if link() == PEER_MEMORY else ("nccl",)
    backends = ("emulated",) if ctx.emulated else gpu_backends if ctx.gpu else ("gloo",)
    found = []
    for model in (ctx.models or ["qwen2.5-7b"]) if ctx.gpu else ["demo"]:
        heads = spec_of(model).attention.kv_heads
        for tpa in (n for n in range(1, ctx.ranks) if ctx.ranks % n == 0 and heads % n == 0):
            layout = HelixLayout.create("helix", ctx.ranks // tpa, tpa)
            found += [(Case(model, backend, layout),) for backend in backends]
    return found


def measure(ctx: BenchContext, case: Case) -> list[Row]:
    """Returns the rows of a job, without those that an earlier model, backend or grid already gave."""
    points = POINTS if ctx.gpu else ON_CPU
    overrides = [
        *named(case.model), "bench=hopb", f"layout.kvp={case.layout.kvp}", f"layout.tpa={case.layout.tpa}",
        f"bench.points=[{','.join(f'{batch}x{length}' for batch, length in points)}]",
        f"bench.steps={STEPS if ctx.gpu else 3}",
        *([] if ctx.emulated else [f"comm.backend={case.backend}"]),
        *(cut(case.model, ctx.ranks, points) if ctx.gpu else []),
    ]  # fmt: skip
    rows: list[Row] = jobs.measure(ctx.ranks, overrides)["hopb"]
    (first,), *_ = cases(ctx)
    alike = case.model == first.model and case.layout == first.layout
    kinds = {"ttl", "failed", *["mla"] * alike, *["delay", "timeline"] * (case == first)}
    rows = [row | {"model": case.model} if row["kind"] in ("ttl", "failed") else row for row in rows]
    return [row for row in rows if row["kind"] in kinds]


def cut(model: str, ranks: int, points: list[tuple[int, int]]) -> list[str]:
    """Returns the overrides of a model in FP8 with the layers that fit next to the largest point's KV."""
    overrides = list(FP8.get(model, ()))
    spec = spec_of(model)
    cache_specs = spec.kv_cache_specs(HelixLayout.create(), 0, "bfloat16")
    tokens = max(batch * length for batch, length in points)
    each = (
        sum(tokens * sum(cache_spec.bytes for cache_spec in layer) for layer in cache_specs) / len(cache_specs) / ranks
    )
    memory = torch.cuda.get_device_properties(0).total_memory
    fit = fitting_layers(spec, ranks, memory, Items.of([*named(model), *overrides]), kv=each)
    layers = min(fit, MAX_LAYERS)
    return [*overrides, *([f"model.config.num_hidden_layers={layers}"] if layers < len(spec.layers) else [])]
