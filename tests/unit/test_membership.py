"""Joining a job: which rank this is, where ranks meet, which backend they get, and who notices that a rank is gone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError

from comm.emulated import EmulatedTransport
from helix.devices import COMMUNICATORS, EMULATED_LINK, choose_backend, gpu_facts
from helix.rank_info import RankInfo
from launch import agent
from launch.inputs.compose import ROOT
from launch.job import membership
from launch.job.lifeline import identity, kill
from launch.job.membership import Job

ONE_HOST, TWO_HOSTS = RankInfo(0, 4, 0, 4), RankInfo(0, 8, 0, 4)


def facts(*gpus: int, peers: bool = True) -> list[dict[str, Any]]:
    return [{"gpus": count, "peers": peers} for count in gpus]


@pytest.mark.parametrize(
    "place, found, selected",
    [
        (ONE_HOST, facts(4, 4, 4, 4), "symm_mem"),
        (ONE_HOST, facts(4, 4, 4, 4, peers=False), "nccl"),
        (ONE_HOST, facts(4, 4, 4) + facts(4, peers=False), "nccl"),  # one without a way to its peers decides for all
        (ONE_HOST, facts(3, 3, 3, 3, peers=False), "gloo"),
        (TWO_HOSTS, 8 * facts(4, peers=False), "nccl"),
        (RankInfo(0, 1, 0, 1), facts(1), "nccl"),  # nobody to reach
        (RankInfo(0, 1, 0, 1), facts(0, peers=False), "gloo"),
    ],
)
def test_auto_is_the_first_that_can_be(place: RankInfo, found: list[dict[str, Any]], selected: str) -> None:
    assert choose_backend("auto", place, found) == choose_backend(selected, place, found) == selected
    assert choose_backend("gloo", place, found) == "gloo"


@pytest.mark.parametrize(
    "backend, found, words",
    [
        ("symm_mem", facts(4, 4, 4) + facts(4, peers=False), "peer access between their GPUs: set comm.backend=nccl"),
        ("nccl", facts(4, 4, 4, 3), "comm.backend=nccl needs a GPU for each rank, but a host has 3 GPUs for 4 ranks"),
        ("symm_mem", facts(4, 4, 4, 3), "symm_mem needs a GPU for each rank, but a host has 3 GPUs for 4 ranks"),
    ],
)
def test_backends_that_cannot_be(backend: str, found: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        choose_backend(backend, ONE_HOST, found)


def test_gpus_apart_emulate_over_their_link() -> None:
    assert choose_backend("emulated", RankInfo(0, 1, 0, 1), facts(1)) == "emulated"
    assert choose_backend("emulated", RankInfo(0, 2, 0, 2), facts(2, 2, peers=False)) == EMULATED_LINK
    assert COMMUNICATORS[EMULATED_LINK] is EmulatedTransport


def test_peers_that_the_user_keeps_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    for disabled, peers in (("0", True), ("1", False)):
        monkeypatch.setenv("NCCL_P2P_DISABLE", disabled)
        assert gpu_facts(RankInfo(0, 2, 0, 2))["peers"] is peers
        assert gpu_facts(RankInfo(0, 1, 0, 1))["peers"] is True
    assert gpu_facts(TWO_HOSTS)["peers"] is False


class Ended(Exception):
    """The end of a process."""


@pytest.mark.parametrize(
    "fate, turn, why",
    [
        ("silent", 20 + 16, "rank 1 sent no heartbeat"),
        ("failed", 21, "rank 1 failed: RuntimeError: no"),
        ("left", 0, ""),
    ],
)
def test_the_watchdog_sees_a_rank_that_is_gone(fate: str, turn: int, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And takes neither one that works for it, nor one that left when it was done; in turns of a second each."""
    store, killed, turns = dist.HashStore(), list[str](), count(1)
    watchdog, peer = (membership.Watchdog(store, RankInfo(rank, 2, rank, 2)) for rank in range(2))

    def end(self: membership.Watchdog, why: str) -> None:
        raise Ended(why)

    def wait(seconds: float) -> bool:
        """The peer lives for 20 turns."""
        now = wait.turn = next(turns)  # type: ignore[attr-defined]
        if now <= 20:
            store.add("alive/1", 1)
        elif fate == "failed":
            peer.report_failure("rank 1 failed: RuntimeError: no")
        elif fate == "left":
            store.set("left/1", "")
        return now > 100

    monkeypatch.setattr(membership, "kill", killed.append)
    monkeypatch.setattr(membership.Watchdog, "_end", end)
    monkeypatch.setattr(watchdog, "_stopped", SimpleNamespace(wait=wait))
    store.set("process/1", "its process")
    with pytest.raises(Ended, match=why) if why else nullcontext():
        watchdog._watch(store)
    assert wait.turn == (turn or 101) and killed == ["its process"] * (fate == "silent")  # type: ignore[attr-defined]


