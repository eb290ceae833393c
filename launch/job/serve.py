"""Serves the engine on rank 0 over a Unix socket: request frames in, updates out."""

from __future__ import annotations

import gc
import logging
import os
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock, Thread
from time import sleep
from typing import Any

import numpy as np
import torch

from helix.attention.block_sparse import BlockSparseAttention
from helix.config import Config
from helix.engine.core import Engine
from helix.engine.inbox import Inbox
from helix.engine.request import Request, RequestUpdate
from helix.engine.timings import Timings
from helix.errors import RankError
from helix.setup.buffers import max_slots
from helix.setup.engine import build_engine
from helix.setup.offload import short_chunk_warning
from helix.tokenizer import has_tokenizer
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.kv_cache_spec import dtype_name
from helix.worker.model_runner import ModelRunner
from helix.worker.warmup import exchange_seconds
from kernels.precompile import on_compilation
from launch.answers.grammar_matcher import GrammarMatcher, GrammarMatcherFactory
from launch.client.chat_tokenizer import read_defaults
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
    encode,
    encode_tokens,
)
from launch.client.errors import REFUSED, ApiError
from launch.client.sampling import make_sampling_params
from launch.inputs.prompt_files import PromptFile, make_body
from launch.job.lifeline import LAUNCHER
from launch.job.report import describe_hopb, summary
from launch.job.spawn import CLIENT_S, SOCKET, TIME_EXCHANGE
from launch.job.task import JobResult, Task

LOG = logging.getLogger(f"helix.{__name__}")
SAMPLED_PROMPTS = 1024  # prompts of a file that are read to find the decode graphs to capture
RANK_VARS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"}
# Decode graphs: greedy, sampled, sampled with filters; later the same with logits processors.
PLAIN_KEYS = {DecodeGraphKey(), DecodeGraphKey(stochastic=True), DecodeGraphKey(stochastic=True, filtered=True)}
PROCESSED_KEYS = {replace(kind, process_logits=True) for kind in PLAIN_KEYS}
STATS_S = 1.0  # interval of stats messages
BUFFER = 1 << 22  # bytes of a client's send buffer
SEND_S = 10  # a client among several that reads nothing for this time is disconnected
PIECE = 1 << 20  # bytes read at a time
MAX_BATCHED_ID = 1 << 31  # request ids below are sent in batched token frames
BACKLOG = 64  # clients that connect before the model is loaded
COMPILING = 2  # grammars compiled at a time


def run(task: Task) -> JobResult:
    """Serves the prompts of a file, or a server's requests, until the client ends the job."""
    plan, comm, config = task.plan, task.comm, task.plan.config
    inbox = Inbox()
    with ExitStack() as stack:
        engine_server, client = None, None
        if comm.rank == 0:
            path = config.serve.socket or os.environ.get(SOCKET)
            if path is None:  # the launcher of these ranks did not start a client
                path = stack.enter_context(TemporaryDirectory(prefix="helix-")) + "/ranks.sock"
                client = stack.enter_context(_client(path))
            engine_server = EngineServer(Path(path), inbox)
            if client is not None:
                Thread(target=_end_with, args=(client, engine_server), daemon=True).start()
        engine = _engine(task)
        path = config.model.path
        serve(
            engine, inbox, engine_server, None if path is None else Path(path).resolve(), random=plan.checkpoint is None
        )
        measured = _measurements(task, engine) if config.serve.socket is None else {}
        code = 0 if client is None else client.wait(CLIENT_S)
    if code not in (0, REFUSED):
        raise RankError(f"the client of these ranks ended with exit code {code}")
    return measured, int(code == REFUSED)


