"""Serves requests that arrive by the clock, inside a job (`bench=serve`).

Contexts are not computed: the cache is filled with random numbers, which rank 0 registers as the KV of some
tokens. Everything after them is computed, as after an earlier turn of a chat.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.ranks import prefix_traces
from benchmarks.ranks.offline import OFFLINE_LOADS
from benchmarks.ranks.steps import randomize
from benchmarks.ranks.synthetic import apply_synthetic
from benchmarks.ranks.timed_client import Arrival, Client, RequestTiming
from benchmarks.schema import lab
from helix.errors import ConfigError
from helix.setup.buffers import max_slots
from helix.setup.engine import build_engine
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.warmup import fill, step_seconds
from launch.job.task import JobResult, Task

K, M = 1 << 10, 1 << 20
SMALLER = 256  # without a GPU, contexts are shorter by this factor


def _ms(seconds: Sequence[float], percent: float) -> float | None:
    return 1e3 * float(np.percentile(seconds, percent)) if len(seconds) else None


def _mean_gap_s(seen: Sequence[RequestTiming]) -> float:
    gaps = [gap for s in seen for gap in s.gaps_s[2:]]
    return sum(gaps) / len(gaps)


def streams(client: Client, small: int) -> Iterator[dict[str, Any]]:
    """Measures time between tokens, and a step's time for comparison, alone and with an arrival each second."""
    new = 768 if small == 1 else 6
    for batch, length in ((1, 128 * K), (8, 32 * K)):
        length //= small
        runner = client.engine.runner
        fill(runner, batch, length + new // 2)
        step_s = step_seconds(runner, DecodeGraphKey(batch, chunks=runner.chunks(batch)))
        fill(runner, 0, 0)
        contexts = [client.context(length) for _ in range(batch)]
        for arrivals in (0, 4 if small == 1 else 1):
            running = [Arrival(0.0, client.request(c, 1, new)) for c in contexts]
            others = [Arrival(0.3 + i, client.request(client.tokens(0), K // small, 16)) for i in range(arrivals)]
            seen = client.serve([*running, *others])
            if client.leads:
                gap_s = _mean_gap_s([seen[int(a.request.id)] for a in running])
                yield {
                    "trace": "streams", "batch": batch, "length": length, "arrivals": arrivals,
                    "step_ms": 1e3 * step_s, "gap_ms": 1e3 * gap_s, "over_step": gap_s / step_s,
                }  # fmt: skip


def first_tokens(client: Client, small: int) -> Iterator[dict[str, Any]]:
    """Measures a short prompt's first token, alone and next to long streams, and the next turn after a long context."""
    contexts = [client.context(128 * K // small) for _ in range(8)]
    for num_running in (0, 8):
        count = 24 if small == 1 else 4
        short = [Arrival(0.7 + 0.13 * i, client.request(client.tokens(0), K // small, 4)) for i in range(count)]
        end = short[-1].at + 1.0
        running = [Arrival(0.0, client.request(c, 1, 2000 if small == 1 else 10), end) for c in contexts[:num_running]]
        seen = client.serve([*running, *short])
        if client.leads:
            first = [seen[int(a.request.id)].first_s for a in short]
            since = seen[int(short[0].request.id)].sent
            gaps = [g for a in running for g in seen[int(a.request.id)].gaps_between(since, math.inf)]
            timings = client.engine.timings
            yield {
                "trace": "short prompt", "batch": num_running, "length": 128 * K // small,
                "first_p50_ms": _ms(first, 50), "first_p99_ms": _ms(first, 99),
                "first_ms": [round(1e3 * s, 1) for s in first],
                "gap_p50_ms": _ms(gaps, 50), "gap_p99_ms": _ms(gaps, 99), "decisions": timings.decisions,
                "prefill_s": timings.prefill_s, "prefill_tokens": timings.prefill_tokens,
            }  # fmt: skip
    for length in (128 * K // small, M // small):
        if length + 256 > client.engine.runner.sizes.length:
            continue
        context = client.context(length)
        found = []
        for _ in range(6 if small == 1 else 2):
            follow_up = client.request(context, 100, 4)
            found.append(client.serve([Arrival(0.0, follow_up)])[int(follow_up.id)])
        if client.leads:
            assert all(f.num_cached_tokens >= length for f in found), "a turn after its context hits the prefix cache"
            first = [f.first_s for f in found[1:]]
            yield {
                "trace": "next turn", "batch": 1, "length": length,
                "first_p50_ms": _ms(first, 50), "first_p99_ms": _ms(first, 99),
            }  # fmt: skip


def during_prefill(client: Client, small: int) -> Iterator[dict[str, Any]]:
    """Measures streams and short prompts during a long prefill, and that prefill alone."""
    # One GPU would take a minute and a half for 512K tokens.
    length = (512 if client.engine.runner.layout.world_size > 1 and small == 1 else 128) * K // small
    contexts = [client.context(32 * K // small) for _ in range(4)]
    alone_s = 0.0
    for num_running in (0, 4):
        long = Arrival(0.5, client.request(client.tokens(0), length, 4))
        running = [Arrival(0.0, client.request(c, 1, 30_000 if small == 1 else 200)) for c in contexts[:num_running]]
        short = [Arrival(1.0 + i, client.request(client.tokens(0), K // small, 4)) for i in range(2 * num_running)]
        seen = client.serve([*running, *short, long], until=long.request)
        if client.leads:
            prompt = seen[int(long.request.id)]
            alone_s = alone_s or prompt.first_s
            gaps = [
                g for a in running for g in seen[int(a.request.id)].gaps_between(prompt.sent, prompt.token_times[0])
            ]
            first = [s.first_s for a in short if (s := seen[int(a.request.id)]).token_times]
            yield {
                "trace": "during a prefill", "batch": num_running, "length": length, "prefill_s": prompt.first_s,
                "over_alone": prompt.first_s / alone_s, "gap_p99_ms": _ms(gaps, 99), "first_p99_ms": _ms(first, 99),
            }  # fmt: skip


def offline(client: Client, small: int) -> Iterator[dict[str, Any]]:
    """Measures offline throughput: requests of one size, all at once, until the last has ended."""
    for count, length, new in OFFLINE_LOADS:
        if small > 1:
            count, length, new = min(count, 8), max(length // small, 4), min(new, 4)
        requests = [client.request(client.tokens(0), length, new) for _ in range(count)]
        begin = perf_counter()
        seen = client.serve([Arrival(0.0, request) for request in requests])
        if client.leads:
            seconds, timings = perf_counter() - begin, client.engine.timings
            gaps, first = [g for s in seen.values() for g in s.gaps_s], [s.first_s for s in seen.values()]
            yield {
                "trace": "offline", "requests": count, "length": length, "new": new, "seconds": seconds,
                "tokens_per_s": count * new / seconds, "first_p50_ms": _ms(first, 50), "first_p99_ms": _ms(first, 99),
                "gap_p50_ms": _ms(gaps, 50), "gap_p99_ms": _ms(gaps, 99), "gap_max_ms": _ms(gaps, 100),
                "prefill_s": timings.prefill_s, "decode_s": sum(timings.ttl_s), "steps": len(timings.ttl_s),
                "decisions": timings.decisions, "preemptions": timings.preemptions,
                "goal": client.engine.schedule.goal,
            }  # fmt: skip


def poisson(client: Client, small: int) -> Iterator[dict[str, Any]]:
    """Sends requests of 1K to 32K tokens at random times: throughput by arrival rate, up to the engine's capacity.

    Most are short. The number at each rate keeps the whole trace within a minute on one GPU.
    """
    rng = random.Random(7)
    capacity = 0.0
    for share, count in ((None, 64), (0.8, 200), (0.4, 40)) if small == 1 else ((None, 12), (0.8, 12), (0.4, 12)):
        lengths = [int(K * 32 ** rng.random() ** 2) // small for _ in range(count)]
        new = [rng.randrange(32, 256) if small == 1 else 4 for _ in range(count)]
        requests = [client.request(client.tokens(0), n, k) for n, k in zip(lengths, new, strict=True)]
        at = 0.0
        arrivals = []
        rate = client.engine.comm.broadcast_object(capacity) * (share or 0.0)
        for request in requests:
            arrivals.append(Arrival(at, request))
            at += rng.expovariate(rate) if rate else 0.0
        begin = perf_counter()
        seen = client.serve(arrivals)
        if client.leads:
            seconds = perf_counter() - begin
            capacity = capacity or count / seconds
            gaps = [g for s in seen.values() for g in s.gaps_s]
            yield {
                "trace": f"poisson {share or 'all at once'}", "share": share, "requests": count,
                "requests_per_s": count / seconds, "tokens_per_s": sum(new) / seconds, "gap_p99_ms": _ms(gaps, 99),
                "gap_max_ms": 1e3 * max(gaps), "first_p50_ms": _ms([s.first_s for s in seen.values()], 50),
            }  # fmt: skip


def full_batch(client: Client, small: int) -> Iterator[dict[str, Any]]:
    """Measures a full batch's tokens per second: three times as many requests as slots, all at once.

    It counts from when half a batch has ended until none waits any more: Vegas (arXiv:2602.07223), appendix E.3. The
    contexts are as many as slots, so set attention.shared_prefix=none: two sequences may have the same.
    """
    rng, slots, length = random.Random(7), client.engine.runner.sizes.slots, 32 * K // small
    contexts = [client.context(length) for _ in range(slots)]
    new = [rng.randrange(128, 512) if small == 1 else rng.randrange(4, 12) for _ in range(3 * slots)]
    requests = [client.request(contexts[i % slots], 1, n) for i, n in enumerate(new)]
    seen = client.serve([Arrival(0.0, request) for request in requests])
    if client.leads:
        begin = sorted(s.token_times[-1] for s in seen.values())[slots // 2]
        end = max(s.token_times[0] for s in seen.values())
        tokens = sum(begin <= at < end for s in seen.values() for at in s.token_times)
        yield {
            "trace": "full batch", "batch": slots, "length": length, "requests": len(requests),
            "seconds": end - begin, "tokens_per_s": tokens / (end - begin),
        }  # fmt: skip


TRACES: dict[str, Callable[[Client, int], Iterator[dict[str, Any]]]] = {
    "streams": streams,
    "first_tokens": first_tokens,
    "during_prefill": during_prefill,
    "offline": offline,
    "poisson": poisson,
}
# Those that run only if they are named: they need settings of their own.
NAMED = {"prefixes": prefix_traces.prefixes, "full_batch": full_batch}


def run(task: Task) -> JobResult:
    """Serves each of `bench.traces`.

    Raises:
        ConfigError: a trace is unknown, or its contexts do not fit.
    """
    plan, comm = task.plan, task.comm
    model, _ = task.load()
    small = 1 if comm.device.type == "cuda" else SMALLER
    # All that memory holds, as for a server; without a GPU, what the traces need.
    wanted = 4 * M if small == 1 else 16 * M // small
    known = TRACES | NAMED
    if unknown := set(traces := lab(plan.config).bench.traces) - set(known):
        raise ConfigError(f"bench.traces has {min(unknown)!r}, which is unknown; known: {', '.join(known)}")
    slots, auto = max_slots(plan.config, comm.device.type), plan.config.decode.max_batch == "auto"
    engine = build_engine(plan.layout, model, plan.config, slots, wanted, fewer=auto)
    apply_synthetic(engine.runner, lab(plan.config))
    randomize(engine.runner, plan.config.seed + comm.rank)
    task.phases.mark("build")
    if comm.device.type == "cuda":
        engine.warmup({DecodeGraphKey()}, mark=task.phases.mark, chunks=True)
    gc.freeze()  # as a server does
    client = Client(engine, plan.config.seed)
    rows: list[dict[str, Any]] = []
    for name in traces or TRACES:
        for row in known[name](client, small):
            task.console.row(row)
            rows.append(row)
        comm.barrier()
    engine.close()
    return {"points": rows}, 0


__all__ = ["TRACES", "run"]
