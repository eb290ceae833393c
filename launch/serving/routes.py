"""The server's HTTP routes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
import zlib
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from helix.config import ServeConfig
from helix.engine.request import outside_vocabulary
from launch.client.answer import Answer
from launch.client.chat_history import EFFORT_VARIABLES
from launch.client.chat_template import variables
from launch.client.engine_client import EngineClient
from launch.client.engine_messages import EngineInfo
from launch.client.errors import ApiError
from launch.client.input_processor import ProcessedPrompt, ReadChat, process_prompt, read_chat, tokenize_body
from launch.client.load_table import LoadTable
from launch.client.request_fields import MESSAGES, RESPONSES
from launch.client.schema_base import Schema
from launch.client.schemas import (
    MAX_IGNORED_NAMES,
    Body,
    Chat,
    Completion,
    Detokenize,
    Tokenize,
    parse_body,
    parse_long_prompt,
    validate_body,
)
from launch.client.session import Session
from launch.serving import messages, responses
from launch.serving.content_blocks import BlockAnswer
from launch.serving.messages import Count, Messages, MessagesAnswer, error_body
from launch.serving.metrics import ServerMetrics
from launch.serving.middleware import AccessLog, with_cors
from launch.serving.openai import OpenAIAnswer, to_json
from launch.serving.openapi import document
from launch.serving.request_executor import LARGE, RECEIVE_S, RequestExecutor
from launch.serving.response_items import ItemReference, ItemsQuery, ResponseQuery, Responses
from launch.serving.response_store import ResponseStore
from launch.serving.responses import ResponsesAnswer
from launch.serving.security import ApiKeys
from launch.serving.shared_state import FoundResponse, LocalState, NewResponse, RemoteState
from launch.serving.streams import ClientDisconnected, EventStream, while_connected

MIB = 1 << 20
SEND_ALL = "; send the whole conversation as input"  # what to do if a stored response is gone
BODY_BYTES, ID_BYTES = 64 * MIB, 16  # body limit if `serve.body_mib` is unset; bytes per token id of a long prompt
MIN_TOKENIZE_IDS = 1 << 20  # token ids that /tokenize and /detokenize accept even if the context is shorter
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that disconnected
PAGE_DIR = Path(__file__).with_name("page")
PAGE = {file.relative_to(PAGE_DIR).as_posix(): file for file in PAGE_DIR.rglob("*") if file.is_file()}
PAGE_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".txt": "text/plain",
    ".woff2": "font/woff2",
}
# The page loads nothing from other hosts, and HTML enters it only through its sanitizer.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types dompurify"
)
PAGE_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
# What clients call the fields of the chat that their request becomes.
OWN_NAMES = {
    RESPONSES: {"messages": "input", "response_format": "text.format", "reasoning_effort": "reasoning.effort"},
    MESSAGES: {"response_format": "output_config.format"},
}
Handler = Callable[[Request], Awaitable[ASGIApp]]
Presenter = OpenAIAnswer | BlockAnswer


class Api:
    """The routes of a server.

    Attributes:
        executor: processes large requests in other processes; None until the first job is ready.
        shared: what all processes of the server share.
        started: when the server started, in Unix seconds.

    Args:
        shared: None: this process has it.
        loads: the requests of all processes; None: this is the only one.
    """

    def __init__(
        self, serve: ServeConfig, keys: ApiKeys, shared: RemoteState | None = None, loads: LoadTable | None = None
    ) -> None:
        self.metrics = ServerMetrics(is_first=shared is None)
        self.engine_client = self.metrics.engine_client = EngineClient(serve.max_queue, self.metrics, loads)
        self.session = Session(serve, self.engine_client)
        self.executor: RequestExecutor | None = None
        self._serve = serve
        self._keys = keys
        self.started = int(time.time())
        self.shared: LocalState | RemoteState = shared or self._local_state()

    def _local_state(self) -> LocalState:
        store, metrics = ResponseStore(self._serve.stored_responses, self._serve.stored_mib * MIB), self.metrics.metrics
        watch = partial(metrics.watch, registry=metrics.server)
        watch("stored_responses", "answers of /v1/responses in memory", lambda: store.count)
        watch("stored_responses_bytes", "bytes of these, as JSON", lambda: store.size)
        return LocalState(store, self.metrics.snapshot, lambda: [*metrics.server.collect()])

    def configure(self, engine_info: EngineInfo, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Loads what the first job's model needs: tokenizer, executor, grammar compiler.

        Args:
            loop: event loop in which to start a worker process of each kind now, so that the first large request does
                not wait for one; None: start them on demand.

        Raises:
            ValueError: the tokenizer or the sampling defaults cannot be read.
        """
        self.session.load(engine_info.model)
        self.metrics.metrics.describe_chat_format(self.session.detected.name, self.session.detected.reads_calls)
        for *_, body in self._routes:
            if body is not None:
                body.model_rebuild()  # build validators before the first request
        self.executor = RequestExecutor(engine_info.model, self._serve.chat_template, self.session.tokenizer, RECEIVE_S)
        compiler = self.session.compiler_for(engine_info)
        if loop is not None:
            loop.call_soon_threadsafe(self.executor.workers.start)
            if compiler is not None:
                loop.call_soon_threadsafe(compiler.workers.start)

    async def close(self) -> None:
        if self.executor is not None:
            await self.executor.close()
        await self.session.close()

    @property
    def _routes(self) -> list[tuple[str, str, Handler, type[Schema] | None]]:
        return [
            ("/v1/chat/completions", "POST", self._chat, Chat),
            ("/v1/completions", "POST", self._complete, Completion),
            ("/v1/responses", "POST", self._respond, Responses),
            ("/v1/responses/{id:path}/input_items", "GET", self._input_items, None),  # ids may have a slash
            ("/v1/responses/{id:path}", "GET", self._response, None),
            ("/v1/responses/{id:path}", "DELETE", self._delete_response, None),
            ("/v1/messages", "POST", self._message, Messages),
            ("/v1/messages/count_tokens", "POST", self._count, Count),
            ("/v1/models", "GET", self._models, None),
            ("/v1/models/{name:path}", "GET", self._model, None),
            ("/v1/loads", "GET", self._loads, None),
            ("/tokenize", "POST", self._tokenize, Tokenize),
            ("/detokenize", "POST", self._detokenize, Detokenize),
            ("/metrics", "GET", self._scrape, None),
            ("/version", "GET", self._version, None),
            ("/openapi.json", "GET", self._openapi, None),
            ("/", "GET", self._page, None),
            ("/page/{name:path}", "GET", self._page, None),
            ("/health", "GET", self._health, None),
            ("/livez", "GET", self._livez, None),
        ]

    @property
    def _open(self) -> tuple[Handler, ...]:
        return self._health, self._livez, self._page, self._openapi

    def app(self) -> ASGIApp:
        routes = [Route(path, self._wrap(handler), methods=[method]) for path, method, handler, _ in self._routes]
        handlers = {HTTPException: _on_http_error, ApiError: _on_api_error, Exception: _on_exception}
        app = with_cors(Starlette(routes=routes, exception_handlers=handlers), self._serve.cors)
        return AccessLog(app)

    # ---- generation

    async def _complete(self, request: Request) -> ASGIApp:
        """Completes texts or token ids."""
        engine_info = self.engine_client.refuse_unless_ready()
        body = await self._body(request, Completion, self._serve.max_queue * engine_info.max_length)
        self._executor_for(body.model)
        prompts = body.prompts
        self._check_num_generations(len(prompts) * (body.n or 1), "prompt")
        has_text = body.echo or body.structured_output is not None or any(isinstance(prompt, str) for prompt in prompts)
        processed = await self._process(request, body, request.state.size) if has_text else None
        return await self._answer(request, body, body, OpenAIAnswer, processed)

    async def _chat(self, request: Request) -> ASGIApp:
        """Answers a conversation with the checkpoint's chat template."""
        read = await self._read_chat(request, Chat, partial(_without_effort, reads=self._reads_effort))
        self._check_num_generations(read.body.n or 1, "n")
        return await self._answer_chat(request, read, OpenAIAnswer)

    async def _respond(self, request: Request) -> ASGIApp:
        """Answers a conversation in OpenAI's Responses format."""
        body, owner = await self._body(request, Responses), request.state.owner
        executor, previous = self._executor_for(body.model), None
        if body.reasoning is not None and body.reasoning.effort is not None and not self._reads_effort:
            body.reasoning.effort = None
            _ignore(body, "reasoning.effort")
        if (name := body.previous_response_id) is not None:
            previous = await self.shared.find_response(owner, name, "previous_response_id", name, SEND_ALL)
        before = [] if previous is None else previous.conversation
        references = [item for item in body.items if isinstance(item, ItemReference)]
        referenced = {item.id: await self._referenced(owner, item) for item in references}
        size = request.state.size + sum(map(len, [*before, *referenced.values()]))
        chat, items = await executor.run(size, responses.convert, body, before, referenced)

        async def store(response: dict[str, Any]) -> None:
            output, rest = json.dumps(response["output"]), json.dumps(response | {"output": None})
            new = NewResponse(response["id"], name, before, items, output.encode(), rest.encode())
            await self.shared.add_response(owner, new)

        processed = await self._process(request, chat, size)
        return await self._answer(request, chat, body, partial(ResponsesAnswer, body=body, store=store), processed)

    async def _referenced(self, owner: str | None, reference: ItemReference) -> bytes:
        """Returns the output of the response that an item belongs to; raises ApiError 404 if it is not stored."""
        response = reference.id.partition("_")[2].rpartition("_")[0]  # of an id such as fc_RESPONSE_3
        found = await self.shared.find_response(owner, f"resp_{response}", "item_reference", reference.id, SEND_ALL)
        return found.conversation[-1]

    async def _find_response(self, request: Request) -> FoundResponse:
        name = request.path_params["id"]
        return await self.shared.find_response(request.state.owner, name, "response_id", name, "")

    async def _response(self, request: Request) -> ASGIApp:
        """Returns a stored response."""
        stored, query = await self._find_response(request), validate_body(ResponseQuery, {**request.query_params})
        if query.stream:
            raise ApiError(400, "stream=true: events of responses are not stored; leave stream out", param="stream")
        content = stored.response.replace(b'"output": null', b'"output": ' + stored.conversation[-1], 1)
        return Response(content, headers=_ignored_header(query, query, ()), media_type="application/json")

    async def _delete_response(self, request: Request) -> ASGIApp:
        """Deletes a stored response; those that continue it keep its items."""
        await self._find_response(request)
        await self.shared.delete_response(request.state.owner, name := request.path_params["id"])
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def _input_items(self, request: Request) -> ASGIApp:
        """Lists the items of a stored response's conversation, up to its own output."""
        items, executor = (await self._find_response(request)).conversation[:-1], self._executor_for(None)
        page = validate_body(ItemsQuery, {**request.query_params})
        work = responses.list_items, request.path_params["id"], items, page
        listed = await executor.run(sum(map(len, items)), *work)
        return JSONResponse(listed, headers=_ignored_header(page, page, ()))

    @property
    def _variables(self) -> frozenset[str]:
        """The template's variables; a template that cannot be read is refused later."""
        with suppress(TemplateError):
            return variables(self._executor_for(None).tokenizer.template)
        return frozenset()

    @property
    def _reads_effort(self) -> bool:
        return not self._variables.isdisjoint(EFFORT_VARIABLES)

    async def _message(self, request: Request) -> ASGIApp:
        """Answers a conversation in Anthropic's Messages format."""
        convert = partial(messages.chat_of, variables=self._variables)
        return await self._answer_chat(request, await self._read_chat(request, Messages, convert), MessagesAnswer)

    async def _count(self, request: Request) -> ASGIApp:
        """Counts the tokens of a conversation in Anthropic's Messages format."""
        engine_info, body = self.engine_client.refuse_unless_ready(), await self._body(request, Count)
        executor, size = self._executor_for(body.model), request.state.size
        chat = await executor.run(size, messages.chat_of, body, self._variables)
        work = executor.tokenizer.encode_chat, chat, chat.prompt_tools, max(engine_info.context, MIN_TOKENIZE_IDS)
        encoded = await executor.run(size, *work)
        headers = _ignored_header(body, chat, encoded.left_out)
        return JSONResponse({"input_tokens": len(encoded.ids)}, headers=headers)

    async def _read_chat(self, request: Request, schema: type[Body], convert: Callable[[Body], Chat]) -> ReadChat:
        """Reads a body of messages and tokenizes it, unless the client leaves meanwhile."""
        executor, engine_info = self._executor_for(None), self.engine_client.refuse_unless_ready()
        content = await self._receive(request)
        work = schema, content, convert, executor.tokenizer, self.session.chat_format, engine_info
        return await while_connected(request.receive, executor.run(len(content), read_chat, *work))

    async def _answer_chat(self, request: Request, read: ReadChat, format: Callable[[Answer], Presenter]) -> ASGIApp:
        self._executor_for(read.body.model)
        if read.error is not None:
            raise read.error
        assert read.chat is not None, "there is an error without a chat"
        return await self._answer(request, read.chat, read.body, format, read.processed)

    async def _process(self, request: Request, body: Chat | Completion, size: int) -> ProcessedPrompt:
        """Runs `process_prompt` for a request of `size` bytes, unless the client leaves meanwhile."""
        executor, engine_info = self._executor_for(body.model), self.engine_client.refuse_unless_ready()
        work = process_prompt, executor.tokenizer, self.session.chat_format, body, engine_info
        return await while_connected(request.receive, executor.run(size, *work))

    async def _answer(
        self,
        request: Request,
        body: Chat | Completion,
        sent: Schema,
        format: Callable[[Answer], Presenter],
        processed: ProcessedPrompt | None,
    ) -> ASGIApp:
        """Answers a body, complete or as a stream.

        Args:
            sent: the body as the client sent it, before conversion.
            format: creates the presentation of the answer for the client.
            processed: see `Session.open`.
        """
        request_log, owner = request.state.request_log, request.state.owner
        cache_salt = json.dumps([owner, body.cache_salt]) if owner or body.cache_salt else None
        opening = self.session.open(body, processed=processed, cache_salt=cache_salt, request_id=request_log.id)
        answer = await while_connected(request.receive, opening)  # compiling a grammar may take long
        request_log.answer, presenter = answer, format(answer)
        headers = _ignored_header(sent, body, answer.left_out)
        if body.stream:
            return EventStream(presenter.events(), answer.close, headers)
        try:
            whole = await while_connected(request.receive, presenter.collect())
            content = await to_json(whole) if answer.with_logprobs else JSONResponse(whole).body
            return Response(content, headers=headers, media_type="application/json")
        finally:
            answer.close()

    # ---- information

    async def _models(self, request: Request) -> ASGIApp:
        """Lists the served model."""
        if self.engine_client.engine_info is None:  # the model's name comes with the first job
            self.engine_client.refuse_unless_ready()
        names = [name for name in self.session.model_names if "*" not in name]
        anthropics = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        # `models` is for Codex, which describes models that are not in it by itself.
        found = {"object": "list", "data": [*map(self._describe_model, names)], "models": []}
        return JSONResponse(found | anthropics)

    async def _model(self, request: Request) -> ASGIApp:
        """Describes a model."""
        self._executor_for(name := request.path_params["name"])
        return JSONResponse(self._describe_model(name))

    def _describe_model(self, name: str) -> dict[str, Any]:
        """Describes the model under a name, in the fields of OpenAI, vLLM (`root`) and Anthropic."""
        engine_info = self.engine_client.engine_info
        described = {"id": name, "object": "model", "created": self.started, "owned_by": "helix"}
        described |= {"root": self.session.name, "type": "model", "display_name": self.session.name}
        described |= {"created_at": datetime.fromtimestamp(self.started, UTC).isoformat().replace("+00:00", "Z")}
        assert engine_info is not None, "the routes refuse requests before the first job"
        detected, length, chat = self.session.detected, engine_info.max_length, self.session.tokenizer.has_template
        more: dict[str, Any] = {"max_model_len": length, "max_input_tokens": length, "chat": chat}
        more |= {"chat_format": detected.name, "tool_calls": detected.reads_calls, "layout": engine_info.layout}
        return described | more

    async def _tokenize(self, request: Request) -> ASGIApp:
        """Tokenizes a text or a conversation."""
        engine_info, body = self.engine_client.refuse_unless_ready(), await self._body(request, Tokenize)
        executor, limit = self._executor_for(body.model), max(engine_info.context, MIN_TOKENIZE_IDS)
        work = executor.tokenizer, body, engine_info.max_length, limit
        content = await executor.run(request.state.size, tokenize_body, *work)
        return Response(content, headers=_ignored_header(body, body, ()), media_type="application/json")

    async def _detokenize(self, request: Request) -> ASGIApp:
        """Decodes token ids to text."""
        engine_info = self.engine_client.refuse_unless_ready()
        body = await self._body(request, Detokenize, max(engine_info.context, MIN_TOKENIZE_IDS))
        executor, ids = self._executor_for(body.model), body.ids
        if len(ids) and (largest := ids.max()) >= engine_info.vocab:  # tokenizers silently skip unknown ids
            raise ApiError(400, outside_vocabulary("tokens", largest, engine_info.vocab), param="tokens")
        text = await executor.run(ids.nbytes, executor.tokenizer.decode, ids)
        return JSONResponse({"prompt": text}, headers=_ignored_header(body, body, ()))

    async def _scrape(self, request: Request) -> ASGIApp:
        """Returns the metrics of all processes of the server in Prometheus's format."""
        text = (await self.shared.collect()).text(self.session.name)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _version(self, request: Request) -> ASGIApp:
        """Returns the version."""
        return JSONResponse({"version": version("helix-runtime")})

    async def _loads(self, request: Request) -> ASGIApp:
        """Returns the load of the ranks, as SGLang does for routers."""
        return JSONResponse(self.metrics.loads((await self.shared.collect()).load))

    async def _openapi(self, request: Request) -> ASGIApp:
        """Returns this OpenAPI document."""
        routes = [
            (path, method, str(handler.__doc__), body, handler in self._open)
            for path, method, handler, body in self._routes
        ]
        return JSONResponse(document(version("helix-runtime"), routes, self._keys.required))

    async def _health(self, request: Request) -> ASGIApp:
        """Returns 200 while all ranks and all processes of the server serve, else 503."""
        state, why = self.engine_client.state, self.engine_client.why
        if state == "ready" and not self.engine_client.loads.all_ready:
            state, why = "starting", "another process of the server is starting"
        return JSONResponse({"state": state, "reason": why}, 200 if state == "ready" else 503)

    async def _page(self, request: Request) -> ASGIApp:
        """Returns a file of the chat page."""
        if (file := PAGE.get(request.path_params.get("name", "index.html"))) is None:
            raise HTTPException(404)
        content = file.read_bytes()
        headers = PAGE_HEADERS | {"etag": f'"{hashlib.sha256(content).hexdigest()}"'}
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=PAGE_TYPES[file.suffix], headers=headers)

    async def _livez(self, request: Request) -> ASGIApp:
        """Returns 200 while the server process responds."""
        return JSONResponse({"state": "alive"})

    # ---- shared by all routes

    def _wrap(self, handler: Handler) -> Callable[[Request], Awaitable[Any]]:
        open_to_all = handler in self._open

        async def answered(request: Request) -> ASGIApp:
            request.state.owner = None if open_to_all else self._keys.owner(request.headers)
            try:
                return await handler(request)
            except (ClientDisconnected, ClientDisconnect):
                return Response(status_code=CLIENT_CLOSED_REQUEST)

        return answered

    def _check_num_generations(self, wanted: int, param: str) -> None:
        if wanted > (most := self._serve.max_queue):
            what = f"the request has {wanted} completions, but at most serve.max_queue={most} can queue"
            raise ApiError(400, what, param=param)

    def _executor_for(self, model: str | None) -> RequestExecutor:
        """Returns the executor; raises ApiError 404 if the request is for another model."""
        self.engine_client.refuse_unless_ready()
        self.session.check_model(model)
        assert self.executor is not None, "set before the first job is ready"
        return self.executor

    async def _body(self, request: Request, schema: type[Body], max_ids: int = 0) -> Body:
        """Receives and parses the body, with at most `max_ids` token ids; sets `request.state.size` to its bytes."""
        executor, content = self._executor_for(None), await self._receive(request)
        if schema is Completion and len(content) > LARGE:
            long_prompt = await executor.run(0, parse_long_prompt, content, max_ids)
            if long_prompt is not None:
                return long_prompt
        return await executor.run(len(content), parse_body, schema, content, max_ids)

    async def _receive(self, request: Request) -> bytes:
        """Receives the body; sets `request.state.size` to its bytes."""
        engine_info = self.engine_client.refuse_unless_ready()
        mib = self._serve.body_mib or max(BODY_BYTES, ID_BYTES * engine_info.max_length) // MIB
        limit, what = mib * MIB, f"the body is larger than {mib} MiB (serve.body_mib)"
        too_large = ApiError(413, what, code="too_large")
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(RECEIVE_S):
                async for piece in request.stream():
                    body += piece
                    if len(body) > limit:
                        raise too_large
        except TimeoutError:
            raise ApiError(408, f"the body was not received within {RECEIVE_S:g} s") from None
        coding = request.headers.get("content-encoding", "identity").strip().lower()
        if coding in ("gzip", "x-gzip"):
            body = await asyncio.to_thread(_gunzip, body, limit + 1)  # zlib releases the GIL
            if len(body) > limit:
                raise too_large
        elif coding not in ("identity", ""):
            what = f"content-encoding={coding!r:.40} is not supported: send the body uncompressed, or with gzip"
            raise ApiError(415, what, code="unsupported_encoding")
        request.state.size = len(body)
        return bytes(body)


