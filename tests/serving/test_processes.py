"""A server of several processes over scripted ranks: what one of them knows is found in all, and one that dies."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from benchmarks.models.http import ServerProcess
from helix.config import ServeConfig
from helix.engine.inbox import Abort, Inbox
from helix.engine.request import Request, RequestUpdate
from launch.client.load_table import LoadTable
from launch.client.supervisor import JobFailed
from launch.inputs.flags import API_KEY
from launch.job.serve import EngineServer
from launch.serving.http import listen
from launch.serving.processes import Processes
from launch.serving.routes import Api
from launch.serving.security import ApiKeys
from tests.serving.api_server import DEADLINE_S, READY, metrics_of
from tests.serving.test_server import Server

QUICK, HELD, QUEUED = 1, 2, 3  # the first token of a prompt: what the ranks do with it
COMPLETIONS = "/v1/completions"


class ScriptedRanks:
    """Ranks that answer at once, hold a request after its first token, or leave it in the queue.

    Attributes:
        requests: all, by the engine's ids, which begin with the number of the process's connection.
        aborted: ids of those that were given up.
        hang: whether they make no progress.
    """

    def __init__(self, path: Path) -> None:
        self.link = EngineServer(path, inbox := Inbox())
        self.requests: dict[str, Request] = {}
        self.aborted: list[str] = []
        self.hang = False
        self._inbox = inbox
        self.link.open(READY, lambda: {"pages": 9, "preemptions": 5, "progress": time.monotonic() * (not self.hang)})
        Thread(target=self._run, daemon=True).start()

    def finish(self, name: str) -> None:
        self.link.send_update(RequestUpdate(name, new_token_ids=(101,), finish_reason="length"))

    def _run(self) -> None:
        while self._inbox.wait(600):
            for message in self._inbox.drain():
                if isinstance(message, Abort):
                    self.aborted.append(str(message.id))
                    self.link.send_update(RequestUpdate(message.id, finish_reason="abort"))
                    continue
                name, kind = str(message.id), message.prompt[0]
                self.requests[name] = message
                if kind == QUEUED:
                    continue
                self.link.send_update(RequestUpdate(name, new_token_ids=(100,)))
                self.link.flush()
                if kind != HELD:
                    self.finish(name)


class Fleet:
    """A server of two processes, and a connection to each."""

    def __init__(self, directory: Path, *overrides: str, **headers: str) -> None:
        self.ranks = ScriptedRanks(path := directory / "job.sock")
        self.server = Server(directory, f"serve.attach={path}", "serve.processes=2", *overrides)
        self.headers = headers
        self._stack = ExitStack()
        self.ends = self.connections()

    def connect(self) -> httpx.Client:
        """Makes a client with one new connection, to either process."""
        return self._stack.enter_context(
            httpx.Client(base_url=self.server.url, timeout=DEADLINE_S, headers=self.headers)
        )

    def connections(self) -> list[httpx.Client]:
        """Returns a connection to each process: that which holds the shared state, and the other."""
        found: dict[bool, httpx.Client] = {}
        while len(found) < 2:
            client = self.connect()
            assert client.post(COMPLETIONS, json=body(QUICK)).status_code == 200
            found.setdefault(self.last().startswith("1:"), client)
        return [found[True], found[False]]

    def last(self) -> str:
        return [*self.ranks.requests][-1]

    def start(self, client: httpx.Client, kind: int) -> tuple[Iterator[str], str]:
        """Starts a stream; returns its lines and the engine's id."""
        count = len(self.ranks.requests)
        request = client.build_request("POST", COMPLETIONS, json=body(kind) | {"stream": True})
        response = client.send(request, stream=True)
        assert response.status_code == 200
        until(lambda: len(self.ranks.requests) > count)
        return response.iter_lines(), self.last()

    def metrics(self, client: httpx.Client) -> dict[str, float]:
        return metrics_of(client.get("/metrics").text)

    def other(self) -> int:
        """Returns the pid of the second process."""
        _, other = ServerProcess(self.server.url, self.server.process.pid).front_ends()
        return other

    def close(self) -> None:
        self.server.kill()
        self._stack.close()
        self.ranks.link.close()


def body(kind: int) -> dict[str, Any]:
    return {"prompt": [kind, 7], "max_tokens": 2}


def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


Start = Callable[..., Fleet]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.delenv(API_KEY, raising=False)
    fleets: list[Fleet] = []

    def make(*overrides: str, **headers: str) -> Fleet:
        fleets.append(Fleet(tmp_path, *overrides, **headers))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()


