"""The engine as the front end sees it: continuations under way, over whatever job serves them at the moment."""

from __future__ import annotations

import asyncio
import itertools
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from launch.serving.errors import ApiError
from launch.serving.frames import Abort, Decoder, Delta, Message, Progress, Ready, Stats, Stop, Submit, encode
from launch.serving.metrics import ENGINE, Metrics

PIECE = 1 << 20  # bytes read at a time
CRASHES = 2  # of the job under one continuation, which then may be the cause of them
RETRY_S = {"starting": 10, "restarting": 10, "draining": 30, "failed": 60}


class Flight:
    """A continuation under way.

    Attributes:
        drawn: token ids so far.
        logprobs: of each, where they were wanted.
        finish_reason, reason: as of `Delta`, once it has ended.
        cached: prompt tokens that were in the cache; None until that is known.
        progress: prompt tokens done; None until it is admitted.
        crashes: of the job that it has lived through.
    """

    def __init__(self, submit: Submit, changed: Callable[[], None]) -> None:
        self.submit = submit
        self.changed = changed
        self.drawn: list[int] = []
        self.logprobs: list[Any] = []
        self.finish_reason: str | None = None
        self.reason: str | None = None
        self.cached: int | None = None
        self.progress: int | None = None
        self.crashes = 0
        self.began = time.monotonic()
        self.last = self.began  # when its last tokens came

    @property
    def waits(self) -> bool:
        """Whether nothing has been heard of it."""
        return self.progress is None and not self.drawn

    def end(self, finish_reason: str, reason: str | None = None) -> None:
        self.finish_reason, self.reason = finish_reason, reason
        self.changed()


