"""Serving over a Unix socket: frames of requests to the engine on rank 0, and its outputs back."""

from __future__ import annotations

import gc
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock, Thread
from time import sleep
from typing import Any

import numpy as np

from helix.attention.block_sparse import BlockSparseAttention
from helix.config import Config
from helix.engine.core import Engine
from helix.engine.inbox import Inbox
from helix.engine.request import Request, RequestUpdate
from helix.engine.timings import Timings
from helix.errors import RankError
from helix.setup.buffers import most_slots
from helix.setup.engine import build_engine
from helix.setup.tiering import of_short_chunks
from helix.worker.graph_keys import StepKind
from helix.worker.keeps import dtype_name
from helix.worker.model_runner import ModelRunner
from helix.worker.warm_up import exchange_seconds
from kernels.ahead import on_compilation
from launch.answers.matcher import BegunGrammar, Grammars
from launch.client.errors import REFUSED, ApiError
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
    encode,
    encode_tokens,
)
from launch.client.sampling import sampling_of
from launch.client.tokens import read_defaults
from launch.inputs.prompts import PromptFile, body_of
from launch.job.lifeline import LAUNCHER
from launch.job.report import summary, what_hopb_does
from launch.job.spawn import CLIENT_S, SOCKET, TIME_EXCHANGE
from launch.job.task import Done, Task

LOOKED_AT = 1024  # prompts of a file, for the kinds of steps that they need
OF_RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"}  # variables
# Captured steps: greedy, sampled, sampled with filters; later the same with shaped logits.
PLAIN = {StepKind(), StepKind(stochastic=True), StepKind(stochastic=True, filtered=True)}
SHAPED = {replace(kind, shaped=True) for kind in PLAIN}
STATS_S = 1.0  # between two reports
BUFFER = 1 << 22  # bytes of the send buffer
PIECE = 1 << 20  # bytes read at a time
MOST_ID = 1 << 31  # of requests whose tokens are sent with others'
COMPILING = 2  # grammars at a time


def run(task: Task) -> Done:
    """Serves the prompts of a file or a server's requests, until the client ends the job."""
    plan, comm, config = task.plan, task.comm, task.plan.config
    inbox = Inbox()
    with ExitStack() as stack:
        link, client = None, None
        if comm.rank == 0:
            path = config.serve.socket or os.environ.get(SOCKET)
            if path is None:  # the launcher of these ranks knows no client
                path = stack.enter_context(TemporaryDirectory(prefix="helix-")) + "/ranks.sock"
                client = stack.enter_context(_client(path))
            link = Link(Path(path), inbox)
            if client is not None:
                Thread(target=_end_with, args=(client, link), daemon=True).start()
        engine = _engine(task)
        path = config.model.path
        serve(engine, inbox, link, None if path is None else Path(path).resolve(), random=plan.checkpoint is None)
        measured = _measured(task, engine) if config.serve.socket is None else {}
        code = 0 if client is None else client.wait(CLIENT_S)
    if code not in (0, REFUSED):
        raise RankError(f"the client of these ranks ended with exit code {code}")
    return measured, int(code == REFUSED)


def _engine(task: Task) -> Engine:
    """Loads the model and builds the engine, for the prompts of a file or for whatever comes."""
    plan, comm, config, console = task.plan, task.comm, task.plan.config, task.console
    model, draft = task.load()
    serves = config.serve.socket is not None
    slots, context = most_slots(config, comm.device.type), model.spec.max_positions
    max_batch, tokens, kinds = slots, slots * context, PLAIN  # if memory allows
    if not serves:
        needs = None
        if isinstance(file := plan.prompts, PromptFile):  # on rank 0
            tokens = file.most_tokens(config.decode.max_tokens, context, slots)
            needs = min(file.sequences, slots), tokens, _kinds(file, config, model.spec.vocab)
        max_batch, tokens, kinds = comm.broadcast_object(needs)
    fewer = config.decode.max_batch == "auto"
    engine = build_engine(plan.layout, model, config, max_batch, tokens, draft=draft, fewer=fewer)
    sizes = engine.runner.sizes
    blocks = config.blocks
    console.note(f"KV cache: {_kv_tokens(engine):,} tokens, page size {blocks.page}, append block {blocks.append}")
    console.note(
        f"batch: up to {sizes.slots * plan.layout.dp:,} sequences of up to {sizes.length:,} tokens, "
        f"prefill chunks of up to {sizes.chunk:,} tokens"
    )
    if config.kv.tier == "host" and (
        warning := of_short_chunks(model.spec, dtype_name(model.weights.dtype), config.kv.dtype, sizes.chunk)
    ):
        console.note(warning)
    task.phases.mark("build")
    if comm.device.type == "cuda":
        engine.warm_up(kinds, SHAPED if serves else (), task.phases.mark, chunks=serves)
    if engine.runner.hopb == "best":
        console.note(what_hopb_does(engine.runner))
    if serves:
        console.note(f"ready after {task.phases}")
        on_compilation(lambda kernel: console.note(f"compiled while serving: {kernel}"))
    return engine


