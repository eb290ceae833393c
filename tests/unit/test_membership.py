"""Joining a job: which rank this is, where ranks meet, which backend they get, and who notices that a rank is gone."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist

from comm.emulated import EmulatedTransport
from helix.devices import EMULATED_LINK, KINDS, choose_backend, gpu_facts
from helix.place import Place
from launch import agent
from launch.inputs.compose import ROOT
from launch.job import membership
from launch.job.lifeline import identity, kill
from launch.job.membership import Job

ONE_HOST, TWO_HOSTS = Place(0, 4, 0, 4), Place(0, 8, 0, 4)


@pytest.mark.parametrize(
    "place, gpus, peers, chosen",
    [
        (ONE_HOST, 4, True, "symm_mem"),
        (ONE_HOST, 4, False, "nccl"),
        (ONE_HOST, 3, False, "gloo"),
        (TWO_HOSTS, 4, False, "nccl"),
        (Place(0, 1, 0, 1), 1, True, "nccl"),  # nobody to reach
        (Place(0, 1, 0, 1), 0, False, "gloo"),
    ],
)
def test_auto_is_the_first_that_can_be(place: Place, gpus: int, peers: bool, chosen: str) -> None:
    facts = [{"gpus": gpus, "peers": peers}] * place.world_size
    assert choose_backend("auto", place, facts) == chosen
    assert choose_backend(chosen, place, facts) == chosen
    assert choose_backend("gloo", place, facts) == "gloo"


def test_one_rank_without_a_way_to_its_peers_decides_for_all() -> None:
    facts = [{"gpus": 4, "peers": True}] * 3 + [{"gpus": 4, "peers": False}]
    assert choose_backend("auto", ONE_HOST, facts) == "nccl"
    with pytest.raises(ValueError, match=r"whose GPUs reach each other's memory: use comm\.backend=nccl"):
        choose_backend("symm_mem", ONE_HOST, facts)


@pytest.mark.parametrize("backend", ["nccl", "symm_mem"])
def test_a_gpu_too_few_is_refused(backend: str) -> None:
    facts = [{"gpus": 4, "peers": False}] * 3 + [{"gpus": 3, "peers": False}]
    with pytest.raises(ValueError, match=f"comm.backend={backend} needs a GPU for each rank: a host has 3 for 4 ranks"):
        choose_backend(backend, ONE_HOST, facts)


def test_gpus_apart_emulate_over_their_link() -> None:
    assert choose_backend("emulated", Place(0, 1, 0, 1), [{"gpus": 1, "peers": True}]) == "emulated"
    apart = [{"gpus": 2, "peers": False}] * 2
    assert choose_backend("emulated", Place(0, 2, 0, 2), apart) == EMULATED_LINK
    assert KINDS[EMULATED_LINK] is EmulatedTransport


def test_peers_that_the_user_keeps_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    for disabled, peers in (("0", True), ("1", False)):
        monkeypatch.setenv("NCCL_P2P_DISABLE", disabled)
        assert gpu_facts(Place(0, 2, 0, 2))["peers"] is peers
        assert gpu_facts(Place(0, 1, 0, 1))["peers"] is True


def test_ranks_of_two_hosts_are_no_peers() -> None:
    assert gpu_facts(TWO_HOSTS)["peers"] is False


@pytest.mark.parametrize("fate", ["silent", "failed", "left"])
def test_the_watchdog_sees_a_rank_that_is_gone(fate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And takes neither one that works for it, nor one that left when it was done."""
    ended: list[str] = []
    monkeypatch.setattr(membership, "BEAT_S", 0.01)
    monkeypatch.setattr(membership, "SILENCE_S", 0.5)
    monkeypatch.setattr(membership, "kill", lambda process: None)  # both are of this process
    monkeypatch.setattr(membership.Watchdog, "_end", lambda self, why: ended.append(why))
    store = dist.HashStore()
    first, second = (membership.Watchdog(store, Place(rank, 2, rank, 2)) for rank in range(2))
    for watchdog in (first, second):
        watchdog.start()
    time.sleep(0.6)
    assert not ended
    if fate == "failed":
        second.tell("rank 1 failed: RuntimeError: no")
    if fate == "left":
        store.set("left/1", "")
    second.stop()
    deadline = time.monotonic() + (0.8 if fate == "left" else 2.0)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
    first.stop()
    words = {"silent": "rank 1 gave no sign of life", "failed": "rank 1 failed: RuntimeError: no"}
    assert (words[fate] in ended[0]) if fate in words else not ended