RANKS = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
RANKS |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def test_places_come_of_what_a_launcher_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, text in RANKS.items():
        monkeypatch.setenv(variable, text)
    assert RankInfo.from_environment() == RankInfo(1, 4, 1, 2)
    monkeypatch.setenv("RANK", "9" * 5000)
    with pytest.raises(ValueError, match=r"RANK=9+ must be an integer from 0 to 3 .* start ranks with torchrun"):
        RankInfo.from_environment()


def test_a_store_that_cannot_be_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as occupied:
        occupied.bind(("localhost", 0))
        occupied.listen()
        for variable, text in (RANKS | {"RANK": "0", "MASTER_PORT": str(occupied.getsockname()[1])}).items():
            monkeypatch.setenv(variable, text)
        with pytest.raises(RuntimeError, match=r"MASTER_PORT=\d+: this rank cannot listen there; set another port"):
            Job(RankInfo(0, 4, 0, 2))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(membership, "SILENCE_S", 0.5)
    with pytest.raises(RuntimeError, match=r"the launcher did not respond within 0 s"):
        Job(RankInfo(0, 4, 0, 2))


def test_only_the_process_that_is_meant_is_killed() -> None:
    """Ranks that hang are named by host, number and start: what has the number since is somebody else's."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    name = identity(process.pid)
    *host, pid, began = name.split()
    for other in ("", " ".join(["other", *host[1:], pid, began]), " ".join([*host, pid, str(int(began) - 1)])):
        kill(other)
        assert process.poll() is None
    process.send_signal(signal.SIGSTOP)
    kill(name)
    assert process.wait(5) == -signal.SIGKILL
    kill(name)  # gone: nobody is


def agents(*nodes: int) -> list[dict[str, str]]:
    return [{"ENDPOINT": "localhost:1", "NODES": str(count), "RANKS": "1"} for count in nodes]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What agents launch that meet at one store."""
    store, found = dist.HashStore(), list[Any]()
    monkeypatch.setattr(agent, "rendezvous_store", lambda endpoint: store)
    monkeypatch.setattr(agent, "elastic_launch", lambda config, program: lambda *given: found.append(given))
    monkeypatch.setattr(agent, "POLL_S", 0.01)
    monkeypatch.setattr(agent.socket, "gethostname", lambda: "a")
    return found


@pytest.mark.parametrize(
    "nodes, words",
    [
        ((2, 2), []),
        ((2, 3), ["NODES=2 on a, but NODES=3 on a: set NODES", "NODES=3 on a, but NODES=2 on a: set NODES"]),
    ],
)
def test_agents_run_once_all_are_there_with_the_same_number_of_hosts(
    nodes: tuple[int, ...], words: list[str], launched: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with ThreadPoolExecutor(len(nodes)) as pool:
        codes = [*pool.map(partial(agent.main, []), agents(*nodes))]
    output = capsys.readouterr().err
    assert codes == [1 if words else 0] * 2 and len(launched) == (0 if words else 2), output
    assert all(line in output for line in words), output


@pytest.mark.parametrize(
    "error, words",
    [
        # torch runs as many agents as it waits for, and returns None to the others once the job has ended.
        (
            AttributeError(name="is_failed"),
            "the job ended without this agent: NODES=1 others had joined as RUN=",
        ),
        (RendezvousTimeoutError(), "not all NODES=1 agents joined as RUN=helix: start one on each host"),
        (RendezvousConnectionError(), "another agent of RUN=helix has ended, or its host is gone"),
    ],
)
def test_what_torch_raises_is_one_line(
    error: Exception,
    words: str,
    launched: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def launch(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(agent, "elastic_launch", lambda config, program: launch)
    assert agent.main([], *agents(1)) == 1
    assert f"error: ENDPOINT=localhost:1: {words}" in capsys.readouterr().err


def test_agents_do_not_wait_for_ever(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agent, "time", SimpleNamespace(monotonic=count(step=100).__next__, sleep=lambda seconds: None))
    assert [agent.main([], given) for given in agents(3, 3)] == [1, 1] and launched == []
    assert "localhost:1: 2 of NODES=3 agents joined within 300 s as RUN=helix" in capsys.readouterr().err


def test_an_agent_says_for_what_it_waits() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    given = os.environ | {"ENDPOINT": endpoint, "NODES": "2", "RANKS": "1"}
    command = [sys.executable, "-m", "launch.agent"]
    with subprocess.Popen(command, cwd=ROOT, env=given, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None
        line = waiting.stderr.readline()
        waiting.kill()
    assert f"helix.launch.agent: ENDPOINT={endpoint}: waiting for 2 agents" in line


def test_a_port_on_which_no_agent_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken by a program that lets everybody in and says nothing."""
    code = """if True:
        import socket, sys
        from launch import agent
        agent.ANSWER_S = 1
        taken = socket.socket()
        taken.bind(("localhost", 0))
        taken.listen()
        endpoint = f"localhost:{taken.getsockname()[1]}"
        sys.exit(agent.main([], {"ENDPOINT": endpoint, "NODES": "2", "RANKS": "1"}))
    """
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "no agent responded within 1 s" in ended.stderr, ended