def _engine(task: Task) -> Engine:
    """Loads the model and builds the engine, sized for the prompts of a file or for any requests."""
    plan, comm, config = task.plan, task.comm, task.plan.config
    model, draft = task.load()
    serves = config.serve.socket is not None
    slots, context = max_slots(config, comm.device.type), model.spec.max_positions
    max_batch, tokens, graph_keys = slots, slots * context, PLAIN_KEYS  # upper bounds; memory may allow less
    if not serves:
        needs = None
        if isinstance(file := plan.prompts, PromptFile):  # on rank 0
            tokens = file.max_total_tokens(config.decode.max_tokens, context, slots)
            needs = min(file.sequences, slots), tokens, _graph_keys(file, config, model.spec.vocab)
        max_batch, tokens, graph_keys = comm.broadcast_object(needs)
    fewer = config.decode.max_batch == "auto"
    engine = build_engine(plan.layout, model, config, max_batch, tokens, draft=draft, fewer=fewer)
    sizes = engine.runner.sizes
    blocks = config.blocks
    dtype = dtype_name(model.weights.dtype)
    if comm.rank == 0:
        LOG.info(f"KV cache: {_kv_tokens(engine):,} tokens, page size {blocks.page}, append block {blocks.append}")
        LOG.info(
            f"batch: up to {sizes.slots * plan.layout.dp:,} sequences of up to {sizes.length:,} tokens, "
            f"prefill chunks of up to {sizes.chunk:,} tokens"
        )
        if snapshots := engine.runner.cache.snapshots:
            LOG.info(f"snapshots of windows and states: up to {snapshots:,}")
        if (slabs := engine.runner.slabs) is not None:
            stripe = engine.runner.placement.stripes.tokens
            on_disk = f", on disk: {slabs.num_records * stripe:,}" if slabs.files is not None else ""
            LOG.info(f"prefixes in host memory: up to {len(slabs.slabs) * stripe:,} tokens{on_disk}")
        if config.kv.offload == "host" and (
            warning := short_chunk_warning(model.spec, dtype, config.kv.dtype, sizes.chunk)
        ):
            LOG.warning(warning)
    task.phases.mark("build")
    if comm.device.type == "cuda":
        torch.set_num_threads(1)  # the host's arrays are small: to wake threads for one takes milliseconds
        grammars = serves and has_tokenizer(config.model.path)
        engine.warmup(graph_keys, PROCESSED_KEYS if serves else (), task.phases.mark, chunks=serves, grammars=grammars)
    if comm.rank == 0:
        if engine.runner.hopb == "best":
            LOG.info(describe_hopb(engine.runner))
        if serves:
            LOG.info("ready after %s", task.phases)
            on_compilation(partial(LOG.warning, "compiled while serving: %s"))
    return engine


def _kv_tokens(engine: Engine) -> int:
    runner = engine.runner
    return runner.sizes.pages * runner.placement.stripes.page_tokens * runner.layout.dp


def _graph_keys(file: PromptFile, config: Config, vocab: int) -> set[DecodeGraphKey]:
    defaults = read_defaults(config.model.path)
    graph_keys = set()
    for prompt in islice(file, SAMPLED_PROMPTS):
        with suppress(ApiError, ValueError):  # the prompt is refused once it is submitted
            body, batch = make_body(prompt, config.decode), prompt.url is not None
            graph_keys.add(DecodeGraphKey.of([make_sampling_params(body, defaults if batch else {}, vocab, 0)]))
    return graph_keys or PLAIN_KEYS


def _measurements(task: Task, engine: Engine) -> dict[str, Any]:
    plan, comm, runner = task.plan, task.comm, engine.runner
    bytes_per_token = comm.all_gather_object(runner.cache.bytes_per_token)
    policy = runner.policy
    blocks = comm.all_gather_object(policy.blocks_read()) if isinstance(policy, BlockSparseAttention) else None
    exchange = _exchange(runner, engine.timings) if TIME_EXCHANGE in os.environ else {}
    if comm.rank:
        return {}
    measured = exchange | summary(plan.layout, engine.timings, bytes_per_token) | {"hopb_selected": runner.hopb_chunks}
    measured |= {} if blocks is None else {"blocks_read_per_rank": blocks}
    chosen = ", ".join(f"{rows} rows in {chunks}" for rows, (chunks, _) in runner.hopb_chunks.items() if chunks > 1)
    title = [] if blocks is None else [f"{plan.config.attention.policy} attention (lossy)"]
    title += [f"HOP-B: {chosen} chunks"] if chosen else []
    task.console.finish("; ".join(title), measured)
    return measured