def _kv_tokens(engine: Engine) -> int:
    """Returns the number of tokens of all sequences together that the cache holds."""
    runner = engine.runner
    return runner.sizes.pages * runner.placement.stripes.page_tokens * runner.layout.dp


def _kinds(file: PromptFile, config: Config, vocab: int) -> set[StepKind]:
    """Finds the kinds of steps that the first prompts need."""
    defaults = read_defaults(config.model.path)
    kinds = set()
    for prompt in islice(file, LOOKED_AT):
        with suppress(ApiError, ValueError):  # it is refused when it comes
            body, batch = body_of(prompt, config.decode), prompt.url is not None
            kinds.add(StepKind.of([sampling_of(body, defaults if batch else {}, vocab, 0)]))
    return kinds or PLAIN


def _measured(task: Task, engine: Engine) -> dict[str, Any]:
    """Shows the tables of a run, and returns the measured part of its record."""
    plan, comm, runner = task.plan, task.comm, engine.runner
    bytes_per_token = comm.all_gather_object(runner.cache.bytes_per_token)
    policy = runner.policy
    blocks = comm.all_gather_object(policy.blocks_read()) if isinstance(policy, BlockSparseAttention) else None
    exchange = _exchange(runner, engine.timings) if TIME_EXCHANGE in os.environ else {}
    if comm.rank:
        return {}
    measured = exchange | summary(plan.layout, engine.timings, bytes_per_token) | {"hopb_chosen": runner.hopb_chunks}
    measured |= {} if blocks is None else {"blocks_read_per_rank": blocks}
    chosen = ", ".join(f"{rows} rows in {chunks}" for rows, (chunks, _) in runner.hopb_chunks.items() if chunks > 1)
    title = [] if blocks is None else [f"{plan.config.attention.policy} attention (lossy)"]
    title += [f"HOP-B: {chosen} chunks"] if chosen else []
    task.console.finish("; ".join(title), measured)
    return measured


def _exchange(runner: ModelRunner, timings: Timings) -> dict[str, Any]:
    """Times the exchange of the run's most frequent size of decode steps alone; a collective call."""
    most = timings.queries.most_common(1) if runner.comm.rank == 0 else []
    queries = runner.comm.broadcast_object(most[0][0] if most else 0)
    return {"exchange_queries": queries, "exchange_us": 1e6 * exchange_seconds(runner, queries)} if queries else {}


@contextmanager
def _client(path: str) -> Iterator[subprocess.Popen[str]]:
    """Starts this job's command again as the client of its ranks."""
    environment = {name: value for name, value in os.environ.items() if name not in OF_RANKS}
    command = [sys.executable, *sys.argv, f"serve.attach={path}"]
    with subprocess.Popen(command, env=environment | {LAUNCHER: str(os.getpid())}, text=True) as client:
        try:
            yield client
        finally:
            client.terminate()


def _end_with(client: subprocess.Popen[str], link: Link) -> None:
    client.wait()
    link.stop()


