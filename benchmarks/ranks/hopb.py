"""Times how much of the exchange HOP-B hides, inside a job (`bench=hopb`).

Three kinds of rows. `ttl`: decode steps of a whole model with one exchange of all rows, in chunks, and without exchange
(each rank keeps its partials of its own heads: wrong tokens, right shapes), and a step's exchanges alone.
`mla`: messages of 128 heads of 512 next to a kernel that only spins. `delay`: the paper's example,
with delays for attention and exchange; its `timeline` rows say when each chunk ran. The hidden share is the time that
chunks save, relative to the exchanges alone. Chunks sample the same tokens up to rounding: each row has the share.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import count
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from benchmarks.ranks.points import at_each, engine_at
from benchmarks.ranks.steps import fill
from benchmarks.schema import lab
from benchmarks.timer import slowest
from comm.base import Communicator
from comm.hopb import Pipeline
from comm.torch_dist import p2p_disabled
from helix.layout import share
from helix.models.decoder import Decoder
from helix.worker.clock import TimedEvent, time_each
from helix.worker.cuda_graphs import StepGraphs
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.model_runner import ModelRunner
from helix.worker.warmup import CHUNKS, choose_chunks, exchange_seconds, step_seconds
from kernels.attention.split_kv import PartialAttention
from launch.inputs.preflight import CheckedRun
from launch.job.task import JobResult, Task

STEPS = 32
REPEATS = 10  # of a step whose tokens are compared
REQUESTS, ATTENTION_UNITS, EXCHANGE_UNITS = 8, 2.0, 1.2  # per request (Helix Parallelism, figure 3)
EXPECTED_UNITS = {"off": 25.6, "on": 17.2}  # 8 * 2 + 8 * 1.2, and 8 * 2 plus the last exchange
PEER_MEMORY = "peer memory"
UNIT_S = 200e-6  # long compared with a kernel launch
MLA_HEADS, MLA_DIM, MLA_BATCHES = 128, 512, (8, 64)


def run(task: Task) -> JobResult:
    """Measures rows of all kinds, steps at each of `bench.points` that fits. Collective.

    Raises:
        ConfigError: the only point does not fit.
    """
    plan, comm = task.plan, task.comm
    model, _ = task.load()
    done = count()
    with task.console.progress("hopb", len(lab(plan.config).bench.points)) as advance:

        def measure(batch: int, length: int) -> list[dict[str, Any]]:
            advance(next(done))
            return _ttl(plan, comm, model, batch, length)

        rows = [{"kind": "failed"} | row for row in at_each(plan, comm, measure)]
        advance(next(done))
    rows += [row for batch in (MLA_BATCHES if comm.capturable else (2,)) for row in _mla(comm, batch)]
    for row in rows:
        row["backend"] = task.backend
    return {"hopb": rows + delays(comm.device)}, 0


def _ttl(plan: CheckedRun, comm: Communicator, model: Decoder, batch: int, length: int) -> list[dict[str, Any]]:
    config = lab(plan.config)
    steps = config.bench.steps
    engine, reserved = engine_at(plan, comm, model, batch, length, 2, hopb="auto")
    fill(engine.runner, batch, length, reserved, config.seed + comm.rank)

    def microseconds(chunks: int) -> float:
        return 1e6 * step_seconds(
            engine.runner, DecodeGraphKey(batch, engine.runner.sizes.drafts, chunks=chunks), steps
        )

    wanted = sampled_tokens(engine.runner, batch, 1, 1)
    alike = {
        chunks: min(
            float((tokens == wanted[0]).float().mean()) for tokens in sampled_tokens(engine.runner, batch, chunks)
        )
        for chunks in CHUNKS
        if chunks <= batch
    }
    on = {chunks: microseconds(chunks) for chunks in alike}
    off = microseconds(1)
    without = without_exchange(engine.runner, comm, lambda: microseconds(1))
    exchange = 1e6 * exchange_seconds(engine.runner, batch, STEPS)
    choose_chunks(engine.runner, batch)
    auto = engine.runner.chunks(batch)
    auto_us = microseconds(auto)
    engine.close()
    return [
        {
            "kind": "ttl", "batch": batch, "length": length, "chunks": chunks,
            "off_us": off, "on_us": on_us, "without_us": without, "exchange_us": exchange,
            "hidden": (off - on_us) / exchange, "auto_us": auto_us, "auto_chunks": auto,
            "same_tokens": alike.get(chunks, 1.0), "link": link(), "layout": str(plan.layout),
            "layers": len(model.spec.layers),
        }
        for chunks, on_us in (on or {1: off}).items()
    ]  # fmt: skip


@torch.inference_mode()
def sampled_tokens(runner: ModelRunner, rows: int, chunks: int, times: int = REPEATS) -> list[Tensor]:
    """Returns the tokens that a step in `chunks` chunks samples, each time from the same state: races would show."""
    state, found, graphs = runner.state, [], None if runner.graphs is None else StepGraphs()
    before = state.tokens.clone(), state.lengths.clone()
    kind = DecodeGraphKey(rows, runner.sizes.drafts, chunks=chunks)
    for _ in range(times):
        found.append((runner.step(kind) if graphs is None else graphs.run(runner.step, kind)).clone())
        state.tokens.copy_(before[0])
        state.lengths.copy_(before[1])
    if graphs is not None:
        graphs.close()
    return found


def link() -> str:
    """Returns which link the GPUs' messages cross."""
    return "host memory" if p2p_disabled() else PEER_MEMORY


