"""Times Pareto fronts of tokens/s per user against tokens/s per GPU: `helix bench pareto`.

DeepSeek-R1's and Llama-405B's whole shapes in FP8. Layouts have 16 to 64 ranks, and 8 where a GPU holds their share;
one or two GPUs emulate them, and run the real kernels of a rank. The simulator selects the layouts and batches to time:
a few evenly spaced points of the fronts of Helix, plain TP and DP attention, at 128K and 1M tokens. One job per layout;
rows of several runs make one record.

  helix bench pareto models=deepseek-r1
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from benchmarks.models.search import frontier, search, select_points
from benchmarks.models.steps import time_job
from benchmarks.models.workloads import K, M, Workload
from benchmarks.runner import BenchContext, Row
from comm.emulated import emulating_processes
from helix.layout import HelixLayout
from helix.models import DecoderSpec
from helix.planner.hardware import E4M3, QUANTIZED, Hardware
from helix.planner.points import DP, Options
from helix.planner.step import StepCost
from launch.inputs.hardware import hardware_of
from launch.inputs.shapes import load_spec

MODELS = "deepseek-r1", "llama-3.1-405b"
LENGTHS = 128 * K, M
RANKS = 8, 16, 32, 64
BATCHES = 2 ** np.arange(8)
TIMED = {"helix": 4, "tp": 2, "dp": 2}  # points of a mode's front per length
FP8 = Options(  # what the runtime runs
    "bf16", "bf16", "bf16", hopb=False, dispatch="all", matrices=dict.fromkeys(QUANTIZED, E4M3)
)
WEIGHTS = ["model.weights=fp8"]  # for a shape that is published in bf16
ON_CPU = Workload("demo", 1, K)


def front(spec: DecoderSpec, hardware: Hardware, length: int, mode: str) -> StepCost | None:
    """Returns a mode's front over the runtime's layouts, by increasing tokens/s per user; None if nothing fits."""
    wide = replace(hardware, gpus=max(RANKS))  # as if one NVLink domain had them all
    try:
        step = search(spec, wide, length, FP8, gpus=RANKS, batches=BATCHES, modes=(mode,))
    except ValueError:
        return None
    p = step.points
    step = select_points(step, (p.pp == 1) & ((p.dp == 1) | ((p.mode == DP) & (p.tpa == 1))))
    return select_points(step, frontier(step)) if len(step.points) else None


def pareto_layouts(model: str, hardware: Hardware) -> dict[HelixLayout, list[Workload]]:
    """Selects layouts, and the batches and lengths to time in each."""
    spec = load_spec(model)
    found: dict[HelixLayout, list[Workload]] = {}
    for length in LENGTHS:
        for mode, count in TIMED.items():
            step = front(spec, hardware, length, mode)
            points = [] if step is None else range(len(step.points))
            for i in dict.fromkeys(np.linspace(0, len(points) - 1, min(count, len(points))).round().astype(int)):
                assert step is not None
                found.setdefault(step.points.layout(i), []).append(Workload(model, int(step.points.batch[i]), length))
    return found


def cases(ctx: BenchContext) -> Iterator[tuple[HelixLayout, list[Workload]]]:
    """Yields one job per layout; on a CPU the smallest."""
    if not ctx.gpu:
        yield HelixLayout.create("helix", 2, 1), [ON_CPU]
        return
    for model in ctx.models or MODELS:
        works = pareto_layouts(model, hardware_of(torch.cuda.get_device_name()))
        yield from sorted(works.items(), key=lambda case: case[0].world_size)


def measure(ctx: BenchContext, layout: HelixLayout, works: list[Workload]) -> Iterator[Row]:
    """Yields the rows of a job."""
    for row in time_job(works, layout, WEIGHTS if ctx.gpu else []):
        yield row | {"ranks": layout.world_size, "emulated_by": emulating_processes() if ctx.gpu else None}
