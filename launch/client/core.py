"""The front end's view of the engine: running continuations, over the job that currently serves them."""

from __future__ import annotations

import asyncio
import itertools
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any

import numpy as np

from helix.engine.request import Request, RequestUpdate
from launch.client.errors import ApiError
from launch.client.frames import (
    Cancel,
    Failed,
    FrameDecoder,
    Message,
    Queued,
    Ready,
    Stats,
    Stop,
    Unread,
    pieces,
)

PIECE = 1 << 20  # bytes read at a time
CRASHES = 2  # crashes of the job during one continuation after which it is taken for the cause
RETRY_S = {"starting": 10, "restarting": 10, "draining": 30, "failed": 60}


class Stage(IntEnum):
    """A stage of a job's work on a continuation."""

    HELD = 0  # no job has it
    SENT = 1
    QUEUED = 2  # read by the job
    ADMITTED = 3
    RUNNING = 4  # part of it has been computed


class Flight:
    """A running continuation.

    Attributes:
        request: as the ranks get it.
        group: identity shared by all continuations of one request of a client.
        name: the request's id in the log.
        drawn: token ids so far.
        logprobs: those of each token, if requested.
        scored: the prompt's tokens behind its first, if requested: ids and log-probabilities [n - 1, width], the
            token's own and those of the most likely ones.
        finish_reason, reason: see `RequestUpdate`; set once it has ended.
        cached: prompt tokens found in the cache; None until known.
        progress: prompt tokens done; None until it is admitted.
        stage: its stage in the current job.
        crashes: crashes of the job during this continuation, which it may have caused.
        admitted: time of its admission, once it is admitted.
        first: time of its first token, by the monotonic clock; None until it has one.
    """

    def __init__(self, request: Request, group: object, name: str, changed: Callable[[], None]) -> None:
        self.request = request
        self.group = group
        self.name = name
        self.changed = changed
        self.drawn: list[int] = []
        self.logprobs: list[Any] = []
        self.scored: tuple[np.ndarray, np.ndarray] | None = None
        self.finish_reason: str | None = None
        self.reason: str | None = None
        self.cached: int | None = None
        self.progress: int | None = None
        self.stage = Stage.SENT
        self.crashes = 0
        self.began = time.monotonic()
        self.admitted = self.began
        self.first: float | None = None
        self.last = self.began  # time of its last tokens

    @property
    def waits(self) -> bool:
        """Whether it has not been admitted yet."""
        return self.progress is None and not self.drawn

    def score(self, begin: int, ids: np.ndarray, values: np.ndarray) -> None:
        """Sets the log-probabilities of prompt tokens from position `begin` on; shapes as in `scored`."""
        if self.scored is None:
            shape = len(self.request.prompt) - 1, ids.shape[1]
            self.scored = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        for whole, part in zip(self.scored, (ids, values), strict=True):
            whole[begin - 1 : begin - 1 + len(part)] = part

    def end(self, finish_reason: str, reason: str | None = None) -> None:
        self.finish_reason, self.reason = finish_reason, reason
        self.changed()


class Observer:
    """Listener to what becomes of continuations; this one does nothing."""

    def submitted(self, flight: Flight) -> None:
        """Takes note that a continuation was submitted."""

    def admitted(self, flight: Flight) -> None:
        """Takes note that it was admitted."""

    def drawn(self, flight: Flight, count: int, now: float) -> None:
        """Takes note of the number of tokens drawn for it, before it has them."""

    def ended(self, flight: Flight, finish_reason: str) -> None:
        """Takes note that it has ended."""

    def reported(self, before: Mapping[str, float], stats: Mapping[str, float]) -> None:
        """Takes note of gauges and counters of the job; `before` are the last ones."""

    def restarted(self) -> None:
        """Takes note that the job is started again."""


