"""What the benchmarks compute before they measure."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import jobs
from benchmarks.bench import BENCHMARKS, given, main
from benchmarks.models import hopb
from benchmarks.models.steps import time_job
from benchmarks.models.workloads import BASELINES, WORKLOADS, fitting_layers, floor_s, layouts
from benchmarks.records import rows, serving_tables, step_tables
from benchmarks.records.step_tables import largest_batch
from benchmarks.runner import Benchmark, Given, Part, record, run
from helix.devices import ranks as ranks_of
from helix.layout import HelixLayout
from launch.inputs.shapes import spec_of
from launch.job import spawn
from tests.laboratory import composed


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
    assert fitting_layers(spec, 1000, memory) == len(spec.layers) == 61
    assert fitting_layers(spec, 8, memory) == 3 + int((0.8 * 8 * memory - 2 * 1.85e9 - 3 * 2 * 0.6e9) / (2 * 11.5e9))
    assert fitting_layers(spec_of("llama-3.1-8b"), 1, memory) == 32
    assert fitting_layers(spec_of("llama-3.1-70b"), 1, memory) < 80


def test_layouts_fit_and_cover_what_is_compared() -> None:
    for model in {work.model for work in [*WORKLOADS, *BASELINES]}:
        spec = spec_of(model)
        for baselines in (False, True):
            found = layouts(spec, 8, baselines)
            for layout in found:
                layout.check_heads(spec.attention.q_heads, spec.attention.kv_heads)
            assert {layout.mode for layout in found} == ({"tp", "medha", "helix"} if baselines else {"helix"})
        assert all(layout.kvp >= 2 for layout in layouts(spec, 8, False))


def test_the_largest_batch_is_a_measured_one_within_the_budget() -> None:
    rows = [{"batch": 1, "ttl_p50_us": 5.0}, {"batch": 8, "ttl_p50_us": 9.0}, {"batch": 32, "failed": "does not fit"}]
    assert [largest_batch(rows, budget) for budget in (4.9, 5.0, 8.0, 100.0)] == [None, 1, 1, 8]


@pytest.mark.parametrize(
    "gpus, ranks, processes, emulated", [(0, 8, 8, 0), (4, 4, 4, 0), (2, 8, 2, 1), (1, 2, 1, 1), (4, 8, 2, 1)]
)
def test_ranks_beyond_the_gpus_are_emulated(
    gpus: int, ranks: int, processes: int, emulated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(spawn, "run", lambda overrides: started.append(overrides) or 1)
    with pytest.raises(jobs.JobError, match=r"^exit code 1$"):
        jobs.measure(ranks, wanted := ["bench=comm", f"layout.kvp={ranks}"])
    [overrides] = started
    assert overrides[:-1] == [*jobs.COMMAND, *["comm.backend=emulated"] * emulated, *wanted]
    assert overrides[-1].startswith("record=")
    assert ranks_of(composed(*overrides[2:])) == processes


def test_a_failed_job_is_a_result_and_an_interrupted_one_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    work, layout = WORKLOADS[0], layouts(spec_of(WORKLOADS[0].model), 2, baselines=False)[0]
    monkeypatch.setattr(spawn, "run", lambda overrides: os.write(2, b"error: no room\n") and 1)
    assert [row["failed"] for row in time_job([work, work], layout, [])] == ["no room"] * 2
    monkeypatch.setattr(spawn, "run", lambda overrides: spawn.INTERRUPTED)
    with pytest.raises(KeyboardInterrupt):  # or the next job would start
        time_job([work], layout, [])


@pytest.mark.parametrize(
    "what, argument, gpus, words",
    [
        ("step", "models=qwen2.5-7B", 8, r"qwen2.5-7B is unknown; known: qwen2.5-7b, .*\(did you mean qwen2.5-7b\?\)"),
        ("hopb", "models=gpt-oss-20b,gpt", 8, "gpt is unknown; known: deepseek-r1, "),
        ("kernels", "models=qwen2.5-7b", 8, "models is unknown; known: output"),
        ("kernels", "ranks=8", 2, "ranks is unknown; known: output"),
        ("step", "models=qwen2.5-7b", 0, "without a GPU the demo model runs"),
        ("step", "--models", 8, "did you mean models=VALUE"),
        ("step", "ranks=8", 8, "one or two GPUs emulate more ranks than there are GPUs; there are 8"),
        ("step", "ranks=two", 8, "ranks=two must be an integer of at most 64 bits"),
    ],
)
def test_a_wrong_argument_of_a_benchmark(
    what: str, argument: str, gpus: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ValueError, match=words):
        given(what, [argument], gpus)


def test_what_a_benchmark_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found, output = given("step", ["models=qwen2.5-7b,llama-3.1-70b", "ranks=8", "output=here"], 2)
    assert (found.ranks, found.models, found.emulated) == (8, ["qwen2.5-7b", "llama-3.1-70b"], True)
    assert output == Path("here")
    found, output = given("speculate", ["models=demo"], 2)
    assert (found.ranks, found.models, found.emulated, output) == (2, ["demo"], False, None)


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["benchmarks.bench", *arguments])
    main()
    return capsys.readouterr().out


def test_every_benchmark_is_listed_and_teaches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = said(monkeypatch, capsys)
    for what, benchmark in BENCHMARKS.items():
        assert f"{what:<15} {benchmark.about}" in listed
        taught = said(monkeypatch, capsys, what, "--help")
        assert f"helix bench {what}" in taught and "output" in taught
        assert ("ranks " in taught, "models:" in taught) == (benchmark.emulated, bool(benchmark.models))
    monkeypatch.setattr(sys, "argv", ["benchmarks.bench", "kernel"])
    with pytest.raises(SystemExit, match=r"^error: kernel is unknown; known: .*\(did you mean kernels\?\)"):
        main()


def test_rows_are_tabulated_and_kept_whatever_becomes_of_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(given: Given, count: int) -> Iterator[dict[str, object]]:
        for i in range(count):
            yield {"bare": i, "us": 12.345, "bar_us": None if i else 6.1725}
        if count == 3:
            raise jobs.JobError("no room")

    device, out = torch.device("cpu"), tmp_path / "rows.jsonl"
    part = Part(lambda given: [(1,), (2,)], measure, "bare us bar_us us/bar_us")
    summed = Benchmark("", "", (part,), summary=lambda rows: {"rows": len(rows)})
    record("x", run(summed, Given(device, 2)), Given(device, 2), out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row.get("bare") for row in rows] == [0, 0, 1, None] and rows[-1]["rows"] == 3
    assert all(row["name"] == "x" and "commit" in row for row in rows)
    shown = capsys.readouterr().out
    assert all(f"┃ {head} " in shown for head in ("bare", "target us", "us/target us")), shown
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines()]
    assert [line for line in table if line] == [["0", "12.3", "6.17", "2.00"]] * 2 + [["1", "12.3", "-", "-"]]

    failing = Benchmark("", "", (Part(lambda given: [(3,)], measure, "us"),))
    with pytest.raises(jobs.JobError):
        record("x", run(failing, Given(device, 2)), Given(device, 2), out)
    assert len(out.read_text().splitlines()) == 7 and "appended 3 lines" in capsys.readouterr().out


def test_what_no_model_and_no_backend_changes_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ("ttl", "mla", "delay", "timeline")
    job = {"hopb": [{"kind": kind} for kind in kinds]}
    monkeypatch.setattr(jobs, "measure", lambda ranks, overrides: job)
    given = Given(torch.device("cuda"), 2, ["qwen2.5-3b", "qwen2.5-7b"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(hopb, "cut", lambda *args: [])
    counted = {case: [row["kind"] for row in hopb.measure(given, case)] for (case,) in hopb.cases(given)}
    grid = HelixLayout.create("helix", 2)
    assert counted == {
        hopb.Case("qwen2.5-3b", "symm_mem", grid): [*kinds], hopb.Case("qwen2.5-3b", "nccl", grid): ["ttl", "mla"],
        hopb.Case("qwen2.5-7b", "symm_mem", grid): ["ttl"], hopb.Case("qwen2.5-7b", "nccl", grid): ["ttl"],
    }  # fmt: skip


def test_every_grid_with_an_exchange_over_the_link_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    given = Given(torch.device("cuda"), 16, ["llama-3.1-405b", "deepseek-r1"])
    found = [(case.model, case.backend, case.layout.kvp, case.layout.tpa) for (case,) in hopb.cases(given)]
    assert found == [
        *(("llama-3.1-405b", "emulated", 16 // tpa, tpa) for tpa in (1, 2, 4, 8)), ("deepseek-r1", "emulated", 16, 1)
    ]  # fmt: skip
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert [case.backend for (case,) in hopb.cases(Given(torch.device("cuda"), 2))] == ["nccl"]


def test_models_are_cut_to_the_layers_that_fit_beside_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 << 30), raising=False
    )
    # Of 68.7 GB, embedding and head take 1.05; a layer 0.4 of weights, and 4.3 of keys and values of 64 x 128K.
    for length, layers in ((128 << 10, hopb.MOST_LAYERS), (256 << 10, int((68.7 - 1.05) / (0.4 + 8.6)))):
        fits = ["model.weights=fp8", f"model.config.num_hidden_layers={layers}"]
        assert hopb.cut("llama-3.1-405b", 8, [(64, length), (8, 8192)]) == fits
    assert hopb.cut("qwen2.5-3b", 2, [(1, 8192)]) == [f"model.config.num_hidden_layers={hopb.MOST_LAYERS}"]


def test_rows_come_while_a_job_measures(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And one that fails leaves those that it had; one whose rows nobody wants any more ends."""
    job = tmp_path / "job.py"
    job.write_text("import sys\nprint('a table')\nprint('{\"a\": 1}')\nsys.exit('error: no room')\n")
    rows = jobs.rows([], [str(job)])
    assert next(rows) == {"a": 1}
    with pytest.raises(jobs.JobError, match=r"^no room$"):
        next(rows)
    assert capfd.readouterr().out == "a table\n"
    job.write_text("import sys, time\nprint(sys.argv[1])\ntime.sleep(60)\n")
    begin, rows = time.monotonic(), jobs.rows(['{"b": 2}'], [str(job)])
    assert next(rows) == {"b": 2}
    rows.close()
    assert time.monotonic() - begin < 30


