"""Serves requests that come over a Unix socket: frames to the engine on rank 0, and its outputs back."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from threading import Lock, Thread

import numpy as np

from helix.build import build_engine
from helix.errors import RankError
from helix.request import Output, Request
from helix.sampling import SamplingParams
from launch.job.interim import Inbox, serve
from launch.job.task import Done, Task
from launch.serving.frames import Abort, Decoder, Delta, Message, Ready, Stop, Submit, encode

SEND_S = 30.0  # for the front end to take a message; its process is stopped where it does not
BUFFER = 1 << 22  # bytes on their way to it
PIECE = 1 << 20  # bytes read at a time


def run(task: Task) -> Done:
    """Serves until the front end says that it is to end."""
    plan, comm = task.plan, task.comm
    inbox = Inbox()
    link = Link(Path(str(plan.config.serve.socket)), inbox) if comm.rank == 0 else None
    model, draft = task.load()
    spec, max_batch = model.spec, plan.config.decode.max_batch
    most = max_batch * spec.max_positions  # or as many as memory holds
    engine = build_engine(plan.layout, comm, model, plan.config, max_batch, most, draft=draft)
    if comm.device.type == "cuda":
        engine.warm_up({(False, False), (True, False), (True, True)})
    if link is not None:
        path = plan.config.model.path
        link.open(
            Ready(
                None if path is None else str(Path(path).resolve()),
                str(plan.layout),
                plan.layout.world_size,
                spec.max_positions,
                spec.vocab,
                engine.token_budget,
                max_batch,
                tuple(sorted(spec.eos)),
            )
        )
    for output in serve(engine, inbox, plan.config.comm.timeout_s / 4):
        assert link is not None  # the other ranks have no outputs
        link.pass_on(output)
    engine.close()
    if link is not None:
        link.close()
    return {}, 0


class Link:
    """Rank 0's end of the socket, for one front end at a time; where one leaves, its requests are aborted.

    Raises:
        RankError: the socket cannot be made.
    """

    def __init__(self, path: Path, inbox: Inbox) -> None:
        self._path = path
        self._inbox = inbox
        self._listener = _listen(path)
        self._lock = Lock()
        self._peer: socket.socket | None = None
        self._prefix = ""  # of the engine's names for this front end's requests
        self._names: dict[str | int, int] = {}

    def open(self, ready: Ready) -> None:
        """Serves whoever connects, from now on."""
        Thread(target=self._accept, args=(ready,), name="front end", daemon=True).start()

    def close(self) -> None:
        """Leaves the socket to nobody."""
        self._listener.close()
        with suppress(OSError):
            self._path.unlink()

    def pass_on(self, output: Output) -> None:
        """Sends an output to the front end that wants it."""
        name = self._names.get(output.id)
        if name is None:
            return
        if output.finish_reason is not None:
            self._names.pop(output.id, None)
        self._send(
            Delta(name, output.finish_reason, output.reason, ids=np.asarray(output.new_ids, dtype=np.int32)), output.id
        )

    def _send(self, message: Message, of: str | int) -> None:
        with self._lock:
            if self._peer is not None and str(of).startswith(self._prefix):
                try:
                    self._peer.sendall(encode(message))
                except OSError:  # it has left, which its reader notices
                    self._peer = None

    def _accept(self, ready: Ready) -> None:
        connection = 0
        while not self._inbox.closed:
            try:
                peer, _ = self._listener.accept()
            except OSError:  # closed
                return
            with peer:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
                connection += 1
                with self._lock:
                    self._peer, self._prefix = peer, f"{connection}:"
                    peer.sendall(encode(ready))
                with suppress(ConnectionError):
                    self._read(peer)
                with self._lock:
                    self._peer = None
                for name in [*self._names]:
                    self._inbox.abort(name)

    def _read(self, peer: socket.socket) -> None:
        decoder = Decoder()
        while data := peer.recv(PIECE):
            for message in decoder.feed(data):
                match message:
                    case Submit():
                        self._submit(message)
                    case Abort():
                        self._inbox.abort(f"{self._prefix}{message.id}")
                    case Stop():
                        self._inbox.close()
                        for name in [*self._names]:
                            self._inbox.abort(name)

    def _submit(self, message: Submit) -> None:
        name = f"{self._prefix}{message.id}"
        try:
            unknown = sorted(message.sampling.keys() - {f.name for f in fields(SamplingParams)})
            if unknown:
                raise ValueError(f"{', '.join(unknown)}: not supported by this engine")
            request = Request(name, message.ids.tolist(), message.max_new_tokens, SamplingParams(**message.sampling))
        except ValueError as error:
            self._send(Delta(message.id, "error", str(error)), name)
            return
        self._names[name] = message.id
        self._inbox.submit(request)


def _listen(path: Path) -> socket.socket:
    """A socket that this user alone can connect to; one that a dead job left is replaced."""
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