def test_requests_spread_and_what_is_counted_is_of_all(start: Start) -> None:
    """Each process tells the same: sums of requests, and once what the ranks say."""
    fleet = start("serve.max_queue=3")
    done = len(fleet.ranks.requests)
    held = [fleet.start(client, HELD) for client in fleet.ends]
    assert {name.partition(":")[0] for name in fleet.ranks.requests} == {"1", "2"}
    until(lambda: fleet.metrics(fleet.connect())["num_preemptions_total"] == 5)
    for client in (fleet.connect() for _ in range(8)):
        found = fleet.metrics(client)
        expected = {
            "generation_tokens_total": 2 * done + 2, "prompt_tokens_total": 2 * done + 4, "num_requests_running": 2,
            "num_requests_waiting": 0, 'request_success_total{finished_reason="length"}': done, "kv_pages": 9,
            "num_preemptions_total": 5, "e2e_request_latency_seconds_count": done,
        }  # fmt: skip
        assert {name: found[name] for name in expected} == expected
        (load,) = client.get("/v1/loads").json()["loads"]
        assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (2, 0)
        assert client.get("/health").status_code == 200
    models = [client.get("/v1/models").json() for client in fleet.ends]
    assert models[0] == models[1]
    for lines, name in held:
        fleet.ranks.finish(name)
        assert [*lines][-2:] == ["data: [DONE]", ""]


def test_the_queue_is_that_of_all_processes(start: Start) -> None:
    """Of three requests two wait in one process and one in the other; neither takes a fourth until one is left."""
    fleet = start("serve.max_queue=3")
    others = fleet.connections()
    waiting = [fleet.start(client, QUEUED) for client in (*fleet.ends, fleet.connect())]
    for client in others:
        answer = client.post(COMPLETIONS, json=body(QUICK))
        assert answer.status_code == 429 and "3 requests are queued (serve.max_queue=3)" in answer.text
    fleet.ranks.finish(waiting[0][1])
    assert [*waiting[0][0]][-2:] == ["data: [DONE]", ""]
    for client in others:
        assert client.post(COMPLETIONS, json=body(QUICK)).status_code == 200


def test_a_stored_response_is_found_by_all_and_limits_by_key_are_of_all(start: Start, tmp_path: Path) -> None:
    (keys := tmp_path / "keys").write_text("ada key-1\nbob key-2\n")
    fleet = start(f"serve.api_keys={keys}", "serve.stored_responses=2", **{"x-api-key": "key-1"})
    names: list[str] = []
    for client in (*fleet.ends, fleet.ends[0]):
        more = {"previous_response_id": names[-1]} if names else {}
        answer = client.post("/v1/responses", json={"input": "x", "max_output_tokens": 2} | more)
        assert answer.status_code == 200, answer.text
        names.append(answer.json()["id"])
        for end in fleet.ends:
            assert end.get(f"/v1/responses/{names[-1]}").json()["id"] == names[-1]
            assert end.get(f"/v1/responses/{names[-1]}", headers={"x-api-key": "key-2"}).status_code == 404
    for end in fleet.ends:
        assert [end.get(f"/v1/responses/{name}").status_code for name in names] == [404, 200, 200]
        items = end.get(f"/v1/responses/{names[-1]}/input_items").json()["data"]
        assert [item["role"] for item in items].count("user") == 3
        assert fleet.metrics(end)["stored_responses"] == 2
    assert fleet.ends[1].delete(f"/v1/responses/{names[-1]}").status_code == 200
    assert fleet.ends[0].get(f"/v1/responses/{names[-1]}").status_code == 404


def test_a_signal_lets_the_requests_of_all_processes_end(start: Start) -> None:
    """Those of the other process too, while the first one has none."""
    fleet = start("serve.drain_s=300")
    probes = fleet.connections()
    lines, name = fleet.start(fleet.ends[1], HELD)
    fleet.server.process.send_signal(signal.SIGTERM)
    fleet.server.wait_for(fleet.server.log, "draining: 1 running request has up to 300 s to finish")
    for probe in probes:
        assert probe.get("/health").json()["state"] == "draining"
        assert probe.post(COMPLETIONS, json=body(QUICK)).status_code == 503
    fleet.ranks.finish(name)
    text = "\n".join(lines)
    assert text.endswith("data: [DONE]\n") and "shut down" not in text
    ended = fleet.server.wait(60)
    assert ended.code == 0 and "WARNING" not in ended.output, ended.output


