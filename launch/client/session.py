"""Pipeline from the body of a request to its answer, for HTTP, `LLM` and prompt files alike."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from helix.config import ServeConfig
from launch.answers.dialects import THOUGHTS, Dialect, Parser, PlainParser, dialect_of
from launch.answers.grammars import begins_with_mark
from launch.client.answer import Answer
from launch.client.choice import Choice
from launch.client.compiler import Compiler
from launch.client.core import Core
from launch.client.errors import ApiError
from launch.client.frames import Ready
from launch.client.prompts import Reading, grammar_of, read
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
        tokens: its tokenizer, once it is loaded.
        defaults: the checkpoint's sampling defaults, which requests over HTTP have.
        compiler: see `compiler_for`.
    """

    def __init__(self, serve: ServeConfig, core: Core) -> None:
        self.core = core
        self.name = serve.name or "model"
        self.tokens: Tokens
        self.compiler: Compiler | None = None
        self.defaults: Mapping[str, Any] = {}
        self._serve = serve

    def load(self, model: str | None) -> None:
        """Reads a model's tokenizer, chat template and sampling defaults, which may be done before a job serves it.

        Args:
            model: the checkpoint's directory; None: a shape alone.

        Raises:
            ValueError: a file cannot be read.
        """
        self.name = self._serve.name or (Path(model).resolve().name if model else "model")
        self.tokens = Tokens(model, self._serve.chat_template)
        self.defaults = read_defaults(model)
        for schema in (Chat, Completion):  # not with the first request; nor with their import, for commands
            schema.model_rebuild()

    def compiler_for(self, ready: Ready) -> Compiler | None:
        """Returns the compiler of grammars for what a job serves, made on demand; None: answers can follow none."""
        if self.compiler is None and ready.guided and ready.model is not None:
            self.compiler = Compiler(Path(ready.model, "tokenizer.json"), ready.vocab, ready.eos)
        return self.compiler

    @cached_property
    def _dialect(self) -> Dialect | None:
        return dialect_of(self.tokens.template)

    async def open(
        self,
        body: Chat | Completion,
        *,
        defaults: Mapping[str, Any] | None = None,
        parsed: bool = True,
        run: Callable[..., Awaitable[Reading]] | None = None,
        salt: str | None = None,
        request_id: str = "",
    ) -> Answer:
        """Submits the continuations of a body; the caller closes the answer.

        Args:
            defaults: sampling parameters where the body has none; None: the checkpoint's.
            parsed: whether a chat's answer is split into thoughts, texts and calls.
            run: runs a function with its arguments elsewhere, for a body whose reading may take long.
            salt: requests share cached prefixes only with those of the same salt.

        Raises:
            ApiError: the request is refused, with the reason.
        """
        ready = self.core.refuse_unless_ready()
        work = self.tokens, self._dialect if isinstance(body, Chat) else None, body, ready
        reading = read(*work) if run is None else await run(read, *work)
        grammar = None if reading.form is None else await grammar_of(reading.form, self.compiler_for(ready), ready)
        requests = requests_of(body, reading, self.defaults if defaults is None else defaults, ready, grammar, salt)
        changed = asyncio.Event()
        parsers = [self._parser(body, reading) if parsed else None for _ in requests]
        flights = self.core.start(requests, changed.set, request_id)  # nothing below fails before the answer owns them
        choices = [
            Choice(index, flight, self.tokens, body, self.core.abort, parser)
            for index, (flight, parser) in enumerate(zip(flights, parsers, strict=True))
        ]
        return Answer(body, reading, choices, self.tokens, changed, request_id, self.name)

    def check_model(self, model: str | None) -> None:
        """Raises ApiError 404 if a request is for another model."""
        if model is not None and model != self.name:
            raise ApiError(404, f"model={model!r:.80} is not served here: {self.name} is", code="model_not_found")

    async def close(self) -> None:
        """Ends the processes that compile grammars."""
        if self.compiler is not None:
            await self.compiler.close()

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
