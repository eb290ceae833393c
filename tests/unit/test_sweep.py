"""Sweeps: what is found before any point runs, and what the table, the CSV and the lines below it say."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.program import PROGRAM
from launch.client.answer import CompletionOutput, RequestOutput
from launch.inputs.files import RECORD_KEYS
from launch.inputs.prompt_files import PromptFile, ResultFile
from launch.inputs.sweep_points import Point
from launch.job import spawn
from launch.job.sweep import check, run
from launch.job.sweep_report import compare_tokens, comparison_rows, plot, show, swept_keys, write_csv
from tests.benchmark_config import compose_config
from tests.unit.test_planning import shown_as


def points(tmp_path: Path, *overrides: str) -> list[Point]:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt_ids": [1, 2, 3]}\n')
    configs = [compose_config(f"decode.prompts={prompts}", *o.split()) for o in overrides]
    return [Point(i, [o], c, PROGRAM.select(c)) for i, (o, c) in enumerate(zip(overrides, configs, strict=True))]


def test_a_mistake_of_all_points_ends_the_sweep(tmp_path: Path) -> None:
    found = points(tmp_path, "decode.top_p=3", "layout.kvp=2 decode.top_p=3", "layout.tpa=3")
    with pytest.raises(ValueError, match=r"^decode: top_p=3"):
        check(found)
    found = points(tmp_path, "kv.offload_prefetch=true", "kv.offload_prefetch=true", "layout.tpa=3", "layout.kvp=2")
    check(found)
    assert [point.status for point in found] == ["failed", "failed", "skipped", "waiting"]
    assert found[0].reason.startswith("kv.offload_prefetch=true needs kv.offload=host") and found[3].reason == ""
    check(found := points(tmp_path, "layout.kvp=1000000000", "layout.kvp=2"))
    assert found[0].status == "skipped" and "1000000000 ranks, but this host runs at most" in found[0].reason
    check(found := points(tmp_path, "layout.tpa=3"))
    assert found[0].status == "skipped"


def test_complete_results_need_a_record_of_the_same_settings(tmp_path: Path) -> None:
    """Results do not depend on the layout, but measurements do."""
    found = points(tmp_path, "layout.kvp=1", "layout.kvp=2")
    for point in found:
        point.config.decode.output, point.config.record = str(tmp_path / "out.jsonl"), str(tmp_path / "record.json")
        point.config.decode.resume = True
    prompts = PromptFile(tmp_path / "p.jsonl")
    results = ResultFile(found[0].config, prompts)
    for prompt in results.remaining:
        results.add(prompt.id, RequestOutput(3, 0, (CompletionOutput("x", (4,), "length"),), None))
    results.close()
    earlier = compose_config("layout.kvp=1", f"decode.prompts={tmp_path}/p.jsonl", "decode.output=moved.jsonl")
    (tmp_path / "record.json").write_text(json.dumps(dict.fromkeys(RECORD_KEYS) | {"config": asdict(earlier)}))
    check(found)
    assert [point.status for point in found] == ["waiting", "failed"]
    assert "out.jsonl already has all results, and record.json has measurements of other settings" in found[1].reason
    (tmp_path / "record.json").unlink()
    check(found := [replace(found[1], status="waiting", reason="")])
    assert found[0].status == "waiting"


@pytest.mark.parametrize("code, status, ttls", [(0, "ok", [5.0, None]), (1, "failed", [None])])
def test_figures_are_of_each_timed_point_and_of_this_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, status: str, ttls: list[float | None]
) -> None:
    [point] = points(tmp_path, "bench=decode")
    point.config.record = str(tmp_path / "0.json")
    timed = {"batch": 1, "length": 64, "gamma": 0, "ttl_p50_us": 5.0, "kv_bytes_per_rank": [3, 4]}
    record = {"points": [timed, {"batch": 9, "length": 64, "gamma": 0, "failed": "no room"}]}
    (tmp_path / "0.json").write_text(json.dumps(record))  # where the job fails, an earlier sweep's
    monkeypatch.setattr(spawn, "run", lambda overrides, **variables: code)
    assert run(point) == code and point.status == status
    rows = point.rows()
    assert [row["ttl_p50_us"] for row in rows] == ttls
    if not code:
        assert [row["reason"] for row in rows] == ["", "no room"]
        assert [(row["batch"], row["kv_bytes_per_rank_max"]) for row in rows] == [(1, 4), (9, None)]


def measured(tmp_path: Path, *ttls: tuple[str, float | None]) -> list[Point]:
    """Points with these overrides and planted TTLs in ms, None: skipped; a ms of exchange each, and equal tokens."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt_ids": [1]}\n')
    found = []
    for number, (text, ttl) in enumerate(ttls):
        config = compose_config("model=demo", f"decode.prompts={prompts}")
        config.decode.output = str(tmp_path / f"{number}.jsonl")
        point = Point(
            number, ["model=demo", *text.split()], config, PROGRAM.select(config), "skipped", "3 ranks on 2 GPUs"
        )
        if ttl is not None:
            point.status, point.reason = "ok", ""
            speed = {"tokens_per_s_user": 1e3 / ttl, "tokens_per_s_gpu": 8e3 / ttl}
            point.record = {"ttl_p50_us": 1e3 * ttl, "exchange_us": 1e3, **speed}
            tokens(point, [1, 2], [3])
        found.append(point)
    return found


