"""Decode steps as CUDA graphs: one launch a step, whatever the step consists of."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor


class StepGraphs:
    """Runs a step eagerly the first time, captures it the second time and replays it from then on, for each key.

    The step must read and write device tensors that stay where they are, and wait for nothing. Every rank has to call
    with the same keys in the same order: the first run and the capture are collective.

    Args:
        step: called with the parts of a key; what it returns is overwritten by the next run of that key.
    """

    def __init__(self, step: Callable[..., Tensor]) -> None:
        self._step = step
        self._warm: set[tuple[Hashable, ...]] = set()
        self._captured: dict[tuple[Hashable, ...], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, *key: Hashable) -> Tensor:
        if key not in self._warm:  # compiles kernels and sets up communication, which capture cannot
            self._warm.add(key)
            return self._step(*key)
        if key not in self._captured:
            graph = torch.cuda.CUDAGraph()
            # Thread-local: the watchdogs of NCCL query events from threads of their own meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = self._step(*key)
            self._captured[key] = graph, result
        graph, result = self._captured[key]
        graph.replay()
        return result

    def close(self) -> None:
        """Gives the captured graphs up: NCCL waits for them when its communicator is destroyed, for ever."""
        torch.cuda.synchronize()
        for graph, _ in self._captured.values():
            graph.reset()
        self._captured.clear()
