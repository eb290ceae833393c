"""Sweeps over two ranks, with Hydra's habits on command lines: what runs, what fails, and what is compared."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from tests.e2e.checkpoints import checkpoint
from tests.e2e.command_line import ENTRY, LABORATORY, Job, lines_of, torchrun, write_lines

SWEEP = [sys.executable, "-m", "launch.sweep"]
NIGHT = """\
# @package _global_
layout:
  kvp: 2
hydra:
  sweeper:
    params:
      decode.max_tokens: range(2,4)
"""


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """A model, prompts and an experiment of one's own, in a directory of groups."""
    prompts = write_lines(tmp_path / "p.jsonl", {"prompt_ids": [1, 2, 3]}, {"prompt_ids": [4, 5]})
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "night.yaml").write_text(NIGHT)
    overrides = [f"model.path={checkpoint('qwen3')}", f"decode.prompts={prompts}", "kv.tokens=4096"]
    return ["--config-dir", str(tmp_path), *overrides]


def rows(directory: Path) -> list[dict[str, str]]:
    with (directory / "sweep.csv").open() as file:
        return [*csv.DictReader(file)]


def test_an_experiment_sweeps_where_it_says(given: list[str], tmp_path: Path) -> None:
    """A range of its own beside a glob of the command line's."""
    ended = Job(
        ENTRY, *given, "-m", "+experiment=night", "hydra.job.name=mine", "++decode.temperature=0", "~layout.tpa",
        "layout=glob([h*,me*])", "+model.config.rope_theta=20000", f"hydra.sweep.dir={tmp_path}/${{hydra.job.name}}",
        "hydra.sweep.subdir=new-${layout.mode}-${decode.max_tokens}", "hydra/launcher=basic", log=tmp_path / "log",
    ).wait()  # fmt: skip
    assert ended.code == 0 and "tokens: " in ended.output, ended.output
    found = [(row["layout"], row["decode.max_tokens"], row["status"], row["kvp"]) for row in rows(tmp_path / "mine")]
    assert sorted(found) == [(mode, n, "ok", "2") for mode in ("helix", "medha") for n in "23"]
    points = sorted(path.parent for path in (tmp_path / "mine").rglob("record.json"))
    assert [point.name for point in points] == [f"new-{mode}-{n}" for mode in ("helix", "medha") for n in "23"]
    for point in points:
        made, tokens = json.loads((point / "record.json").read_text())["config"], int(point.name[-1])
        assert (made["decode"]["max_tokens"], made["layout"]["tpa"]) == (tokens, 1)
        assert made["model"]["config"] == {"rope_theta": 20000}
        assert [len(line["token_ids"]) for line in lines_of(point / "results.jsonl")] == [tokens] * 2


def test_a_sweep_skips_survives_and_reports(given: list[str], tmp_path: Path) -> None:
    """Its last point fails once the weights are in, on both ranks alike, which say so in one line."""
    directory = tmp_path / "sweep"
    ended = Job(
        SWEEP, *given[:-1], "decode.max_tokens=4", "layout.kvp=2", "layout.tpa=1,4", "kv.tokens=16,1000000000000",
        "kv.dtype=auto,fp8_all", f"hydra.sweep.dir={directory}", log=tmp_path / "log",
    ).wait()  # fmt: skip
    points = rows(directory)
    assert [row["status"] for row in points] == ["ok", *["failed"] * 3, *["skipped"] * 4]
    assert ended.code == 1, "some points failed"
    assert points[0]["kvp"] == "2" and float(points[0]["ttl_p50_us"]) > 0
    assert all("layout.tpa=4 does not fit" in row["reason"] for row in points if row["status"] == "skipped")
    early, late = points[1]["reason"], points[2]["reason"]  # found before any point ran, and by a job
    assert early.startswith("kv.dtype=fp8_all: the model has no index keys") and points[3]["reason"] == early
    assert late.startswith("kv.tokens=1000000000000 needs")
    assert ended.output.count("error: kv.tokens=") == 1 and "rank 0 failed" not in ended.output, ended.output
    assert (
        f"point 1, 3 failed: {early}" in " ".join(ended.output.split()) and "layout.tpa=4 does not fit" in ended.output
    )
    assert (directory / "sweep.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(lines_of(directory / "0" / "results.jsonl")[0]["token_ids"]) == 4


def test_a_sweep_over_hopb_is_an_ablation(given: list[str], tmp_path: Path) -> None:
    """Two ranks exchange; the second point is the baseline, and draws the same tokens."""
    prompts = write_lines(tmp_path / "p.jsonl", *({"prompt_ids": [1, 2, i], "max_tokens": 8} for i in range(4)))
    directory = tmp_path / "sweep"
    ended = Job(
        SWEEP, *given, f"decode.prompts={prompts}", "layout.kvp=2", "hopb=on,off", f"hydra.sweep.dir={directory}",
        log=tmp_path / "log",
    ).wait()  # fmt: skip
    assert ended.code == 0 and "tokens: equal in both points" in ended.output, ended.output
    assert ended.output.count("hopb=on splits steps of several sequences into 2 chunks") == 1
    on, off = rows(directory)
    assert (on["hopb"], off["hopb"], on["baseline"], off["gain_percent"]) == ("on", "off", "1", "0.0")
    assert float(on["gain_percent"]) == pytest.approx(100 * (1 - float(on["ttl_p50_us"]) / float(off["ttl_p50_us"])))
    record = json.loads((directory / "0" / "record.json").read_text())
    assert record["config"]["hopb"] == {"chunks": "best"} and record["exchange_queries"] == 4
    assert 0 < record["exchange_us"] == float(on["exchange_us"])


def test_jobs_of_a_benchmark_are_swept(tmp_path: Path) -> None:
    shape = [f"model.path={checkpoint('qwen3')}", "bench=decode", "bench.points=[1x64]", "bench.steps=2"]
    ended = Job(
        LABORATORY, *shape, "-m", "layout.kvp=2", "layout=helix,medha", f"hydra.sweep.dir={tmp_path}/swept",
        log=tmp_path / "log",
    ).wait()  # fmt: skip
    assert ended.code == 0, ended.output
    assert [(row["layout"], row["status"]) for row in rows(tmp_path / "swept")] == [("helix", "ok"), ("medha", "ok")]


def test_a_sweep_under_torchrun_is_refused_with_what_to_type(given: list[str], tmp_path: Path) -> None:
    ended = Job(torchrun(2), *given[2:], "-m", "layout.kvp=1,2", log=tmp_path / "log").wait()
    assert ended.code != 0
    (error,) = (line for line in ended.output.splitlines() if line.startswith("error: -m"))
    assert error.startswith(
        "error: -m under torchrun would run the whole sweep on every rank; run `helix run model.path="
    )
    assert error.endswith("layout.kvp=1,2 -m` instead")