def _exchange(runner: ModelRunner, timings: Timings) -> dict[str, Any]:
    """Times the exchange alone at the run's most frequent decode batch size; a collective call."""
    most = timings.queries.most_common(1) if runner.comm.rank == 0 else []
    queries = runner.comm.broadcast_object(most[0][0] if most else 0)
    return {"exchange_queries": queries, "exchange_us": 1e6 * exchange_seconds(runner, queries)} if queries else {}


@contextmanager
def _client(path: str) -> Iterator[subprocess.Popen[str]]:
    """Runs this job's command again as the client of its ranks."""
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARS}
    command = [sys.executable, *sys.argv, f"serve.attach={path}"]
    with subprocess.Popen(command, env=environment | {LAUNCHER: str(os.getpid())}, text=True) as client:
        try:
            yield client
        finally:
            client.terminate()


def _end_with(client: subprocess.Popen[str], engine_server: EngineServer) -> None:
    client.wait()
    engine_server.stop()


def serve(
    engine: Engine, inbox: Inbox, engine_server: EngineServer | None, model: Path | None, random: bool = False
) -> None:
    """Serves requests until the inbox is closed, then closes the engine; a collective call.

    Args:
        engine_server: rank 0's; None on other ranks.
        model: checkpoint directory; None for a shape without a checkpoint.
        random: whether the weights are random.
    """
    runner, sizes, spec = engine.runner, engine.runner.sizes, engine.runner.model.spec
    if engine_server is not None:
        unguided = engine_server.load_grammars(model, spec.vocab, spec.eos)
        engine_info = EngineInfo(
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
            takes_snapshots=runner.cache.snapshots > 0,
        )
        engine_server.open(engine_info, lambda: engine_stats(engine))
    gc.freeze()  # long-lived objects: collecting over them again would stall all ranks for about 150 ms
    try:
        for updates in engine.serve(inbox):
            assert engine_server is not None  # other ranks yield no updates
            for update in updates:
                engine_server.send_update(update)
            engine_server.flush()
    except Exception as error:
        if engine_server is not None:
            engine_server.fail(str(error) if isinstance(error, RankError) else f"{type(error).__name__}: {error}")
        raise
    engine.close()
    if engine_server is not None:
        engine_server.close()


def engine_stats(engine: Engine) -> dict[str, float]:
    """Returns the gauges and counters that rank 0 sends every second."""
    pools, timings, moves = [tables.pool for tables in engine.tables], engine.timings, engine.moves
    moved: dict[str, float] = {}
    if moves is not None:
        moved = {f"prefix_{name}": value for name, value in moves.counters.items()}
        moved |= {"slabs": moves.store.slabs, "slabs_used": moves.store.used}
        moved |= {"records": moves.store.records, "records_used": moves.store.used_records}
    return {
        "pages": engine.runner.sizes.pages * len(pools),
        "pages_used": sum(pool.used for pool in pools),
        "pages_cached": sum(pool.evictable for pool in pools),
        "pages_free": sum(pool.free for pool in pools),
        "preemptions": timings.preemptions,
        # Counted by the engine's thread, so that a hang shows (see `HangDetector`).
        "progress": timings.decisions + engine.runner.model.layers_run,
        "chunk_s": timings.chunk_s,
        "drafts": sum(timings.acceptance.verified[:1]),
        **{f"cached_{source}": tokens for source, tokens in timings.cached_tokens.items()},
        **moved,
        **{f"drafts_accepted_{position}": accepted for position, accepted in enumerate(timings.acceptance.accepted)},
    }


