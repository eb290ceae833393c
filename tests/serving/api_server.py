"""A front end in this process, over a scripted job."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from helix.config import ServeConfig
from helix.engine.request import Logprobs, Request, RequestUpdate
from helix.tokenizer import load_tokenizer
from launch.client.engine_client import EngineClient
from launch.client.engine_messages import Cancel, EngineInfo, FrameDecoder, Message, Stop, encode, encode_tokens
from launch.client.session import Session
from launch.client.supervisor import Supervisor
from launch.serving.http import Server, listen, make_server
from launch.serving.routes import Api
from launch.serving.security import ApiKeys

ROOT = Path(__file__).parents[2]
DEMO = Path(__file__).parents[2] / "assets" / "demo-model"
READY = EngineInfo(str(DEMO), "helix kvp=2", 2, 32768, 4096, 4096, 4096, 8, (0,))
DEADLINE_S = 60.0


def text_of(name: str) -> str:
    """Reads a file of texts/."""
    return (Path(__file__).parent / "texts" / name).read_text(encoding="utf-8")


def changed(directory: Path, files: dict[str, Any], of: Path = DEMO) -> Path:
    """Makes a copy of a model's directory with some files replaced, by text or JSON."""
    directory.mkdir()
    for file in of.iterdir():
        if file.name not in files:
            (directory / file.name).symlink_to(file)
    for name, content in files.items():
        (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def without_template(directory: Path) -> Path:
    """Makes a demo model without chat template."""
    settings = json.loads((DEMO / "tokenizer_config.json").read_text())
    return changed(directory / "demo-model", {"tokenizer_config.json": settings | {"chat_template": None}})


Script = Callable[["FakeJob", Request], Awaitable[None]]
Serve = Callable[..., Awaitable["ApiServer"]]  # the fixture `serve`: `api_server` without its directory


async def counting(job: FakeJob, submit: Request) -> None:
    """Emits token n at position n: output depends on the position only, like an engine's sampling."""
    begin = len(submit.prompt)
    for n in range(begin, begin + submit.max_tokens):
        await job.emit(submit, [100 + n], "length" if n == begin + submit.max_tokens - 1 else None)


async def silent(job: FakeJob, submit: Request) -> None:
    """Emits nothing."""


@dataclass
class FakeJob:
    """A scripted job at the other end of the socket."""

    script: Script = counting
    ready: EngineInfo = READY
    received: list[Message] = field(default_factory=list)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    server: asyncio.Server | None = None
    path: Path = Path()
    starts: int = 0

    @property
    def submits(self) -> list[Request]:
        return [message for message in self.received if isinstance(message, Request)]

    @property
    def aborts(self) -> list[int]:
        return [message.id for message in self.received if isinstance(message, Cancel)]

    async def listen(self, path: Path) -> None:
        self.path = path
        self.server = await asyncio.start_unix_server(self._serve, path)

    async def listen_again(self) -> None:
        """Listens at the same path again, after `close`."""
        self.path.unlink(missing_ok=True)
        await self.listen(self.path)

    async def emit(self, submit: Request, ids: list[int], finish: str | None = None, **more: Any) -> None:
        if ids and finish is None and not more:  # as ranks do
            self.send_frame(encode_tokens([number for token in ids for number in (int(submit.id), token)]))
        else:
            more |= {"logprobs": tuple(Logprobs(*of) for of in more.pop("logprobs", ()))}
            self.send(RequestUpdate(submit.id, new_token_ids=tuple(ids), finish_reason=finish, **more))
        await asyncio.sleep(0)

    def send(self, message: Message) -> None:
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        if self.writers:
            self.writers[-1].write(frame)

    def die(self) -> None:
        """Aborts the connection, as when a job dies; the next one is another job's."""
        self.writers.pop().transport.abort()

    async def close(self) -> None:
        if self.server is not None:
            self.server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.starts += 1
        self.writers.append(writer)
        self.send(self.ready)
        decoder, tasks = FrameDecoder(), []
        with suppress(ConnectionError, asyncio.CancelledError):
            while data := await reader.read(1 << 20):
                for message in decoder.feed(data):
                    self.received.append(message)
                    if isinstance(message, Stop):
                        writer.close()
                    elif isinstance(message, Request):
                        tasks.append(asyncio.create_task(self.script(self, message)))  # type: ignore[arg-type]
        for task in tasks:
            task.cancel()


@dataclass
class ApiServer:
    """A running front end, with an HTTP client and its engine client."""

    url: str
    client: httpx.AsyncClient
    engine_client: EngineClient
    api: Api
    job: FakeJob
    supervisor: Supervisor
    server: Server

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def session(self) -> Session:
        return self.api.session  # type: ignore[return-value]

    async def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return await self.client.post(path, **({"json": body} if body is not None else {}), **more)

    async def get(self, path: str, **more: Any) -> httpx.Response:
        return await self.client.get(path, **more)

    async def connect(self, path: str, body: Any, **more: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Sends a request; returns the connection, for the test to read."""
        where = () if "sock" in more else ("127.0.0.1", self.port)
        reader, writer = await asyncio.open_connection(*where, **more)
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        return reader, writer

    async def metrics(self) -> dict[str, float]:
        return metrics_of((await self.get("/metrics")).text)


@asynccontextmanager
async def api_server(directory: Path, job: Any = None, **settings: Any) -> AsyncIterator[ApiServer]:
    """Runs a front end over a job, and waits until it is ready."""
    job = job or FakeJob()
    path = Path(tempfile.mkdtemp(dir=directory)) / "job.sock"
    serve = replace(ServeConfig(), attach=str(path), **{"port": 0, **settings})
    api = Api(serve, ApiKeys(serve.api_keys))
    engine_client = api.engine_client
    engine_client.on_engine_info = api.configure
    (listener,) = listen(serve)
    server = make_server(api.app(), serve)
    supervisor = Supervisor(engine_client, serve, [], directory)
    await job.listen(path)
    tasks = [asyncio.create_task(server.serve(sockets=[listener])), asyncio.create_task(supervisor.run())]
    await until(lambda: engine_client.state == "ready" and server.started)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S, verify=False) as client:
            yield ApiServer(url, client, engine_client, api, job, supervisor, server)
    finally:
        server.should_exit = True
        await tasks[0]
        tasks[1].cancel()
        await api.close()
        await job.close()


def pieces(answer: httpx.Response) -> list[dict[str, Any]]:
    """Returns the chunks of a stream, or the whole response as one."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return [answer.json()]
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


@dataclass
class ReceivedChoice:
    """A choice, as assembled by a client.

    Attributes:
        calls: names and arguments.
        ends: finish reason.
    """

    thinking: str = ""
    content: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    ends: str | None = None


def read(answer: httpx.Response, index: int = 0) -> ReceivedChoice:
    """Assembles a choice of a completion or a chat, whole or streamed."""
    assert answer.status_code == 200, answer.text
    found = ReceivedChoice()
    for choice in (choice for piece in pieces(answer) for choice in piece["choices"] if choice["index"] == index):
        message = choice.get("delta") or choice.get("message") or choice
        found.thinking += message.get("reasoning_content") or ""
        found.content += message.get("content") or message.get("text") or ""
        for call in message.get("tool_calls") or ():
            assert call.get("index", len(found.calls)) == len(found.calls)
            found.calls.append((call["function"]["name"], json.loads(call["function"]["arguments"])))
        found.ends = choice["finish_reason"]
    return found


@cache
def tokens_of(text: str, model: str) -> list[int]:
    """Tokenizes a text."""
    return load_tokenizer(model).encode(text, add_special_tokens=False)


def scripted_reply(text: str, finish: str | None = "stop", end: int = 0) -> Script:
    """Returns a script that emits a text token by token, and ends by EOS, at a limit, or with an error."""

    async def script(job: FakeJob, submit: Request) -> None:
        for token in tokens_of(text, job.ready.model):
            await job.emit(submit, [token])
        if finish:
            why = {"reason": "planted"} if finish == "error" else {}
            await job.emit(submit, [end] if finish == "stop" else [], finish, **why)

    return script


def metrics_of(text: str) -> dict[str, float]:
    """Parses Prometheus text into values by name without the prefix `helix:`."""
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("helix:"))
    return {name.removeprefix("helix:"): float(value) for name, value in lines}


class Clock:
    """A settable clock that replaces a module's `time`."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


async def until(holds: Callable[[], Any]) -> None:
    """Polls until a condition holds."""
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.01)
