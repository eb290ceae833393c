"""The processes of a server that answer HTTP, `serve.processes` of them.

The first one supervises the ranks and holds the shared state. It starts the others. Each of them listens at the same
port, has its own connection to the ranks, and calls the first one over a channel.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pickle
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from helix.config import ServeConfig
from helix.log import NUMBERS, print_error
from helix.packages import rank_environment
from launch.client.engine_messages import EngineInfo
from launch.client.load_table import LoadTable
from launch.client.supervisor import LAUNCHER, WINDOW_S, JobFailed, Supervisor
from launch.serving.http import Server, make_server
from launch.serving.metrics import Snapshot, sum_metrics
from launch.serving.routes import Api
from launch.serving.security import ApiKeys
from launch.serving.shared_state import SIZE, Channel, LocalState, RemoteState

LOG = logging.getLogger(f"helix.{__name__}")
START_S = 60.0  # for a process to start
BEAT_S = 1.0  # interval of checks that a process responds
CLOSE_S = 5.0  # for a process to end once its channel is closed
POLL_S = 0.1  # for streams to send their last events


@dataclass
class Peer:
    """One of the other processes.

    Attributes:
        past: what its predecessors had counted.
        last: what it had counted when it was last asked.
    """

    process: Process | None = None
    channel: Channel | None = None
    past: Snapshot | None = None
    last: Snapshot | None = None


class Processes:
    """The other processes of a server; restarts one that dies.

    Args:
        api: of the first process.
        listeners: their sockets. They stay open here: connections that wait for a process that died reach the next.
        ranks: leads to the socket of the ranks.
        table: file of the load table.
    """

    def __init__(
        self, serve: ServeConfig, keys: ApiKeys, api: Api, listeners: Sequence[socket.socket], ranks: Path, table: int
    ) -> None:
        self._serve, self._listeners, self._table = serve, listeners, table
        self._loads = api.engine_client.loads
        self._setup = replace(serve, attach=str(ranks)), keys, api.started
        self._peers = [Peer() for _ in listeners]
        self._failures: deque[float] = deque()
        self._draining = self._stopping = False
        names = "find_response", "add_response", "delete_response", "collect"
        self._methods = {name: getattr(api.shared, name) for name in names}
        assert isinstance(api.shared, LocalState)
        api.shared.others = self._snapshots

    async def run(self) -> None:
        """Keeps the processes running until `stop`.

        Raises:
            JobFailed: a process cannot start, or they died more often than `serve.restarts` allows.
        """
        await asyncio.gather(*(self._keep(row) for row, _ in enumerate(self._peers, 1)))

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of `Front` in each process; returns the results of those that answer in time."""
        channels = [peer.channel for peer in self._peers if peer.channel is not None]
        calls = (channel.call(method, *arguments) for channel in channels)
        results = await asyncio.gather(*calls, return_exceptions=True)
        return [one for one in results if not isinstance(one, BaseException)]

    async def drain(self) -> int:
        """Has all processes refuse new requests; returns how many requests run."""
        self._draining = True
        return sum(await self.call("drain"))

    def refuse(self) -> None:
        """Frees the port; open connections continue."""
        self._draining = True
        for listener in self._listeners:
            listener.close()

    async def stop(self) -> None:
        """Ends the processes."""
        self._stopping = True
        processes = [peer.process for peer in self._peers if peer.process is not None]
        for peer in self._peers:
            if peer.channel is not None:
                peer.channel.close()
        ends = [asyncio.create_task(process.wait()) for process in processes]
        if ends:
            await asyncio.wait(ends, timeout=CLOSE_S)
        for process in processes:
            if process.returncode is None:
                process.kill()
        await asyncio.gather(*ends)

    async def _keep(self, row: int) -> None:
        peer = self._peers[row - 1]
        while not self._stopping:
            code = await self._run_once(peer, row)
            self._loads.clear(row)
            if self._stopping:
                return
            peer.past, peer.last = _add(peer.past, peer.last), None
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            why = f"process {row} of the server {how}"
            self._failures.append(time.monotonic())
            while self._failures[0] < time.monotonic() - WINDOW_S:
                self._failures.popleft()
            if len(self._failures) > self._serve.restarts:
                raise JobFailed(f"more than serve.restarts={self._serve.restarts} processes in ten minutes: {why}")
            if self._draining:
                LOG.warning("%s: its requests are lost", why)
                self._listeners[row - 1].close()  # nobody will answer these connections
                return
            LOG.warning("%s: its requests are lost; restarting it", why)

    async def _run_once(self, peer: Peer, row: int) -> int:
        here, there = socket.socketpair()
        with there:
            fds = there.fileno(), self._listeners[row - 1].fileno(), self._table
            try:
                peer.process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "launch.serve_process", *map(str, fds)),
                    pass_fds=fds,
                    env=os.environ | rank_environment() | {LAUNCHER: str(os.getpid()), NUMBERS["process"]: str(row)},
                    stdin=DEVNULL,
                    start_new_session=True,  # control-C in a terminal reaches only the first process
                )
            except OSError as error:
                here.close()
                why = f"serve.processes={self._serve.processes}: process {row} of the server cannot start: {error}"
                raise JobFailed(why) from error
        try:
            reader, writer = await asyncio.open_connection(sock=here)
            setup = pickle.dumps((*self._setup, row))
            writer.write(SIZE.pack(len(setup)) + setup)
            peer.channel = Channel(reader, writer, self._methods)
            if self._draining:  # it does not know that
                peer.process.kill()
            watch = asyncio.create_task(self._watch(peer.channel, peer, row))
            await peer.channel.serve()
            watch.cancel()
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await peer.process.wait()
        finally:
            if peer.channel is not None:
                peer.channel.close()
            if peer.process.returncode is None:
                peer.process.kill()
            code = await peer.process.wait()
            peer.process = peer.channel = None
        return code

    async def _watch(self, channel: Channel, peer: Peer, row: int) -> None:
        """Ends the connection to a process that does not respond, which is then killed."""
        timeout_s = START_S
        try:
            while True:
                peer.last = await channel.call("snapshot", timeout_s=timeout_s)
                timeout_s = self._serve.hang_s
                await asyncio.sleep(BEAT_S)
        except TimeoutError:
            LOG.warning("process %d of the server did not respond for %g s", row, timeout_s)
            channel.close()
        except ConnectionError:
            pass

    async def _snapshots(self) -> list[Snapshot]:
        """Returns what each process has counted, with its predecessors; the last known if it does not answer."""

        async def ask(peer: Peer) -> list[Snapshot]:
            if peer.channel is not None:
                with suppress(TimeoutError, ConnectionError):
                    peer.last = await peer.channel.call("snapshot", timeout_s=BEAT_S)
            return [one for one in (peer.past, peer.last) if one is not None]

        found = await asyncio.gather(*map(ask, self._peers))
        return [one for several in found for one in several]