def serve(engine: Engine, inbox: Inbox, link: Link | None, model: Path | None, random: bool = False) -> None:
    """Serves requests of rank 0's link until the inbox is closed, then closes the engine; a collective call.

    Args:
        link: rank 0's; None on the other ranks.
        model: the checkpoint's directory; None for a shape alone.
        random: whether the weights are random.
    """
    runner, sizes, spec = engine.runner, engine.runner.sizes, engine.runner.model.spec
    if link is not None:
        unguided = link.learn(model, spec.vocab, spec.eos)
        ready = Ready(
            model=None if model is None else str(model),
            layout=str(runner.layout),
            ranks=runner.layout.world_size,
            context=spec.max_positions,
            max_length=sizes.length,
            vocab=spec.vocab,
            kv_tokens=_kv_tokens(engine),
            max_batch=sizes.slots * runner.layout.dp,
            eos=tuple(sorted(spec.eos)),
            guided=unguided is None,
            unguided=unguided,
            random=random,
        )
        link.open(ready, lambda: engine_stats(engine))
    gc.freeze()  # what stays: to look through it again would stop all ranks for some 150 ms
    try:
        for updates in engine.serve(inbox):
            assert link is not None  # the other ranks have none
            for update in updates:
                link.pass_on(update)
            link.flush()
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
        "pages": engine.runner.sizes.pages * len(pools),
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

    def pass_on(self, update: RequestUpdate) -> None:
        """Sends the news of a request to the front end that submitted it; tokens alone wait for `flush`."""
        name = self._names.get(update.id)
        if name is None:
            return
        alone = update.finish_reason is None and not update.logprobs
        if update.new_ids and alone and name < MOST_ID:
            if self._of != (prefix := self._prefix):  # what another front end has left behind is nobody's
                self._of, self._drawn = prefix, []
            if str(update.id).startswith(prefix):
                for token in update.new_ids:
                    self._drawn += (name, token)
            return
        self.flush()
        if update.finish_reason is not None:
            self._names.pop(update.id, None)
            followed = self._followed.pop(update.id, None)
            if followed is not None and followed.mistake is not None and update.finish_reason in ("stop", "length"):
                update.finish_reason, update.reason = "error", followed.mistake
        self._send(replace(update, id=name), update.id)

    def flush(self) -> None:
        """Sends the tokens that have been passed on: a message for all requests, as each costs as much as the draw."""
        if self._drawn:
            drawn, self._drawn = self._drawn, []
            self._write(encode_tokens(drawn), self._of)

    def _tell(self, stats: Callable[[], dict[str, float]]) -> None:
        while not self._closed:
            self._send(Stats(stats()), self._prefix)
            sleep(STATS_S)

    def _send(self, message: Message, of: str | int) -> None:
        self._write(encode(message), of)

    def _write(self, frame: bytes, of: str | int) -> None:
        with self._lock:
            if self._peer is not None and str(of).startswith(self._prefix):
                try:
                    self._peer.sendall(frame)
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
                    case Request() if message.grammar is not None:
                        self._uncompiled.add(f"{self._prefix}{message.id}")
                        self._compiling.submit(self._submit, message, self._prefix)
                    case Request():
                        self._submit(message, self._prefix)
                    case Unread():
                        self._refuse(message.id, message.reason, self._prefix)
                    case Cancel():
                        self._abort(f"{self._prefix}{message.id}")
                    case Stop():
                        self.stop()

    def stop(self) -> None:
        """Ends the job and all running requests."""
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

    def _submit(self, message: Request, prefix: str) -> None:
        number, name = int(message.id), f"{prefix}{message.id}"
        try:
            request, grammar = begun(replace(message, id=name), self._grammars)
        except BaseException as error:  # also panics of llguidance: only this request fails
            self._uncompiled.discard(name)
            self._refuse(
                number, str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}", name
            )
            return
        with self._passing:
            if self._closed or (grammar is not None and name not in self._uncompiled):
                return
            self._uncompiled.discard(name)
            self._names[name] = number
            if grammar is not None:
                self._followed[name] = grammar
            self._send(Queued(number), name)
            self._inbox.submit(request)

    def _refuse(self, number: int, reason: str, of: str) -> None:
        self._send(RequestUpdate(number, finish_reason="error", reason=reason), of)


def begun(request: Request, grammars: Grammars | None) -> tuple[Request, BegunGrammar | None]:
    """Returns a request with the matcher of its grammar, and the matcher.

    Raises:
        ValueError: the grammar is invalid, or the model can follow none.
    """
    if request.grammar is None:
        return request, None
    if grammars is None:
        raise ValueError("no answer of this model can be made to follow a grammar")
    answer = request.prompt[len(request.prompt) - request.drawn :]
    matcher = grammars.begun(request.grammar, np.asarray(answer).tolist())
    return replace(request, matcher=matcher), matcher


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
