"""Middleware for all routes: request ids, the access log, CORS."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from launch.client.answer import Answer

LOG = logging.getLogger("helix.access")
ID = re.compile(r"[\x21-\x7e]{1,128}")  # request ids that are accepted from clients: one word
PROBES = ("/health", "/livez", "/metrics", "/v1/loads")  # not logged: they are polled every few seconds
MAX_PATH = 200  # characters of the path in the log
EXPOSED = ("x-request-id", "x-ignored-fields", "retry-after")  # headers that cross-origin pages may read


@dataclass
class RequestLog:
    """What the access log says about a request.

    Attributes:
        answer: the answer, if the request generates one.
    """

    id: str
    status: int = 0
    answer: Answer | None = None
    start_time: float = field(default_factory=time.monotonic)

    def write(self, method: str, path: str, owner: str | None) -> None:
        """Logs the request: as text its id, owner, method, path, status and measurements; as JSON fields."""
        request = {"id": self.id, "owner": owner, "method": method, "path": path[:MAX_PATH], "status": self.status}
        measured: dict[str, Any] = {}
        if self.answer is not None:
            generations = [choice.generation for choice in self.answer.choices]
            usage = self.answer.usage()
            measured |= {"in": usage["prompt_tokens"], "cached": usage["prompt_tokens_details"]["cached_tokens"]}
            measured |= {"out": usage["completion_tokens"], "end": ",".join(str(g.finish_reason) for g in generations)}
            if firsts := [g.first_token_time for g in generations if g.first_token_time is not None]:
                measured["first_s"] = round(min(firsts) - self.start_time, 3)
        measured["total_s"] = round(time.monotonic() - self.start_time, 3)
        words = ("-" if value is None else str(value) for value in request.values())
        text = " ".join([*words, *(f"{name}={value}" for name, value in measured.items())])
        LOG.info("%s", text, extra={"fields": request | measured})


class AccessLog:
    """ASGI middleware that puts a `RequestLog` into the request's state and logs it under `helix.access`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        given_id = headers.get(b"x-request-id", b"").decode("latin-1")
        request_log = RequestLog(given_id if ID.fullmatch(given_id) else uuid.uuid4().hex)
        state = scope.setdefault("state", {})
        state["request_log"] = request_log

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                request_log.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_log.id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, sent)
        finally:
            path = scope["raw_path"].partition(b"?")[0].decode("latin-1")  # stays percent-encoded: one word
            if path not in PROBES:
                request_log.write(scope["method"], path, state.get("owner"))


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Allows pages of these origins to use an application; `*` allows all."""
    if not origins:
        return app
    methods = ["GET", "POST", "DELETE"]
    return CORSMiddleware(app, origins, methods, allow_headers=["*"], expose_headers=EXPOSED)
