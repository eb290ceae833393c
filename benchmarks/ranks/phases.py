"""Breaks an iteration of drafting and verification into phases, by events inside its CUDA graph."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median

import torch

from comm.base import Communicator
from helix.worker.cuda_graphs import StepGraphs
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.model_runner import ModelRunner

TIMES = 9
STEPS = TIMES + 2  # steps that `phase_us` runs


def phase_us(runner: ModelRunner, comm: Communicator, kind: DecodeGraphKey) -> dict[str, float]:
    """Times each phase of a step in median microseconds, on the slowest rank. Collective; sequences advance."""
    kind = replace(kind, chunks=runner.chunks(kind.rows))
    graphs = StepGraphs() if runner.graphs is not None else None
    marks: list[tuple[str | None, torch.cuda.Event | float]] = []

    def mark(phase: str | None) -> None:
        if graphs is None:
            if comm.device.type == "cuda":
                torch.cuda.synchronize()
            marks.append((phase, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record()
        marks.append((phase, event))

    def step() -> None:
        (partial(graphs.run, runner.step) if graphs is not None else runner.step)(kind)

    found: dict[str, list[float]] = defaultdict(list)
    step()
    runner.mark = mark
    try:
        for i in range(TIMES + 1):
            if graphs is None or i == 0:  # a replay records the events that were captured with the graph
                marks.clear()
            comm.barrier()
            step()
            if comm.device.type == "cuda":
                torch.cuda.synchronize()
            for (phase, begin), (_, end) in pairwise(marks):
                if i and phase is not None:
                    found[phase].append(_between(begin, end))
    finally:
        runner.mark = lambda phase: None
        if graphs is not None:
            graphs.close()
    rank_medians = comm.all_gather_object({phase: median(us) for phase, us in found.items()})
    return {phase: round(max(medians[phase] for medians in rank_medians), 1) for phase in found}


def _between(begin: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return 1e6 * (float(end) - float(begin))  # type: ignore[arg-type]
    return 1e3 * begin.elapsed_time(end)
