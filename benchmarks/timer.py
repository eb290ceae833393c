"""Timing: one kernel by CUDA-graph replays over inputs that together do not fit the L2, and calls in a row."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from comm.base import Communicator
from helix.worker.clock import TimedEvent, time_each

READ_CEILING = 4.69e12  # bytes/s; read-only sum over 4 GiB on an H200
PRODUCT_CEILING = 700e12  # FLOP/s in bf16; the library's products in long prompts, an H200 at 700 W (benchmarks/LOG.md)
READ_CEILING_H100 = 3.0e12
PAGE, DIM = 64, 128
ROTATED = 256 << 20  # bytes of KV that pass before the first one is read again: four times the L2
K = 1024
WARM_UP_S = 0.05  # a GPU that was idle takes its time to come up to speed: up to 10% at the first few launches


def read_ceiling(device: torch.device) -> float:
    """Bytes per second of reading alone on this GPU; those of an H200 where there is none."""
    on_h100 = device.type == "cuda" and "H100" in torch.cuda.get_device_name(device)
    return READ_CEILING_H100 if on_h100 else READ_CEILING


def replays(
    run: Callable[[int], Any],
    copies: int,
    device: torch.device,
    min_launches: int,
    times: int,
    warm_up_s: float = WARM_UP_S,
) -> list[float]:
    """Seconds of one run within a graph of `min_launches` or more, one behind the other over rotated copies; sorted."""
    if device.type != "cuda":
        return time_each(lambda: run(0), 1, device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # what the run reads may still be on its way
    with torch.cuda.stream(stream):
        run(0)
        graph = torch.cuda.CUDAGraph()
        launches = max(copies, min_launches)
        with torch.cuda.graph(graph, stream=stream):
            for i in range(launches):
                run(i % copies)
        begin = time.perf_counter()
        while time.perf_counter() - begin < warm_up_s:
            graph.replay()
            stream.synchronize()
        found = time_each(graph.replay, times + 1, device)[1:]  # the first begins while the host launches it
    graph.reset()
    return sorted(s / launches for s in found)


def in_a_row(call: Callable[[], Any], times: int, device: torch.device) -> list[float]:
    """Seconds from the end of one call to that of the next, as the device sees them; the first begins here."""
    moments = [TimedEvent(device)]
    for _ in range(times):
        call()
        moments.append(TimedEvent(device))
    moments[-1].wait()
    return [end.since(begin) for begin, end in pairwise(moments)]


def slowest(comm: Communicator, seconds: list[float]) -> list[float]:
    """Each of some times on the rank that took longest; a collective call."""
    return [max(rank_seconds) for rank_seconds in zip(*comm.all_gather_object(seconds), strict=True)]


def seconds(run: Callable[[int], Any], copies: int, device: torch.device) -> float:
    """Median time of one run within a graph, over rotated copies."""
    return median(replays(run, copies, device, min_launches=4, times=15))