def test_crowds_stand_beside_those_of_their_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of another model, and newer, change nothing of a model's."""
    crowd = {"gpus": 1, "requests": 8, "length": 1 << 15, "new": 128}
    lines = [
        crowd | {"engine": "vllm 0.25.1", "goal": None, "model": "a", "seconds": 4.0},
        crowd | {"engine": "helix", "goal": "balance", "model": "a", "seconds": 5.0},
        crowd | {"engine": "helix", "goal": "balance", "model": "b", "seconds": 9.0},
    ]
    monkeypatch.setattr(rows, "ROOT", tmp_path)
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks/results/crowds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert serving_tables.crowds_beside_vllm(1)[2:] == ["| 8 x 32K, 128 | 4.00 s | 5.00 s | 1.25 |"]


SLOW = """
import sys, time
file = sys.argv[-1].partition("=")[2]
with open(file, "a") as out:
    for part in ('{"a": 1}\\n{"a"', ': 2}\\n', '{"a": 3'):
        out.write(part)
        out.flush()
        time.sleep(0.5)
sys.exit("error: no room")
"""


def test_points_come_as_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole lines alone; what a job that fails has not ended is left out."""
    (job := tmp_path / "job.py").write_text(SLOW)
    monkeypatch.setattr(jobs, "COMMAND", (str(job),))
    begin, points = time.monotonic(), jobs.points(2, ["bench=decode"])
    assert next(points) == {"a": 1} and time.monotonic() - begin < 20
    assert next(points) == {"a": 2}
    with pytest.raises(jobs.JobError, match=r"^no room$"):
        next(points)


def test_emulated_steps_stand_beside_those_of_the_same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    point = {"model": "qwen2.5-7b", "batch": 1, "length": 1 << 20, "layout": "helix kvp=2 tpa=4 -> tpf=8 ep=1"}
    lines = {
        "step": [("new", 1000.0)],
        "step.emulated-8": [("old", 1500.0), ("new", 990.0)],
        "baselines.emulated-8": [("older", 2000.0)],
    }

    def recorded(name: str, *key: str) -> list[dict[str, object]]:
        return [point | {"commit": commit, "ttl_p50_us": us} for commit, us in lines.get(name, [])]

    monkeypatch.setattr(step_tables, "results", recorded)
    assert step_tables.emulated_eight()[2:] == [
        "| qwen2.5-7b | 1 x 1M | helix kvp=2 tpa=4 | 1.00 ms | 0.99 ms | -1.0% |"
    ]
    lines["step.emulated-8"].pop()
    assert not step_tables.emulated_eight()


def test_whole_models_stand_beside_plain_tp_and_dp(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in bf16 of the same workload is none of them; what does not fit is said.

    The ideal counts products where these outlast reading: over 2^20 latents, 128 heads take 52.14 us in each of 61
    layers at 700 TFLOP/s, and reading takes 32.19 us.
    """
    work = {"model": "deepseek-r1", "batch": 1, "length": 1 << 20, "weights": "fp8", "floor_us": 2000.0}
    work |= {"used_bytes_per_gpu": [98e9, 99e9], "vllm_ms": None, "bar": None}
    whole = [
        work | {"layout": "helix kvp=8 tpa=1 -> tpf=8 ep=1", "ttl_p50_us": 5000.0},
        work | {"layout": "helix kvp=8 tpa=1 -> tpf=1 ep=8", "ttl_p50_us": 6000.0},
        work | {"layout": "tp kvp=1 tpa=8 -> tpf=8 ep=1", "failed": "no room"},
        work | {"layout": "dp dp=8 -> tpf=1 ep=8", "ttl_p50_us": 7000.0, "commit": "another"},
    ]
    bf16 = {**whole[0], "weights": None, "layers": 44, "ttl_p50_us": 1.0}
    recorded = {step_tables.WHOLE: whole, "step": [bf16]}
    monkeypatch.setattr(step_tables, "results", lambda name, *key: recorded.get(name, []))
    (row,) = step_tables.whole()[2:]
    cells = "kvp=8 tpa=1 tpf=8 ep=1 | 5.00 ms | 3.22 ms | 1.55 | does not fit | 7.00 ms ‡ | 99 GB"
    assert row == f"| deepseek-r1, FP8 | 1 x 1M | {cells} |"
    assert step_tables.headline()[2:] == ["| deepseek-r1, FP8 | 1 latent | 8 | 1 x 1M | 5.00 ms | does not fit | - |"]
    del whole[2]
    assert "| 5.00 ms | does not fit, planned | - |" in step_tables.headline()[2]


def test_plain_tp_compares_with_helix_of_the_same_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest commit that has both counts, not the newest of each."""
    work = {"model": "deepseek-v2-lite", "batch": 1, "length": 1 << 20}
    helix, tp = "helix kvp=8 tpa=1 -> tpf=8 ep=1", "tp kvp=1 tpa=8 -> tpf=8 ep=1"
    rows = [
        work | {"commit": "old", "layout": helix, "ttl_p50_us": 2000.0},
        work | {"commit": "new", "layout": helix, "ttl_p50_us": 1000.0},
        work | {"commit": "old", "layout": tp, "ttl_p50_us": 8000.0},
        work | {"batch": 8, "commit": "old", "layout": helix, "ttl_p50_us": 9000.0},
        work | {"batch": 8, "commit": "old", "layout": tp, "failed": "no room"},
    ]
    monkeypatch.setattr(step_tables, "results", lambda name, *key: rows if name == "step" else [])
    lines = step_tables.over_tp()[2:]
    assert lines[1] == "| 1 x 1M | - | - | 4.00 | - |" and lines[3] == "| 8 x 1M | - | - | plain TP does not fit | - |"
