"""Hydra's habits on command lines, over two ranks."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.checkpoints import checkpoint
from tests.e2e.cli import ENTRY, LABORATORY, Job, torchrun

HELIX = [sys.executable, "-m", "launch.cli"]
NIGHT = """\
# @package _global_
layout:
  kvp: 2
hydra:
  sweeper:
    params:
      decode.max_tokens: 2,3
"""


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """A model, prompts and an experiment of one's own, in a directory of groups."""
    (tmp_path / "p.jsonl").write_text('{"prompt_ids": [1, 2, 3]}\n{"prompt_ids": [4, 5]}\n')
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "night.yaml").write_text(NIGHT)
    overrides = [f"model.path={checkpoint('qwen3')}", f"decode.prompts={tmp_path / 'p.jsonl'}", "kv.tokens=4096"]
    return ["--config-dir", str(tmp_path), *overrides]


def rows(directory: Path) -> list[dict[str, str]]:
    with (directory / "sweep.csv").open() as file:
        return [*csv.DictReader(file)]


def config(point: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((point / "record.json").read_text())["config"]
    return found


@pytest.mark.parametrize("command", [ENTRY, [*HELIX, "run"]], ids=["torchrun_entry.py", "helix run"])
def test_an_experiment_sweeps_where_it_says(command: list[str], given: list[str], tmp_path: Path) -> None:
    ended = Job(
        command, *given, "-m", "+experiment=night", "hydra.job.name=mine", "++decode.temperature=0", "~layout.tpa",
        "+model.config.rope_theta=20000", f"hydra.sweep.dir={tmp_path}/${{hydra.job.name}}",
        "hydra.sweep.subdir=new-${decode.max_tokens}", "hydra/launcher=basic", log=tmp_path / "log",
    ).wait()  # fmt: skip
    assert ended.code == 0, ended.output
    found = rows(tmp_path / "mine")
    assert [(row["decode.max_tokens"], row["status"], row["kvp"]) for row in found] == [
        ("2", "ok", "2"),
        ("3", "ok", "2"),
    ]
    points = sorted(path.parent for path in (tmp_path / "mine").rglob("record.json"))
    assert [point.name for point in points] == ["new-2", "new-3"]
    for point, tokens in zip(points, (2, 3), strict=True):
        made = config(point)
        assert (made["decode"]["max_tokens"], made["layout"]["tpa"]) == (tokens, 1)
        assert made["model"]["config"] == {"rope_theta": 20000}
        lines = (point / "results.jsonl").read_text().splitlines()
        assert [len(json.loads(line)["output_ids"]) for line in lines] == [tokens] * 2


def test_lists_ranges_and_globs(given: list[str], tmp_path: Path) -> None:
    ended = Job(
        ENTRY, *given, "--multirun", "layout.kvp=2", "layout=glob([h*,me*])", "decode.max_tokens=range(1,3)",
        f"hydra.sweep.dir={tmp_path}/swept", log=tmp_path / "log",
    ).wait()  # fmt: skip
    assert ended.code == 0, ended.output
    found = [(row["layout"], row["decode.max_tokens"], row["status"]) for row in rows(tmp_path / "swept")]
    assert found == [(mode, n, "ok") for mode in ("helix", "medha") for n in "12"]
    assert "tokens: " in ended.output


def test_jobs_of_a_benchmark_are_swept(tmp_path: Path) -> None:
    shape = [f"model.path={checkpoint('qwen3')}", "bench=decode", "bench.points=[1x64]", "bench.steps=2"]
    ended = Job(
        LABORATORY, *shape, "-m", "layout.kvp=2", "layout=helix,medha", f"hydra.sweep.dir={tmp_path}/swept",
        log=tmp_path / "log",
    ).wait()  # fmt: skip
    assert ended.code == 0, ended.output
    assert [(row["layout"], row["status"]) for row in rows(tmp_path / "swept")] == [("helix", "ok"), ("medha", "ok")]
    shown = Job(
        [*HELIX, "bench"], *shape, "-m", "layout.kvp=1,2", "--cfg", "job", "-p", "layout", log=tmp_path / "l"
    ).wait()
    assert shown.code == 0 and shown.output.count("# point ") == 2, shown.output


def test_a_sweep_under_torchrun_is_refused_with_what_to_type(given: list[str], tmp_path: Path) -> None:
    ended = Job(torchrun(2), *given[2:], "-m", "layout.kvp=1,2", log=tmp_path / "log").wait()
    assert ended.code != 0
    (said,) = (line for line in ended.output.splitlines() if line.startswith("error: -m"))
    assert said.startswith(
        "error: -m under torchrun would run the whole sweep on every rank: type `helix run model.path="
    )
    assert said.endswith("layout.kvp=1,2 -m`")