def _add(past: Snapshot | None, last: Snapshot | None) -> Snapshot | None:
    """Adds the counters of a process that died to those of its predecessors: sums over processes must not fall."""
    both = [one for one in (past, last) if one is not None]
    if not both:
        return None
    metrics = [metric for one in both for metric in one.metrics if metric.type != "gauge"]
    load = {key: sum(one.load[key] for one in both) if key in ("queried", "hits") else 0 for key in both[0].load}
    return Snapshot(sum_metrics(metrics), load)


class Front:
    """What the first process calls in another."""

    def __init__(self, api: Api, server: Server, supervisor: Supervisor) -> None:
        self._api, self._server, self._supervisor = api, server, supervisor

    async def snapshot(self) -> Snapshot:
        return self._api.metrics.snapshot()

    async def refuse(self) -> None:
        self._server.refuse()

    async def drain(self) -> int:
        """Refuses new requests; returns how many run."""
        self._api.engine_client.draining = True
        return self._api.engine_client.running

    async def fail(self, why: str) -> int:
        """Ends all requests with an error, as the ranks will leave; returns how many there were."""
        running = self._api.engine_client.running
        await self._supervisor.stop()
        self._api.engine_client.fail(why)
        return running

    @property
    def methods(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("snapshot", "refuse", "drain", "fail")}


async def close_server(server: Server, http_task: asyncio.Task[None]) -> None:
    """Lets streams send their last events, then ends the HTTP server."""
    await asyncio.sleep(POLL_S)
    server.should_exit = True
    with suppress(SystemExit):
        await http_task


async def _serve(control: socket.socket, listener: socket.socket, table: int) -> int:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):  # service managers signal all processes: the first one decides
        loop.add_signal_handler(number, lambda: None)
    reader, writer = await asyncio.open_connection(sock=control)
    (size,) = SIZE.unpack(await reader.readexactly(SIZE.size))
    serve, keys, started, row = pickle.loads(await reader.readexactly(size))
    channel_methods: dict[str, Any] = {}
    channel = Channel(reader, writer, channel_methods)
    api = Api(serve, keys, RemoteState(channel), LoadTable(serve.processes, table, row))
    api.started = started

    def on_ready(engine_info: EngineInfo) -> None:
        api.configure(engine_info, loop)
        gc.freeze()  # as in the first process

    api.engine_client.on_engine_info = on_ready
    server = make_server(api.app(), serve)
    supervisor = Supervisor(api.engine_client, serve, [], Path())
    channel_methods |= Front(api, server, supervisor).methods
    http_task = asyncio.create_task(server.serve(sockets=[listener]))
    supervision = asyncio.create_task(supervisor.run())
    called = asyncio.create_task(channel.serve())
    await asyncio.wait((called, supervision), return_when=asyncio.FIRST_COMPLETED)
    code = 0
    if supervision.done() and (error := supervision.exception()) is not None:
        print_error(error)
        code = 1
    else:
        await called
    await close_server(server, http_task)
    supervision.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await supervision
    channel.close()
    await api.close()
    return code


def run(control: int, listener: int, table: int) -> int:
    """Runs one of the other processes until the first one closes the channel; arguments are file descriptors."""
    for fd in (control, listener, table):
        os.set_inheritable(fd, False)  # its workers would keep the port
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(socket.socket(fileno=control), socket.socket(fileno=listener), table))
