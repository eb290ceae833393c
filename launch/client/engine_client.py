"""The client's view of the engine: in-flight generations, and the connection to the job that serves them."""

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
from launch.client.engine_messages import (
    Cancel,
    EngineInfo,
    Failed,
    FrameDecoder,
    MalformedMessage,
    Message,
    Queued,
    Stats,
    Stop,
    encode_parts,
)
from launch.client.errors import ApiError
from launch.client.load_table import LoadTable

PIECE = 1 << 20  # bytes read at a time
MAX_CRASHES = 2  # job crashes during a generation before it counts as their cause
RETRY_S = {"starting": 10, "restarting": 10, "draining": 30, "failed": 60}


class Stage(IntEnum):
    """How far a job has come with a generation."""

    UNSENT = 0  # not sent to the current job
    SENT = 1
    QUEUED = 2  # received by the job
    ADMITTED = 3
    RUNNING = 4  # part of the prompt has been computed


class Generation:
    """One in-flight sequence of a request.

    Attributes:
        request: as sent to the ranks.
        group: shared by all generations of one client request.
        name: the request's id in the log.
        logprobs: one entry per output token, if requested.
        prompt_logprobs: for prompt tokens after the first, if requested: ids int32 and log-probabilities float32, both
            [n - 1, width]; column 0 is the prompt token itself, the others are the most likely tokens.
        finish_reason, reason: see `RequestUpdate`; set once it has finished.
        num_cached_tokens: prompt tokens found in the prefix cache; None until known.
        progress: prompt tokens computed; None until admitted.
        stage: its stage in the current job.
        crashes: job crashes that it may have caused.
        admitted_time, first_token_time: monotonic time; `first_token_time` is None until there is a token.
    """

    def __init__(self, request: Request, group: object, name: str, on_update: Callable[[], None]) -> None:
        self.request = request
        self.group = group
        self.name = name
        self.on_update = on_update
        self.output_token_ids: list[int] = []
        self.logprobs: list[Any] = []
        self.prompt_logprobs: tuple[np.ndarray, np.ndarray] | None = None
        self.finish_reason: str | None = None
        self.reason: str | None = None
        self.num_cached_tokens: int | None = None
        self.progress: int | None = None
        self.stage = Stage.SENT
        self.crashes = 0
        self.arrival_time = time.monotonic()
        self.admitted_time = self.arrival_time
        self.first_token_time: float | None = None
        self.last_token_time = self.arrival_time

    @property
    def is_waiting(self) -> bool:
        return self.progress is None and not self.output_token_ids

    def set_prompt_logprobs(self, begin: int, ids: np.ndarray, values: np.ndarray) -> None:
        """Sets the log-probabilities of prompt tokens from position `begin` on; arrays [n, width]."""
        if self.prompt_logprobs is None:
            shape = len(self.request.prompt) - 1, ids.shape[1]
            self.prompt_logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        for whole, part in zip(self.prompt_logprobs, (ids, values), strict=True):
            whole[begin - 1 : begin - 1 + len(part)] = part

    def end(self, finish_reason: str, reason: str | None = None) -> None:
        self.finish_reason, self.reason = finish_reason, reason
        self.on_update()


class Observer:
    """Observes generations and the job; this base class ignores everything."""

    def on_submit(self, generation: Generation) -> None:
        """Called when a generation is submitted."""

    def on_admit(self, generation: Generation) -> None:
        """Called when it is admitted."""

    def on_tokens(self, generation: Generation, count: int, now: float) -> None:
        """Called with the number of new tokens, before they are appended."""

    def on_finish(self, generation: Generation, finish_reason: str) -> None:
        """Called when it has finished."""

    def on_stats(self, before: Mapping[str, float], stats: Mapping[str, float]) -> None:
        """Called with new gauges and counters of the job; `before` are the previous ones."""

    def on_restart(self) -> None:
        """Called when the job restarts."""


