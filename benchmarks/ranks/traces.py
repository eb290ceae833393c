"""Profiles of decode steps and of chunks of prompts: the kernels that they consist of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from comm.base import Communicator

NAME = 100  # characters of a kernel's name that are kept
LONGEST = 6  # kernels whose times on all ranks, and from start to end, are kept


def trace(step: Callable[[], Any], layers: int, comm: Communicator) -> dict[str, Any]:
    """Finds what a step consists of on this rank's GPU: launches a layer, the share of time without a kernel, kernels.

    Kernels start while others run out, and wait as running ones: each counts from the end of those before it. Of the
    longest, the times of all ranks tell who is waited for, and those from start to end what runs beside another.
    """
    if comm.device.type != "cuda":
        step()
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        comm.barrier()  # profilers take their time to start, and peers would wait inside the first kernels
        step()
        torch.cuda.synchronize()
    kernels = [e for e in profiled.events() or [] if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in kernels)
    until, microseconds, whole = float("-inf"), Counter[str](), Counter[str]()
    for start, end, name in spans:
        microseconds[name[:NAME]] += max(0.0, end - max(start, until))
        whole[name[:NAME]] += end - start
        until = max(until, end)
    total = until - spans[0][0] if spans else 0.0
    ranks = comm.all_gather_object(dict(microseconds))
    return {
        "launches_per_layer": len(spans) / layers,
        "idle_share": 1 - microseconds.total() / total if total else None,
        "kernel_us": {name: round(us, 1) for name, us in microseconds.most_common()},
        "whole_us": {name: round(us, 1) for name, us in whole.most_common(LONGEST)},
        "kernel_us_by_rank": {
            name: [round(of.get(name, 0.0), 1) for of in ranks] for name, _ in microseconds.most_common(LONGEST)
        },
    }
