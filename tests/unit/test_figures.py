"""Figures from recorded results: what is drawn, whether it can be read, what a wrong name gets."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure

from benchmarks.records import figures as records_figures
from benchmarks.records import style
from benchmarks.records.figures import DRAWINGS, footer, main, rows_of
from benchmarks.records.rows import newest
from launch.inputs.compose import ROOT
from tests.legible import illegible

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
         "us": n + 5.0, "best_peer_over_ours": 1 + n / 100}
        for heads in ("8/1", "28/4") for batch in (1, 8) for n in (4, 64)
    ],
    "step": [
        {"model": model, "batch": 1, "length": 128 * K, "layout": layout, "floor_us": 500.0, "bar": bar,
         "ttl_p50_us": 700.0 + i}
        for model, bar in (("qwen2.5-7b", 1.5), ("llama-3.1-8b", None)) for i, layout in enumerate(LAYOUTS)
    ] + [{"model": "llama-3.1-70b", "batch": 1, "length": K, "layout": LAYOUTS[1], "floor_us": 9.0, "bar": 2.0,
          "failed": "x"}]
    + [
        {"model": "qwen3-30b-a3b", "batch": batch, "length": K * K,
         "layout": f"helix kvp=4 tpa=2 -> tpf={8 // ep} ep={ep}", "floor_us": 500.0, "bar": None,
         "ttl_p50_us": 700.0 + ep}
        for batch in (1, 8) for ep in (1, 2, 8)
    ],
    "hopb": [
        {"kind": "ttl", "backend": "symm_mem", "model": "a-7b", "batch": batch, "length": length, "chunks": chunks,
         "off_us": 900.0, "on_us": 850.0, "without_us": 800.0, "hidden": 0.5}
        for batch in (2, 8) for length in (128 * K, K * K) for chunks in (2, 4)
    ] + [
        {"kind": "timeline", "regime": regime,
         "spans": [dict(zip(("stream", "chunk", "start_us", "end_us"), span, strict=True)) for span in spans]}
        for regime, spans in SPANS.items()
    ],
    "speculate": [
        {"kind": "synthetic", "model": "a-70b", "layout": LAYOUTS[1], "acceptance": 0.8,
         "batch": batch, "length": length,
         "gamma": gamma, "gain": 1.1 + gamma / 9, "gain_at_rate": 1 + gamma / 8, "tokens_per_s_user": 70.0 + gamma}
        for batch, length in ((1, 8 * K), (32, 8 * K), (1, K * K)) for gamma in (0, 1, 4, 15)
    ] + [{"kind": "synthetic", "model": "a-70b", "layout": LAYOUTS[1], "acceptance": 0.8, "batch": 8, "length": K * K,
          "gamma": 4, "failed": "does not fit"}],
}  # fmt: skip
PROVENANCE = {"device": "NVIDIA H200", "commit": "0123456789ab", "versions": {"torch": "2.11.0"}}


def write(path: Path, rows: list[dict[str, Any]], name: str = "test") -> None:
    path.write_text("".join(json.dumps({"name": name, **PROVENANCE, **row}) + "\n" for row in rows))


RECORDED = [name for name in DRAWINGS if rows_of(name, ROOT / "benchmarks" / "results")]


@pytest.mark.parametrize("name", RECORDED)
def test_every_figure_can_be_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page shows: drawn from the kept records."""
    figures: list[Figure] = []
    monkeypatch.setattr(style.plt, "close", figures.append)
    main([name, f"figures={tmp_path}"])
    monkeypatch.undo()
    (png,) = tmp_path.iterdir()
    height, width, _ = plt.imread(png).shape
    assert png.name == f"{name}.png" and width <= 1500 and height <= 1500
    assert not illegible(figures[0])
    assert any("better" in f"{panel.get_xlabel()} {panel.get_ylabel()}" for panel in figures[0].axes)
    plt.close(figures[0])


def test_a_page_says_under_its_figures_what_is_better() -> None:
    images = re.compile(r"(?:^!\[.*figures/.*\.png\)\n)+\n(.*(?:\n.+)*)", re.M)
    texts = [page.read_text() for page in (ROOT / "docs").rglob("*.md")]
    said = [caption for text in texts for caption in images.findall(text)]
    assert len(said) >= len(RECORDED)
    assert [caption for caption in said if not re.search(r"[Ff]igures? .*(?:is|are)\s+better", caption, re.S)] == []


def test_what_cannot_be_read_is_found() -> None:
    figure, axes = style.panels(1)
    style.legend(figure, [{"label": "a line"}])
    assert not illegible(figure)
    axes[0, 0].text(0.5, 0.5, "small", fontsize=style.TEXT - 1)
    axes[0, 0].text(0.1, 0.1, "one over")
    axes[0, 0].text(0.11, 0.11, "another")
    figure.text(0.99, 0.5, "past the right edge")
    axes[0, 0].set_title("the bar for a run that failed")
    problems = " ".join(illegible(figure))
    for word in ("small: 8", "one over, another: overlap", "past the right edge", "the bar for"):
        assert word in problems
    plt.close(figure)


