"""Fronts that are measured: which points are timed, and how they stand beside the simulator's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.models import fronts as timed
from benchmarks.records import fronts, style
from benchmarks.runner import Given
from launch.inputs.hardware import load_hardware
from launch.inputs.shapes import load_spec
from tests.legible import illegible

H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize("model", timed.MODELS)
def test_points_are_of_the_front_and_fit(model: str) -> None:
    hardware, spec = load_hardware("h100"), load_spec(model)
    found = timed.chosen(model, hardware)
    works = [work for same in found.values() for work in same]
    assert {work.length for work in works} == {*timed.LENGTHS} and len(works) <= 12 and len(found) <= 6
    assert {layout.mode for layout in found} == {"helix", "tp"}
    for layout, same in found.items():
        assert layout.world_size in timed.RANKS
        layout.check_heads(spec.attention.q_heads, spec.attention.kv_heads)
        assert len({(work.batch, work.length) for work in same}) == len(same)


def test_a_front_only_rises_for_gpus_where_it_falls_for_users() -> None:
    step = timed.front(load_spec("llama-3.1-405b"), load_hardware("h100"), timed.LENGTHS[0], "helix")
    assert step is not None and step.fits.all()
    assert (step.user[1:] > step.user[:-1]).all() and (step.gpu[1:] < step.gpu[:-1]).all()


def test_nothing_fits_where_ranks_are_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed, "RANKS", (2, 4))
    assert timed.front(load_spec("deepseek-r1"), load_hardware("h100"), timed.LENGTHS[0], "helix") is None


def test_cases_of_a_gpu_come_with_the_fewest_ranks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: H100)
    cases = [*timed.cases(Given(torch.device("cuda"), 1, ["deepseek-r1"]))]
    ranks = [layout.world_size for layout, _ in cases]
    assert ranks == sorted(ranks) and ranks[0] == 16
    assert [layout.world_size for layout, _ in timed.cases(Given(torch.device("cpu"), 2))] == [2]


def row(layout: str, batch: int, length: int, ttl_us: float) -> dict[str, Any]:
    ranks = 16
    rates = {"tokens_per_s_user": 1e6 / ttl_us, "tokens_per_s_gpu": batch * 1e6 / ttl_us / ranks}
    return {"model": "llama-3.1-405b", "batch": batch, "length": length, "device": H100, "layout": layout,
            "ttl_p50_us": ttl_us, "commit": "a1", "emulated_by": 1, **rates}  # fmt: skip


def rows() -> list[dict[str, Any]]:
    helix, tp = "helix kvp=2 tpa=8 -> tpf=16 ep=1", "tp kvp=1 tpa=16 -> tpf=16 ep=1"
    points = [(helix, 1, 8e3), (helix, 8, 18e3), (tp, 1, 9e3)]
    found = [row(layout, batch, length, ttl) for length in timed.LENGTHS for layout, batch, ttl in points]
    return [*found, {**row(tp, 8, timed.LENGTHS[1], 1.0), "failed": "no room"}]


def test_measured_points_stand_beside_the_simulated_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fronts, "results", lambda name, *key: rows())
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in fronts.points()]
    assert len(table) == 2 + 7 and table[-1][4] == "does not fit"
    first = fronts.predicted_us(rows()[0])
    assert table[2][5] == f"{first / 1e3:.2f} ms" and table[2][6] == f"{first / 8e3 - 1:+.0%}"
    budgets = [[cell.strip() for cell in line.split("|")[1:-1]] for line in fronts.budgets()]
    of_helix = next(line for line in budgets if line[1:4] == ["128K", "1 H100", "helix"])
    assert [cell.split()[0] for cell in of_helix[4:]] == ["1", "8", "8"]


def test_the_figure_can_be_read() -> None:
    figure = fronts.figure(rows())
    assert len([panel for panel in figure.axes if panel.lines]) == 2 and not illegible(figure)
    style.plt.close(figure)
