"""A trace of prefixes that leave the GPU and come back from host memory; needs kv.prefix_host_bytes.

Times of the first token: of a context that is computed, on the GPU, and back from host memory; and steps of other
sequences while a prefix is restored or stored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from threading import Timer
from typing import Any

import numpy as np

from benchmarks.ranks.timed_client import Arrival, Client, RequestTiming
from helix.engine.request import Request
from helix.engine.request_state import Offer
from helix.errors import ConfigError

K = 1024
COMPUTED = 256 * K  # tokens; longer contexts are random data
STREAMS, STREAM_TOKENS = 4, 32 * K
BEGIN_S = 2.0  # of a restore or store next to streams
STORE_S = 0.4  # after the begin of a store, which takes about as long
PREFILL_S = 0.06  # of the 100 tokens after a restore, which are no part of it
REPEATS = 4


def prefixes(client: Client, small: int) -> Iterator[dict[str, Any]]:
    """Yields rows of one context, as long as `decode.max_length` and pages allow, up to 1M tokens."""
    engine, slabs = client.engine, client.engine.runner.slabs
    if slabs is None:
        raise ConfigError("bench.traces=[prefixes] needs kv.prefix_host_bytes: set it to the bytes of a context")
    stripe = engine.runner.placement.stripes.tokens
    length = min(K * K // small, engine.runner.sizes.length - 256) // stripe * stripe
    computes = length <= COMPUTED
    if small > 1 and engine.moves is not None:
        engine.moves.start_s = 0.0  # a tiny context is computed faster than any restore starts
    base = {"trace": "prefixes", "length": length, "stripe": stripe, "stripe_bytes": slabs.max_bytes}
    _one(client, client.request(client.tokens(0), 2 * K // small, 4))  # so that prefill has been timed
    before = _counters(client)
    if computes:
        context = client.tokens(length)
        yield from _row(client, base, "computed", before, _one(client, client.request(context, 100, 4)))
        before = _counters(client)
    else:
        context = client.context(length)
        _offer(client, context)
    yield from _row(client, base, "on the GPU", before, _one(client, client.request(context, 100, 4)))
    for _ in range(REPEATS):
        _evict(client)
        before = _counters(client)
        yield from _row(client, base, "restored", before, _one(client, client.request(context, 100, 4)))
    if computes:
        yield from _next_to_streams(client, small, base, context)


def _next_to_streams(client: Client, small: int, base: dict[str, Any], context: np.ndarray) -> Iterator[dict[str, Any]]:
    new, begin_s = (1200, BEGIN_S) if small == 1 else (12, 0.0)
    contexts = [client.context(STREAM_TOKENS // small) for _ in range(STREAMS)]
    for what in ("alone", "restore", "store", "alone"):
        arrivals = [Arrival(0.0, client.request(c, 1, new)) for c in contexts]
        running = list(arrivals)
        if what == "restore":
            _evict(client, but=contexts)
            arrivals.append(Arrival(begin_s, client.request(context, 100, 1)))
        if what == "store":
            Timer(begin_s, _offer, (client, client.context(len(context)))).start()
        before, begin = _counters(client), time.perf_counter()
        seen = client.serve(arrivals)
        if client.leads:
            other = seen[int(arrivals[-1].request.id)] if what == "restore" else None
            end_s = begin_s + STORE_S if what == "store" else math.inf
            if other is not None:
                end_s = other.token_times[0] - begin - PREFILL_S
            if small > 1:
                end_s = math.inf
            gaps = [g for a in running for g in seen[int(a.request.id)].gaps_between(begin + begin_s, begin + end_s)]
            timings = client.engine.timings
            row = {
                "streams": STREAMS, "gap_mean_ms": 1e3 * float(np.mean(gaps)) if gaps else None,
                "gap_p99_ms": 1e3 * float(np.percentile(gaps, 99)) if gaps else None,
                "gap_max_ms": 1e3 * max(gaps, default=0.0), "gaps": len(gaps),
                "decide_us": 1e6 * timings.decide_s / max(timings.decisions, 1),
            }  # fmt: skip
            for found in _row(client, base, f"streams, {what}", before, other):
                yield found | row


def _one(client: Client, request: Request) -> RequestTiming | None:
    """Serves a request until all moves have ended too; returns its timing on rank 0."""
    return client.serve([Arrival(0.0, request)]).get(int(request.id))


def _row(
    client: Client, base: dict[str, Any], what: str, before: dict[str, float], seen: RequestTiming | None
) -> Iterator[dict[str, Any]]:
    if client.leads:
        now, found = _counters(client), dict[str, Any]()
        for name in ("stored", "loaded"):
            size, seconds = (
                now.get(f"{name}_{unit}", 0) - before.get(f"{name}_{unit}", 0) for unit in ("bytes", "seconds")
            )
            found[f"{name}_bytes"] = size
            found[f"{name}_gbs"] = size / seconds / 1e9 if seconds else None
        found |= {name: int(now.get(name, 0) - before.get(name, 0)) for name in ("late", "failed", "dropped")}
        if seen is not None:
            found |= {"ttft_s": seen.first_s, "cached": seen.num_cached_tokens}
        yield base | {"what": what} | found


def _counters(client: Client) -> dict[str, float]:
    return dict(client.engine.moves.counters) if client.leads and client.engine.moves is not None else {}


def _offer(client: Client, context: np.ndarray) -> None:
    """Offers a context, whose KV is registered, to host memory, as its sequence would at its end."""
    if client.leads and client.engine.moves is not None:
        client.engine.moves._offers.append(Offer(None, 0, context, []))


def _evict(client: Client, but: Sequence[np.ndarray] = ()) -> None:
    """Evicts all contexts from the GPU, except for some."""
    if client.leads:
        (tables,) = client.engine.tables
        held = [tables.admit(context, len(context), 0) for context in but]
        tables.tree.evict(tables.pool.available)
        for table, context in zip(held, but, strict=True):
            assert table is not None
            tables.end(table, context)
