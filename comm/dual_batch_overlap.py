"""Dual-batch overlap (DBO): one half of a long prompt chunk computes while the other half communicates.

    main stream   stage 0 | stage 1 | stage 2 |         | join
    side stream           | stage 0 | stage 1 | stage 2 |

Each micro-batch has its own stream and process groups. In one shared group NCCL would send in launch order, and the
first micro-batch's next message, not ready yet, would hold up the second's. The second micro-batch runs one stage after
the first, and may read what the first wrote in earlier stages. All ranks launch the stages in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from comm.base import Communicator, T

MAX_UNSPLIT_RANKS = 2  # up to here, steps that only all-reduce do not gain from a split: benchmarks/LOG.md
MIN_MICRO_BATCH_TOKENS = 2048  # smaller messages gain nothing, and use LL buffers, which only one stream may use


@dataclass(frozen=True)
class MicroBatch:
    """One half of a step; records events that the other half waits for.

    Kernels of the two halves overlap within a stage, so dependencies within a stage need an event.

    Attributes:
        events: of both halves, by key; empty on a CPU.
    """

    first: bool
    events: dict[Hashable, torch.cuda.Event] = field(default_factory=dict)

    def record(self, key: Hashable, device: torch.device) -> None:
        """Records an event after the kernels launched so far."""
        if device.type == "cuda":
            (event := torch.cuda.Event()).record()
            self.events[key] = event

    def wait(self, key: Hashable) -> None:
        """Makes later kernels wait for the event recorded under `key`, if any."""
        if (event := self.events.get(key)) is not None:
            event.wait()


class DualBatchOverlap:
    """Runs a step as two overlapping micro-batches: on a GPU the second gets a side stream, on a CPU they alternate."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._side_stream = torch.cuda.Stream(comm.device) if comm.capturable else None
        self._priority_stream = torch.cuda.Stream(comm.device, priority=-1) if comm.capturable else None

    @contextmanager
    def overlapped(self) -> Iterator[None]:
        """Launches messages on a high-priority stream, to overlap what the current stream launches next.

        Without priority their few CTAs would wait for the end of a kernel that fills the GPU.
        """
        if self._priority_stream is not None:
            self._priority_stream.wait_stream(torch.cuda.current_stream(self._priority_stream.device))
        self._comm.micro_batch = 1
        try:
            with torch.cuda.stream(self._priority_stream):
                yield
        finally:
            self._comm.micro_batch = 0

    @contextmanager
    def micro_batches(self) -> Iterator[Callable[..., list[Any]]]:
        """Yields a function that runs one stage of both micro-batches; on exit the current stream joins the second."""
        self._comm.single_stream = False
        try:
            yield self._run_both
            if self._side_stream is not None:
                torch.cuda.current_stream(self._side_stream.device).wait_stream(self._side_stream)
        finally:
            self._comm.single_stream = True

    def _run_both(self, stage: Callable[..., T], *arguments: Sequence[Any]) -> list[T]:
        # `arguments` are pairs: the first and the second micro-batch's value.
        first, second = zip(*arguments, strict=True)
        side = self._side_stream
        if side is not None:  # waits for the first half's earlier stages, not for the one launched next
            side.wait_stream(torch.cuda.current_stream(side.device))
        found = stage(*first)
        self._comm.micro_batch = 1
        try:
            with torch.cuda.stream(side):
                return [found, stage(*second)]
        finally:
            self._comm.micro_batch = 0
