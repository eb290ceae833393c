"""Measures how fast the front-end processes of a server pass on a step of many streams.

    python -m tests.serving.processes [streams=256] [processes=1,2,1,2] [record=FILE]

Scripted ranks send a token to each stream and the next ones once all clients have received theirs, as events of chat
completions would come from an engine whose step takes no time. Ranks and clients share this process, which is the same
work with any number of front ends.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.models.http import ServerProcess
from helix.engine.inbox import Inbox
from helix.engine.request import RequestUpdate
from launch.job.serve import EngineServer
from tests.serving.api_server import READY
from tests.serving.load import append_row, worked_s
from tests.serving.test_server import Server

STEPS, WARMUP = 200, 20
BODY = {"prompt": [2, 7], "max_tokens": 4000, "stream": True}


class Clients:
    """Connections that count events."""

    def __init__(self, port: int, count: int) -> None:
        self.events = 0
        self._selector = selectors.DefaultSelector()
        content = json.dumps(BODY).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        for _ in range(count):
            (one := socket.create_connection(("127.0.0.1", port))).sendall(head + content)
            self._selector.register(one, selectors.EVENT_READ)

    def read(self, events: int) -> None:
        """Reads until so many events have come."""
        deadline = time.monotonic() + 60
        while self.events < events:
            assert time.monotonic() < deadline, f"{self.events} of {events} events"
            for key, _ in self._selector.select(1.0):
                self.events += key.fileobj.recv(1 << 16).count(b"\ndata: ")  # type: ignore[union-attr]

    def close(self) -> None:
        for key in [*self._selector.get_map().values()]:
            key.fileobj.close()  # type: ignore[union-attr]


def measured(directory: Path, processes: int, streams: int) -> dict[str, Any]:
    """Runs the measurement with so many processes; returns its row."""
    link = EngineServer(path := directory / "job.sock", inbox := Inbox())
    link.open(READY, dict)
    server = Server(directory, f"serve.attach={path}", f"serve.processes={processes}", f"serve.max_queue={streams}")
    try:
        clients, names = Clients(int(server.url.rpartition(":")[2]), streams), list[Any]()
        while len(names) < streams:
            assert inbox.wait(60)
            names += [message.id for message in inbox.drain()]
        fronts = ServerProcess(server.url, server.process.pid).front_ends()
        assert len(fronts) == processes
        times = list[float]()
        for step in range(1, STEPS + WARMUP + 1):
            if step == WARMUP + 1:
                spent, own = sum(worked_s(fronts)), time.process_time()
            begin = time.perf_counter()
            for name in names:
                link.send_update(RequestUpdate(name, new_token_ids=(100 + step,)))
            link.flush()
            clients.read(step * streams)
            times.append(time.perf_counter() - begin)
        used = {"front": sum(worked_s(fronts)) - spent, "rest": time.process_time() - own}
        clients.close()
    finally:
        server.kill()
        link.close()
    steps = sorted(times[WARMUP:])
    row = {"processes": processes, "streams": streams, "step_p50_ms": round(steps[STEPS // 2] * 1e3, 2)}
    row |= {"step_p90_ms": round(steps[STEPS * 9 // 10] * 1e3, 2), "tokens_per_s": round(STEPS * streams / sum(steps))}
    return row | {f"{name}_us_per_token": round(of / (STEPS * streams) * 1e6, 1) for name, of in used.items()}


def main(streams: str = "256", processes: str = "1,2,1,2", record: str | None = None) -> int:
    """Prints and records a row for each number of processes."""
    for count in map(int, processes.split(",")):
        with tempfile.TemporaryDirectory(prefix="helix-processes-") as directory:
            row = measured(Path(directory), count, int(streams))
        print(row)
        append_row(record, "front-end-processes", row)
    return 0


if __name__ == "__main__":
    sys.exit(main(**dict(argument.split("=", 1) for argument in sys.argv[1:])))
