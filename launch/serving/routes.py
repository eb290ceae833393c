"""The server's routes, over the core."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from helix.config import ServeConfig
from launch.serving.answers import answer_of, parsers_of
from launch.serving.compiler import Compiler
from launch.serving.core import Core
from launch.serving.dialects import Dialect, Parser, dialect_of
from launch.serving.errors import ApiError
from launch.serving.frames import Ready
from launch.serving.prompts import Reading, grammar_of, ids_of, read
from launch.serving.reader import RECEIVE_S, Reader
from launch.serving.sampling import submits_of
from launch.serving.schemas import Body, Chat, Completion, Detokenize, Tokenize, parsed, unknown
from launch.serving.security import Keys
from launch.serving.streams import EventStream, Gone, while_connected
from launch.serving.tokens import Tokens, read_defaults

MIB = 1 << 20
BODY_BYTES, ID_BYTES = 64 * MIB, 16  # limit of a body if `serve.body_mib` is unset; bytes per id of a long prompt
COUNTED_IDS = 1 << 20  # that /tokenize and /detokenize accept even if the context is shorter
MOST_TOLD = 32  # ignored fields
GONE = 499  # status for a client that has left
PAGE = Path(__file__).with_name("page.html")
# The page needs no other hosts, and shows models' output as plain text.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
PAGE_HEADERS = {"content-security-policy": POLICY, "x-frame-options": "DENY", "referrer-policy": "no-referrer"}
Handler = Callable[[Request], Awaitable[ASGIApp]]


class Api:
    """The routes of a server.

    Args:
        keys: the keys that authorise requests.
    """

    def __init__(self, serve: ServeConfig, core: Core, keys: Keys) -> None:
        self._serve = serve
        self._core = core
        self._keys = keys
        self._reader: Reader | None = None
        self._dialect: Dialect | None = None
        self._compiler: Compiler | None = None
        self._defaults: dict[str, Any] = {}
        self._started = int(time.time())
        self.name = serve.name or "model"

    def know(self, ready: Ready) -> None:
        """Loads the tokenizer, chat template and sampling defaults of the model that a job serves.

        Raises:
            ValueError: the tokenizer cannot be read.
        """
        self.name = self._serve.name or (Path(ready.model).name if ready.model else "model")
        self._reader = Reader(ready.model, self._serve.chat_template, RECEIVE_S)
        self._dialect = dialect_of(self._reader.tokens.template)
        if self._dialect is not None:
            Parser(self._dialect.template, "", [])  # its imports take seconds: not with the first chat
        self._defaults = read_defaults(ready.model)
        if ready.guided and ready.model is not None:
            self._compiler = Compiler(Path(ready.model, "tokenizer.json"), ready.vocab, ready.eos)

    def start(self) -> None:
        """Starts the process that reads large requests, once the model is known: the first one need not wait for it."""
        assert self._reader is not None
        self._reader.start()

    async def close(self) -> None:
        """Ends the processes that `start` and requests have started."""
        if self._reader is not None:
            await self._reader.close()
        if self._compiler is not None:
            await self._compiler.close()

    def app(self) -> Starlette:
        """Creates the ASGI application."""
        routes = [
            ("/v1/chat/completions", "POST", self._chat),
            ("/v1/completions", "POST", self._complete),
            ("/v1/models", "GET", self._models),
            ("/v1/models/{name:path}", "GET", self._model),
            ("/tokenize", "POST", self._tokenize),
            ("/detokenize", "POST", self._detokenize),
            ("/metrics", "GET", self._metrics),
            ("/version", "GET", self._version),
            ("/", "GET", self._page),
            ("/health", "GET", self._health),
            ("/livez", "GET", self._livez),
        ]
        return Starlette(
            routes=[Route(path, self._answered(handler), methods=[method]) for path, method, handler in routes],
            exception_handlers={HTTPException: _no_such_route, ApiError: _refused, Exception: _failed},
        )

    # ---- generation

    async def _complete(self, request: Request) -> ASGIApp:
        ready = self._core.refuse_unless_ready()
        body = await self._body(request, Completion, self._serve.waiting * ready.max_length)
        reader, prompts = self._known(body.model), body.prompts
        if (wanted := len(prompts) * (body.n or 1)) > self._serve.waiting:
            what = f"the request wants {wanted} continuations, and serve.waiting={self._serve.waiting} may wait"
            raise ApiError(400, what, param="prompt")
        has_text = body.echo or body.shape is not None or any(isinstance(prompt, str) for prompt in prompts)
        size = request.state.size if has_text else 0
        return await self._answer(request, body, ready, await reader.run(size, read, *self._of(body, ready)))

    async def _chat(self, request: Request) -> ASGIApp:
        ready, body = self._core.refuse_unless_ready(), await self._body(request, Chat)
        reader = self._known(body.model)
        reading = await reader.run(request.state.size, read, *self._of(body, ready))
        return await self._answer(request, body, ready, reading)

    def _of(self, body: Chat | Completion, ready: Ready) -> tuple[Tokens, Dialect | None, Chat | Completion, Ready]:
        """Returns the arguments of `read`."""
        return self._known(body.model).tokens, self._dialect, body, ready

    async def _answer(self, request: Request, body: Chat | Completion, ready: Ready, reading: Reading) -> ASGIApp:
        """Starts the continuations of a body, and answers whole or as a stream."""
        tokens, changed = self._known(body.model).tokens, asyncio.Event()
        grammar = await grammar_of(reading.form, self._compiler)
        salt = json.dumps([request.state.owner, body.cache_salt]) if request.state.owner or body.cache_salt else None
        submits = submits_of(body, reading, self._defaults, ready, grammar, salt)
        parsers = parsers_of(body, reading, self._dialect, len(submits))
        flights = self._core.start(submits, changed.set)  # nothing below fails before `answer` owns them
        answer = answer_of(
            body, reading, flights, parsers, tokens, ready.eos, self.name, changed, self._core.abort
        )  # fmt: skip
        ignored = ",".join(map(_header, unknown(body)[:MOST_TOLD]))
        headers = {"x-ignored-fields": ignored} if ignored else {}
        if body.stream:
            return EventStream(answer.events(), answer.close, self._serve.slow_s, headers)
        try:
            return JSONResponse(await while_connected(request.receive, answer.whole()), headers=headers)
        finally:
            answer.close()

    # ---- information

    async def _models(self, request: Request) -> ASGIApp:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _model(self, request: Request) -> ASGIApp:
        self._known(request.path_params["name"])
        return JSONResponse(self._described())

    def _described(self) -> dict[str, Any]:
        ready = self._core.ready
        described = {"id": self.name, "object": "model", "created": self._started, "owned_by": "helix"}
        if ready is None or self._reader is None:
            return described
        return described | {"max_model_len": ready.max_length, "chat": self._reader.tokens.has_template}

    async def _tokenize(self, request: Request) -> ASGIApp:
        ready, body = self._core.refuse_unless_ready(), await self._body(request, Tokenize)
        reader, most = self._known(body.model), max(ready.context, COUNTED_IDS)
        work = reader.tokens, body, ready.max_length, most
        return Response(await reader.run(request.state.size, ids_of, *work), media_type="application/json")

    async def _detokenize(self, request: Request) -> ASGIApp:
        ready = self._core.refuse_unless_ready()
        body = await self._body(request, Detokenize, max(ready.context, COUNTED_IDS))
        reader, ids = self._known(body.model), body.ids
        return JSONResponse({"prompt": await reader.run(ids.nbytes, reader.tokens.decode, ids)})

    async def _metrics(self, request: Request) -> ASGIApp:
        return Response(self._core.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _version(self, request: Request) -> ASGIApp:
        return JSONResponse({"version": version("helix-runtime")})

    async def _health(self, request: Request) -> ASGIApp:
        state, why = self._core.state, self._core.why
        return JSONResponse({"state": state, "reason": why}, 200 if state == "ready" else 503)

    async def _page(self, request: Request) -> ASGIApp:
        return Response(PAGE.read_bytes(), media_type="text/html", headers=PAGE_HEADERS)

    async def _livez(self, request: Request) -> ASGIApp:
        return JSONResponse({"state": "alive"})

    # ---- shared by all routes

    def _answered(self, handler: Handler) -> Callable[[Request], Awaitable[Any]]:
        open_to_all = handler in (self._health, self._livez, self._page)

        async def answered(request: Request) -> ASGIApp:
            request.state.owner = None if open_to_all else self._keys.owner(request.headers.get("authorization"))
            try:
                return await handler(request)
            except (Gone, ClientDisconnect):
                return Response(status_code=GONE)

        return answered

    def _known(self, model: str | None) -> Reader:
        """Returns the reader of a request's model.

        Raises:
            ApiError: 404, another model is served.
        """
        self._core.refuse_unless_ready()
        assert self._reader is not None, "set before the first job is ready"
        if model is not None and model != self.name:
            raise ApiError(404, f"model={model!r:.80} is not served here: {self.name} is", code="model_not_found")
        return self._reader

    async def _body(self, request: Request, schema: type[Body], most_ids: int = 0) -> Body:
        """Reads the body, with at most `most_ids` token ids; sets `request.state.size`, its bytes."""
        reader, ready = self._known(None), self._core.refuse_unless_ready()
        mib = self._serve.body_mib or max(BODY_BYTES, ID_BYTES * ready.max_length) // MIB
        most, what = mib * MIB, f"the body is larger than {mib} MiB (serve.body_mib)"
        too_large = ApiError(413, what, code="too_large")
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > most:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(RECEIVE_S):
                async for piece in request.stream():
                    body += piece
                    if len(body) > most:
                        raise too_large
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {RECEIVE_S:g} s") from None
        request.state.size = len(body)
        return await reader.run(len(body), parsed, schema, bytes(body), most_ids)


def _header(name: str) -> str:
    """Escapes a field's name for a header."""
    return name.encode("ascii", errors="backslashreplace").decode().replace("\n", " ").replace("\r", " ")[:80]


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, headers=error.headers)


def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path:.200}: {error.detail}"
    return JSONResponse(ApiError(error.status_code, message).body(), error.status_code, headers=error.headers)


def _failed(request: Request, error: Exception) -> Response:
    return JSONResponse(ApiError(500, f"the server failed: {type(error).__name__}").body(), 500)