def without_exchange(runner: ModelRunner, comm: Communicator, measure: Callable[[], float]) -> float:
    """Calls `measure` while each rank keeps its part of its own heads' attention instead of exchanging it."""

    def local_part(found: PartialAttention, shares: list[int]) -> Tensor:
        first = sum(shares[: comm.kvp_rank])
        return found.merge_states()[0][:, first : first + shares[comm.kvp_rank]]

    for layer in runner.model.layers:
        alone = SimpleNamespace(
            merge_states_exchange=local_part, all_gather=comm.all_gather, gather_rows=comm.gather_rows,
            kvp_rank=comm.kvp_rank,
            wire_rate=comm.wire_rate,
        )  # fmt: skip
        layer.mixer.comm = alone  # type: ignore[attr-defined]
    result = measure()
    for layer in runner.model.layers:
        layer.mixer.comm = comm  # type: ignore[attr-defined]
    return result


def _mla(comm: Communicator, batch: int) -> list[dict[str, Any]]:
    """Times the exchange of MLA's latent outputs next to a kernel that spins as long as in the paper's example."""
    ranks = len(comm.kvp_group)
    shares = [len(share(MLA_HEADS, ranks, k)) for k in range(ranks)]
    dtype = torch.bfloat16 if comm.capturable else torch.float32
    out = torch.randn(batch, MLA_HEADS, MLA_DIM, device=comm.device, dtype=dtype)
    lse = torch.randn(batch, MLA_HEADS, device=comm.device)
    pipeline, busy = Pipeline(comm.device if comm.capturable else None), _busy(comm.device)

    def measured(chunks: int, attention_s: float, exchanges: bool = True) -> float:
        cuts = _cut(batch, chunks)
        result = out.new_empty(batch, shares[comm.kvp_rank], MLA_DIM)

        def attend(chunk: int) -> PartialAttention:
            busy(attention_s * len(out[cuts[chunk]]) / batch)
            return PartialAttention(out[cuts[chunk]], lse[cuts[chunk]])

        def exchange(chunk: int, found: PartialAttention) -> None:
            if exchanges:
                comm.merge_states_exchange(found, shares, result[cuts[chunk]])

        comm.barrier()
        chain = partial(pipeline.run, chunks, attend, exchange)
        return median(slowest(comm, _captured(chain, comm.device, comm.barrier)))

    alone = measured(1, 0.0)
    attention = alone * ATTENTION_UNITS / EXCHANGE_UNITS
    off = measured(1, attention)
    without = measured(1, attention, exchanges=False)
    rows = []
    for chunks in [n for n in CHUNKS if n <= batch]:
        on = measured(chunks, attention)
        rows.append(
            {
                "kind": "mla", "heads": MLA_HEADS, "dim": MLA_DIM, "batch": batch, "chunks": chunks,
                "exchange_us": 1e6 * alone, "off_us": 1e6 * off, "on_us": 1e6 * on, "without_us": 1e6 * without,
                "hidden": (off - on) / alone,
            }
        )  # fmt: skip
    return rows


