"""Dual-batch overlap: one half of a long prompt chunk computes while the other's messages are in flight.

    main stream   turn 0 | turn 1 | turn 2 |        | join
    side stream          | turn 0 | turn 1 | turn 2 |

Each collective belongs to a half's stream and to its process groups, so that only this half waits for it: in one group
messages are sent in the order of their launches, and the first half's next one, which is not ready, would hold up the
second's. The second half runs a turn behind the first: it may read what the first wrote in earlier turns. All ranks
launch the turns, and so each half's collectives, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from comm.base import Communicator, T

MAX_UNSPLIT_RANKS = 2  # most ranks that send nothing but sums whose steps are not cut: benchmarks/LOG.md
MIN_MICRO_BATCH_TOKENS = 2048  # tokens: smaller messages gain nothing, and use LL buffers, bound to one stream


@dataclass(frozen=True)
class MicroBatch:
    """One half of a step, which marks what it has done and waits for what the other has.

    Within a turn a half's kernels run beside the other's: it waits for all that those of this turn do for it.

    Attributes:
        first: whether it is the first of the two.
        events: events by what was done, of both halves; empty where kernels run as they are launched.
    """

    first: bool
    events: dict[Hashable, torch.cuda.Event] = field(default_factory=dict)

    def record(self, key: Hashable, device: torch.device) -> None:
        """Marks what kernels launched so far do as done."""
        if device.type == "cuda":
            (event := torch.cuda.Event()).record()
            self.events[key] = event

    def wait(self, key: Hashable) -> None:
        """Lets kernels launched from here on wait for what was marked, if it was."""
        if (event := self.events.get(key)) is not None:
            event.wait()


class DualBatchOverlap:
    """Runner of the two halves of a step.

    Args:
        comm: of the halves' collectives. On a GPU the second half gets a side stream, elsewhere the same calls are made
            in the same order.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._side_stream = torch.cuda.Stream(comm.device) if comm.capturable else None
        self._priority_stream = torch.cuda.Stream(comm.device, priority=-1) if comm.capturable else None

    @contextmanager
    def overlapped(self) -> Iterator[None]:
        """Launches messages beside what the current stream does next, after all that it has been given.

        Their programs are few, and the first to get a place: else they would wait for the end of a kernel that fills
        the GPU, and not be beside it.
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
        """Yields what runs a turn of both halves; at the end the current stream waits for the second half."""
        self._comm.single_stream = False
        try:
            yield self._run_both
            if self._side_stream is not None:
                torch.cuda.current_stream(self._side_stream.device).wait_stream(self._side_stream)
        finally:
            self._comm.single_stream = True

    def _run_both(self, stage: Callable[..., T], *arguments: Sequence[Any]) -> list[T]:
        """Runs a turn of each half, which launches kernels on the current stream, each in its own memory.

        Args:
            arguments: pairs, of the first half's value and the second's.
        """
        first, second = zip(*arguments, strict=True)
        side = self._side_stream
        if side is not None:  # for the first half's earlier turns, not the one launched next
            side.wait_stream(torch.cuda.current_stream(side.device))
        found = stage(*first)
        self._comm.micro_batch = 1
        try:
            with torch.cuda.stream(side):
                return [found, stage(*second)]
        finally:
            self._comm.micro_batch = 0
