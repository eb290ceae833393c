"""Pipeline from the body of a request to its answer, for HTTP, `LLM` and prompt files alike."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helix.answers.dialects import THOUGHTS, Dialect, Parser, PlainParser, dialect_of
from helix.answers.grammars import begins_with_mark
from helix.config import ServeConfig
from launch.client.answer import Answer
from launch.client.choice import Choice
from launch.client.compiler import Compiler
from launch.client.core import Core
from launch.client.errors import ApiError
from launch.client.frames import Ready
from launch.client.prompts import Reading, grammar_of, read
from launch.client.reader import RECEIVE_S, Reader
from launch.client.sampling import requests_of
from launch.client.schemas import Chat, Completion
from launch.client.tokens import Tokens, read_defaults


class Session:
    """Client of a model that ranks serve: bodies of requests in, answers out.

    Args:
        serve: how it is served.
        core: the connection to the ranks.

    Attributes:
        name: the model's name to clients.
        reader: reads requests, in processes of their own where they are large; set by `load`.
        defaults: the checkpoint's sampling defaults, which requests over HTTP have.
    """

    def __init__(self, serve: ServeConfig, core: Core) -> None:
        self.core = core
        self.name = serve.name or "model"
        self.reader: Reader | None = None
        self.defaults: Mapping[str, Any] = {}
        self._serve = serve
        self._dialect: Dialect | None = None
        self._compiler: Compiler | None = None

    def load(self, model: str | None, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Reads a model's tokenizer, chat template and sampling defaults, which may be done before a job serves it.

        Args:
            model: the checkpoint's directory; None: a shape alone.
            loop: event loop in which processes that read large requests start meanwhile, so that the first such request
                does not wait for one; None: they start on demand.

        Raises:
            ValueError: a file cannot be read.
        """
        self.name = self._serve.name or (Path(model).resolve().name if model else "model")
        self.reader = Reader(model, self._serve.chat_template, RECEIVE_S, loop)
        self._dialect = dialect_of(self.reader.tokens.template)
        self.defaults = read_defaults(model)

    def know(self, ready: Ready, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Takes over what a job serves; arguments and errors as in `load`, which is called if it was not."""
        if ready.guided and ready.model is not None:
            self._compiler = Compiler(Path(ready.model, "tokenizer.json"), ready.vocab, ready.eos)
            if loop is not None:
                loop.call_soon_threadsafe(self._compiler.workers.start)
        if self.reader is None:
            self.load(ready.model, loop)

    @property
    def tokens(self) -> Tokens:
        """The model's tokenizer."""
        assert self.reader is not None, "set before the first job is ready"
        return self.reader.tokens

    async def open(
        self,
        body: Chat | Completion,
        *,
        defaults: Mapping[str, Any] | None = None,
        parsed: bool = True,
        size: int = 0,
        salt: str | None = None,
        request_id: str = "",
    ) -> Answer:
        """Submits the continuations of a body; the caller closes the answer.

        Args:
            defaults: sampling parameters where the body has none; None: the checkpoint's.
            parsed: whether a chat's answer is split into thoughts, texts and calls.
            size: bytes of a body whose reading may take long: it is read in another process; 0: it is read here.
            salt: requests share cached prefixes only with those of the same salt.

        Raises:
            ApiError: the request is refused, with the reason.
        """
        ready, reader = self.core.refuse_unless_ready(), self.reader
        assert reader is not None, "set before the first job is ready"
        work = reader.tokens, self._dialect, body, ready
        reading = await reader.run(size, read, *work) if size else read(*work)
        grammar = await grammar_of(reading.form, self._compiler, ready)
        requests = requests_of(body, reading, self.defaults if defaults is None else defaults, ready, grammar, salt)
        changed = asyncio.Event()
        parsers = [self._parser(body, reading) if parsed else None for _ in requests]
        flights = self.core.start(requests, changed.set, request_id)  # nothing below fails before the answer owns them
        choices = [
            Choice(index, flight, reader.tokens, body, self.core.abort, parser)
            for index, (flight, parser) in enumerate(zip(flights, parsers, strict=True))
        ]
        return Answer(body, reading, choices, reader.tokens, changed, request_id, self.name)

    def check_model(self, model: str | None) -> None:
        """Raises ApiError 404 if a request is for another model."""
        if model is not None and model != self.name:
            raise ApiError(404, f"model={model!r:.80} is not served here: {self.name} is", code="model_not_found")

    async def close(self) -> None:
        """Ends the processes that read requests and compile grammars."""
        if self.reader is not None:
            await self.reader.close()
        if self._compiler is not None:
            await self._compiler.close()

    def _parser(self, body: Chat | Completion, reading: Reading) -> Parser | None:
        """Creates the parser of a continuation; None for completions, which are text alone."""
        if not isinstance(body, Chat):
            return None
        dialect, turn = self._dialect, reading.turn or ""
        template = None if dialect is None else dialect.template
        if template is not None and begins_with_mark(body.shape, dialect) and not turn.strip():
            template = template | {"fields": {name: f for name, f in template["fields"].items() if name != THOUGHTS}}
        if body.has_to_call and (dialect is None or dialect.calls is None):
            return PlainParser(template, turn, body.named)
        given = [tool.model_dump(exclude_none=True) for tool in body.shown_tools]
        return Parser(template, turn, given, body.may_call_again)