def test_a_process_that_dies_does_not_hold_up_a_drain(start: Start) -> None:
    fleet = start("serve.drain_s=300")
    fleet.start(fleet.ends[1], HELD)
    other = fleet.other()
    fleet.server.process.send_signal(signal.SIGTERM)
    fleet.server.wait_for(fleet.server.log, "draining: 1 running request has up to 300 s to finish")
    os.kill(other, signal.SIGKILL)
    ended = fleet.server.wait(60)
    assert ended.code == 0 and "process 1 of the server was killed by SIGKILL: its requests are lost\n" in ended.output


def test_a_process_that_dies_loses_its_streams_alone(start: Start) -> None:
    """Another takes its place, with what it had counted."""
    fleet = start()
    (lines, name), (lost, lost_name) = (fleet.start(client, HELD) for client in fleet.ends)
    before = fleet.metrics(fleet.ends[0])
    os.kill(fleet.other(), signal.SIGKILL)
    with pytest.raises(httpx.HTTPError):
        list(lost)
    until(lambda: lost_name in fleet.ranks.aborted)
    fleet.server.wait_for(fleet.server.log, "process 1 of the server was killed by SIGKILL: its requests are lost")
    fleet.ranks.finish(name)
    assert [*lines][-2:] == ["data: [DONE]", ""]
    fleet.server.until_health(200)
    fleet.ends = fleet.connections()
    assert {name.partition(":")[0] for name in fleet.ranks.requests} == {"1", "2", "3"}
    for client in fleet.ends:
        found = fleet.metrics(client)
        assert found["num_requests_running"] == 0
        assert found["prompt_tokens_total"] == 2 * len(fleet.ranks.requests) > before["prompt_tokens_total"]


def test_processes_that_die_too_often_end_the_server_with_the_cause(start: Start) -> None:
    fleet = start("serve.restarts=0")
    lines, _ = fleet.start(fleet.ends[0], HELD)
    os.kill(fleet.other(), signal.SIGKILL)
    ended = fleet.server.wait(60)
    why = "error: more than serve.restarts=0 processes in ten minutes: process 1 of the server was killed by SIGKILL"
    assert ended.code == 1 and why in ended.output, ended.output
    assert "more than serve.restarts=0" in "".join(lines)


def test_a_process_that_hangs_is_replaced(start: Start) -> None:
    fleet = start("serve.hang_s=1")
    os.kill(pid := fleet.other(), signal.SIGSTOP)
    fleet.server.wait_for(fleet.server.log, "process 1 of the server did not respond for 1 s", 60)
    fleet.server.wait_for(fleet.server.log, "restarting it")
    fleet.server.until_health(200)
    assert fleet.other() != pid


def test_ranks_that_hang_are_noticed_while_only_another_process_has_requests(start: Start) -> None:
    """The first process alone can restart them."""
    fleet = start("serve.hang_s=3")
    fleet.start(fleet.ends[1], HELD)
    fleet.ranks.hang = True
    fleet.server.wait_for(fleet.server.log, " process 1 helix.launch.client.supervisor: the ranks made no progress", 60)
    fleet.server.wait_for(fleet.server.log, "WARNING helix.launch.client.supervisor: the ranks made no progress", 60)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_processes_share_a_port_that_no_other_server_has(host: str) -> None:
    with ExitStack() as stack:
        listeners = [stack.enter_context(one) for one in listen(ServeConfig(host=host, port=0, processes=3))]
        port = listeners[0].getsockname()[1]
        assert [one.getsockname()[:2] for one in listeners] == [(host, port)] * 3
        for processes in (1, 2):
            with pytest.raises(ValueError, match="cannot listen: Address already in use"):
                listen(ServeConfig(host=host, port=port, processes=processes))


def test_no_process_outlives_the_first(start: Start) -> None:
    fleet = start()
    fleet.server.process.kill()
    fleet.server.gone()


def test_a_process_that_cannot_start_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The host allows no more processes, for example."""

    async def refuse(*args: Any, **options: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    serve = ServeConfig(processes=2)
    with socket.create_server(("127.0.0.1", 0)) as listener, tempfile.TemporaryFile() as table:
        table.truncate(LoadTable.size(2))
        api = Api(serve, ApiKeys(None), loads=LoadTable(2, table.fileno()))
        processes = Processes(serve, ApiKeys(None), api, [listener], tmp_path, table.fileno())
        with pytest.raises(JobFailed, match=r"serve.processes=2: process 1 of the server cannot start: .*unavailable"):
            asyncio.run(processes.run())