def test_the_foot_says_what_was_emulated() -> None:
    row = {"device": "NVIDIA H200", "commit": "a1"}
    assert footer([row, {**row, "commit": "b2"}]) == "measured on NVIDIA H200, commits a1, b2"
    assert footer([{**row, "emulated_by": 2}]) == "emulated on 2 x NVIDIA H200, commit a1"


def test_last_line_of_a_point_counts(tmp_path: Path) -> None:
    old, other = ROWS["kernels"][:2]
    write(tmp_path / "kernels.jsonl", [old, other, {**old, "best_peer_over_ours": 1.25, "commit": "new"}])
    rows = rows_of("kernels", tmp_path)
    found = [(row["best_peer_over_ours"], row["commit"]) for row in rows]
    assert found == [(1.25, "new"), (other["best_peer_over_ours"], PROVENANCE["commit"])]
    # A key that misses a field would show one of two points.
    with pytest.raises(ValueError, match=r"lines of heads=8/1, batch=1 have length=4096 and length=65536"):
        newest(tmp_path / "kernels.jsonl", "heads", "batch")
    (panel,) = records_figures.kernels(rows).axes
    drawn = {point for line in panel.get_lines() for point in zip(*line.get_data(), strict=True)}
    assert (old["length"], 1.25) in drawn and (old["length"], old["best_peer_over_ours"]) not in drawn
    plt.close("all")


@pytest.mark.parametrize(
    "older, newer, options, said",
    [
        ({}, {}, {}, None),
        ({"kv": "fp8"}, {"kv": "auto"}, {}, "have kv=fp8 and kv=auto; add kv to the key, or to YIELDED"),
        ({}, {"kv": "fp8"}, {}, "have kv=auto and kv=fp8"),  # what lines meant before they said it
        ({"over": "4 GPUs"}, {"over": "8 ranks"}, {}, "have over=4 GPUs and over=8 ranks"),
        ({"repeat": 0.0}, {"repeat": 0.8}, {}, "have repeat=0.0 and repeat=0.8"),
        ({"layers": 12}, {"layers": 61}, {"free": ("layers",)}, None),
        ({"layers": 12, "superseded": "older kernels"}, {"layers": 61}, {}, None),
        ({"kind": "other", "layers": 12}, {"kind": "x", "layers": 61}, {"kind": "x"}, None),
        ({"commit": "a", "steps": 3, "kv_bytes": 7, "share": 0.1}, {"commit": "b", "steps": 4, "share": 0.2}, {}, None),
    ],
)
def test_lines_of_one_point_have_the_same_settings(
    tmp_path: Path, older: dict[str, Any], newer: dict[str, Any], options: dict[str, Any], said: str | None
) -> None:
    """Or a table would show one for the other; what a run yields may differ, and then the newest counts."""
    write(tmp_path / "r.jsonl", [{"batch": 1, **older}, {"batch": 1, **newer}])
    if said is None:
        assert newest(tmp_path / "r.jsonl", "batch", **options) == [{"name": "test", **PROVENANCE, "batch": 1, **newer}]
    else:
        with pytest.raises(ValueError, match=re.escape(f"r.jsonl: lines of batch=1 {said}")):
            newest(tmp_path / "r.jsonl", "batch", **options)


def test_the_best_split_of_each_workload_is_drawn() -> None:
    rows = [{**row, "ttl_p50_us": ttl} for row, ttl in zip(ROWS["step"][:3], (300.0, 900.0, 650.0), strict=True)]
    rows.append({**rows[1], "length": K * K, "failed": "kv.tokens=8388904 needs 16399 pages of 3"})
    (panel,) = records_figures.step(rows).axes  # one model, one panel
    assert [round(row.get_width(), 6) for row in panel.patches] == [1.3]  # kvp=1 is faster, and splits nothing
    assert {text.get_text() for text in panel.texts} == {"1.30", "kvp=8 tpa=1", "does not fit"}
    assert [label.get_text() for label in panel.get_yticklabels()] == ["1 x 128K", "1 x 1M"]
    plt.close("all")


def test_baselines_are_the_best_of_each_mode_in_the_models_measured_most() -> None:
    layouts = ["helix kvp=2 tpa=4", "helix kvp=8 tpa=1", "tp kvp=1 tpa=8"]
    rows = [
        {"model": f"m{i}", "batch": batch, "length": K, "layout": layout, "tokens_per_s_user": 100.0 + 10 * j,
         "tokens_per_s_gpu": 9.0 + i}
        for i in range(6) for batch in (1, 8)[: 1 + (i > 1)] for j, layout in enumerate(layouts)
    ]  # fmt: skip
    figure = records_figures.baselines(rows)
    assert [panel.get_title() for panel in figure.axes] == [f"m{i}, 1K tokens" for i in (2, 3, 4, 5)]
    assert [list(line.get_xdata()) for line in figure.axes[0].get_lines()] == [[110.0] * 2, [120.0] * 2]
    plt.close(figure)


