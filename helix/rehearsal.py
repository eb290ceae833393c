"""A rehearsal of the steps to come: it launches no kernel, and when it is over all of them are compiled."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from helix.autotune import fill
from helix.decision import Admission, Decision, Segment
from helix.model_runner import ModelRunner
from helix.sampling import SamplingParams
from kernels.ahead import compiled_ahead


@torch.inference_mode()
def rehearse(
    runner: ModelRunner, prompts: Iterable[int], steps: Iterable[tuple[int, int, bool, bool, bool, int, bool]]
) -> None:
    """Goes through prompts and decode steps; a collective, to be called while nothing is served.

    What pages and slots hold is lost.

    Args:
        prompts: their lengths, none longer than a chunk.
        steps: arguments of `ModelRunner.step`.
    """
    with compiled_ahead():
        for count in prompts:
            pages = np.arange(runner.placement.stripes.pages_for(count), dtype=np.int32)
            tokens = np.zeros(count, dtype=np.int32)
            admission = Admission("rehearsal", 0, count, tokens, 0, pages, count, count, SamplingParams())
            segment = Segment(0, 0, count, last=True, tokens=tokens)
            runner.execute(Decision(0, (), (), (admission,), (segment,), 0, 1, stochastic=False, filtered=False))
            runner.execute(Decision.nothing((0,)))
        for step in steps:
            fill(runner, step[0], 1)
            runner.step(*step)
        fill(runner, 0, 0)