class ClientSession:
    """A client's connection to rank 0.

    Attributes:
        prefix: prefix of the engine's request ids for this client.
        batch: alternating request ids and tokens to send in the next frame.

    Args:
        is_alone: whether there are no other clients. The engine waits for a single one that does not read, and
            disconnects one that would stop it for others.
    """

    def __init__(self, peer: socket.socket, number: int, is_alone: Callable[[], bool]) -> None:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
        self.prefix = f"{number}:"
        self.batch: list[int] = []
        self._peer = peer
        self._is_alone = is_alone
        self._lock = Lock()
        self._open = True

    def send(self, message: Message) -> None:
        self._write(encode(message))

    def flush(self) -> None:
        """Sends the collected tokens in one frame for all requests: a frame each would cost as much as sampling."""
        if self.batch:
            pairs, self.batch = self.batch, []
            self._write(encode_tokens(pairs))

    def messages(self) -> Iterator[Message]:
        """Yields the client's messages until it disconnects or sends what is not a frame (ValueError)."""
        decoder = FrameDecoder()
        with suppress(OSError):
            while data := self._peer.recv(PIECE):
                yield from decoder.feed(data)

    def close(self) -> None:
        """Ends the connection; `messages` ends too."""
        self._open = False
        with suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Frees the socket, once no thread sends to it any more."""
        self.close()
        with self._lock:
            self._peer.close()

    def _write(self, frame: bytes) -> None:
        left = memoryview(frame)
        with self._lock:
            while left and self._open:
                try:
                    left = left[self._peer.send(left) :]
                except BlockingIOError:
                    if not self._is_alone():
                        LOG.warning("a client of the ranks read nothing for %d s: disconnected", SEND_S)
                        self.close()
                except OSError:  # the client disconnected
                    self.close()


class EngineServer:
    """Rank 0's end of the socket. It serves several clients; each gets the updates of its own requests.

    Requests of a client that disconnects are aborted.

    Raises:
        RankError: the socket cannot be created.
    """

    def __init__(self, path: Path, inbox: Inbox) -> None:
        self._path = path
        self._inbox = inbox
        self._listener = _listen(path)
        self._sessions: list[ClientSession] = []
        self._sessions_lock = Lock()
        self._closed = False
        self._request_ids: dict[str | int, tuple[ClientSession, int]] = {}  # by the engine's ids
        self._batched: set[ClientSession] = set()  # sessions with collected tokens; only the engine's thread uses it
        self._matchers: dict[str | int, GrammarMatcher] = {}
        self._grammars: GrammarMatcherFactory | None = None
        self._compile_pool = ThreadPoolExecutor(COMPILING, "grammars")  # other requests are read meanwhile
        self._compiling_ids: set[str] = set()
        self._submit_lock = Lock()  # held while a request goes into the inbox, so that it is not aborted before

    def load_grammars(self, model: Path | None, vocab: int, eos: Collection[int]) -> str | None:
        """Loads the tokenizer for grammars; returns why structured outputs are not supported, or None if they are."""
        path = None if model is None else model / "tokenizer.json"
        if path is None or not path.exists():
            return "the model has no tokenizer"
        try:
            self._grammars = GrammarMatcherFactory(path, vocab, eos)
        except (ValueError, OSError) as error:
            return " ".join(str(error).split())[:300]
        return None

    def open(self, engine_info: EngineInfo, stats: Callable[[], dict[str, float]]) -> None:
        """Starts serving clients that connect, and sends them the result of `stats` every second."""
        Thread(target=self._accept, args=(engine_info,), name="clients", daemon=True).start()
        Thread(target=self._send_stats, args=(stats,), name="stats", daemon=True).start()

    def fail(self, reason: str) -> None:
        self.flush()
        self._broadcast(Failed(reason))

    def close(self) -> None:
        """Closes and removes the socket and the clients' connections; this process may live on."""
        with self._sessions_lock:
            self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # `accept` returns
        self._listener.close()
        for session in self._all_sessions():
            session.close()
        with suppress(OSError):
            self._path.unlink()

    def send_update(self, update: RequestUpdate) -> None:
        """Sends an update to the client that submitted the request; updates with only tokens wait for `flush`."""
        if (entry := self._request_ids.get(update.id)) is None:
            return
        session, number = entry
        tokens_only = update.finish_reason is None and not update.logprobs
        if update.new_token_ids and tokens_only and number < MAX_BATCHED_ID:
            for token in update.new_token_ids:
                session.batch += (number, token)
            self._batched.add(session)
            return
        session.flush()
        if update.finish_reason is not None:
            self._request_ids.pop(update.id, None)
            matcher = self._matchers.pop(update.id, None)
            if matcher is not None and matcher.error is not None and update.finish_reason in ("stop", "length"):
                update.finish_reason, update.reason = "error", matcher.error
        session.send(replace(update, id=number))

    def flush(self) -> None:
        """Sends the tokens of a step, one frame to each client."""
        while self._batched:
            self._batched.pop().flush()

    def _all_sessions(self) -> list[ClientSession]:
        with self._sessions_lock:
            return [*self._sessions]

    def _broadcast(self, message: Message) -> None:
        for session in self._all_sessions():
            session.send(message)

    def _send_stats(self, stats: Callable[[], dict[str, float]]) -> None:
        while not self._closed:
            self._broadcast(Stats(stats()))
            sleep(STATS_S)

    def _accept(self, engine_info: EngineInfo) -> None:
        for number in count(1):
            try:
                peer, _ = self._listener.accept()
            except OSError:  # the listener was closed
                return
            session = ClientSession(peer, number, lambda: len(self._sessions) < 2)
            with self._sessions_lock:
                if self._closed:
                    session.release()
                    return
                session.send(engine_info)  # before any broadcast
                self._sessions.append(session)
            Thread(target=self._serve, args=(session,), name=f"client {number}", daemon=True).start()

    def _serve(self, session: ClientSession) -> None:
        """Reads a client's messages until it disconnects, then aborts its requests."""
        try:
            for message in session.messages():
                self._handle(message, session)
        except ValueError as error:
            LOG.warning("serve.socket=%s: received data that is %s", self._path, error)
        with self._sessions_lock:
            self._sessions.remove(session)
        session.release()
        for left in [*self._compiling_ids, *self._request_ids]:
            if str(left).startswith(session.prefix):
                self._abort(left)

    def _handle(self, message: Message, session: ClientSession) -> None:
        match message:
            case Request() if message.grammar is not None:
                self._compiling_ids.add(f"{session.prefix}{message.id}")
                self._compile_pool.submit(self._submit, message, session)
            case Request():
                self._submit(message, session)
            case MalformedMessage():
                self._refuse(message.id, message.reason, session)
            case Cancel():
                self._abort(f"{session.prefix}{message.id}")
            case Stop():
                self.stop()

    def stop(self) -> None:
        self._closed = True
        self._inbox.close()
        for name in [*self._request_ids]:
            self._inbox.abort(name)

    def _abort(self, name: str | int) -> None:
        with self._submit_lock:
            if name in self._compiling_ids:
                self._compiling_ids.remove(str(name))
            else:
                self._inbox.abort(name)

    def _submit(self, message: Request, session: ClientSession) -> None:
        number, name = int(message.id), f"{session.prefix}{message.id}"
        try:
            request, grammar = attach_matcher(replace(message, id=name), self._grammars)
        except BaseException as error:  # includes panics of llguidance: only this request fails
            self._compiling_ids.discard(name)
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            self._refuse(number, reason, session)
            return
        with self._submit_lock:
            if self._closed or (grammar is not None and name not in self._compiling_ids):
                return
            self._compiling_ids.discard(name)
            self._request_ids[name] = session, number
            if grammar is not None:
                self._matchers[name] = grammar
            session.send(Queued(number))
            self._inbox.submit(request)

    def _refuse(self, number: int, reason: str, session: ClientSession) -> None:
        session.send(RequestUpdate(number, finish_reason="error", reason=reason))


def attach_matcher(request: Request, grammars: GrammarMatcherFactory | None) -> tuple[Request, GrammarMatcher | None]:
    """Attaches the matcher of a request's grammar; returns the request and the matcher.

    Raises:
        ValueError: the grammar is invalid, or the model does not support grammars.
    """
    if request.grammar is None:
        return request, None
    if grammars is None:
        raise ValueError("this model does not support structured outputs: it has no usable tokenizer")
    answer = request.prompt[len(request.prompt) - request.num_prior_output_tokens :]
    matcher = grammars.create_matcher(request.grammar, np.asarray(answer).tolist())
    return replace(request, matcher=matcher), matcher


def _listen(path: Path) -> socket.socket:
    """Creates a socket that only this user can connect to; replaces a dead job's socket."""
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _answers(path):
            path.unlink()
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        raise RankError(f"serve.socket={path}: cannot listen: {error.strerror or error}") from error
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