class EngineClient:
    """All in-flight generations and their connection to a job; it outlives jobs.

    Attributes:
        draining: whether new requests are refused because the server is shutting down.
        on_engine_info: called in a thread with the first job's `EngineInfo`, before the client is ready.
        engine_info: the job's `EngineInfo`, once the first job has sent it.
        stats: the job's latest gauges and counters.
        observer: observes all generations.
        loads: the requests in flight in all processes of the server.

    Args:
        max_waiting: maximum number of waiting generations, over all processes.
    """

    def __init__(self, max_waiting: int, observer: Observer | None = None, loads: LoadTable | None = None) -> None:
        self._state, self._why = "starting", "the model is loading"
        self.draining = False
        self.on_engine_info: Callable[[EngineInfo], None] = lambda engine_info: None
        self.engine_info: EngineInfo | None = None
        self.generations: dict[str | int, Generation] = {}
        self.stats: dict[str, float] = {}
        self.observer = observer or Observer()
        self.loads = loads or LoadTable()
        self._max_waiting = max_waiting
        self._waiting_ids: set[str | int] = set()
        self._next_ids = itertools.count(1)
        self._writer: StreamWriter | None = None
        self._ready_event = asyncio.Event()

    @property
    def state(self) -> str:
        """One of starting, ready, restarting, draining, failed."""
        return "draining" if self.draining else self._state

    @property
    def why(self) -> str:
        return "the server is shutting down" if self.draining else self._why

    @property
    def connected(self) -> bool:
        return self._writer is not None

    @property
    def running(self) -> int:
        """Number of in-flight requests; a request may have several generations."""
        return len({generation.group for generation in self.generations.values()})

    @property
    def waiting(self) -> int:
        return len(self._waiting_ids)

    def refuse_unless_ready(self) -> EngineInfo:
        """Returns the job's `EngineInfo`.

        Raises:
            ApiError: 503, with the state and its reason.
        """
        if self.state != "ready" or self.engine_info is None:
            raise ApiError(503, f"{self.state}: {self.why}", code=self.state, retry_s=RETRY_S.get(self.state, 10))
        return self.engine_info

    async def wait_ready(self) -> EngineInfo:
        await self._ready_event.wait()
        assert self.engine_info is not None
        return self.engine_info

    def start(self, requests: Sequence[Request], on_update: Callable[[], None], name: str = "") -> list[Generation]:
        """Submits requests to the job, all or none; sets their `id`.

        Args:
            name: the request's id in the log.

        Raises:
            ApiError: 503 or 429; 400 if a request is too large for a frame.
        """
        self.refuse_unless_ready()
        group = object()
        generations = [
            Generation(replace(request, id=next(self._next_ids)), group, name, on_update) for request in requests
        ]
        # Count them first and then look: two processes that do so at once never exceed the limit together.
        self._publish(len(generations))
        try:
            if (waiting := self.loads.waiting) > self._max_waiting:
                what = f"{waiting - len(generations)} requests are queued (serve.max_queue={self._max_waiting})"
                raise ApiError(429, f"{what}: try again later", code="queue_full", retry_s=5)
            frames = [encode_parts(generation.request) for generation in generations]
        except Exception as error:
            self._publish()
            if isinstance(error, ValueError):
                raise ApiError(400, str(error), code="too_large") from error
            raise
        for generation, frame in zip(generations, frames, strict=True):
            self.generations[generation.request.id] = generation
            self._waiting_ids.add(generation.request.id)
            self.observer.on_submit(generation)
            self._write(frame)
        self._publish()
        return generations

    def abort(self, generation: Generation, finish_reason: str = "abort") -> None:
        """Cancels a generation with the given finish reason; does nothing if it has finished."""
        if generation.request.id in self.generations:
            self._finish(generation, finish_reason, None)
            self._send(Cancel(int(generation.request.id)))

    def stop(self) -> None:
        self._send(Stop())

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> str:
        """Exchanges messages with a job until the connection ends; resubmits in-flight generations once it is ready.

        Returns:
            Why it ended, if known.

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
                    return f"the ranks sent data that cannot be decoded: {error}"
                for message in messages:
                    if isinstance(message, Failed):
                        why = f"the ranks failed: {message.reason}"
                    elif not isinstance(message, EngineInfo):
                        self._handle_message(message)
                    else:
                        if self.engine_info is None:
                            await asyncio.to_thread(self.on_engine_info, message)
                        self._resubmit(message, writer)
        except ConnectionError:
            pass
        finally:
            self._writer = None
            if self._state == "ready":
                self._set_state("restarting", why or "the connection to the ranks closed")
            writer.close()
        return why

    def on_job_lost(self, why: str) -> Generation | None:
        """Handles the end of a job that may have had work.

        If the job had received or started exactly one new request, that request is the likely cause and is not
        retried. Queued requests are not suspects, nor is any request that the job had not received.

        Returns:
            A generation of the request that is not retried.
        """
        self._set_state("restarting", why)
        given_up = self._fail_suspects(why)
        for generation in self.generations.values():
            generation.stage = Stage.UNSENT
        return given_up

    def _fail_suspects(self, why: str) -> Generation | None:
        """Ends requests that may have crashed a job; returns a generation of the one that did."""
        new: dict[object, Generation] = {}
        for generation in self.generations.values():
            if generation.stage in (Stage.SENT, Stage.ADMITTED):
                new.setdefault(generation.group, generation)
        if len(new) == 1:
            ((group, given_up),) = new.items()
            for generation in [generation for generation in self.generations.values() if generation.group == group]:
                self._finish(generation, "error", f"the engine failed while it started this request: {why}")
            return given_up
        for generation in [one for one in self.generations.values() if one.stage not in (Stage.UNSENT, Stage.QUEUED)]:
            generation.crashes += 1
            if generation.crashes >= MAX_CRASHES:
                what = f"the engine failed {MAX_CRASHES} times while running this request: {why}"
                self._finish(generation, "error", what)
        return None

    def fail(self, why: str) -> None:
        """Ends all generations: no job will come back. In a drain this is no error: another server can run them."""
        self._set_state("failed", why)
        for generation in [*self.generations.values()]:
            self._finish(generation, "abort" if self.draining else "error", why)

    def _resubmit(self, engine_info: EngineInfo, writer: StreamWriter) -> None:
        self.engine_info = engine_info
        self._writer = writer
        self._set_state("ready", "")
        self._ready_event.set()
        for generation in self.generations.values():
            generation.stage = Stage.SENT
            # Output is as if uninterrupted: sampling depends only on seed and position.
            before, drawn = generation.request, len(generation.output_token_ids)
            ids = np.concatenate([before.prompt, np.asarray(generation.output_token_ids, dtype=np.int32)])
            self._send(replace(before, prompt=ids, num_prior_output_tokens=drawn, max_tokens=before.max_tokens - drawn))

    def _handle_message(self, message: Message) -> None:
        if isinstance(message, Stats):
            self.observer.on_stats(self.stats, message.values)
            self.stats = message.values
        elif isinstance(message, MalformedMessage | Queued | RequestUpdate) and message.id in self.generations:
            generation = self.generations[message.id]
            if isinstance(message, MalformedMessage):
                self._finish(generation, "error", f"the ranks sent a malformed message: {message.reason}")
                self._send(Cancel(message.id))
            elif isinstance(message, Queued):
                generation.stage = Stage.QUEUED
            else:
                self._handle_update(generation, message)

    def _handle_update(self, generation: Generation, update: RequestUpdate) -> None:
        if (part := update.prompt_logprobs) is not None:
            generation.set_prompt_logprobs(part.begin, part.ids, part.values)
            return
        if generation.num_cached_tokens is None:
            generation.num_cached_tokens = update.cached_tokens
        if update.new_token_ids or update.finish_reason is not None:
            self._append_tokens(generation, update.new_token_ids)
            generation.logprobs += update.logprobs
            if update.finish_reason is not None:
                self._finish(generation, update.finish_reason, update.reason)
        else:
            self._mark_admitted(generation)
            generation.stage = Stage.ADMITTED if generation.stage < Stage.ADMITTED else Stage.RUNNING
            generation.progress = update.num_computed_tokens
        generation.on_update()

    def _mark_admitted(self, generation: Generation) -> None:
        if generation.request.id in self._waiting_ids:
            self._waiting_ids.remove(generation.request.id)
            self._publish()
            generation.admitted_time = time.monotonic()
            self.observer.on_admit(generation)

    def _append_tokens(self, generation: Generation, tokens: Sequence[int]) -> None:
        if tokens:
            now = time.monotonic()
            self._mark_admitted(generation)
            generation.first_token_time = generation.first_token_time or now
            self.observer.on_tokens(generation, len(tokens), now)
            generation.last_token_time = now
        generation.stage = Stage.RUNNING
        generation.output_token_ids += tokens
        generation.progress = len(generation.request.prompt)

    def _finish(self, generation: Generation, finish_reason: str, reason: str | None) -> None:
        self.generations.pop(generation.request.id, None)
        self._waiting_ids.discard(generation.request.id)
        self._publish()
        self.observer.on_finish(generation, finish_reason)
        generation.end(finish_reason, reason)

    def _set_state(self, state: str, why: str) -> None:
        self._state, self._why = state, why
        self._publish()

    def _publish(self, more: int = 0) -> None:
        """Writes this process's row of the load table, with `more` generations that wait."""
        self.loads.write(self._state == "ready", len(self.generations) + more, len(self._waiting_ids) + more)

    def _send(self, message: Message) -> None:
        self._write(encode_parts(message))

    def _write(self, frame: tuple[bytes, memoryview]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.writelines(frame)
