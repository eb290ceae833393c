"""A job of one rank in this process: an engine behind a socket, as a front end sees it."""

from __future__ import annotations

import asyncio
import json
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
    """Makes an engine of one rank; `eos` replaces the model's own."""
    layout = HelixLayout.create()
    comm = LoopbackWorld(1).communicator(0, layout.kvp_group(0))
    engine = build_engine(checkpoint(family), layout, comm, 4, page_size=4, **options)
    if eos is not None:
        engine.runner.model.spec = replace(engine.runner.model.spec, eos=(eos,))
    return engine


class Died(Exception):
    """A planted failure."""


class DyingEngineServer(EngineServer):
    """An engine server that dies after `lives` messages, counted once `among` requests have come; None: never."""

    def __init__(self, path: Path, inbox: Inbox, lives: int | None, among: int) -> None:
        super().__init__(path, inbox)
        self._lives, self._among = lives, among
        self._came: set[str | int] = set()

    def send_update(self, update: RequestUpdate) -> None:
        self._came.update(list(self._request_ids))  # copy at once: another thread adds to it
        if self._lives == 0:
            self.close()
            raise Died
        super().send_update(update)
        if self._lives is not None and len(self._came) >= self._among:
            self._lives -= 1


class EngineJob:
    """An engine of one rank, restarted each time that it dies.

    Args:
        deaths: number of messages after which each engine dies; engines after these live.
        among: requests that must arrive before messages are counted; later ones find no engine.
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
    """Writes a tokenizer in which token 7 is `t7`, separated by spaces, so that texts show tokens."""
    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return directory


def ids_of(text: str) -> tuple[int, ...]:
    """Parses such a text into token ids."""
    return tuple(int(word[1:]) for word in text.split())
