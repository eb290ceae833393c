"""Runs a server: HTTP and the supervisor of the ranks, until a signal arrives or the supervisor gives up."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import resource
import shlex
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from socket import socket
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from helix.config import ServeConfig
from helix.log import print_error
from launch.client.chat_tokenizer import ChatTokenizer
from launch.client.engine_client import EngineClient
from launch.client.engine_messages import EngineInfo
from launch.client.load_table import LoadTable
from launch.client.supervisor import JobFailed, Supervisor
from launch.serving.http import make_server
from launch.serving.processes import Processes, close_server
from launch.serving.routes import Api
from launch.serving.security import ApiKeys

LOG = logging.getLogger(f"helix.{__name__}")
POLL_S = 0.1  # interval of polling requests while draining


def run(serve: ServeConfig, keys: ApiKeys, listeners: Sequence[socket], arguments: Sequence[str]) -> int:
    """Serves until a signal; returns the exit code.

    Args:
        listeners: one for each of `serve.processes`.
        arguments: settings of the ranks.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection needs a file descriptor
    with TemporaryDirectory(prefix="helix-") as directory, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(serve, keys, listeners, arguments, Path(directory)))


async def _serve(
    serve: ServeConfig, keys: ApiKeys, listeners: Sequence[socket], arguments: Sequence[str], directory: Path
) -> int:
    table = os.open(directory / "loads", os.O_RDWR | os.O_CREAT)
    os.truncate(table, LoadTable.size(serve.processes))
    api = Api(serve, keys, loads=LoadTable(serve.processes, table))
    engine_client = api.engine_client
    loop = asyncio.get_running_loop()
    engine_client.on_engine_info = lambda engine_info: _on_ready(api, engine_info, loop)
    server = make_server(api.app(), serve)
    supervisor = Supervisor(engine_client, serve, arguments, directory)
    processes = Processes(serve, keys, api, listeners[1:], supervisor.path, table)
    stop, force_stop = asyncio.Event(), asyncio.Event()
    freed = set[asyncio.Task[Any]]()

    def on_signal(number: signal.Signals) -> None:
        (force_stop if stop.is_set() else stop).set()
        if number == signal.SIGINT:  # free the port for a new server; after SIGTERM, /health stays available
            server.refuse()
            processes.refuse()
            freed.add(asyncio.create_task(processes.call("refuse")))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    http_task = asyncio.create_task(server.serve(sockets=[listeners[0]]))
    supervision = asyncio.create_task(_supervise(supervisor, processes))
    announcement = asyncio.create_task(_announce(api, keys.required, listeners[0]))
    stopped, forced = asyncio.create_task(stop.wait()), asyncio.create_task(force_stop.wait())
    code = 0
    try:
        await asyncio.wait((supervision, stopped), return_when=asyncio.FIRST_COMPLETED)
        if stopped.done() and not supervision.done():
            await _drain(engine_client, processes, serve.drain_s, supervision, force_stop)
            await supervisor.stop()
            closing = asyncio.create_task(processes.stop())
            await close_server(server, http_task)  # frees the port before the ranks are gone
            await closing
            if serve.attach is None and engine_client.connected:  # the server's own ranks, which were asked to stop
                await asyncio.wait((supervision, forced), return_when=asyncio.FIRST_COMPLETED)
            supervision.cancel()
        await supervision
    except asyncio.CancelledError:
        pass
    except (JobFailed, ValueError) as error:
        print_error(error)
        engine_client.fail(str(error))
        await processes.call("fail", str(error))
        code = 1
    await processes.stop()
    await close_server(server, http_task)
    for task in (stopped, forced, announcement):
        task.cancel()
    await api.close()
    return code


async def _supervise(supervisor: Supervisor, processes: Processes) -> None:
    """Runs the ranks and the server's other processes until both have been stopped, or one of them fails."""
    ranks, others = asyncio.create_task(supervisor.run()), asyncio.create_task(processes.run())
    try:
        await asyncio.wait((ranks, others), return_when=asyncio.FIRST_EXCEPTION)
        for task in (ranks, others):
            if task.done():
                task.result()
    finally:
        ranks.cancel()  # the other processes still tell their clients why
        await asyncio.gather(ranks, return_exceptions=True)


def _on_ready(api: Api, engine_info: EngineInfo, loop: asyncio.AbstractEventLoop) -> None:
    """Loads the model's tokenizer and template; runs in a thread."""
    api.configure(engine_info, loop)
    gc.freeze()  # long-lived objects: collecting over them again would stall all requests for about 50 ms


async def _announce(api: Api, keyed: bool, listener: socket) -> None:
    """Prints the address once all processes of the server are ready."""
    engine_info = await api.engine_client.wait_ready()
    while not api.engine_client.loads.all_ready:
        await asyncio.sleep(POLL_S)
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    session = api.session
    lines = [
        f"{session.name}{' with random weights' if engine_info.random else ''} is served at {url}",
        f"chat page: {url}",
    ]
    for what, found in (("default sampling parameters", session.defaults), ("ignored", session.unread_defaults)):
        if found:
            given = ", ".join(f"{name}={value!s:.80}" for name, value in found.items())
            lines.append(f"{what}: {given} (generation_config.json)")
    print("\n".join([*lines, _curl(url, session.tokenizer, keyed)]), flush=True)


def _curl(url: str, tokenizer: ChatTokenizer, keyed: bool) -> str:
    """Returns a curl command for a first request; the API key is a shell variable."""
    text = "def read_json(path):"  # a prompt for both chat models and code models
    path, body = "completions", dict[str, Any](prompt=text if tokenizer.backend is not None else [1, 2, 3])
    if tokenizer.has_template:
        path, body = "chat/completions", {"messages": [{"role": "user", "content": text}]}
    key = ' -H "Authorization: Bearer $HELIX_API_KEY"' if keyed else ""  # as `helix serve` and `helix chat` read it
    data = shlex.quote(json.dumps(body | {"max_tokens": 64, "stream": True}))
    return f"curl -N {url}/v1/{path}{key} -H 'Content-Type: application/json' -d {data}"


async def _drain(
    engine_client: EngineClient,
    processes: Processes,
    drain_s: float,
    supervision: asyncio.Task[None],
    force_stop: asyncio.Event,
) -> None:
    """Waits until nothing runs, a second signal arrives or the deadline passes; time without ranks does not count."""
    engine_client.draining = True
    left = drain_s
    if running := engine_client.running + await processes.drain():
        LOG.info(
            "draining: %d running request%s up to %g s to finish (serve.drain_s); new requests are refused; another "
            "control-C or SIGTERM stops the server now",
            *(running, "s have" if running > 1 else " has", drain_s),
        )
    while engine_client.loads.in_flight and left > 0 and not supervision.done() and not force_stop.is_set():
        begin = time.monotonic()
        await asyncio.sleep(POLL_S)
        left -= (time.monotonic() - begin) * engine_client.connected
    why = "the server has shut down"
    if running := engine_client.running + sum(await processes.call("fail", why)):
        LOG.warning("%d request%s cut off", running, "s were" if running > 1 else " was")
    engine_client.fail(why)