def _gunzip(body: bytearray, limit: int) -> bytearray:
    """Decompresses up to `limit` bytes; raises ApiError 400 if the body is not exactly one complete gzip stream."""
    stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        plain = stream.decompress(body, limit)
    except zlib.error as error:
        raise ApiError(400, f"content-encoding is gzip, but the body is not: {error}", code="invalid_gzip") from None
    if len(plain) < limit and (not stream.eof or stream.unused_data):
        what = "has data after its end" if stream.eof else "is truncated"
        raise ApiError(400, f"content-encoding is gzip, but the body {what}", code="invalid_gzip")
    return bytearray(plain)


def _without_effort(body: Chat, reads: bool) -> Chat:
    """Leaves out an effort that the template does not read."""
    if body.reasoning_effort is not None and not reads:
        body.reasoning_effort = None
        _ignore(body, "reasoning_effort")
    return body


def _ignore(body: Schema, name: str) -> None:
    """Names a field in the header of ignored fields."""
    assert body.model_extra is not None, "schemas collect unknown fields"
    body.model_extra[name] = None


def _ignored_header(sent: Schema, body: Schema, left_out: Iterable[str]) -> dict[str, str]:
    """Returns the header that names what has no effect, or not as it was sent.

    Args:
        sent, body: the body before and after conversion, whose `model_extra` has names of fields.
        left_out: fields of messages.
    """
    of_body = [*(body.model_extra or ()), *(f"messages.{name}" for name in left_out)]
    names = {*(sent.model_extra or ()), *(_own_name(name, sent.route) for name in of_body)}
    return {"x-ignored-fields": ",".join(map(_header, sorted(names)[:MAX_IGNORED_NAMES]))} if names else {}


