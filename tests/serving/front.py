"""A front end in this process, over a job that a test writes in a few lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import uvloop

from helix.config import ServeConfig
from helix.engine.request import Logprobs, Request, RequestUpdate
from launch.client.core import Core
from launch.client.frames import Cancel, FrameDecoder, Message, Ready, encode, encode_tokens
from launch.client.session import Session
from launch.client.supervisor import Supervisor
from launch.serving.http import Server, listen, make_server
from launch.serving.routes import Api
from launch.serving.security import Keys

ROOT = Path(__file__).parents[2]
DEMO = Path(__file__).parents[2] / "assets" / "demo-model"
READY = Ready(str(DEMO), "helix kvp=2", 2, 32768, 4096, 4096, 4096, 8, (0,))
DEADLINE_S = 60.0


def without_template(directory: Path) -> Path:
    """The demo model's tokenizer, without a chat template."""
    (made := directory / "demo-model").mkdir()
    (made / "tokenizer.json").symlink_to(DEMO / "tokenizer.json")
    settings = json.loads((DEMO / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (made / "tokenizer_config.json").write_text(json.dumps(settings))
    return made


Script = Callable[["FakeJob", Request], Awaitable[None]]
Check = Callable[["Front"], Awaitable[None]]


async def counting(job: FakeJob, submit: Request) -> None:
    """Token n of a sequence is n: what comes depends on the position alone, as an engine's draws do."""
    begin = len(submit.prompt)
    for n in range(begin, begin + submit.max_tokens):
        await job.say(submit, [100 + n], "length" if n == begin + submit.max_tokens - 1 else None)


async def silent(job: FakeJob, submit: Request) -> None:
    """Nothing ever comes."""


@dataclass
class FakeJob:
    """A scripted job at the other end of the socket."""

    script: Script = counting
    ready: Ready = READY
    got: list[Message] = field(default_factory=list)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    server: asyncio.Server | None = None

    @property
    def submits(self) -> list[Request]:
        return [message for message in self.got if isinstance(message, Request)]

    @property
    def aborts(self) -> list[int]:
        return [message.id for message in self.got if isinstance(message, Cancel)]

    async def listen(self, path: Path) -> None:
        self.server = await asyncio.start_unix_server(self._serve, path)

    async def say(self, submit: Request, ids: list[int], finish: str | None = None, **more: Any) -> None:
        if ids and finish is None and not more:  # as ranks do
            self.send_frame(encode_tokens([number for token in ids for number in (int(submit.id), token)]))
        else:
            more |= {"logprobs": tuple(Logprobs(*of) for of in more.pop("logprobs", ()))}
            self.send(RequestUpdate(submit.id, new_ids=tuple(ids), finish_reason=finish, **more))
        await asyncio.sleep(0)

    def send(self, message: Message) -> None:
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        if self.writers:
            self.writers[-1].write(frame)

    def die(self) -> None:
        """Ends the connection, as a job's death does; the next one is another job."""
        self.writers.pop().transport.abort()

    async def close(self) -> None:
        if self.server is not None:
            self.server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        self.send(self.ready)
        decoder, tasks = FrameDecoder(), []
        with suppress(ConnectionError, asyncio.CancelledError):
            while data := await reader.read(1 << 20):
                for message in decoder.feed(data):
                    self.got.append(message)
                    if isinstance(message, Request):
                        tasks.append(asyncio.create_task(self.script(self, message)))  # type: ignore[arg-type]
        for task in tasks:
            task.cancel()


@dataclass
class Front:
    url: str
    core: Core
    api: Api
    session: Session
    job: FakeJob
    supervisor: Supervisor
    server: Server

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        async with httpx.AsyncClient(timeout=DEADLINE_S, verify=False) as client:
            return await client.post(f"{self.url}{path}", **({"json": body} if body is not None else {}), **more)

    async def options(self, path: str, **more: Any) -> httpx.Response:
        async with httpx.AsyncClient(timeout=DEADLINE_S, verify=False) as client:
            return await client.options(f"{self.url}{path}", **more)

    async def connect(self, path: str, body: Any, **more: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection on which a request has been sent; its bytes are the test's to read."""
        where = () if "sock" in more else ("127.0.0.1", self.port)
        reader, writer = await asyncio.open_connection(*where, **more)
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        return reader, writer

    async def get(self, path: str, **more: Any) -> httpx.Response:
        async with httpx.AsyncClient(timeout=DEADLINE_S, verify=False) as client:
            return await client.get(f"{self.url}{path}", **more)


@asynccontextmanager
async def front(directory: Path, job: FakeJob | None = None, **settings: Any) -> AsyncIterator[Front]:
    """A front end over a job, ready."""
    job = job or FakeJob()
    path = directory / "job.sock"
    serve = replace(ServeConfig(), attach=str(path), **{"port": 0, **settings})
    api = Api(serve, Keys(serve.api_keys))
    core = api.core
    core.on_first = api.know
    listener = listen(serve)
    server = make_server(api.app(), serve)
    supervisor = Supervisor(core, serve, [], directory)
    await job.listen(path)
    tasks = [asyncio.create_task(server.serve(sockets=[listener])), asyncio.create_task(supervisor.keep())]
    await until(lambda: core.state == "ready" and server.started)
    try:
        yield Front(f"http://127.0.0.1:{listener.getsockname()[1]}", core, api, api.session, job, supervisor, server)
    finally:
        server.should_exit = True
        await tasks[0]
        tasks[1].cancel()
        await api.close()
        await job.close()


def run(check: Check, directory: Path, job: FakeJob | None = None, **settings: Any) -> None:
    """Runs a check of a front end, in an event loop as the server's."""

    async def with_front() -> None:
        async with front(directory, job, **settings) as made, asyncio.timeout(110):
            await check(made)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(with_front())


def metrics_of(text: str) -> dict[str, float]:
    """Values of Prometheus's text, by their names without the prefix `helix:`."""
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("helix:"))
    return {name.removeprefix("helix:"): float(value) for name, value in lines}


async def until(holds: Callable[[], Any], seconds: float = DEADLINE_S) -> None:
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.01)
