"""Times what a decode step sends between hosts, and predicts it, inside a job (`bench=multi-node`).

Pings are all-to-alls of half and of twice a step's message: a line through both gives the link's latency and bandwidth.
The predicted time of an exchange is latency + bytes / bandwidth, plus packing and combining without sending.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.ranks.collectives import microseconds
from benchmarks.ranks.hopb import without_exchange
from benchmarks.ranks.points import at_each, engine_at
from benchmarks.ranks.steps import fill, rewind
from benchmarks.schema import lab
from comm.base import Communicator, message_bytes
from helix.models.decoder import Decoder
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.warmup import step_seconds
from kernels.attention.split_kv import PartialAttention
from launch.inputs.preflight import CheckedRun
from launch.job.task import JobResult, Task

EAGER = 60  # calls of each size on a CPU
ROUNDS = 3  # in each, all sizes are timed once: a shared link varies over time
ALIGNED = 64  # bytes


def run(task: Task) -> JobResult:
    """Times the exchange at each of `bench.points`. Collective.

    Raises:
        ConfigError: the only point does not fit.
    """
    model, _ = task.load()
    rows = at_each(task.plan, task.comm, partial(_time_point, task.plan, task.comm, model))
    return {"multi_node": [{"kind": "exchange", "backend": task.backend} | row for row in rows]}, 0


def _time_point(plan: CheckedRun, comm: Communicator, model: Decoder, batch: int, length: int) -> list[dict[str, Any]]:
    config, K = lab(plan.config), len(comm.kvp_group)
    engine, reserved = engine_at(plan, comm, model, batch, length, 3, hopb="none")
    fill(engine.runner, batch, length, reserved, config.seed + comm.rank)
    kind = DecodeGraphKey(batch, engine.runner.sizes.drafts, sparse=engine.runner.sparse_at(length))
    (out, lse, shares), layers = _exchanged(comm, partial(engine.runner.step, kind))
    rewind(engine.runner, batch, length)

    def step_us() -> float:
        return 1e6 * step_seconds(engine.runner, kind, config.bench.steps)

    ttl, without = step_us(), without_exchange(engine.runner, comm, step_us)
    engine.close()
    exchange = partial(comm.exchange, out, lse, shares)
    message = message_bytes(len(lse), max(shares), out.shape[-1], out.dtype)[1] * (K - 1)
    with _replaced(comm, "all_to_all", lambda x: x):
        local_us = microseconds(comm, exchange, EAGER)[0]
    sizes = [-(-message // 2 // ALIGNED) * ALIGNED, 2 * message]
    pings = [partial(comm.all_to_all, out.new_empty(K, size // (K - 1), dtype=torch.uint8)) for size in sizes]
    rounds = [[microseconds(comm, call, EAGER)[0] for call in (*pings, exchange)] for _ in range(ROUNDS)]
    half, twice, measured = (sorted(found)[ROUNDS // 2] for found in zip(*rounds, strict=True))
    us_per_byte = max(twice - half, 0.0) / (sizes[1] - sizes[0])
    latency = max(half - us_per_byte * sizes[0], 0.0)
    predicted = local_us + latency + us_per_byte * message
    return [
        {
            "batch": batch,
            "length": length,
            "ttl_us": ttl,
            "without_us": without,
            "exchange_bytes": layers * message,
            "predicted_bytes": layers * lse.numel() * (out.shape[-1] * out.itemsize + 4) * (K - 1) // K,
            "message_bytes": message,
            "latency_us": latency,
            "gb_per_s": 1e-3 / us_per_byte if us_per_byte else None,
            "local_us": local_us,
            "exchange_us": measured,
            "predicted_us": predicted,
            "error": predicted / measured - 1,
            "step_exchange_us": (ttl - without) / layers,
        }
    ]


def _exchanged(comm: Communicator, step: Callable[[], Any]) -> tuple[tuple[Tensor, Tensor, list[int]], int]:
    exchanges: list[tuple[Tensor, Tensor, list[int]]] = []

    def exchange(parts: PartialAttention, shares: list[int], result: Tensor | None = None) -> Tensor:
        out, lse = parts.merge_states()
        exchanges.append((out.clone(), lse.clone(), shares) if not exchanges else exchanges[0])
        return type(comm).merge_states_exchange(comm, parts, shares, result)

    with _replaced(comm, "merge_states_exchange", exchange):
        step()
    return exchanges[0], len(exchanges)


@contextmanager
def _replaced(comm: Communicator, name: str, call: Callable[..., Tensor]) -> Iterator[None]:
    setattr(comm, name, call)
    try:
        yield
    finally:
        delattr(comm, name)