def _own_name(name: str, route: str) -> str:
    """Renames a field of the chat, with what follows its name, to what clients of a route call it."""
    field = re.split("[.:]", name, maxsplit=1)[0]
    return OWN_NAMES.get(route, {}).get(field, field) + name.removeprefix(field)


def _header(name: str) -> str:
    plain = name.encode("ascii", errors="backslashreplace").decode()
    return "".join(letter if letter.isprintable() else " " for letter in plain)[:80]


def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    route = request.url.path.removeprefix("/v1/").partition("/")[0]
    if (own := OWN_NAMES.get(route, {}).get(error.param or "")) is not None:
        message = error.message.replace(str(error.param), own)
        error = ApiError(error.status, message, param=own, code=error.code)
    return _error_response(request, error)


def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path:.200}: {error.detail}"
    response = _error_response(request, ApiError(error.status_code, what))
    response.headers.update(error.headers or {})
    return response


def _on_exception(request: Request, error: Exception) -> Response:
    return _error_response(request, ApiError(500, f"the server failed: {type(error).__name__}"))


def _error_response(request: Request, error: ApiError) -> Response:
    """Creates the response for an error in the format of the route's API."""
    make_body = error_body if request.url.path.startswith("/v1/messages") else ApiError.body
    return JSONResponse(make_body(error, request.state.request_log.id), error.status, headers=error.headers)
