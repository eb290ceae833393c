"""Times decode steps of whole models: `helix bench step | baselines | sparse-steps | sparse-policies`.

Every point is a separate job (`bench=decode`): random weights of the real shape, a KV cache full of random data,
over all GPUs of this machine. TTL (time per token) is compared with the ideal: all weights that a step reads
and all KV, each once, over all GPUs at the measured read ceiling, whatever the layout.

`sparse-steps` times 1 to 8 sequences of 8K to 1M tokens with dense attention, then with 8 and with 32 selected blocks
of 128, from the first token on: in turns over the same cache, in one layout. A row's `sparse` says what queries read,
and is null for dense attention. On one GPU, and on eight ranks that it emulates:

  helix bench sparse-steps
  helix bench sparse-steps ranks=8

`sparse-policies` times every policy and dense attention, at fewer points of more models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

import torch

from benchmarks import jobs
from benchmarks.models.workloads import (
    BASELINES,
    WORKLOADS,
    Items,
    K,
    M,
    Workload,
    fitting_spec,
    floor_s,
    layouts,
    named,
    widest,
)
from benchmarks.runner import BenchContext, Row
from benchmarks.schema import compose_config
from helix.layout import HelixLayout
from helix.models import DecoderSpec
from launch.inputs.auto_layout import budget

STEPS = 32
ON_CPU = Workload("demo", 1, K)
SPARSE_MODELS = ("qwen2.5-7b", "llama-3.1-8b", "gpt-oss-20b")
SPARSE_ON_CPU = [Workload("demo", batch, 8 * K) for batch in (1, 2)]
ROOMY = ("kv.memory_fraction=0.95",)  # so that an H200 holds 2 x 1M tokens of Qwen2.5-7B
LENGTHS = (8 * K, 32 * K, 128 * K, 512 * K, M)
BATCHES = (1, 2, 4, 8)
POLICY_POINTS = [(1, 128 * K), (1, 512 * K), (4, 128 * K)]  # that one GPU holds for each of SPARSE_MODELS
BUDGETS = (
    (
        "attention=block_sparse", "attention.num_blocks=32", "attention.from_tokens=0",
        'bench.variants=["attention.policy=dense","attention.num_blocks=8","attention.num_blocks=32"]',
    ),
)  # fmt: skip
POLICIES: tuple[tuple[str, ...], ...] = (
    (),
    *((f"attention={policy}", "attention.from_tokens=0") for policy in ("block_sparse", "parts", "quest", "window")),
)


def time_job(works: list[Workload], layout: HelixLayout, overrides: list[str]) -> list[Row]:
    """Runs one job over the workloads of one model; returns the figures of each, or the error (mostly out of memory).

    With `bench.gammas` or `bench.variants` among the overrides a workload has a row for each of them.

    Raises:
        KeyboardInterrupt: the job was interrupted; start no other.
    """
    points = ",".join(f"{w.batch}x{w.length}" for w in works)
    try:
        found = jobs.measure(
            layout.world_size,
            [
                *named(works[0].model), f"layout={layout.mode}", f"layout.kvp={layout.kvp}",
                f"layout.tpa={layout.tpa}", f"layout.ep={layout.ep}", f"layout.dp={layout.dp}", "bench=decode",
                f"bench.points=[{points}]",
                *overrides, f"bench.steps={STEPS if torch.cuda.is_available() else 3}",
            ],
        )  # fmt: skip
    except jobs.JobError as error:
        found = {"points": [{"failed": str(error)}] * len(works)}
    shared = {k: found[k] for k in ("backend",) if k in found}
    each = len(found["points"]) // len(works)
    return [
        {
            "model": w.model,
            "batch": w.batch,
            "length": w.length,
            "bar": w.target,
            "vllm_ms": w.vllm_ms,
            "layout": str(layout),
            **shared,
            **point,
        }
        for w, point in zip((w for w in works for _ in range(each)), found["points"], strict=True)
    ]


def cases(
    workloads: list[Workload], baselines: bool, ctx: BenchContext
) -> Iterator[tuple[list[Workload], DecoderSpec, HelixLayout, list[str]]]:
    """Yields one job per model and layout, with its workloads; on a CPU the smallest."""
    selected = [w for w in workloads if ctx.models is None or w.model in ctx.models] if ctx.gpu else [ON_CPU]
    for model in dict.fromkeys(w.model for w in selected):
        spec, overrides = fitting_spec(model, ctx.ranks)
        for layout in layouts(spec, ctx.ranks, baselines):
            yield [w for w in selected if w.model == model], spec, layout, overrides


def measure(
    ctx: BenchContext, works: list[Workload], spec: DecoderSpec, layout: HelixLayout, overrides: list[str]
) -> Iterator[Row]:
    """Yields the rows of a job, with the ideal of each."""
    items = Items.of([*named(works[0].model), *overrides]) if ctx.gpu else Items(*[4.0] * len(Items._fields))
    for row in time_job(works, layout, overrides):
        floor_us = 1e6 * floor_s(spec, row["batch"], row["length"], ctx.ranks, items)
        yield row | {"layers": len(spec.layers), "floor_us": floor_us}


def sparse_cases(
    models: tuple[str, ...], points: list[tuple[int, int]], attentions: tuple[tuple[str, ...], ...], ctx: BenchContext
) -> Iterator[tuple[list[Workload], DecoderSpec, HelixLayout, list[str]]]:
    """Yields one job per model and attention, in the widest grid that splits the KV."""
    for model in (ctx.models or models) if ctx.gpu else [SPARSE_ON_CPU[0].model]:
        spec, cut = fitting_spec(model, ctx.ranks)
        works = [Workload(model, batch, length) for batch, length in points]
        grid = widest(spec, ctx.ranks)
        for attention in attentions:
            yield works if ctx.gpu else SPARSE_ON_CPU, spec, grid, [*cut, *ROOMY, *attention]


def measure_sparse(
    ctx: BenchContext, works: list[Workload], spec: DecoderSpec, layout: HelixLayout, overrides: list[str]
) -> Iterator[Row]:
    """Yields the rows of a job with what its queries read: `sparse` is None for dense attention."""
    for row in time_job(works, layout, overrides):
        read = budget(compose_config([*overrides, *row.get("variant", "").split()]))
        attention = "dense" if read is None else f"block_sparse, k={read.topk} of {read.block // read.parts}"
        about = {"layers": len(spec.layers), "attention": attention}
        yield row | about | {"sparse": None if read is None else asdict(read)}


STEP_MODELS, BASELINE_MODELS = (tuple(dict.fromkeys(w.model for w in works)) for works in (WORKLOADS, BASELINES))
step_cases = partial(cases, WORKLOADS, False)
baseline_cases = partial(cases, BASELINES, True)
budget_cases = partial(sparse_cases, SPARSE_MODELS[:1], [(n, length) for length in LENGTHS for n in BATCHES], BUDGETS)
policy_cases = partial(sparse_cases, SPARSE_MODELS, POLICY_POINTS, POLICIES)