RANKS = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("RANK", "4", "from 0 to 3 (WORLD_SIZE=4)"),
        ("RANK", "-1", "from 0 to 3"),
        ("RANK", "one", "from 0 to 3"),
        ("RANK", "9" * 5000, "from 0 to 3"),
        ("WORLD_SIZE", "0", "from 1 to 65535"),
        ("WORLD_SIZE", "\u0664", "from 1 to"),
        ("LOCAL_RANK", "2", "from 0 to 1 (LOCAL_WORLD_SIZE=2)"),
        ("LOCAL_WORLD_SIZE", "5", "from 1 to 4 (WORLD_SIZE=4)"),
        ("MASTER_PORT", "99999999", "from 1 to 65535"),
        ("MASTER_PORT", "0", "from 1 to 65535"),
        ("MASTER_PORT", "http", "from 1 to 65535"),
        ("MASTER_ADDR", "", "RANK is set but MASTER_ADDR is not"),
        ("MASTER_ADDR", "no..host", "not a host that is known here"),
    ],
)
def test_what_a_launcher_cannot_have_set(name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, text in RANKS.items():
        monkeypatch.setenv(variable, text)
    assert Place.from_environment() == Place(1, 4, 1, 2)
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as caught:
        Place.from_environment()
    assert words in str(caught.value) and name in str(caught.value) and "start ranks with torchrun" in str(caught.value)


def test_a_store_that_cannot_be_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        for variable, text in (RANKS | {"RANK": "0", "MASTER_PORT": str(taken.getsockname()[1])}).items():
            monkeypatch.setenv(variable, text)
        with pytest.raises(RuntimeError, match=r"MASTER_PORT=\d+: this rank cannot listen there, set another port"):
            Job(Place(0, 4, 0, 2))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(membership, "SILENCE_S", 0.5)
    with pytest.raises(RuntimeError, match=r"the launcher did not answer there within 0 s"):
        Job(Place(0, 4, 0, 2))


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


@pytest.mark.parametrize(
    "variables, words",
    [
        ({}, "ENDPOINT= must be HOST:PORT"),
        ({"ENDPOINT": "host0"}, "ENDPOINT=host0 must be HOST:PORT"),
        ({"ENDPOINT": "localhost:0"}, "must be HOST:PORT"),
        ({"ENDPOINT": "localhost:99999999"}, "must be HOST:PORT"),
        ({"ENDPOINT": "no..host:29500"}, "no host of that name"),
        ({"NODES": "0"}, "NODES=0 must be an integer from 1"),
        ({"NODES": "two"}, "NODES=two must be"),
        ({"RANKS": "1000000000"}, "RANKS=1000000000 must be an integer from 1"),
        ({"RANKS": "-1"}, "RANKS=-1 must be"),
    ],
)
def test_what_an_agent_cannot_be_told(
    variables: dict[str, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"ENDPOINT": "localhost:29500", "NODES": "2", "RANKS": "1"} if variables else {}
    assert agent.main([], given | variables) == 1
    said = capsys.readouterr().err
    assert words in said and said.startswith("error: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    "nodes, words",
    [
        ((2, 2), []),
        ((2, 3), ["NODES=2 on a, but NODES=3 on a: set NODES", "NODES=3 on a, but NODES=2 on a: set NODES"]),
        ((3, 3), ["localhost:1: 2 of NODES=3 agents came within 1 s as RUN=helix"]),
    ],
)
def test_agents_run_once_all_are_there_with_the_same_number_of_hosts(
    nodes: tuple[int, ...], words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store, launched = dist.HashStore(), []
    monkeypatch.setattr(agent, "meeting_store", lambda endpoint: store)
    monkeypatch.setattr(agent, "elastic_launch", lambda config, program: lambda *given: launched.append(given))
    monkeypatch.setattr(agent, "MEETING_S", 1 if nodes == (3, 3) else 30)
    monkeypatch.setattr(agent.socket, "gethostname", lambda: "a")
    given = [{"ENDPOINT": "localhost:1", "NODES": str(count), "RANKS": "1"} for count in nodes]
    with ThreadPoolExecutor(len(nodes)) as agents:
        codes = [*agents.map(partial(agent.main, []), given)]
    said = capsys.readouterr().err
    assert codes == [1 if words else 0] * 2 and len(launched) == (0 if words else 2), said
    assert all(line in said for line in words), said


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
    assert ended.returncode == 1 and "no agent answered within 1 s" in ended.stderr, ended
