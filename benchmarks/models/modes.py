"""Times decode steps of MoE models in layouts of every mode: `helix bench modes`.

Each layout is a separate job, as in `helix bench step`: plain TP, Medha's, Helix, and data-parallel attention
(mode `dp`), with every expert split over all GPUs (TP) and with whole experts spread over them (EP). Steps are not
emulated: in mode `dp` all rows would be copies of two processes' few, and select too few experts.
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
    """Yields one job per model and layout, with all workloads; on a CPU the smallest."""
    for model in (ctx.models or MODELS) if ctx.gpu else [ON_CPU.model]:
        spec, cut = fitting_spec(model, 1)  # fit on a single GPU: Medha may have the whole FFN on one
        works = [Workload(model, batch, length) for batch, length in POINTS] if ctx.gpu else [ON_CPU]
        for layout in [*layouts(spec, ctx.ranks, baselines=True), HelixLayout.create("dp", dp=ctx.ranks)]:
            yield works, spec, layout, cut
            if spec.experts is not None and layout.mode != "medha":
                yield works, spec, replace(layout, tpf=1, ep=ctx.ranks), cut
