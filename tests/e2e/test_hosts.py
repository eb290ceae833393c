"""Decode over two agents that only sockets connect: what is exchanged, and what pings predict of it."""

from __future__ import annotations

import pytest
import torch

from benchmarks.jobs import JobError
from benchmarks.models import hosts
from benchmarks.runner import Given

pytestmark = pytest.mark.timeout(240)


def test_the_exchange_between_two_agents_is_timed_and_predicted() -> None:
    """Times of shared cores mean little; bytes do."""
    device = torch.device("cpu")
    ((model,),) = hosts.cases(Given(device, 2))
    (row,) = hosts.measure(Given(device, 2), model)
    assert (row["model"], row["backend"], row["batch"]) == ("demo", "gloo", 4)
    assert abs(row["predicted_bytes"] / row["exchange_bytes"] - 1) < 0.1
    assert row["exchange_bytes"] == 8 * row["message_bytes"]  # layers of the demo model
    assert min(row[key] for key in ("latency_us", "local_us", "exchange_us", "predicted_us", "ttl_us")) > 0
    assert row["error"] == pytest.approx(row["predicted_us"] / row["exchange_us"] - 1)


def test_an_agent_that_fails_ends_both_and_says_why() -> None:
    with pytest.raises(JobError, match=r"bench\.steps=0 must be from 1"):
        hosts.over_agents(["model=demo", "bench=hosts", "layout.kvp=2", "bench.steps=0", "comm.backend=gloo"], False)


def test_one_gpu_has_no_other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="use two"):
        hosts.cases(Given(torch.device("cuda"), 1))
