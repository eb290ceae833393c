"""Profiles the kernels of decode steps and prompt chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from comm.base import Communicator

NAME = 100  # maximum length of a kernel's name
LONGEST = 6  # kernels whose times on all ranks, and from start to end, are recorded


def trace(step: Callable[[], Any], layers: int, comm: Communicator) -> dict[str, Any]:
    """Profiles a step on this rank's GPU: launches per layer, idle share, and kernels.

    A kernel may start while others drain, and waits as a running one, so each counts from the end of those before it.
    For the longest kernels, the times of all ranks show who is waited for, and start-to-end times show overlap.
    """
    if comm.device.type != "cuda":
        step()
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        comm.barrier()  # profilers start slowly, and peers would wait inside the first kernels
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
