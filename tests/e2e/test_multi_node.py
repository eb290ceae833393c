"""Decode over two agents that only sockets connect: what is exchanged, and what pings predict of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks.jobs import JobError
from benchmarks.models import multi_node
from benchmarks.runner import BenchContext
from tests.e2e.command_line import as_copies

pytestmark = pytest.mark.timeout(400)


def test_the_exchange_between_two_agents_is_timed_and_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of shared cores mean little, least of all their difference, which an exchange's is; bytes do."""
    as_copies(monkeypatch)
    device = torch.device("cpu")
    ((model,),) = multi_node.cases(BenchContext(device, 2))
    (row,) = multi_node.measure(BenchContext(device, 2), model)
    assert (row["model"], row["backend"], row["batch"]) == ("demo", "gloo", 4)
    assert abs(row["predicted_bytes"] / row["exchange_bytes"] - 1) < 0.1
    assert row["exchange_bytes"] == 8 * row["message_bytes"]  # layers of the demo model
    assert min(row[key] for key in ("local_us", "predicted_us", "ttl_us")) > 0 <= row["latency_us"]
    assert row["error"] == pytest.approx(row["predicted_us"] / row["exchange_us"] - 1)


FAILING = """#!/bin/sh
mkdir "$0.first" 2> /dev/null || exec sleep 600
echo "error: no room" >&2
exit 1
"""


def test_an_agent_that_fails_ends_both_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script stands in for Python: the first agent fails at once, and the other would go on."""
    (agent := tmp_path / "agent").write_text(FAILING)
    agent.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(agent))
    with pytest.raises(JobError, match=r"^no room$"):
        multi_node.over_agents([], False)


def test_one_gpu_has_no_other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="two hosts need two GPUs"):
        multi_node.cases(BenchContext(torch.device("cuda"), 1))