def delays(device: torch.device) -> list[dict[str, Any]]:
    """Times the paper's example: eight requests, 2 units of attention and 1.2 of exchange each, serial or pipelined."""
    pipeline, busy = Pipeline(device if device.type == "cuda" else None), _busy(device)

    def run(chunks: int, spans: list[tuple[str, int, TimedEvent, TimedEvent]] | None = None) -> None:
        cuts = _cut(REQUESTS, chunks)

        def wait(stream: str, request: int, units: float) -> None:
            if spans is None:
                busy(units * UNIT_S)
                return
            begin = TimedEvent(device)
            busy(units * UNIT_S)
            spans.append((stream, request, begin, TimedEvent(device)))

        def attend(chunk: int) -> slice:
            for request in range(cuts[chunk].start, cuts[chunk].stop):
                wait("attention", request, ATTENTION_UNITS)
            return cuts[chunk]

        def exchange(chunk: int, rows: slice) -> None:
            for request in range(rows.start, rows.stop):
                wait("exchange", request, EXCHANGE_UNITS)

        pipeline.run(chunks, attend, exchange)

    rows: list[dict[str, Any]] = []
    units: dict[str, float] = {}
    for regime, chunks in (("off", 1), ("on", REQUESTS)):
        units[regime] = median(_captured(partial(run, chunks), device)) / UNIT_S
        spans: list[tuple[str, int, TimedEvent, TimedEvent]] = []
        origin = TimedEvent(device)
        run(chunks, spans)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found = [
            {"stream": stream, "chunk": chunk, "start_us": 1e6 * a.since(origin), "end_us": 1e6 * b.since(origin)}
            for stream, chunk, a, b in spans
        ]
        rows.append({"kind": "timeline", "regime": regime, "spans": found})
    result = {
        "kind": "delay", "chunks": REQUESTS, "unit_us": 1e6 * UNIT_S,
        **{f"{regime}_units": value for regime, value in units.items()},
        **{f"expected_{regime}_units": value for regime, value in EXPECTED_UNITS.items()},
    }  # fmt: skip
    return [result, *rows]


def _cut(rows: int, chunks: int) -> list[slice]:
    return [slice(part.start, part.stop) for part in (share(rows, chunks, i) for i in range(chunks))]


def _busy(device: torch.device) -> Callable[[float], None]:
    """Returns a function that spins on the GPU's current stream, or sleeps on the host."""
    if device.type != "cuda":
        return time.sleep

    def busy(seconds: float) -> None:
        _busy_kernel[(1,)](int(1e9 * seconds), num_warps=1)

    return busy


@triton.jit(do_not_specialize=["ns"])
def _busy_kernel(ns: int) -> None:
    begin = globaltimer()  # not cycles: the clock drops on an otherwise idle GPU
    while globaltimer() - begin < ns:
        pass


def _captured(
    run: Callable[[], object], device: torch.device, barrier: Callable[[], None] = lambda: None
) -> list[float]:
    """Seconds of each replay of `run` (on a CPU, of each call), after three for warm-up."""
    if device.type != "cuda":
        return time_each(run, 3, device)
    graphs = StepGraphs()
    for _ in range(3):
        graphs.run(run)
    torch.cuda.synchronize(device)
    barrier()
    seconds = time_each(partial(graphs.run, run), STEPS, device)
    graphs.close()
    return seconds
