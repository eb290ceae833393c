"""Times decode steps of models with experts in layouts of every mode: `helix bench modes`.

Every layout is a job of its own, as in `helix bench step`: plain TP, Medha's, Helix, and attention of whole sequences
by rank (mode `dp`), with every expert split over all GPUs and with whole experts spread over them. Steps are not
emulated: in mode `dp` all rows would be copies of two processes' few, and choose too few experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.models.steps import ON_CPU
from benchmarks.models.workloads import K, Workload, fitting_spec, layouts
from benchmarks.runner import BenchContext
from helix.layout import HelixLayout
from helix.models import DecoderSpec

MODELS = ("deepseek-v2-lite", "qwen3-30b-a3b", "deepseek-r1")
POINTS = [(1, 128 * K), (8, 32 * K), (32, 8 * K)]


def cases(ctx: BenchContext) -> Iterator[tuple[list[Workload], DecoderSpec, HelixLayout, list[str]]]:
    """Each model's workloads in each layout, a job each; on a CPU a tiny one."""
    for model in (ctx.models or MODELS) if ctx.gpu else [ON_CPU.model]:
        spec, cut = fitting_spec(model, 1)  # on a single GPU: Medha may have the whole FFN on one
        works = [Workload(model, batch, length) for batch, length in POINTS] if ctx.gpu else [ON_CPU]
        for layout in [*layouts(spec, ctx.ranks, baselines=True), HelixLayout.create("dp", dp=ctx.ranks)]:
            yield works, spec, layout, cut
            if spec.experts is not None and layout.mode != "medha":
                yield works, spec, replace(layout, tpf=1, ep=ctx.ranks), cut
