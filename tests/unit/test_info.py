"""Facts of a machine that `helix info` shows."""

from __future__ import annotations

import json

import pytest
import torch

from launch import info
from launch.inputs import machine


def test_a_machine_without_gpus(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    info.main(["json=-"])
    found = json.loads(capsys.readouterr().out)
    assert (
        found["backend"] == "gloo" and found["gpus"] == [] and torch.__version__.startswith(found["versions"]["torch"])
    )
    info.main([])
    shown = capsys.readouterr().out
    assert "no GPU" in shown and "gloo, on CPUs" in shown and "helix-runtime" in shown


@pytest.mark.parametrize("count, peers, wanted", [(1, True, "nccl"), (2, True, "symm_mem"), (2, False, "nccl")])
def test_collectives_follow_the_links(count: int, peers: bool, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: peers)
    assert machine.backend(count) == wanted


def test_kernels_follow_the_capability() -> None:
    assert "plain torch" in machine.kernels(None) and "Hopper kernels and" in machine.kernels((9, 0))
    assert all("general" in machine.kernels(c) for c in ((8, 0), (8, 9), (10, 0), (12, 0)))


def test_the_planner_s_description() -> None:
    assert machine.described("NVIDIA H200").startswith("NVIDIA H200, 149 GB")
    assert "helix calibrate" in machine.described("NVIDIA X9")
