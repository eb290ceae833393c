"""What the benchmarks compute before they measure."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from contextlib import nullcontext

import pytest

from launch.bench.__main__ import check_models
from launch.bench.steps import largest_batch, measure
from launch.bench.workloads import BASELINES, WORKLOADS, fitting_layers, floor_s, layouts
from launch.inputs import parts
from launch.inputs.compose import spec_of
from launch.job import spawn


@pytest.mark.parametrize(
    "model, batch, length, milliseconds",
    [  # the floors of a whole step on eight H200 that are published beside vLLM's figures, within their rounding
        ("llama-3.1-8b", 1, 131072, 0.86),
        ("llama-3.1-8b", 8, 131072, 4.06),
        ("llama-3.1-8b", 1, 1 << 20, 4.06),
        ("qwen2.5-7b", 1, 131072, 0.58),
        ("qwen2.5-7b", 8, 131072, 1.98),
        # Written out: 15.7e9 numbers, of which 210e6 only in the embedding; at batch 1, 58 of 64 experts stay unread.
        ("deepseek-v2-lite", 1, 0, 2 * (15.706e9 - 0.210e9 - 26 * 58 * 3 * 2048 * 1408) / 8 / 4.69e9),
        ("deepseek-v2-lite", 1, 1 << 20, (2 * 2.450e9 + 27 * 1152 * (1 << 20)) / 8 / 4.69e9),
    ],
)
def test_floors(model: str, batch: int, length: int, milliseconds: float) -> None:
    assert 1e3 * floor_s(spec_of(model), batch, length, 8) == pytest.approx(milliseconds, rel=0.01)


def test_the_layers_that_fit() -> None:
    """DeepSeek-R1: 671e9 numbers less 14e9 of the layer for more tokens; 11.5e9 of a layer with experts."""
    spec, memory = spec_of("deepseek-r1"), 141 << 30
    assert fitting_layers(spec, 1000, memory) == spec.layers == 61
    assert fitting_layers(spec, 8, memory) == 3 + int((0.8 * 8 * memory - 2 * 1.85e9 - 3 * 2 * 0.6e9) / (2 * 11.5e9))
    assert fitting_layers(spec_of("llama-3.1-8b"), 1, memory) == 32
    assert fitting_layers(spec_of("llama-3.1-70b"), 1, memory) < 80


def test_layouts_fit_and_cover_what_is_compared() -> None:
    for model in {work.model for work in [*WORKLOADS, *BASELINES]}:
        spec = spec_of(model)
        for baselines in (False, True):
            found = layouts(spec, 8, baselines)
            for layout in found:
                layout.check_heads(spec.q_heads, spec.kv_heads)
            assert {layout.mode for layout in found} == ({"tp", "medha", "helix"} if baselines else {"helix"})
        assert all(layout.kvp >= 2 for layout in layouts(spec, 8, False))


def test_the_largest_batch_is_a_measured_one_within_the_budget() -> None:
    rows = [{"batch": 1, "ttl_p50_us": 5.0}, {"batch": 8, "ttl_p50_us": 9.0}, {"batch": 32, "failed": "does not fit"}]
    assert [largest_batch(rows, budget) for budget in (4.9, 5.0, 8.0, 100.0)] == [None, 1, 1, 8]


@pytest.mark.parametrize(
    "gpus, ranks, processes, played", [(0, 8, 8, 0), (4, 4, 4, 0), (2, 8, 2, 1), (1, 2, 1, 1), (4, 8, 2, 1)]
)
def test_ranks_beyond_the_gpus_are_played(
    gpus: int, ranks: int, processes: int, played: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[int, list[str]]] = []
    monkeypatch.setattr(parts.torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(spawn, "launch", lambda count, overrides: started.append((count, overrides)) or 1)
    with pytest.raises(spawn.JobError, match=r"^exit code 1$"):
        spawn.measure(ranks, ["bench=comm"])
    [(count, overrides)] = started
    assert count == processes
    assert overrides[:-1] == ["comm.backend=emulated"] * played + ["bench=comm"]
    assert overrides[-1].startswith("record=")


def test_a_failed_job_is_a_result_and_an_interrupted_one_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    work, layout = WORKLOADS[0], layouts(spec_of(WORKLOADS[0].model), 2, baselines=False)[0]
    monkeypatch.setattr(spawn, "launch", lambda count, overrides: os.write(2, b"error: no room\n") and 1)
    assert [row["failed"] for row in measure([work, work], layout, [])] == ["no room"] * 2
    monkeypatch.setattr(spawn, "launch", lambda count, overrides: spawn.INTERRUPTED)
    with pytest.raises(KeyboardInterrupt):  # or the next job would start
        measure([work], layout, [])


@pytest.mark.parametrize(
    "what, models, gpus, words",
    [
        ("step", ["qwen2.5-7B"], 8, "step has no qwen2.5-7B; it has qwen2.5-7b, "),
        ("hopb", ["gpt-oss-20b", "gpt"], 8, "hopb has no gpt; it has deepseek-r1, "),
        ("kernels", ["qwen2.5-7b"], 8, "kernels has none to choose"),
        ("step", ["qwen2.5-7b"], 0, "without a GPU the demo model runs"),
        ("step", ["qwen2.5-7b", "llama-3.1-70b"], 8, ""),
        ("speculate", ["demo"], 8, ""),
    ],
)
def test_models_that_a_benchmark_does_not_know_are_refused(
    what: str, models: list[str], gpus: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) if words else nullcontext():
        check_models(ArgumentParser(), what, models, gpus)
    assert words in capsys.readouterr().err
