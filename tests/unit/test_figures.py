"""Figures from recorded results: what is drawn, which line of a point counts, what a wrong name gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

from launch.bench import clock as bench_clock
from launch.records import figures as records_figures
from launch.records.figures import DRAWINGS, load, main

K = 1024
LAYOUTS = [f"helix kvp={n} tpa={8 // n} -> tpf=8 ep=1" for n in (1, 2, 8)]
SPANS = {
    "off": [("attention", i, 2 * i, 2 * i + 2) for i in range(4)]
    + [("exchange", i, 8 + 1.2 * i, 9.2 + 1.2 * i) for i in range(4)],
    "on": [("attention", i, 2 * i, 2 * i + 2) for i in range(4)]
    + [("exchange", i, 2 * i + 2, 2 * i + 3.2) for i in range(4)],
}
ROWS: dict[str, list[dict[str, Any]]] = {
    "kernels": [
        {"kind": "decode", "heads": heads, "batch": batch, "length": n * K, "queries": 1,
         "kv_bytes": n << 20, "us": n + 5.0, "cudnn_us": n + 4.0,
         "flash_us": None, "bar_us": 5.5}
        for heads in ("8/1", "28/4") for batch in (1, 8) for n in (4, 64)
    ],
    "moe": [
        {"kind": "moe", "model": model, "tpf": 8 // ep, "ep": ep, "tokens": n, "us": 9.0 + n, "bar_us": 10.0 + n}
        for model in ("a-30b", "b-20b") for ep in (1, 8) for n in (1, 8, 64)
    ],
    "comm": [
        {"op": op, "ranks": ranks, "message_bytes": size, "symm_us": 4.0, "nccl_us": 20.0, "bar_us": bar}
        for op, bar in (("exchange", 6.0), ("all_gather", None)) for ranks in (2, 8) for size in (K, 64 * K)
    ],
    "step": [
        {"model": model, "batch": 1, "length": 128 * K, "layout": layout, "floor_us": 500.0, "bar": bar,
         "ttl_p50_us": 700.0 + i}
        for model, bar in (("a-7b", 1.5), ("b-8b", None)) for i, layout in enumerate(LAYOUTS)
    ] + [{"model": "c-70b", "batch": 1, "length": K, "layout": LAYOUTS[1], "floor_us": 9.0, "bar": 2.0, "failed": "x"}]
    + [
        {"model": "d-30b-a3b", "batch": batch, "length": K * K, "layout": f"helix kvp=4 tpa=2 -> tpf={8 // ep} ep={ep}",
         "floor_us": 500.0, "bar": None, "ttl_p50_us": 700.0 + ep}
        for batch in (1, 8) for ep in (1, 2, 8)
    ],
    "baselines": [
        {"model": "a-7b", "batch": batch, "length": length, "layout": layout, "tokens_per_s_user": 200.0 / batch,
         "tokens_per_s_gpu": 30.0 * batch, "ttl_p50_us": 900.0}
        for batch in (1, 4, 16) for length in (128 * K, K * K) for layout in LAYOUTS
    ] + [{"model": "b-8b", "batch": 1, "length": K * K, "layout": LAYOUTS[0], "failed": "exit code 1"}],
    "hopb": [
        {"kind": "ttl", "backend": "symm_mem", "model": "a-7b", "batch": batch, "length": length, "chunks": chunks,
         "off_us": 900.0, "on_us": 850.0, "without_us": 800.0, "hidden": 0.5}
        for batch in (2, 8) for length in (128 * K, K * K) for chunks in (2, 4)
    ] + [
        {"kind": "timeline", "regime": regime,
         "spans": [dict(zip(("stream", "chunk", "start_us", "end_us"), span, strict=True)) for span in spans]}
        for regime, spans in SPANS.items()
    ],
    "prefill": [
        {"kind": "kernel", "heads": heads, "q_tokens": 8 * K, "length": n * K, "tflops": 500.0, "cudnn_tflops": 600.0,
         "matrix_tflops": 800.0}
        for heads in ("8/1", "32/8") for n in (8, 128)
    ],
    "speculate": [
        {"kind": "synthetic", "model": "a-70b", "layout": LAYOUTS[1], "acceptance": 0.8,
         "batch": batch, "length": length,
         "gamma": gamma, "gain": 1.1 + gamma / 9, "gain_at_rate": 1 + gamma / 8, "tokens_per_s_user": 70.0 + gamma}
        for batch, length in ((1, 8 * K), (32, 8 * K), (1, K * K)) for gamma in (0, 1, 4, 15)
    ] + [{"kind": "synthetic", "model": "a-70b", "layout": LAYOUTS[1], "acceptance": 0.8, "batch": 8, "length": K * K,
          "gamma": 4, "failed": "does not fit"}],
}  # fmt: skip
ROWS |= {f"{name}.emulated-8": ROWS[name] for name in ("step", "baselines")}
PROVENANCE = {"device": "NVIDIA H200", "commit": "0123456789ab", "versions": {"torch": "2.11.0"}}


def write(path: Path, rows: list[dict[str, Any]], name: str = "test") -> None:
    path.write_text("".join(json.dumps({"name": name, **PROVENANCE, **row}) + "\n" for row in rows))


@pytest.mark.parametrize("name", DRAWINGS)
def test_every_figure_is_drawn(name: str, tmp_path: Path) -> None:
    source = DRAWINGS[name].source
    write(tmp_path / f"{source}.jsonl", ROWS[source], source)
    main([name, "--results", str(tmp_path), "--figures", str(tmp_path / "figures")])
    (png,) = (tmp_path / "figures").iterdir()
    assert png.name == f"{name}.png"
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    height, width, _ = plt.imread(png).shape
    assert 800 <= width <= 3000 and 300 <= height <= 3000
    assert not plt.get_fignums()


@pytest.mark.parametrize("name", DRAWINGS)
def test_every_axis_says_what_it_shows(name: str) -> None:
    drawing = DRAWINGS[name]
    figure = drawing.draw([row for row in ROWS[drawing.source] if row.get("kind") == drawing.kind])
    # The panels of a timeline share the axis under the lowest one.
    assert all(panel.get_ylabel() for panel in figure.axes) and figure.axes[-1].get_xlabel()
    assert name == "hopb-timeline" or all(panel.get_xlabel() for panel in figure.axes)
    plt.close(figure)


def test_small_print_says_who_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(records_figures.Figure, "supxlabel", lambda figure, text, **style: said.append(text))
    rows = [{**row, "emulated_by": 2} for row in ROWS["step.emulated-8"]]
    write(tmp_path / "step.emulated-8.jsonl", rows, "step.emulated-8")
    main(["step.emulated-8", "--results", str(tmp_path), "--figures", str(tmp_path / "figures")])
    assert said == ["2 x NVIDIA H200 that emulate all ranks, commit 0123456789ab"]


def test_last_line_of_a_point_counts(tmp_path: Path) -> None:
    old, other = ROWS["kernels"][:2]
    write(tmp_path / "kernels.jsonl", [old, other, {**old, "us": 1.25, "commit": "new"}])
    rows = load(tmp_path / "kernels.jsonl", DRAWINGS["kernels"].key)
    assert [(row["us"], row["commit"]) for row in rows] == [(1.25, "new"), (other["us"], PROVENANCE["commit"])]
    # A key that misses a field makes one point of two.
    assert len(load(tmp_path / "kernels.jsonl", ("heads", "batch"))) == 1
    (panel,) = records_figures.kernels(rows).axes
    drawn = {point for line in panel.get_lines() for point in zip(*line.get_data(), strict=True)}
    assert (old["kv_bytes"], 1.25) in drawn and (old["kv_bytes"], old["us"]) not in drawn
    plt.close("all")


def test_best_split_stands_out() -> None:
    rows = [{**row, "ttl_p50_us": ttl} for row, ttl in zip(ROWS["step"][:3], (300.0, 900.0, 650.0), strict=True)]
    (panel,) = records_figures.step(rows).axes  # one model, one panel
    drawn = [
        (round(bar.get_width(), 6), records_figures.mpl.colors.to_hex(bar.get_facecolor()).upper())
        for bar in panel.patches
    ]
    assert drawn == [(0.6, records_figures.ORANGE), (1.8, records_figures.GREY), (1.3, records_figures.BLUE)]
    plt.close("all")


def test_grids_are_shares_of_the_first() -> None:
    (panel,) = records_figures.grids(ROWS["step"]).axes
    drawn = [list(zip(*line.get_data(), strict=True)) for line in panel.get_lines()]
    assert drawn == [[(1, 1.0), (2, 702 / 701), (8, 708 / 701)]] * 2
    plt.close("all")


def test_gains_are_drawn_as_expected_and_as_they_came() -> None:
    figure = records_figures.speculate(ROWS["speculate"])
    gain, rate = figure.axes
    drawn = [(line.get_linestyle(), list(line.get_ydata())) for line in gain.get_lines() if len(line.get_xdata()) == 4]
    assert drawn == [("-", [1, 1.125, 1.5, 2.875]), ("None", [1.1 + g / 9 for g in (0, 1, 4, 15)])] * 3
    assert [list(line.get_xdata()) for line in rate.get_lines()] == [[0, 1, 4, 15]] * 3, "what failed is left out"
    plt.close(figure)


def test_roofline_is_the_measured_ceiling() -> None:
    assert records_figures.READ_CEILING == bench_clock.READ_CEILING


def test_small_print_names_device_and_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    monkeypatch.setattr(records_figures.plt, "close", figures.append)
    write(tmp_path / "prefill.jsonl", [{**row, "commit": f"c{i % 2}"} for i, row in enumerate(ROWS["prefill"])])
    main(["prefill", "--results", str(tmp_path), "--figures", str(tmp_path)])
    monkeypatch.undo()
    assert figures[0].get_supxlabel() == "NVIDIA H200, commit c0; NVIDIA H200, commit c1"
    plt.close("all")


def test_missing_results_are_skipped_with_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "hopb.jsonl", [row for row in ROWS["hopb"] if row["kind"] == "ttl"])
    main(["--results", str(tmp_path), "--figures", str(tmp_path / "figures")])
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(DRAWINGS) and sum(line.startswith("skipped") for line in said) == len(DRAWINGS) - 1
    assert f"{tmp_path / 'comm.jsonl'} does not exist" in said[list(DRAWINGS).index("comm")]
    assert "has no lines for it" in said[list(DRAWINGS).index("hopb-timeline")]
    assert [png.name for png in (tmp_path / "figures").iterdir()] == ["hopb.png"]


def test_unknown_name_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["kernels", "kernel"])
    assert f"no figure is called kernel; choose from {', '.join(DRAWINGS)}" in capsys.readouterr().err


def test_slowest_regime_of_the_timeline_comes_first() -> None:
    figure = records_figures.timeline(ROWS["hopb"][:-3:-1])  # HOP-B on, which was recorded first here, below HOP-B off
    assert [panel.get_title(loc="left") for panel in figure.axes] == ["HOP-B: off", "HOP-B: on"]
    texts = [[text.get_text() for text in panel.texts] for panel in figure.axes]
    assert "12.8 us" in texts[0] and "9.2 us" in texts[1] and "saves 3.6 us" in texts[1]
    plt.close(figure)
