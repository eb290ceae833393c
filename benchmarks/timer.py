"""Timing: CUDA-graph replays of one kernel over inputs that exceed the L2 cache, and back-to-back calls."""

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
PRODUCT_CEILING = 700e12  # FLOP/s in bf16; cuBLAS in long prompts, an H200 at 700 W (benchmarks/LOG.md)
READ_CEILING_H100 = 3.0e12
PAGE, DIM = 64, 128
ROTATED = 256 << 20  # bytes of KV to read before a copy repeats: four times the L2
K = 1024
WARM_UP_S = 0.05  # an idle GPU needs time to raise its clocks: the first few launches are up to 10% slower


def read_ceiling(device: torch.device) -> float:
    """Returns this GPU's read-only bandwidth in bytes/s; without a GPU, an H200's."""
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
    """Returns sorted seconds per run, from CUDA-graph replays of at least `min_launches` runs over rotating copies."""
    if device.type != "cuda":
        return time_each(lambda: run(0), 1, device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # the inputs may still be in flight
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
        found = time_each(graph.replay, times + 1, device)[1:]  # drop the first: it overlaps its own launch by the host
    graph.reset()
    return sorted(s / launches for s in found)


def in_a_row(call: Callable[[], Any], times: int, device: torch.device) -> list[float]:
    """Returns the seconds from the end of each call to the end of the next, by device events."""
    moments = [TimedEvent(device)]
    for _ in range(times):
        call()
        moments.append(TimedEvent(device))
    moments[-1].wait()
    return [end.since(begin) for begin, end in pairwise(moments)]


def slowest(comm: Communicator, seconds: list[float]) -> list[float]:
    """Returns the maximum over ranks of each time. Collective."""
    return [max(rank_seconds) for rank_seconds in zip(*comm.all_gather_object(seconds), strict=True)]


def seconds(run: Callable[[int], Any], copies: int, device: torch.device) -> float:
    """Returns the median seconds of one run, by graph replays over rotating copies."""
    return median(replays(run, copies, device, min_launches=4, times=15))