def tokens(point: Point, *prompts: list[int]) -> None:
    lines = (json.dumps({"id": i, "token_ids": ids}) + "\n" for i, ids in enumerate(prompts))
    Path(str(point.config.decode.output)).write_text("".join(lines))


GRID = ("layout.kvp=2 hopb=on", 10.5), ("layout.kvp=2 hopb=off", 10.0), ("layout.kvp=4 hopb=on", 4.5)
GRID = (*GRID, ("layout.kvp=4 hopb=off", 5.0), ("layout.kvp=3 hopb=off", None))


@pytest.mark.parametrize("width, lacks", [(100, 0), (80, 0), (60, 24)])
def test_the_table_fits_the_terminal(
    width: int, lacks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """HOP-B off is the baseline of each layout, whatever the order; a narrow terminal lacks the last columns."""
    monkeypatch.setenv("COLUMNS", str(width))
    found = measured(tmp_path, *GRID)
    show(found, comparison_rows(found))
    output = capsys.readouterr().out.splitlines()
    assert max(map(len, output)) <= width
    wanted = shown_as("sweep").splitlines()
    assert [line.rstrip() for line in output[1:8]] == [line[: 77 - lacks].rstrip() for line in wanted[1:8]]
    assert width < 80 or output == wanted


def test_long_settings_are_cut_and_figures_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    long = "attention.num_blocks=1 speculation.suffix_pool_tokens=1 decode.prefill_chunk=1 decode.prompts='/d/{}.jsonl'"
    found = measured(tmp_path, (long.format("a"), 1.0), (long.replace("=1", "=2").format("b"), 2.0))
    show(found, comparison_rows(found))
    output = capsys.readouterr().out.splitlines()
    assert max(map(len, output)) <= 80
    assert re.fullmatch(r"    1  2 +2 +2 +b\.jsonl +2\.00 ms +-100\.0%", output[4].rstrip()), output


def test_the_csv_has_a_column_for_each_swept_key(tmp_path: Path) -> None:
    found = measured(tmp_path, *GRID)
    write_csv(tmp_path / "sweep.csv", rows := comparison_rows(found))
    with (tmp_path / "sweep.csv").open() as file:
        read = list(csv.DictReader(file))
    assert list(read[0])[:5] == ["point", "layout.kvp", "hopb", "baseline", "gain_percent"]
    assert [(row["hopb"], row["baseline"]) for row in read] == [
        ("on", "1"), ("off", "1"), ("on", "3"), ("off", "3"), ("off", ""),
    ]  # fmt: skip
    assert float(read[2]["gain_percent"]) == pytest.approx(10) and read[0]["exchange_us"] == "1000.0"
    plot(tmp_path / "sweep.png", rows, swept_keys(found))
    assert (tmp_path / "sweep.png").read_bytes()[:4] == b"\x89PNG"


def test_without_hopb_the_first_point_with_figures_is_the_baseline(tmp_path: Path) -> None:
    found = measured(tmp_path, ("layout.kvp=1", None), ("layout.kvp=2", 4.0), ("layout.kvp=4", 2.0))
    assert [row["gain_percent"] for row in comparison_rows(found)] == [None, 0.0, 50.0]
    found = measured(tmp_path, ("hopb=off", None), ("hopb=on", 4.0))  # nothing to compare with
    assert [row["gain_percent"] for row in comparison_rows(found)] == [None, None]


def test_tokens_are_compared_where_the_same_was_asked(tmp_path: Path) -> None:
    found = measured(tmp_path, ("hopb=off", 1.0), ("hopb=on", 1.0), ("hopb=auto", 1.0), ("hopb.chunks=2", 1.0))
    tokens(found[2], [1, 2], [4])
    assert compare_tokens(found) == "tokens: equal in points 0, 1, 3; point 2 differs from point 0 in 1 of 2 prompts"
    found[2].config.decode.seed = 5
    found[3].config.decode.max_batch = "2"
    assert compare_tokens(found) == "tokens: equal in points 0, 1, 3"
    assert compare_tokens(found[:1]) is None and compare_tokens(found[:2]) == "tokens: equal in both points"
