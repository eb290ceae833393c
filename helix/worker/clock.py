"""Timing on a device's stream, independent of the host."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch


class TimedEvent:
    """A point of the current stream, reached once the device has run so far; on a CPU, its time of creation."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()
        self._at = perf_counter()

    @property
    def reached(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def since(self, other: TimedEvent) -> float:
        """Returns the seconds since another event of the same stream; both must be reached."""
        if self._event is None or other._event is None:
            return self._at - other._at
        return float(other._event.elapsed_time(self._event)) / 1e3


def time_each(
    call: Callable[[], Any], times: int, device: torch.device, between: Callable[[], Any] = lambda: None
) -> list[float]:
    """Times each of `times` calls on the device, without host delays; `between` runs after each call, untimed."""
    pairs: list[tuple[TimedEvent, TimedEvent]] = []
    for _ in range(times):
        begin = TimedEvent(device)
        call()
        pairs.append((begin, TimedEvent(device)))
        between()
    for _, end in pairs:
        end.wait()
    return [end.since(begin) for begin, end in pairs]


__all__ = ["TimedEvent", "time_each"]