def test_grids_are_shares_of_the_first() -> None:
    (panel,) = records_figures.grids(ROWS["step"]).axes
    drawn = [list(zip(*line.get_data(), strict=True)) for line in panel.get_lines()]
    assert drawn == [[(1, 1.0), (2, 702 / 701), (8, 708 / 701)]] * 2
    plt.close("all")


def test_gains_are_drawn_as_expected_and_as_they_came() -> None:
    figure = records_figures.speculate(ROWS["speculate"])
    gain, rate = figure.axes
    drawn = [(line.get_linestyle(), list(line.get_ydata())) for line in gain.get_lines() if len(line.get_xdata()) == 4]
    expected, measured = ("-", [1, 1.125, 1.5, 2.875]), ("None", [1.1 + g / 9 for g in (0, 1, 4, 15)])
    assert drawn == [expected] * 3 + [measured] * 3
    assert [list(line.get_xdata()) for line in rate.get_lines()] == [[0, 1, 4, 15]] * 3, "what failed is left out"
    plt.close(figure)


def test_needles_are_shares_of_those_outside_of_the_window() -> None:
    rows = [
        {"kvp": 1, "haystack": haystack, "length": length, "policy": policy, "keys": keys, "distant": distant,
         "distant_hits": hits}
        for haystack in ("code", "loop") for length in (8 * K, 32 * K)
        for policy, keys, distant, hits in (
            ("dense", None, 20, 20), ("bounds-8", 1664, 16, 12), ("bounds-32", 4736, 16, 16), ("mean-8", 1664, 16, 4),
            ("mean_std-8", 1664, 16, 8), ("window-640", 640, 16, 0), ("quest-64", 1552, 16, 15),
            ("int8-32", 4736, 16, 1),
        )
    ]  # fmt: skip
    figure = records_figures.needles([*rows, {**rows[1], "kvp": 8, "distant_hits": 0}])
    titles = [f"{name}, {n}K tokens" for name in ("code", "looped paragraph") for n in (8, 32)]
    assert [panel.get_title() for panel in figure.axes] == titles
    for panel in figure.axes:
        drawn = [[*zip(*line.get_data(), strict=True)] for line in panel.get_lines()]
        assert drawn[:3] == [[(1664, 0.75), (4736, 1.0)], [(1664, 0.25)], [(1664, 0.5)]]
        assert drawn[3:5] == [[(1552, 0.9375)], [(640, 0.0)]] and len(drawn) == 6
    plt.close(figure)


def test_recall_over_budgets() -> None:
    rows = [
        {"length": 8 * K, "page": page, "score": score, "budgets": [512, 4096], "recall": [0.5, 0.75],
         "kept": [0.9, 1.0]}
        for page in (128, 16) for score in ("bounds", "mean", "best", "pairs")
    ]  # fmt: skip
    found, kept = records_figures.recall(rows).axes
    assert [[*line.get_ydata()] for line in found.get_lines() if len(line.get_xdata())] == [[0.5, 0.75]] * 4
    assert [[*line.get_ydata()] for line in kept.get_lines() if len(line.get_xdata())] == [[0.9, 1.0]] * 6
    assert {line.get_linestyle() for line in kept.get_lines()} == {"-", "--"}
    plt.close("all")


def test_missing_results_are_skipped_with_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "hopb.jsonl", [row for row in ROWS["hopb"] if row["kind"] == "ttl"])
    main([f"results={tmp_path}", f"figures={tmp_path / 'figures'}"])
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(DRAWINGS) and sum(line.startswith("skipped") for line in said) == len(DRAWINGS) - 1
    assert f"{tmp_path / 'comm.jsonl'} does not exist" in said[list(DRAWINGS).index("comm")]
    assert "has no lines for it" in said[list(DRAWINGS).index("hopb-timeline")]
    assert [png.name for png in (tmp_path / "figures").iterdir()] == ["hopb.png"]


@pytest.mark.parametrize(
    "argument, words",
    [
        ("kernel", "kernel is unknown; known: kernels, "),
        ("--figures", "is unknown"),
        ("figure=x", "did you mean figures"),
    ],
)
def test_a_wrong_argument_names_the_known_ones(argument: str, words: str) -> None:
    with pytest.raises(SystemExit, match=words):
        main(["kernels", argument])


def test_slowest_regime_of_the_timeline_comes_first() -> None:
    figure = records_figures.timeline(ROWS["hopb"][:-3:-1])  # HOP-B on, which was recorded first here, below HOP-B off
    assert [panel.get_title(loc="left") for panel in figure.axes] == ["HOP-B: off", "HOP-B: on"]
    texts = [[text.get_text() for text in panel.texts] for panel in figure.axes]
    assert "12.8 us" in texts[0] and "9.2 us" in texts[1] and "saves 3.6 us" in texts[1]
    plt.close(figure)
