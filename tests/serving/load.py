"""Opens ten thousand connections to a server with running streams, then none: measures latency, memory and idle CPU.

    python -m tests.serving.load [connections=10000] [record=FILE]

`/health` must answer within 50 ms (p99) while 32 answers stream, and the front end must stay below 1 GiB. After
20 collective timeouts without requests, it must be alive, and no process of the server may use more than 1% of a core.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from select import select
from threading import Event, Thread
from typing import Any

import torch

from launch.job.lifeline import status
from launch.job.report import provenance
from tests.serving.test_server import Server, served

STREAMS = 32
TOKENS = 1500  # per stream: more than it gets
PROBES, BETWEEN_S = 1000, 0.02
TIMEOUT_S, TIMEOUTS = 5, 20
MAX_MS, MAX_MIB, MAX_SHARE = 50.0, 1024.0, 0.01  # limits to check
SETTINGS = "layout.kvp=2", f"decode.max_batch={STREAMS}", "kv.tokens=65536", f"comm.timeout_s={TIMEOUT_S}"


class Streams(Thread):
    """Clients that read streams.

    Attributes:
        texts: number of texts that each has received.
        left: set it to end them.
    """

    def __init__(self, host: str) -> None:
        super().__init__(daemon=True)
        self.texts, self.left = [0] * STREAMS, Event()
        self._sockets = list[socket.socket]()
        for index in range(STREAMS):
            body = {"prompt": f"def f{index}(", "stream": True, "max_tokens": TOKENS, "ignore_eos": True}
            (connection := HTTPConnection(host, timeout=30)).request("POST", "/v1/completions", json.dumps(body))
            self._sockets.append(connection.sock)
        self.start()

    def run(self) -> None:
        while not self.left.is_set():
            for one in select(self._sockets, [], [], 0.1)[0]:
                self.texts[self._sockets.index(one)] += one.recv(1 << 16).count(b'"text"')
        for one in self._sockets:
            one.close()

    def all_write(self, seconds: float = 120.0) -> None:
        """Waits until each stream has received a new text."""
        before, deadline = [*self.texts], time.monotonic() + seconds
        while any(now == then for now, then in zip(self.texts, before, strict=True)):
            assert time.monotonic() < deadline, f"streams got {self.texts}"
            time.sleep(0.05)


def asked(connection: HTTPConnection, path: str) -> HTTPConnection:
    """Sends a GET and checks the response; returns the connection."""
    connection.request("GET", path)
    answer = connection.getresponse()
    assert answer.status == 200 and answer.read(), answer
    return connection


def health_ms(host: str) -> list[float]:
    """Returns sorted latencies of `/health` in ms; every other connection is new."""
    times, kept = [], HTTPConnection(host, timeout=30)
    for number in range(PROBES):
        begin = time.perf_counter()
        connection = asked(kept if number % 2 else HTTPConnection(host, timeout=30), "/health")
        times.append((time.perf_counter() - begin) * 1e3)
        if connection is not kept:
            connection.close()
        time.sleep(BETWEEN_S)
    return sorted(times)


def worked_s(pids: list[int]) -> list[float]:
    """Returns the CPU seconds of processes."""
    return [sum(map(int, status(pid)[11:13])) / os.sysconf("SC_CLK_TCK") for pid in pids]


def measured(server: Server, connections: int) -> dict[str, Any]:
    """Runs the measurement; returns its row."""
    api_server, host = server.process.pid, server.url.removeprefix("http://")
    streams = Streams(host)
    streams.all_write()
    with ExitStack() as stack:
        for _ in range(connections):  # used once, then kept open
            stack.enter_context(closing(asked(HTTPConnection(host, timeout=30), "/livez")))
        begin, texts = time.monotonic(), sum(streams.texts)
        times = health_ms(host)
        rate = (sum(streams.texts) - texts) / (time.monotonic() - begin)
        streams.all_write()  # all streams still run
        lines = Path(f"/proc/{api_server}/status").read_text().splitlines()
        peak_mib = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024
    row: dict[str, Any] = {"connections": connections, "streams": STREAMS, "pieces_per_s": round(rate, 1)}
    row |= {f"health_p{p}_ms": round(times[len(times) * p // 100], 1) for p in (50, 99)}
    row |= {"health_most_ms": round(times[-1], 1), "front_peak_mib": round(peak_mib)}
    streams.left.set()
    streams.join()
    server.complete("x", max_tokens=1)  # the engine has dropped the streams
    time.sleep(2 * TIMEOUT_S)
    pids = [api_server, *(pid for pid in server.members() if pid != api_server)]
    before = worked_s(pids)
    time.sleep(TIMEOUTS * TIMEOUT_S)
    shares = [(now - then) / (TIMEOUTS * TIMEOUT_S) for now, then in zip(worked_s(pids), before, strict=True)]
    assert server.health()[0] == 200 and server.complete("x", max_tokens=1).usage.completion_tokens == 1
    return row | {"idle_s": TIMEOUTS * TIMEOUT_S, "idle_cores": [round(share, 4) for share in shares]}


def append_row(record: str | None, name: str, row: dict[str, Any]) -> None:
    """Appends a row to the record, if given."""
    if record is not None:
        with Path(record).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, **provenance(torch.device("cpu")), **row}) + "\n")


def main(connections: str = "10000", record: str | None = None) -> int:
    """Prints and records a row; returns 1 if a limit is exceeded."""
    with tempfile.TemporaryDirectory(prefix="helix-load-") as directory, served(Path(directory), *SETTINGS) as server:
        row = measured(server, int(connections))
    for name, value in row.items():
        print(f"{name}: {value}")
    append_row(record, "load", row)
    kept = row["health_p99_ms"] <= MAX_MS and row["front_peak_mib"] < MAX_MIB
    return int(not kept or max(row["idle_cores"]) >= MAX_SHARE)


if __name__ == "__main__":
    sys.exit(main(**dict(argument.split("=", 1) for argument in sys.argv[1:])))