class Core:
    """Continuations on their way to a job and back; it outlives jobs.

    Attributes:
        draining: whether new continuations are refused because the server is to end.
        on_first: called in a thread with what the first job serves, before the core is ready.
        ready: what the job serves, once the first one is there.
        heard: when the job last said anything, by the monotonic clock.
        stats: what it last said of itself.
        metrics: of all that went through here.
    """

    def __init__(self, most_waiting: int) -> None:
        self._state, self._why = "starting", "the model is being loaded"
        self.draining = False
        self.on_first: Callable[[Ready], None] = lambda ready: None
        self.ready: Ready | None = None
        self.flights: dict[int, Flight] = {}
        self.heard = time.monotonic()
        self.stats: dict[str, float] = {}
        self.metrics = Metrics()
        self.metrics.watch("num_requests_waiting", "requests of which nothing has been heard", lambda: self.waiting)
        self.metrics.watch(
            "num_requests_running", "requests that were admitted", lambda: len(self.flights) - self.waiting
        )
        for key, (name, what) in ENGINE.items():
            self.metrics.watch(name, what, lambda key=key: self.stats.get(key, 0))  # type: ignore[misc]
        self._most_waiting = most_waiting
        self._numbers = itertools.count(1)
        self._writer: StreamWriter | None = None

    @property
    def state(self) -> str:
        """One of starting, ready, restarting, draining and failed."""
        return "draining" if self.draining else self._state

    @property
    def why(self) -> str:
        """The reason of a state that is not ready."""
        return "the server is ending" if self.draining else self._why

    @property
    def connected(self) -> bool:
        return self._writer is not None

    @property
    def waiting(self) -> int:
        return sum(flight.waits for flight in self.flights.values())

    def refuse_unless_ready(self) -> Ready:
        """What is served.

        Raises:
            ApiError: 503, with the state and its reason.
        """
        if self.state != "ready" or self.ready is None:
            raise ApiError(503, f"{self.state}: {self.why}", code=self.state, retry_s=RETRY_S.get(self.state, 10))
        return self.ready

    def start(self, submits: list[Submit], changed: Callable[[], None]) -> list[Flight]:
        """Hands continuations to the job, all of them or none; their `id` is set here.

        Raises:
            ApiError: 503 or 429.
        """
        self.refuse_unless_ready()
        if self.waiting + len(submits) > self._most_waiting:
            raise ApiError(
                429,
                f"{self.waiting} requests wait, {self._most_waiting} (serve.waiting) may: try again later",
                code="queue_full",
                retry_s=5,
            )
        if not self.flights:
            self.heard = time.monotonic()
        flights = [Flight(replace(submit, id=next(self._numbers)), changed) for submit in submits]
        for flight in flights:
            self.flights[flight.submit.id] = flight
            self.metrics.prompt_tokens.inc(len(flight.submit.ids))
            self._send(flight.submit)
        return flights

    def abort(self, flight: Flight, finish_reason: str = "abort") -> None:
        """Nobody wants the rest of it, for a reason of its own; nothing where it has ended."""
        if flight.submit.id in self.flights:
            self._end(flight, finish_reason, None)
            self._send(Abort(flight.submit.id))

    def stop(self) -> None:
        """Tells the job to end."""
        self._send(Stop())

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Works with a job until its connection ends; what was under way before is submitted again.

        Raises:
            ValueError: it sent what is no frame.
        """
        decoder = Decoder()
        try:
            while data := await reader.read(PIECE):
                self.heard = time.monotonic()
                for message in decoder.feed(data):
                    if isinstance(message, Ready):
                        if self.ready is None:
                            await asyncio.to_thread(self.on_first, message)
                        self._begin(message, writer)
                    else:
                        self._take(message)
        except ConnectionError:
            pass
        finally:
            self._writer = None
            if self._state == "ready":
                self._state, self._why = "restarting", "the connection to the ranks ended"
            writer.close()

    def lost(self, why: str) -> None:
        """The job has ended while it had work, or may have had."""
        self._state, self._why = "restarting", why
        for flight in [*self.flights.values()]:
            flight.crashes += 1
            if flight.crashes >= CRASHES:
                self._end(flight, "error", f"the engine failed {CRASHES} times while it worked on this request: {why}")

    def fail(self, why: str) -> None:
        """No job will come back."""
        self._state, self._why = "failed", why
        for flight in [*self.flights.values()]:
            self._end(flight, "error", why)

    def _begin(self, ready: Ready, writer: StreamWriter) -> None:
        self.ready = ready
        self._writer = writer
        self._state, self._why = "ready", ""
        for flight in self.flights.values():
            # As if it had not been interrupted: what is drawn depends on seed and position alone.
            before, drawn = flight.submit, len(flight.drawn)
            ids = np.concatenate([before.ids, np.asarray(flight.drawn, dtype=np.int32)])
            self._send(replace(before, ids=ids, drawn=drawn, max_new_tokens=before.max_new_tokens - drawn))

    def _take(self, message: Message) -> None:
        if isinstance(message, Stats):
            before, now = (values.get("preemptions", 0) for values in (self.stats, message.values))
            self.metrics.preemptions.inc(now - before if now >= before else now)  # another job counts from 0
            self.stats = message.values
        elif isinstance(message, Delta | Progress) and (flight := self.flights.get(message.id)) is not None:
            self._count(flight, message)
            if isinstance(message, Progress):
                flight.progress = message.done
            else:
                flight.drawn += message.ids.tolist()
                flight.logprobs += message.logprobs
                flight.progress = len(flight.submit.ids)
                if flight.cached is None:
                    flight.cached = message.cached
                if message.finish_reason is not None:
                    self._end(flight, message.finish_reason, message.reason)
            flight.changed()

    def _count(self, flight: Flight, message: Delta | Progress) -> None:
        now, metrics = time.monotonic(), self.metrics
        if flight.waits:
            metrics.queued.observe(now - flight.began)
        if isinstance(message, Delta) and (count := len(message.ids)):
            if flight.drawn:
                metrics.between_tokens.observe((now - flight.last) / count)
            else:
                metrics.first_token.observe(now - flight.began)
                metrics.cached_tokens.inc(message.cached or 0)
            metrics.new_tokens.inc(count)
            flight.last = now

    def _end(self, flight: Flight, finish_reason: str, reason: str | None) -> None:
        self.flights.pop(flight.submit.id, None)
        self.metrics.ended.labels(finish_reason).inc()
        self.metrics.whole.observe(time.monotonic() - flight.began)
        flight.end(finish_reason, reason)

    def _send(self, message: Message) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(message))
