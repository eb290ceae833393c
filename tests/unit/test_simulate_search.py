"""Search, the paper's headlines, provenance, refusals; and the model against what was recorded on GPUs."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from benchmarks.models.search import frontier, select_points
from benchmarks.papers import rows as paper_rows
from benchmarks.papers.figures import write_figures
from benchmarks.papers.simulated import PAGE, RECORD, paper, with_tables
from benchmarks.records import style
from benchmarks.records.planner_check import errors
from helix.checks import check_layout
from helix.layout import HelixLayout
from helix.planner.hardware import COLLECTIVES, PROVENANCE, Hardware
from helix.planner.points import MODES, Options, Points, layouts
from helix.planner.step import predict
from launch.inputs import plots
from launch.inputs.compose import ROOT
from launch.inputs.hardware import HARDWARE, load_hardware
from launch.inputs.shapes import load_spec, spec_of
from launch.simulate import main
from tests.figure_legibility import illegible
from tests.unit.test_planning import shown_as

M = 10**6
WHOLE = paper_rows.Setting(load_hardware("gb200"))
GB200 = WHOLE.in_powers()
BF16 = Options(weights="bf16", kv="bf16", messages="bf16")


def test_the_frontier_is_what_nothing_beats() -> None:
    found = GB200.run(load_spec("llama-3.1-405b"), MODES)
    best = frontier(found)
    assert (np.diff(found.tokens_per_s_user[best]) > 0).all() and (np.diff(found.tokens_per_s_gpu[best]) < 0).all()
    for i in range(len(found.points)):
        as_good = (found.tokens_per_s_user[best] >= found.tokens_per_s_user[i] * (1 - 1e-9)) & (
            found.tokens_per_s_gpu[best] >= found.tokens_per_s_gpu[i] * (1 - 1e-9)
        )
        assert as_good.any()
    order = np.random.default_rng(0).permutation(len(found.points))
    assert np.array_equal(
        found.tokens_per_s_user[best], found.tokens_per_s_user[order][frontier(select_points(found, order))]
    ), "whatever the order"


@pytest.mark.parametrize("model", ["llama-3.1-405b", "deepseek-r1", "qwen2.5-7b", "gpt-oss-20b"])
def test_layouts_of_the_runtime_s_modes_are_those_that_the_runtime_takes(model: str) -> None:
    spec = load_spec(model)
    found = layouts(spec, [12], ("tp", "medha", "helix"), pp=False)
    ours = {row for row in found if row[2] == 1}  # without data parallelism
    assert len(set(found)) == len(found)
    expected = set()
    for mode in ("tp", "medha", "helix"):
        for kvp in (1, 2, 3, 4, 6, 12):
            for ep in range(1, 13):
                try:
                    layout = HelixLayout.create(mode, kvp, 12 // kvp, ep=ep)
                    check_layout(layout, spec)
                except ValueError:
                    continue
                if (kvp > 1) == (mode != "tp"):
                    expected.add((MODES.index(mode), 1, 1, kvp, 12 // kvp, layout.tpf, ep))
    assert ours == expected and expected


@pytest.mark.parametrize(
    "model, user, batch, batch_alone, alone",
    [("deepseek-r1", (1.35, 1.65), 32, 32, 7.49), ("llama-3.1-405b", (1.04, 1.22), 4, 4, 2.69)],
)
def test_headlines_with_one_set_of_constants(
    model: str, user: tuple[float, float], batch: int, batch_alone: int, alone: float
) -> None:
    """Paper: 1.5x and 32x, 1.13x and 4x. Reading alone: 7.49x and 2.69x, worked out from bytes."""
    spec = load_spec(model)
    row, _, _ = paper_rows.headline(spec, GB200)
    assert user[0] <= row["user_gain"] <= user[1]
    assert row["batch_gain"] == batch and row["baseline_users"] == 1
    assert row["gpu_gain"] == pytest.approx(batch, rel=0.05)
    bare = replace(GB200, hardware=paper_rows.scaled(GB200.hardware, kernel=0, collective=0, link=1e30))
    row, _, _ = paper_rows.headline(spec, bare)
    assert row["user_gain"] == pytest.approx(alone, abs=0.005) and row["batch_gain"] == batch_alone


# ---- against what was recorded


def test_recorded_steps_that_the_constants_were_not_fitted_on() -> None:
    held_out = errors()[0]["off"]
    assert len(held_out) >= 12
    assert np.median(held_out) <= 0.10 and np.quantile(held_out, 0.9) <= 0.20


shape = cache(spec_of)


def test_memory_is_what_the_runtime_took() -> None:
    """KV bytes per rank of recorded runs, which hold some tokens more than the length: within 3%."""
    rows = [json.loads(line) for line in (ROOT / "benchmarks/results/step.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "kv_bytes_per_rank" in row]
    assert len({row["model"] for row in rows}) >= 6
    for row in rows:
        spec = shape(row["model"], *([f"model.config.num_hidden_layers={row['layers']}"] if "layers" in row else []))
        if spec.windows.count(None) < len(spec.layers):
            continue  # recorded when layers with a window kept every token
        layout = dict(word.split("=") for word in row["layout"].split()[1:3])
        points = Points.of("helix", row["batch"], kvp=int(layout["kvp"]), tpa=int(layout["tpa"]))
        found = predict(spec, load_hardware("h200"), points, row["length"], BF16)
        assert found.memory.kv_bytes[0] == pytest.approx(max(row["kv_bytes_per_rank"]), rel=0.03)


# ---- hardware and provenance


@pytest.mark.parametrize("path", sorted(HARDWARE.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_constant_says_how_it_is_known(path: Path) -> None:
    hardware = load_hardware(path.stem)
    step = predict(load_spec("llama-3.1-8b"), hardware, Points.of("helix", kvp=2, tpa=2), M, BF16)
    worst = max(hardware.read_bytes_per_s.level, hardware.kernel_s.level, hardware.rate("bf16").level)
    assert step.level[0] >= worst and step.provenance(0) in PROVENANCE[1:]
    # Bounds of what any GPU of these generations could have: a wrong unit is off by 1000.
    assert 7e10 < hardware.memory_bytes.value < 3e11 and 2e12 < hardware.read_bytes_per_s.value < 1e13
    assert 1e-7 < hardware.kernel_s.value < 1e-5


def test_a_description_that_lacks_something_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a name"):
        Hardware.from_mapping({})
    with pytest.raises(ValueError, match="lacks flops"):
        Hardware.from_mapping({"name": "x", "gpus": 1})
    with pytest.raises(ValueError, match="lacks the collectives all_to_all"):
        Hardware.from_mapping({"name": "x", "gpus": 1, "flops": {}, "collectives": {}})
    ops = {op: {"latency_s": {}, "measured_bytes": 0, "bytes_per_s": 1.0} for op in COLLECTIVES}
    with pytest.raises(ValueError, match=r"bytes_per_s needs value, provenance and source, not 1\.0"):
        Hardware.from_mapping({"name": "x", "gpus": 1, "flops": {}, "collectives": ops})
    guessed = {"value": 1, "provenance": "guessed", "source": "-"}
    ops = {op: {**given, "bytes_per_s": guessed} for op, given in ops.items()}
    with pytest.raises(ValueError, match="provenance 'guessed'; known: measured"):
        Hardware.from_mapping({"name": "x", "gpus": 1, "flops": {}, "collectives": ops})


def test_the_runtime_s_layout_of_a_point() -> None:
    assert Points.of("helix", kvp=4, tpa=2).layout(0) == HelixLayout.create("helix", 4, 2)
    with pytest.raises(ValueError, match="neither pipeline stages nor groups of several ranks"):
        Points.of("tp", pp=2).layout(0)


# ---- the command


def test_the_record_is_what_the_code_simulates() -> None:
    """All of Llama-405B, whose search is small, one change of DeepSeek-R1, and the first constants of the sweep."""
    kept = [json.loads(line) for line in RECORD.read_text().splitlines()]
    llama, r1 = "llama-3.1-405b", "deepseek-r1"
    found = [paper_rows.rounded(row) for row in paper_rows.simulated(llama, load_spec(llama), WHOLE)]
    assert found == [row for row in kept if row.get("model") == llama], "run helix papers helix"
    in_powers, _, _ = paper_rows.headline(load_spec(r1), GB200)
    (row,) = (
        row for row in kept if row.get("model") == r1 and row.get("change") == "GPUs and batches in powers of two"
    )
    assert row.items() >= {key: paper_rows.rounded(in_powers[key]) for key in row.keys() & in_powers.keys()}.items()
    specs = {model: load_spec(model) for model in (r1, llama)}
    sweep = [row for row in kept if row["kind"] == "hopb-sweep"]
    assert [*map(paper_rows.rounded, islice(paper_rows.hopb_sweep(specs, WHOLE), 3))] == sweep[:3]
    assert sum(row["points"] for row in kept if "points" in row) > 100_000


def test_tables_and_figures_are_those_of_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_tables(PAGE.read_text()) == PAGE.read_text(), "run helix papers"
    figures: list[Figure] = []
    monkeypatch.setattr(style.plt, "close", figures.append)
    write_figures(paper(), tmp_path)
    monkeypatch.undo()
    for figure in figures:
        assert not illegible(figure)
        style.plt.close(figure)
    for picture in tmp_path.glob("*.png"):
        assert (ROOT / "benchmarks" / "figures" / picture.name).is_file() and picture.stat().st_size > 10_000
    assert len(list(tmp_path.glob("*.png"))) == 6


def test_a_point_phase_by_phase(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = "llama-3.1-405b layout.kvp=8 layout.tpa=8 batch=4 context=1000000 dtype=fp4"
    main(["point", "hardware=gb200", *shape.split()])
    out = capsys.readouterr().out
    assert "exchange" in out and "TTL 6.100 ms" in out and "(roofline)" in out
    main(["point", "hardware=gb200", *shape.split(), "hopb.chunks=2"])
    assert "630.13" in out and "630.27" in capsys.readouterr().out, "two chunks hide less than four"
    picture = tmp_path / "step.png"
    for width in ("80", "100"):
        monkeypatch.setenv("COLUMNS", width)
        main(
            ["point", "llama-3.1-70b", "hardware=h200", "layout.kvp=2", "layout.tpa=4", "batch=2", f"--plot={picture}"]
        )
        assert capsys.readouterr().out == shown_as("step")
    assert 10_000 < picture.stat().st_size < 150_000
    with pytest.raises(SystemExit, match=r"error: a batch of 1 does not fit: 141.10 GB of weights and "):
        main(["point", "hardware=h200", "llama-3.1-70b", "layout=tp"])
    shown = capsys.readouterr().out
    assert "attention" in shown and "room for a batch of 0" in shown


def test_where_the_time_of_a_step_goes() -> None:
    step = predict(load_spec("deepseek-r1"), load_hardware("h200"), Points.of("helix", 8, kvp=8), 1 << 17, BF16)
    figure = plots.phases(step, "deepseek-r1")
    (axes,) = figure.axes
    assert axes.get_xlabel() == f"time (ms), of {1e3 * step.ttl_s[0]:.2f} a step" and not illegible(figure)
    assert sum(bar.get_width() for bar in axes.patches) == pytest.approx(1e3 * step.ttl_s[0])
    style.plt.close(figure)
