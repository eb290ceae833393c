"""Which backend a job gets, and who notices that a rank is gone."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from launch import distributed
from launch.distributed import Place, choose_backend, gpu_facts

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


def test_a_gpu_alone_can_stand_in_but_not_two_apart() -> None:
    assert choose_backend("stand_in", Place(0, 1, 0, 1), [{"gpus": 1, "peers": True}]) == "stand_in"
    with pytest.raises(ValueError, match="reach each other's memory, or one"):
        choose_backend("stand_in", Place(0, 2, 0, 2), [{"gpus": 2, "peers": False}] * 2)


def test_ranks_of_two_hosts_are_no_peers() -> None:
    assert gpu_facts(TWO_HOSTS)["peers"] is False


@pytest.mark.parametrize("fate", ["silent", "failed", "left"])
def test_the_watchdog_sees_a_rank_that_is_gone(fate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And takes neither one that works for it, nor one that left when it was done."""
    ended: list[str] = []
    monkeypatch.setattr(distributed, "BEAT_S", 0.01)
    monkeypatch.setattr(distributed, "SILENCE_S", 0.5)
    monkeypatch.setattr(distributed._Watchdog, "_end", lambda self, why: ended.append(why))
    store = dist.HashStore()
    first, second = (distributed._Watchdog(store, Place(rank, 2, rank, 2)) for rank in range(2))
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
