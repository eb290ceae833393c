"""Serving over a Unix socket: frames of requests to the engine on rank 0, and its outputs back."""

from __future__ import annotations

import gc
import os
import socket
import stat
import sys
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock, Thread
from time import sleep

import numpy as np

import helix.events.request
from helix.answers.matcher import BegunGrammar, Grammars
from helix.build.buffers import most_slots
from helix.build.engine import build_engine
from helix.build.tiering import of_short_chunks
from helix.control.engine import Engine
from helix.control.inbox import Inbox
from helix.errors import RankError
from helix.events.decision import StepKind
from helix.events.request import Request
from helix.events.sampling_params import SamplingParams
from kernels.ahead import on_compilation
from launch.client.frames import (
    Cancel,
    Delta,
    Failed,
    FrameDecoder,
    Message,
    Progress,
    Queued,
    Ready,
    Scored,
    Stats,
    StepDeltas,
    Stop,
    Submit,
    Unread,
    encode,
)
from launch.job.task import Done, Task

# Captured steps: greedy, sampled, sampled with filters; later the same with shaped logits.
PLAIN = {StepKind(), StepKind(stochastic=True), StepKind(stochastic=True, filtered=True)}
SHAPED = {replace(kind, shaped=True) for kind in PLAIN}
STATS_S = 1.0  # between two reports
BUFFER = 1 << 22  # bytes of the send buffer
PIECE = 1 << 20  # bytes read at a time
MOST_ID = 1 << 31  # of requests whose tokens are sent with others'
COMPILING = 2  # grammars at a time


def run(task: Task) -> Done:
    """Runs the engine until the front end ends the job."""
    plan, comm = task.plan, task.comm
    inbox = Inbox()
    link = Link(Path(str(plan.config.serve.socket)), inbox) if comm.rank == 0 else None
    model, draft = task.load()
    max_batch = most_slots(plan.config, comm.device.type)
    most = max_batch * model.spec.max_positions  # if memory allows
    auto = plan.config.decode.max_batch == "auto"
    engine = build_engine(plan.layout, comm, model, plan.config, max_batch, most, draft=draft, fewer=auto)
    if plan.config.kv.tier == "host":
        stored = model.weights.dtype, plan.config.kv.dtype
        if warning := of_short_chunks(model.spec, *stored, engine.prefill_chunk):
            task.console.note(warning)
    task.phases.mark("build")
    if comm.device.type == "cuda":
        engine.warm_up(PLAIN, SHAPED, task.phases.mark, chunks=True)
    task.console.note(f"ready after {task.phases}")
    on_compilation(lambda kernel: task.console.note(f"compiled while serving: {kernel}"))
    path = plan.config.model.path
    serve(engine, inbox, link, None if path is None else Path(path).resolve(), random=plan.checkpoint is None)
    return {}, 0


def serve(engine: Engine, inbox: Inbox, link: Link | None, model: Path | None, random: bool = False) -> None:
    """Serves requests of rank 0's link until the inbox is closed, then closes the engine; a collective call.

    Args:
        link: rank 0's; None on the other ranks.
        model: the checkpoint's directory; None for a shape alone.
        random: whether the weights are random.
    """
    runner, spec = engine.runner, engine.runner.model.spec
    if link is not None:
        unguided = link.learn(model, spec.vocab, spec.eos)
        ready = Ready(
            model=None if model is None else str(model),
            layout=str(runner.layout),
            ranks=runner.layout.world_size,
            context=spec.max_positions,
            max_length=runner.max_length,
            vocab=spec.vocab,
            kv_tokens=runner.cache.pages * runner.placement.stripes.page_tokens * runner.layout.dp,
            max_batch=runner.max_batch * runner.layout.dp,
            eos=tuple(sorted(spec.eos)),
            guided=unguided is None,
            unguided=unguided,
            random=random,
        )
        link.open(ready, lambda: engine_stats(engine))
        engine.on_yielded = link.flush
    gc.freeze()  # what stays: to look through it again would stop all ranks for some 150 ms
    try:
        for update in engine.serve(inbox):
            assert link is not None  # the other ranks have none
            link.pass_on(update)
    except Exception as error:
        if link is not None:
            link.fail(str(error) if isinstance(error, RankError) else f"{type(error).__name__}: {error}")
        raise
    engine.close()
    if link is not None:
        link.close()


