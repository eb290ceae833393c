"""A job of one rank in this process: an engine behind a socket, as a front end finds it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from comm.loopback import LoopbackWorld
from helix.engine.core import Engine
from helix.engine.inbox import Inbox
from helix.engine.request import RequestUpdate
from helix.layout import HelixLayout
from launch.job.serve import EngineServer, serve
from tests.e2e.checkpoints import checkpoint
from tests.e2e.parity import build_engine


def alone(family: str, eos: int | None = None, **options: Any) -> Engine:
    """An engine of one rank; `eos` ends its answers in place of its model's own tokens."""
    layout = HelixLayout.create()
    comm = LoopbackWorld(1).communicator(0, layout.kvp_group(0))
    engine = build_engine(checkpoint(family), layout, comm, 4, page_size=4, **options)
    if eos is not None:
        engine.runner.model.spec = replace(engine.runner.model.spec, eos=(eos,))
    return engine


class Died(Exception):
    """Planted."""


class DyingEngineServer(EngineServer):
    """A link whose job dies after `lives` messages, counted once `among` requests have come; None: it lives."""

    def __init__(self, path: Path, inbox: Inbox, lives: int | None, among: int) -> None:
        super().__init__(path, inbox)
        self._lives, self._among = lives, among
        self._came: set[str | int] = set()

    def send_update(self, update: RequestUpdate) -> None:
        self._came.update(list(self._request_ids))  # copied at once: another thread adds to them
        if self._lives == 0:
            with self._lock:
                assert self._peer is not None
                self._peer.shutdown(socket.SHUT_RDWR)
            self.close()
            raise Died
        super().send_update(update)
        if self._lives is not None and len(self._came) >= self._among:
            self._lives -= 1


class EngineJob:
    """An engine of one rank, and another one each time that it dies.

    Args:
        deaths: of each engine, after how many messages it dies; those behind them live.
        among: requests that have to come before messages are counted: whoever asks later finds no engine.
    """

    def __init__(self, make: Callable[[], Engine], model: Path, deaths: tuple[int, ...] = (), among: int = 1) -> None:
        self._make, self._model, self._among = make, model, among
        self._deaths = [*deaths]
        self._inbox = Inbox()
        self._thread: Thread | None = None

    async def listen(self, path: Path) -> None:
        self._thread = Thread(target=self._run, args=(path,), daemon=True)
        self._thread.start()

    async def close(self) -> None:
        self._inbox.close()
        assert self._thread is not None
        await asyncio.to_thread(self._thread.join, 60)
        assert not self._thread.is_alive(), "an engine ends once its inbox is closed"

    def _run(self, path: Path) -> None:
        while True:
            engine, self._inbox = self._make(), Inbox()
            link = DyingEngineServer(path, self._inbox, self._deaths.pop(0) if self._deaths else None, self._among)
            try:
                return serve(engine, self._inbox, link, self._model)
            except Died:
                pass


def name_tokens(directory: Path, vocab: int) -> Path:
    """A tokenizer under which token 7 is the text `t7`, and spaces stand between tokens: texts tell tokens."""
    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return directory


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(int(word[1:]) for word in text.split())
