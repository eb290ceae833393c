"""Rehearsal of later steps: compiles all their kernels without launching any."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from helix.engine.decision import Admission, Decision, Segment, StepKind
from helix.sampling_params import SamplingParams
from helix.worker.autotune import fill
from helix.worker.model_runner import ModelRunner
from kernels.ahead import compiled_ahead


@torch.inference_mode()
def rehearse(
    runner: ModelRunner,
    chunks: Iterable[tuple[int, int, int]],
    steps: Iterable[StepKind],
) -> None:
    """Runs chunks of prompts and decode steps without launches; a collective, to be called while idle.

    The content of pages and slots is lost.

    Args:
        chunks: (prompts, tokens of each, tokens before these) of each chunk.
        steps: kinds of decode steps, each once.
    """
    graphs, runner.graphs = runner.graphs, None  # what is not launched cannot be captured
    with compiled_ahead():
        for prompts, count, known in chunks:
            end, slots = known + count, range(prompts)
            pages = np.arange(runner.placement.stripes.pages_for(end), dtype=np.int32)
            tokens = np.zeros(count, dtype=np.int32)
            text = np.zeros(end, dtype=np.int32)
            admit = [
                Admission("rehearsal", i, end, text, 0, pages, end, end, SamplingParams(), known, known) for i in slots
            ]
            parts = [Segment(i, known, end, last=True, tokens=tokens) for i in slots]
            rows = min(1 << (prompts - 1).bit_length(), runner.max_batch)
            # In mode dp the FFN has as many rows as attention if all prompts are one rank's.
            counts = (prompts * count, *[0] * (runner.layout.dp - 1)) if runner.layout.dp > 1 else ()
            runner.execute(Decision(0, (), (), tuple(admit), tuple(parts), 0, StepKind(rows), counts=counts))
            runner.execute(Decision.nothing(tuple(slots)))
        for kind in steps:
            fill(runner, kind.rows, 1)
            runner.step(kind)
        fill(runner, 0, 0)
    runner.graphs = graphs