def engine_stats(engine: Engine) -> dict[str, float]:
    """Returns the gauges and counters that rank 0 reports every second."""
    pools, timings = [tables.pool for tables in engine.tables], engine.timings
    return {
        "pages": engine.runner.cache.pages * len(pools),
        "pages_used": sum(pool.used for pool in pools),
        "pages_cached": sum(pool.cached for pool in pools),
        "pages_free": sum(pool.free for pool in pools),
        "preemptions": timings.preemptions,
        # Of the engine's thread alone, so that a hang shows: see `Silence`.
        "progress": timings.decisions + engine.runner.model.layers_run,
        "chunk_s": timings.chunk_s,
        "drafts": sum(timings.acceptance.tried[:1]),
        **{f"drafts_kept_{place}": kept for place, kept in enumerate(timings.acceptance.kept)},
    }


class Link:
    """Rank 0's end of the socket, for one front end at a time; when it leaves, its requests are aborted.

    Raises:
        RankError: the socket cannot be created.
    """

    def __init__(self, path: Path, inbox: Inbox) -> None:
        self._path = path
        self._inbox = inbox
        self._listener = _listen(path)
        self._lock = Lock()
        self._peer: socket.socket | None = None
        self._closed = False
        self._prefix = ""  # prefix of the engine's names for this front end's requests
        self._names: dict[str | int, int] = {}
        self._drawn: list[int] = []  # ids and tokens that are sent together, of the front end with prefix `_of`
        self._of = ""
        self._followed: dict[str | int, BegunGrammar] = {}
        self._grammars: Grammars | None = None
        self._compiling = ThreadPoolExecutor(COMPILING, "grammars")  # meanwhile other requests are read
        self._uncompiled: set[str] = set()
        self._passing = Lock()  # held while a request goes to the inbox, so that it is not aborted before

    def learn(self, model: Path | None, vocab: int, eos: Collection[int]) -> str | None:
        """Reads a model's tokenizer for grammars; returns why answers cannot follow any, None if they can."""
        path = None if model is None else model / "tokenizer.json"
        if path is None or not path.exists():
            return "the model has no tokenizer"
        try:
            self._grammars = Grammars(path, vocab, eos)
        except (ValueError, OSError) as error:
            return " ".join(str(error).split())[:300]
        return None

    def open(self, ready: Ready, stats: Callable[[], dict[str, float]]) -> None:
        """Starts serving front ends that connect, and sends them the result of `stats` every second."""
        Thread(target=self._accept, args=(ready,), name="front end", daemon=True).start()
        Thread(target=self._tell, args=(stats,), name="stats", daemon=True).start()

    def fail(self, reason: str) -> None:
        """Sends the front end the reason of the job's failure."""
        self.flush()
        self._send(Failed(reason), self._prefix)

    def close(self) -> None:
        """Closes and removes the socket, and ends the front end's connection: this process may live on."""
        self._closed = True
        self._listener.close()
        with self._lock, suppress(OSError):
            if self._peer is not None:
                self._peer.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            self._path.unlink()

    def pass_on(self, update: helix.events.request.RequestUpdate) -> None:
        """Sends the news of a request to the front end that submitted it; tokens alone wait for `flush`."""
        name = self._names.get(update.id)
        if name is None:
            return
        finish_reason, reason = update.finish_reason, update.reason
        if update.new_ids and finish_reason is None and not update.logprobs and name < MOST_ID:
            if self._of != (prefix := self._prefix):  # what another front end has left behind is nobody's
                self._of, self._drawn = prefix, []
            if str(update.id).startswith(prefix):
                for token in update.new_ids:
                    self._drawn += (name, token)
            return
        self.flush()
        if (part := update.scored) is not None:
            both = np.stack([part.ids, part.values.view(np.int32)])
            self._send(Scored(name, part.begin, part.ids.shape[1], both.reshape(-1)), update.id)
            return
        if finish_reason is not None:
            self._names.pop(update.id, None)
            followed = self._followed.pop(update.id, None)
            if followed is not None and followed.mistake is not None and finish_reason in ("stop", "length"):
                finish_reason, reason = "error", followed.mistake
        if update.new_ids or finish_reason is not None:
            ids = np.asarray(update.new_ids, dtype=np.int32)
            logprobs = tuple((of.drawn, of.best) for of in update.logprobs)
            told: Message = Delta(name, finish_reason, reason, update.cached_tokens, logprobs, ids)
        else:
            told = Progress(name, update.prefilled, update.prompt_tokens, update.cached_tokens)
        self._send(told, update.id)

    def flush(self) -> None:
        """Sends the tokens that have been passed on: a message for all requests, as each costs as much as the draw."""
        if self._drawn:
            drawn, self._drawn = self._drawn, []
            self._send(StepDeltas(np.array(drawn, dtype=np.int32)), self._of)

    def _tell(self, stats: Callable[[], dict[str, float]]) -> None:
        while not self._closed:
            self._send(Stats(stats()), self._prefix)
            sleep(STATS_S)

    def _send(self, message: Message, of: str | int) -> None:
        with self._lock:
            if self._peer is not None and str(of).startswith(self._prefix):
                try:
                    self._peer.sendall(encode(message))
                except OSError:  # it has left, which its reader notices
                    self._peer = None

    def _accept(self, ready: Ready) -> None:
        connection = 0
        while not self._closed:
            try:
                peer, _ = self._listener.accept()
            except OSError:  # closed
                return
            with peer:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
                connection += 1
                try:
                    with self._lock:
                        self._peer, self._prefix = peer, f"{connection}:"
                        peer.sendall(encode(ready))
                    self._read(peer)
                except OSError:  # it has left
                    pass
                except ValueError as error:
                    print(f"serve.socket={self._path}: received data that is {error}", file=sys.stderr, flush=True)
                with self._lock:
                    self._peer = None
                for left in [*self._uncompiled, *self._names]:
                    self._abort(left)

    def _read(self, peer: socket.socket) -> None:
        decoder = FrameDecoder()
        while data := peer.recv(PIECE):
            for message in decoder.feed(data):
                match message:
                    case Submit() if message.grammar is not None:
                        self._uncompiled.add(f"{self._prefix}{message.id}")
                        self._compiling.submit(self._submit, message, self._prefix)
                    case Submit():
                        self._submit(message, self._prefix)
                    case Unread():
                        self._send(Delta(message.id, "error", message.reason), self._prefix)
                    case Cancel():
                        self._abort(f"{self._prefix}{message.id}")
                    case Stop():
                        self._closed = True
                        self._inbox.close()
                        for name in [*self._names]:
                            self._inbox.abort(name)

    def _abort(self, name: str | int) -> None:
        with self._passing:
            if name in self._uncompiled:
                self._uncompiled.remove(str(name))
            else:
                self._inbox.abort(name)

    def _submit(self, message: Submit, prefix: str) -> None:
        name = f"{prefix}{message.id}"
        try:
            request, grammar = request_of(name, message, self._grammars)
        except BaseException as error:  # also panics of llguidance: only this request fails
            self._uncompiled.discard(name)
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            self._send(Delta(message.id, "error", reason), name)
            return
        with self._passing:
            if self._closed or (grammar is not None and name not in self._uncompiled):
                return
            self._uncompiled.discard(name)
            self._names[name] = message.id
            if grammar is not None:
                self._followed[name] = grammar
            self._send(Queued(message.id), name)
            self._inbox.submit(request)


def request_of(name: str, message: Submit, grammars: Grammars | None) -> tuple[Request, BegunGrammar | None]:
    """Creates the engine's request, and the grammar in it.

    Raises:
        ValueError: the grammar is invalid, or the model can follow none.
    """
    given = dict(message.sampling)
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    grammar = None
    if message.grammar is not None:
        if grammars is None:
            raise ValueError("no answer of this model can be made to follow a grammar")
        answer = message.ids[len(message.ids) - message.drawn :]
        grammar = grammars.begun(message.grammar, answer.tolist())
    request = Request(
        name,
        message.ids,
        message.max_new_tokens,
        SamplingParams(**given),
        priority=message.priority,
        salt=message.salt,
        drawn=message.drawn,
        grammar=grammar,
    )
    return request, grammar


def _listen(path: Path) -> socket.socket:
    """Creates a socket that only this user can connect to; replaces one that a dead job left."""
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _answers(path):
            path.unlink()
        listener.bind(str(path))
        listener.listen(1)
    except OSError as error:
        raise RankError(f"serve.socket={path} cannot be listened at: {error.strerror or error}") from error
    finally:
        os.umask(before)
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
