"""Two servers behind a router that others have made: answers are the servers' own, and one of them may die."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.e2e.cli import Job
from tests.serving.front import DEMO
from tests.serving.test_server import Server

pytestmark = pytest.mark.clients
# In a Python of their own, on PATH: smg 1.13.0 and vllm-router 0.1.17 are what has been tried.
ROUTERS = {
    "smg": ["smg", "launch", "--policy", "power_of_two", "--load-monitor-interval", "1"],
    "vllm-router": ["vllm-router", "--policy", "cache_aware"],
}
OPTIONS = "layout.kvp=1", "decode.max_batch=16"
REQUESTS, KILLED_AT, TOKENS = 24, 8, 40


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@dataclass
class Fleet:
    url: str
    servers: list[Server]
    router: Job

    def post(self, path: str, **body: object) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json={"model": "chat", "temperature": 0} | body, timeout=60)


@pytest.fixture(params=ROUTERS)
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    name = request.param
    if shutil.which(name) is None:
        pytest.skip(f"no {name} on PATH: python -m venv DIR && DIR/bin/pip install {name} && export PATH=$PATH:DIR/bin")
    shutil.copytree(DEMO, tmp_path / "chat")
    jobs: list[Job] = []
    try:
        for number in range(2):
            (directory := tmp_path / str(number)).mkdir()
            jobs.append(Server(directory, f"model.path={tmp_path}/chat", *OPTIONS))
        servers = [job for job in jobs if isinstance(job, Server)]
        port, metrics = free_ports(2)
        where = ["--host=127.0.0.1", f"--port={port}", "--prometheus-host=127.0.0.1", f"--prometheus-port={metrics}"]
        workers = ["--health-check-interval-secs=1", "--worker-urls", *(server.url for server in servers)]
        jobs.append(Job([*ROUTERS[name], *where, *workers], log=tmp_path / "router"))
        made = Fleet(f"http://127.0.0.1:{port}", servers, jobs[-1])
        deadline = time.monotonic() + 120
        while not _routes(made):
            assert time.monotonic() < deadline and made.router.process.poll() is None, made.router.log.read_text()
            time.sleep(0.2)
        yield made
    finally:
        for job in jobs:
            job.kill()
            job.process.kill()  # smg writes its title over the mark by which a job's processes are found
            job.process.wait(10)


def _routes(fleet: Fleet) -> bool:
    try:
        return fleet.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200
    except httpx.HTTPError:
        return False


def streamed(answer: httpx.Response) -> tuple[str, bool]:
    """A stream's text, and whether it came to its end."""
    text, whole = "", False
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:]).get("choices", ()):
                text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                whole |= choice["finish_reason"] == "length"
    return text, whole


def test_answers_come_through(fleet: Fleet) -> None:
    """Completions and chats, whole and streamed, as they come without the router; both servers have work."""
    said = {"messages": [{"role": "user", "content": "def f"}]}
    for path, more in (("/v1/completions", {"prompt": "def f"}), ("/v1/chat/completions", said)):
        body = {"model": "chat", "temperature": 0, "max_tokens": 12} | more
        straight = httpx.post(f"{fleet.servers[0].url}{path}", json=body, timeout=60).json()["choices"][0]
        text = straight["text"] if "text" in straight else straight["message"]["content"]
        through = fleet.post(path, **body)
        assert through.json()["choices"] == [straight], through.text
        assert through.json()["usage"]["completion_tokens"] == 12
        with httpx.stream("POST", f"{fleet.url}{path}", json=body | {"stream": True}, timeout=60) as stream:
            assert streamed(stream) == (text, True)
    refused = fleet.post("/v1/completions", prompt="x", max_tokens=1, best_of=2)
    assert refused.status_code == 400 and "best_of is not supported" in refused.json()["error"]["message"]
    with ThreadPoolExecutor(8) as pool:
        for answer in pool.map(lambda i: fleet.post("/v1/completions", prompt=f"{i} {i}", max_tokens=30), range(16)):
            assert answer.status_code == 200
    assert all(" POST /v1/completions 200 " in server.log.read_text() for server in fleet.servers)


def test_a_server_that_dies_takes_only_what_it_had_begun(fleet: Fleet) -> None:
    """Streams under way there; all other answers come from the other server, and later ones too."""

    def complete(number: int) -> tuple[bool, bool]:
        """Tells whether an answer came whole, and whether it is a stream that had begun."""
        body = {"model": "chat", "prompt": f"def f{number}(", "max_tokens": TOKENS, "ignore_eos": True}
        body["stream"] = number % 2 == 0
        begun = False
        time.sleep(0.1 * number)
        if number == KILLED_AT:
            os.kill(fleet.servers[1].process.pid, signal.SIGKILL)
        try:
            with httpx.stream("POST", f"{fleet.url}/v1/completions", json=body, timeout=60) as answer:
                begun = body["stream"] and answer.status_code == 200  # the server sends headers at once
                if begun:
                    return streamed(answer)[1], begun
                return json.loads(answer.read()).get("usage", {}).get("completion_tokens") == TOKENS, begun
        except httpx.HTTPError:
            return False, begun

    with ThreadPoolExecutor(REQUESTS) as pool:
        answers = [*pool.map(complete, range(REQUESTS))]
    for number, (whole, begun) in enumerate(answers):
        assert whole or (begun and number <= KILLED_AT), (number, answers, fleet.router.log.read_text()[-2000:])
    assert sum(whole for whole, _ in answers) > REQUESTS // 2
