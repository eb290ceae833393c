"""Decode steps as CUDA graphs: one launch a step, or part of one, whatever it consists of."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch


class StepGraphs:
    """Runs a step eagerly the first time, captures it the second time and replays it from then on, for each key.

    A step must read and write device tensors that stay where they are, and wait for nothing. Every rank has to call
    with the same keys in the same order: the first run and the capture are collective.
    """

    def __init__(self) -> None:
        self._warm: set[Hashable] = set()
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, step: Callable[..., Any], *args: Hashable) -> Any:
        """What `step` returns for its arguments, which are the key with it; the next run of that key overwrites it."""
        key = step, *args
        if key not in self._warm:  # compiles kernels and sets up communication, which capture cannot
            self._warm.add(key)
            return step(*args)
        if key not in self._captured:
            graph = torch.cuda.CUDAGraph()
            # Thread-local: the watchdogs of NCCL query events from threads of their own meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = step(*args)
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
