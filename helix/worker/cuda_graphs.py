"""CUDA graphs of steps: a whole step, or a part of one, in one launch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch


class StepGraphs:
    """Captured steps by key: the first run of a key is eager, the second is captured, later ones are replayed.

    A step must read and write device tensors at fixed addresses, and must not wait for the device. Every rank calls
    with the same keys in the same order: the first run and the capture are collective.
    """

    def __init__(self) -> None:
        self._warm: set[Hashable] = set()
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, step: Callable[..., Any], *args: Hashable, captures: bool = True) -> Any:
        """Runs a step, keyed by function and arguments; returns its result, which the next such run overwrites.

        Args:
            captures: if False, it is not captured now, but replayed or run eagerly.
        """
        key = step, *args
        if key not in self._warm:  # compile kernels and set up communication, which capture cannot
            self._warm.add(key)
            return step(*args)
        if key not in self._captured:
            if not captures:
                return step(*args)
            graph = torch.cuda.CUDAGraph()
            # Thread-local, since NCCL's watchdog threads query events during capture.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = step(*args)
            self._captured[key] = graph, result
        graph, result = self._captured[key]
        graph.replay()
        return result

    def has(self, step: Callable[..., Any], *args: Hashable) -> bool:
        return (step, *args) in self._captured

    def close(self) -> None:
        """Frees the captured graphs: otherwise NCCL hangs when its communicator is destroyed."""
        torch.cuda.synchronize()
        for graph, _ in self._captured.values():
            graph.reset()
        self._captured.clear()