class Core:
    """Registry of running continuations, and their connection to a job; it outlives jobs.

    Attributes:
        draining: whether new continuations are refused because the server is ending.
        on_first: called in a thread with the first job's `Ready`, before the core is ready.
        ready: the job's `Ready` message, once the first job has sent it.
        stats: the job's last gauges and counters.
        observer: hears of all continuations.
    """

    def __init__(self, most_waiting: int, observer: Observer | None = None) -> None:
        self._state, self._why = "starting", "the model is being loaded"
        self.draining = False
        self.on_first: Callable[[Ready], None] = lambda ready: None
        self.ready: Ready | None = None
        self.flights: dict[str | int, Flight] = {}
        self.stats: dict[str, float] = {}
        self.observer = observer or Observer()
        self._most_waiting = most_waiting
        self._numbers = itertools.count(1)
        self._writer: StreamWriter | None = None
        self._served = asyncio.Event()

    @property
    def state(self) -> str:
        """The state: starting, ready, restarting, draining or failed."""
        return "draining" if self.draining else self._state

    @property
    def why(self) -> str:
        """The reason for a state other than ready."""
        return "the server is ending" if self.draining else self._why

    @property
    def connected(self) -> bool:
        return self._writer is not None

    @property
    def running(self) -> int:
        """The number of requests that have not ended; several continuations may be of one."""
        return len({flight.group for flight in self.flights.values()})

    @property
    def waiting(self) -> int:
        return sum(flight.waits for flight in self.flights.values())

    def refuse_unless_ready(self) -> Ready:
        """Returns the job's `Ready` message.

        Raises:
            ApiError: 503, with the state and its reason.
        """
        if self.state != "ready" or self.ready is None:
            raise ApiError(503, f"{self.state}: {self.why}", code=self.state, retry_s=RETRY_S.get(self.state, 10))
        return self.ready

    async def first_ready(self) -> Ready:
        """Waits for the first job to be ready; returns its message."""
        await self._served.wait()
        assert self.ready is not None
        return self.ready

    def start(self, requests: Sequence[Request], changed: Callable[[], None], name: str = "") -> list[Flight]:
        """Submits continuations to the job, all of them or none; sets their `id`.

        Args:
            name: the request's id in the log.

        Raises:
            ApiError: 503 or 429; 400 if one is too large for a frame.
        """
        self.refuse_unless_ready()
        # All are counted first: to see who of many waits takes long.
        if len(self.flights) + len(requests) > self._most_waiting < self.waiting + len(requests):
            raise ApiError(
                429,
                f"{self.waiting} requests wait, {self._most_waiting} (serve.waiting) may: try again later",
                code="queue_full",
                retry_s=5,
            )
        group = object()
        flights = [Flight(replace(request, id=next(self._numbers)), group, name, changed) for request in requests]
        try:
            frames = [pieces(flight.request) for flight in flights]
        except ValueError as error:
            raise ApiError(400, str(error), code="too_large") from error
        for flight, frame in zip(flights, frames, strict=True):
            self.flights[flight.request.id] = flight
            self.observer.submitted(flight)
            self._write(frame)
        return flights

    def abort(self, flight: Flight, finish_reason: str = "abort") -> None:
        """Cancels a continuation with the given finish reason; does nothing if it has ended."""
        if flight.request.id in self.flights:
            self._end(flight, finish_reason, None)
            self._send(Cancel(int(flight.request.id)))

    def stop(self) -> None:
        """Tells the job to end."""
        self._send(Stop())

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> str:
        """Exchanges messages with a job until its connection ends; resubmits running continuations when it is ready.

        Returns:
            The reason of its end, if known.

        Raises:
            ValueError: the model's tokenizer or other files cannot be read.
        """
        decoder = FrameDecoder()
        why = ""
        try:
            while data := await reader.read(PIECE):
                try:
                    messages = decoder.feed(data)
                except ValueError as error:
                    return f"the ranks sent data that is {error}"
                for message in messages:
                    if isinstance(message, Failed):
                        why = f"the ranks failed: {message.reason}"
                    elif not isinstance(message, Ready):
                        self._take(message)
                    else:
                        if self.ready is None:
                            await asyncio.to_thread(self.on_first, message)
                        self._begin(message, writer)
        except ConnectionError:
            pass
        finally:
            self._writer = None
            if self._state == "ready":
                self._state, self._why = "restarting", why or "the connection to the ranks ended"
            writer.close()
        return why

    def lost(self, why: str) -> Flight | None:
        """Handles the end of a job that had, or may have had, work.

        If only one request was being read or begun with, it is the likely cause and is not retried. Requests that
        waited for admission are not to blame, and none is for a job that ended before it had them.

        Returns:
            A continuation of the request that was given up.
        """
        self._state, self._why = "restarting", why
        given_up = self._blame(why)
        for flight in self.flights.values():
            flight.stage = Stage.HELD
        return given_up

    def _blame(self, why: str) -> Flight | None:
        """Ends the requests that may have ended a job; returns a continuation of the one that has."""
        new: dict[object, Flight] = {}
        for flight in self.flights.values():
            if flight.stage in (Stage.SENT, Stage.ADMITTED):
                new.setdefault(flight.group, flight)
        if len(new) == 1:
            ((group, given_up),) = new.items()
            for flight in [flight for flight in self.flights.values() if flight.group == group]:
                self._end(flight, "error", f"the engine failed when it began with this request: {why}")
            return given_up
        for flight in [one for one in self.flights.values() if one.stage not in (Stage.HELD, Stage.QUEUED)]:
            flight.crashes += 1
            if flight.crashes >= CRASHES:
                self._end(flight, "error", f"the engine failed {CRASHES} times while it worked on this request: {why}")
        return None

    def fail(self, why: str) -> None:
        """Ends all continuations with an error: no job will come back."""
        self._state, self._why = "failed", why
        for flight in [*self.flights.values()]:
            self._end(flight, "error", why)

    def _begin(self, ready: Ready, writer: StreamWriter) -> None:
        self.ready = ready
        self._writer = writer
        self._state, self._why = "ready", ""
        self._served.set()
        for flight in self.flights.values():
            flight.stage = Stage.SENT
            # Continues as if uninterrupted: draws depend only on seed and position.
            before, drawn = flight.request, len(flight.drawn)
            ids = np.concatenate([before.prompt, np.asarray(flight.drawn, dtype=np.int32)])
            self._send(replace(before, prompt=ids, drawn=drawn, max_tokens=before.max_tokens - drawn))

    def _take(self, message: Message) -> None:
        if isinstance(message, Stats):
            self.observer.reported(self.stats, message.values)
            self.stats = message.values
        elif isinstance(message, Unread | Queued | RequestUpdate) and message.id in self.flights:
            flight = self.flights[message.id]
            if isinstance(message, Unread):
                self._end(flight, "error", f"a message of the ranks is malformed: {message.reason}")
                self._send(Cancel(message.id))
            elif isinstance(message, Queued):
                flight.stage = Stage.QUEUED
            else:
                self._update(flight, message)

    def _update(self, flight: Flight, update: RequestUpdate) -> None:
        if (part := update.scored) is not None:
            flight.score(part.begin, part.ids, part.values)
            return
        flight.cached = update.cached_tokens if flight.cached is None else flight.cached
        if update.new_ids or update.finish_reason is not None:
            self._add(flight, update.new_ids)
            flight.logprobs += update.logprobs
            if update.finish_reason is not None:
                self._end(flight, update.finish_reason, update.reason)
        else:
            self._admitted(flight)
            flight.stage = Stage.ADMITTED if flight.stage < Stage.ADMITTED else Stage.RUNNING
            flight.progress = update.prefilled
        flight.changed()

    def _admitted(self, flight: Flight) -> None:
        if flight.waits:
            flight.admitted = time.monotonic()
            self.observer.admitted(flight)

    def _add(self, flight: Flight, tokens: Sequence[int]) -> None:
        """Adds tokens that a continuation has drawn."""
        if tokens:
            now = time.monotonic()
            self._admitted(flight)
            flight.first = flight.first or now
            self.observer.drawn(flight, len(tokens), now)
            flight.last = now
        flight.stage = Stage.RUNNING
        flight.drawn += tokens
        flight.progress = len(flight.request.prompt)

    def _end(self, flight: Flight, finish_reason: str, reason: str | None) -> None:
        self.flights.pop(flight.request.id, None)
        self.observer.ended(flight, finish_reason)
        flight.end(finish_reason, reason)

    def _send(self, message: Message) -> None:
        self._write(pieces(message))

    def _write(self, frame: tuple[bytes, memoryview]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.writelines(frame)
