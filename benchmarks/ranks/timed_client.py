"""Sends requests to an engine by the clock, and notes when their tokens come."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from threading import Thread
from time import perf_counter

import numpy as np

from benchmarks.ranks.synthetic import vocab_held
from helix.engine.core import Engine
from helix.engine.inbox import Inbox
from helix.engine.request import Request
from helix.errors import ConfigError


@dataclass(frozen=True)
class Arrival:
    """A request with its arrival time and optional abort time, in seconds from the start."""

    at: float
    request: Request
    abort: float | None = None


@dataclass
class RequestTiming:
    """What a client sees of one request, in seconds of the clock.

    Attributes:
        token_times: arrival of each token.
    """

    sent: float = 0.0
    token_times: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0
    end: str = ""

    @property
    def first_s(self) -> float:
        return self.token_times[0] - self.sent

    @property
    def gaps_s(self) -> list[float]:
        return self.gaps_between(0.0, math.inf)

    def gaps_between(self, begin: float, end: float) -> list[float]:
        """Returns the gaps that ended between two times."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False) if begin <= b <= end]


class Client:
    """Sends requests to an engine and records its updates.

    Args:
        engine: its cache is already filled with random numbers.
    """

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.rng = np.random.default_rng(seed)
        self.leads = engine.comm.rank == 0
        self._sent = 0

    def tokens(self, count: int) -> np.ndarray:
        """Returns random tokens, int32 [count]; the same on every rank."""
        return self.rng.integers(0, vocab_held(self.engine.runner), count, dtype=np.int32)

    def context(self, count: int) -> np.ndarray:
        """Returns new tokens int32 [count], registered as cached."""
        tokens = self.tokens(count)
        if self.leads:
            (tables,) = self.engine.tables
            table = tables.admit(tokens, count, 0)
            if table is None:
                raise ConfigError(f"a context of {count} tokens does not fit the cache: raise layout.kvp")
            tables.end(table, tokens)
        return tokens

    def request(self, context: np.ndarray, more: int, new: int) -> Request:
        """Makes a request: a context, then `more` random tokens."""
        self._sent += 1
        return Request(self._sent, np.concatenate((context, self.tokens(more))), new)

    def serve(self, arrivals: Sequence[Arrival], until: Request | None = None) -> dict[int, RequestTiming]:
        """Returns the timing of each request; empty on other ranks. Aborts all once `until` has ended."""
        inbox, seen = Inbox(), {int(a.request.id): RequestTiming() for a in arrivals}
        begin = perf_counter()

        def feed() -> None:
            events: list[tuple[float, Callable[[], None]]] = []
            for a in arrivals:
                events.append((a.at, lambda a=a: self._send(inbox, seen, a)))  # type: ignore[misc]
                if a.abort is not None:
                    events.append((a.abort, lambda a=a: inbox.abort(a.request.id)))  # type: ignore[misc]
            for at, event in sorted(events, key=lambda e: e[0]):
                time.sleep(max(0.0, begin + at - perf_counter()))
                event()
            inbox.close()

        if self.leads:
            Thread(target=feed, daemon=True).start()
        for delta in chain.from_iterable(self.engine.serve(inbox)):
            found, now = seen[int(delta.id)], perf_counter()
            found.token_times += [now] * len(delta.new_token_ids)
            found.num_cached_tokens = delta.cached_tokens
            found.end = delta.finish_reason or found.end
            if delta.finish_reason == "error":
                raise RuntimeError(f"a request of the benchmark was refused: {delta.reason}")
            if until is not None and delta.id == until.id and delta.finish_reason is not None:
                for name in seen:
                    inbox.abort(name)
        return seen

    @staticmethod
    def _send(inbox: Inbox, seen: dict[int, RequestTiming], arrival: Arrival) -> None:
        seen[int(arrival.request.id)].sent = perf_counter()
        inbox.submit(arrival.request)
