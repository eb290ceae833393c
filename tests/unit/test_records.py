"""Tables and figures of records: expressions of columns, rows that stand beside each other, what is drawn, and read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure

from benchmarks.models.speculate import with_gains
from benchmarks.ranks.hopb import PEER_MEMORY
from benchmarks.records import draft_gains, figures, pareto, rows, style
from benchmarks.records.declared import cells, columns_of, declared, render_cell
from benchmarks.records.declared import rows_of as rows_of_table
from benchmarks.records.figures import DRAWINGS, footer, main, rows_of
from benchmarks.records.rows import newest
from benchmarks.records.step_tables import largest_batch
from benchmarks.records.tables import TABLES, shorten_table
from launch.inputs.compose import ROOT
from tests.figure_legibility import illegible

Row = dict[str, Any]
Records = dict[str, list[Row]]
Plant = Callable[[Records], None]
K, M = 1 << 10, 1 << 20
H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Puts records in place of those that are kept."""
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    for module in (rows, draft_gains):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    draft_gains.accepted.cache_clear()

    def write(records: Records) -> None:
        for name, of in records.items():
            (results / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of))

    return write


# ---- columns


@pytest.mark.parametrize(
    "template, row, wanted",
    [
        ("us:us", {"us": 1234.56}, "1,234.6 us"),
        ("ttl_us:ms", {"ttl_us": 1250.0}, "1.25 ms"),
        ("n:K", {"n": 8192}, "8K"),
        ("KV", {"batch": 8, "length": M}, "8 x 1M"),
        ("{a / b:.2f} x of {', '.join(['{', '}:'])}", {"a": 3, "b": 2}, "1.50 x of {, }:"),
        ("{'none' if x != 1 else 'one'}", {"x": 1}, "one"),
        ("each(shares, '.1f')", {"shares": [0.5, 0.25]}, "0.5 0.2"),
        ("""{'a' if x else "b's: "}""", {"x": 0}, "b's: "),
        ("us:us", {}, None),
        ("us:us", {"us": None}, None),
        ("us / 2:us", {"us": None}, None),
        ("of['x']:us", {"of": {}}, None),
        ("any", {"any": "a field, whatever Python calls so"}, "a field, whatever Python calls so"),
    ],
)
def test_a_column_says(template: str, row: Row, wanted: str | None) -> None:
    assert render_cell(template, row) == wanted


def test_a_mistake_in_a_column_is_no_dash() -> None:
    with pytest.raises(TypeError):
        render_cell("us + 'x'", {"us": 1.0})


def test_every_column_is_of_fields_that_records_have() -> None:
    """A misspelt one would be all dashes."""
    for name, table in declared().items():
        if table.keys() & {"record", "rows"} and "columns" in table and "across" not in table:
            head, *lines = cells(columns_of(table), rows_of_table(table))
            empty = [title for title, *column in zip(head, *lines, strict=True) if {*column} <= {"-", ""}]
            assert not empty, name


def test_long_tables_of_a_page_have_eight_rows() -> None:
    table = ["| n |", "|---|", *(f"| {n} |" for n in range(15)), "", "Rows of 2 commits: a, b."]
    shown = [f"| {n} |" for n in (0, 2, 4, 6, 8, 10, 12, 14)]
    assert shorten_table("x", table) == [*table[:2], *shown, "", "8 of 15 rows; all: `helix tables x`", *table[-2:]]
    assert shorten_table("x", table[:14]) == table[:14]


# ---- tables of planted records

STEP = {"model": "qwen2.5-7b", "batch": 1, "length": M, "layout": "helix kvp=2 tpa=4 -> tpf=8 ep=1"}
R1 = {"model": "deepseek-r1", "batch": 1, "length": M, "weights": "fp8", "floor_us": 2000.0, "vllm_ms": None}
R1 |= {"used_bytes_per_gpu": [98e9, 99e9], "bar": None}
# The ideal counts products where these outlast reading: over 2^20 latents, 128 heads take 52.14 us in each of 61
# layers at 700 TFLOP/s, and reading takes 32.19 us.
WHOLE = [
    R1 | {"layout": "helix kvp=8 tpa=1 -> tpf=8 ep=1", "ttl_p50_us": 5000.0},
    R1 | {"layout": "helix kvp=8 tpa=1 -> tpf=1 ep=8", "ttl_p50_us": 6000.0},
    R1 | {"layout": "tp kvp=1 tpa=8 -> tpf=8 ep=1", "failed": "no room"},
    R1 | {"layout": "dp dp=8 -> tpf=1 ep=8", "ttl_p50_us": 7000.0, "commit": "another"},
]
IN_BF16 = {**WHOLE[0], "weights": None, "layers": 44, "ttl_p50_us": 1.0}  # of the same workload, and none of them
LATENTS = {"model": "deepseek-v2-lite", "batch": 1, "length": M}
HELIX, TP = "helix kvp=8 tpa=1 -> tpf=8 ep=1", "tp kvp=1 tpa=8 -> tpf=8 ep=1"
OFFLINE_LOAD = {"gpus": 1, "requests": 8, "length": 1 << 15, "new": 128}
BALANCE = OFFLINE_LOAD | {"engine": "helix", "goal": "balance"}
SPECULATED = {
    "kind": "synthetic", "model": "a-7b", "layout": "helix kvp=2 tpa=2 -> tpf=4 ep=1", "batch": 2, "length": 64,
    "speculation": None,
}  # fmt: skip
PARTS_US = {"_linear_kernel": 30.0, "_replay_kernel": 10.0}


def speculated(gamma: int, ttl_us: float, tokens: float) -> Row:
    rate = {"tokens_per_step": tokens, "tokens_per_s_user": 1e6 * tokens / ttl_us, "kernel_us": PARTS_US}
    return SPECULATED | {"gamma": gamma, "ttl_p50_us": ttl_us, "ttl_p90_us": 1.5 * ttl_us} | rate


def hopb(model: str, link: str | None, chunks: int, on_us: float, auto_us: float = 1000.0) -> Row:
    found = {
        "kind": "ttl", "model": model, "backend": "nccl", "layout": "helix kvp=8 tpa=1", "batch": 64, "length": 32768,
        "chunks": chunks, "off_us": 1000.0, "on_us": on_us, "without_us": 800.0, "exchange_us": 200.0, "layers": 3,
        "hidden": (1000.0 - on_us) / 200.0, "auto_us": auto_us, "auto_chunks": chunks,
    }  # fmt: skip
    return found if link is None else found | {"link": link}


def kept(task: str, counts: list[int], **options: Any) -> Row:
    row = {"model": "demo-model", "length": 8192, "task": task, "policy": "any", "gamma": len(counts), "iterations": 10}
    return row | {"accepted": counts, "sparsity": 0.07, "reach": 8, "temperature": 0.0} | options


def drafter_job(commit: str, drafter: str, plain_us: float, us: float) -> list[Row]:
    own = {"kind": "drafters", "model": "demo", "layout": "x", "batch": 4, "length": 8192, "gamma": 0}
    own |= {"commit": commit, "drafter": drafter}
    long = own | {"length": M, "failed": "no room"}
    return [own | {"ttl_p50_us": plain_us}, own | {"gamma": 2, "ttl_p50_us": us}, long]


LAYER = {"kind": "layer-drafts", "model": "glm-4.6", "layers": 92, "layout": "helix", "drafter": "mtp", "batch": 1}
LAYER |= {"length": 1 << 17, "gamma": 3, "ttl_p50_us": 1250.0, "step_over_plain": 1.25, "gain_published": None}
SLOW = "host memory"
PLANTED: dict[str, tuple[Records, list[str]]] = {
    # Rows of another model, and newer, change nothing of a model's.
    "throughput.1gpu": (
        {
            "throughput": [
                OFFLINE_LOAD | {"engine": "vllm 0.25.1", "goal": None, "model": "a", "seconds": 4.0},
                BALANCE | {"model": "a", "seconds": 5.0},
                BALANCE | {"model": "b", "seconds": 9.0},
            ]
        },
        ["| 8 x 32K, 128 | 4.00 s | - | - | 5.00 s | 1.25 |"],
    ),
    "emulated-eight": (
        {
            "step": [STEP | {"commit": "new", "ttl_p50_us": 1000.0}],
            "step.emulated-8": [STEP | {"commit": c, "ttl_p50_us": us} for c, us in (("old", 1500.0), ("new", 990.0))],
            "baselines.emulated-8": [STEP | {"commit": "older", "ttl_p50_us": 2000.0}],
        },
        ["| qwen2.5-7b | 1 x 1M | helix kvp=2 tpa=4 | 1.00 ms | 0.99 ms | -1.0% |"],
    ),
    "whole": (
        {"fp8-steps": WHOLE, "step": [IN_BF16]},
        [
            "| deepseek-r1, FP8 | 1 x 1M | kvp=8 tpa=1 tpf=8 ep=1 | 5.00 ms | 3.22 ms | 1.55 | does not fit "
            "| 7.00 ms ‡ | 99 GB |"
        ],
    ),
    "headline": (
        {"fp8-steps": WHOLE, "step": [IN_BF16]},
        ["| deepseek-r1, FP8 | 1 latent | 8 | 1 x 1M | 5.00 ms | does not fit | - |"],
    ),
    "headline, planned": (
        {"fp8-steps": WHOLE[:1], "step": []},
        ["| deepseek-r1, FP8 | 1 latent | 8 | 1 x 1M | 5.00 ms | does not fit, planned | - |"],
    ),
    "over-emulated": (
        {
            "baselines.emulated-8": [
                LATENTS | {"layout": layout, **(of if isinstance(of, dict) else {"ttl_p50_us": of})}
                for layout, of in ((HELIX, 1000.0), (TP, 4000.0), ("medha kvp=8 tpa=1", {"failed": "no room"}))
            ]
        },
        ["| deepseek-v2-lite | 1 latent | does not fit | 4.00 | does not fit | does not fit |"],
    ),
    # The newest commit that has both counts, not the newest of each.
    "over-tp": (
        {
            "step": [
                LATENTS | {"commit": "old", "layout": HELIX, "ttl_p50_us": 2000.0},
                LATENTS | {"commit": "new", "layout": HELIX, "ttl_p50_us": 1000.0},
                LATENTS | {"commit": "old", "layout": TP, "ttl_p50_us": 8000.0},
                LATENTS | {"batch": 8, "commit": "old", "layout": HELIX, "ttl_p50_us": 9000.0},
                LATENTS | {"batch": 8, "commit": "old", "layout": TP, "failed": "no room"},
            ]
        },
        [
            "| 1 x 128K | - | - | - | - |",
            "| 1 x 1M | - | - | 4.00 | - |",
            "| 8 x 128K | - | - | - | - |",
            "| 8 x 1M | - | - | plain TP does not fit | - |",
        ],
    ),
    "speculate": (
        {
            "speculate": [
                *with_gains([speculated(0, 1000.0, 1.0), speculated(2, 1250.0, 2.0)], 0.5),
                SPECULATED | {"batch": 4, "gamma": 0, "failed": "no room"},
            ]
        },
        [
            "| a-7b | 2 x 64 | 0 | 1.00 ms (1.50) | 1.00 | 1000.0 | 1.00 | 1.00 | 25.0% | 0.0% | 0.0% | 75.0% | 0.0% "
            "| 0.0% | 0.0% |",
            "| a-7b | 2 x 64 | 2 | 1.25 ms (1.88) | 2.00 | 1600.0 | 1.60 | 1.40 | 25.0% | 0.0% | 0.0% | 75.0% | 0.0% "
            "| 0.0% | 0.0% |",
            "| a-7b | 4 x 64 | 0 | does not fit | | | | | | | | | | | |",
        ],
    ),
    "layer-drafts": (
        {
            "layer-drafts": [
                LAYER | {"phase_us": {"draft": 100.0, "verify": 1100.0, "accept": 10.0, "choose": 40.0}},
                LAYER | {"layers": 12, "phase_us": {}},
            ]
        },
        ["| glm-4.6 | 1 x 128K | mtp | 3 | 1.25 ms | 1.10 ms | 0.10 ms | 0.05 ms | 1.25 x | - |"],
    ),
    # Each commit has a line, with gains over its own plain step; a point that does not fit has one line.
    "drafters": (
        {
            "acceptance": [kept("code", [10, 10]), kept("code", [10, 10], policy="quest")],
            "drafters": [*drafter_job("old", "any", 1000.0, 2000.0), *drafter_job("new", "quest", 1500.0, 2000.0)],
        },
        [
            "| demo | 4 x 8K | old | 1.00 ms | 1.50 x (2) | - | - | - | - |",
            "| demo | 4 x 8K | new | 1.50 ms | - | - | - | 2.25 x (2) | - |",
            "| demo | 4 x 1M | - | does not fit | - | - | - | - | - |",
        ],
    ),
    "hopb": (
        {"hopb": [hopb("qwen2.5-7b", None, 2, 1100.0), hopb("llama-3.1-405b", SLOW, 2, 950.0)]},
        ["| nccl | 64 x 32K | 2 | 1,000 us | 1,100 us | 800 us | -50% | 1,000 us |"],
    ),
    "hopb-ablation": (
        {
            "hopb": [hopb("llama-3.1-405b", SLOW, 2, 950.0)],
            "hopb.emulated-8": [
                hopb("llama-3.1-405b", SLOW, 2, 930.0, 925.0),
                hopb("llama-3.1-405b", SLOW, 4, 880.0, 1004.0),
                hopb("llama-3.1-405b", PEER_MEMORY, 2, 1010.0),
            ],
            "simulate": [
                {
                    "kind": "hopb-lost",
                    "model": "llama-3.1-405b",
                    "exchange": "serial",
                    "speed": speed,
                    "paper": 0.12,
                    "fixed": speed / 2,
                    "at": "x",
                }
                for speed in (0.8, 0.5)
            ],
        },
        [
            "| llama-3.1-405b | paper, GB200 | 12% | 1M | - | - |",
            "| llama-3.1-405b | simulated, GB200, exchange serial | 25.0% | x | - | - |",
            *(
                f"| llama-3.1-405b | measured, {where} | {lost} | 64 x 32K, helix kvp=8 tpa=1, {rest} |"
                for where, lost, rest in (
                    (f"{SLOW}, nccl", "5.0%", "2 chunks | 25% | 0.0%"),
                    (f"8 emulated ranks, {SLOW}, nccl", "12.0%", "4 chunks | 60% | 0.4%"),
                    (f"8 emulated ranks, {PEER_MEMORY}, nccl", "-1.0%", "2 chunks | -5% | 0.0%"),
                )
            ),
        ],
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_rows_stand_beside_those_that_they_compare_with(name: str, plant: Plant) -> None:
    records, wanted = PLANTED[name]
    plant(records)
    lines = [line for line in TABLES[name.split(",")[0]]()[2:] if line.startswith("|")]
    assert lines == wanted


def test_a_table_says_of_which_commits_its_rows_are(plant: Plant) -> None:
    points = [{"kind": "fetch", "pieces": n, "us": 1.0, "gbs": 2.0, "commit": commit} for n, commit in enumerate("aab")]
    plant({"offload-steps": points})
    assert TABLES["offload-fetch"]()[-2:] == ["", "Rows of 2 commits: a, b."]
    plant({"offload-steps": points[:2]})
    assert TABLES["offload-fetch"]()[-1].startswith("| 1 |")
    plant({"offload-steps": []})
    assert TABLES["offload-fetch"]() == [], "without a record there is no table"


def test_the_largest_batch_is_a_measured_one_within_the_budget() -> None:
    of = [{"batch": 1, "ttl_p50_us": 5.0}, {"batch": 8, "ttl_p50_us": 9.0}, {"batch": 32, "failed": "does not fit"}]
    assert [largest_batch(of, budget) for budget in (4.9, 5.0, 8.0, 100.0)] == [None, 1, 1, 8]


# ---- gains by acceptance, and Pareto fronts


def test_tokens_of_an_iteration_are_measured_ones(plant: Plant) -> None:
    """They are those of the latest record of the drafter as it ships, with as many drafts or more."""
    few, more = kept("copy", [8]), kept("copy", [5, 5], reach=0)
    plant(
        {"acceptance": [kept("code", [1, 1, 1]), kept("code", [9, 6, 3]), few, more, kept("facts", [5, 4], policy="x")]}
    )
    assert draft_gains.accepted("any", 2) == {"demo-model 8K code": 2.5}
    assert draft_gains.accepted("any", 1) == {"demo-model 8K code": 1.9, "demo-model 8K copy": 1.8}
    assert draft_gains.accepted("any", 4) == {}


def test_a_gain_is_of_plain_steps_at_the_same_point(plant: Plant) -> None:
    plant({"acceptance": [kept("code", [10, 10]), kept("code", [5, 5], length=16384)]})
    plain = {"batch": 4, "length": 99, "gamma": 0, "ttl_p50_us": 10.0, "drafter": "any"}
    row, other = plain | {"gamma": 2, "ttl_p50_us": 20.0}, plain | {"batch": 1, "ttl_p50_us": 1.0}
    found = draft_gains.gains(row, [other, plain, row])
    assert found == {"step_over_plain": 2.0, "gain": {"demo-model 8K code": 1.5, "demo-model 16K code": 1.0}}
    assert draft_gains.gained(found) == 1.0 and draft_gains.gained(found, task="copy") is None
    with pytest.raises(ValueError, match="99: times of commits b, a are compared"):
        draft_gains.gains(row | {"model": "demo", "commit": "b"}, [plain | {"commit": "a"}])
    failed = plain | {"failed": "no room"}
    assert [draft_gains.gains(r, [failed]) for r in (plain, failed, row)] == [{}] * 3


def test_the_best_number_of_drafts_is_that_of_the_worst_task() -> None:
    same = {"model": "qwen3-8b", "drafter": "any", "batch": 1, "length": 8192}
    few = same | {"gamma": 2, "gain": {"demo-model 8K code": 1.2, "demo-model 8K copy": 1.3, "other 8K copy": 0.1}}
    many = same | {"gamma": 6, "gain": {"demo-model 8K code": 2.0, "demo-model 8K copy": 1.1, "other 8K copy": 0.2}}
    partly = same | {"gamma": 8, "gain": {"demo-model 8K code": 3.0}}  # no record of 8 drafts on copies
    plain = same | {"gamma": 0}
    assert draft_gains.best([few, many, partly, plain]) == [few]
    assert draft_gains.best([few, many, partly, plain], "other") == [many]


def front_rows() -> list[Row]:
    helix, tp = "helix kvp=2 tpa=8 -> tpf=16 ep=1", "tp kvp=1 tpa=16 -> tpf=16 ep=1"
    found = [
        {"model": "llama-3.1-405b", "batch": batch, "length": length, "device": H100, "layout": layout, "commit": "a1",
         "emulated_by": 1, "ttl_p50_us": us, "tokens_per_s_user": 1e6 / us, "tokens_per_s_gpu": batch * 1e6 / us / 16}
        for length in (128 * K, M) for layout, batch, us in ((helix, 1, 8e3), (helix, 8, 18e3), (tp, 1, 9e3))
    ]  # fmt: skip
    return [*found, {**found[-1], "batch": 8, "failed": "no room"}]


def test_measured_points_stand_beside_the_simulated_ones(plant: Plant) -> None:
    plant({"pareto": [row if "failed" not in row else {**row, "ttl_p50_us": None} for row in front_rows()]})
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TABLES["pareto"]()]
    assert len(table) == 2 + 7 and table[-1][4] == "does not fit"
    first = pareto.predicted_us(front_rows()[0])
    assert table[2][5] == f"{first / 1e3:.2f} ms" and table[2][6] == f"{first / 8e3 - 1:+.0%}"
    budgets = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TABLES["pareto-budgets"]()]
    helix_row = next(line for line in budgets if line[1:4] == ["128K", "1 H100", "helix"])
    assert [cell.split()[0] for cell in helix_row[4:]] == ["1", "8", "8"]


# ---- which lines of a record count


@pytest.mark.parametrize(
    "older, newer, options, wrong",
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
    tmp_path: Path, older: Row, newer: Row, options: Row, wrong: str | None
) -> None:
    """Or a table would show one for the other; what a run yields may differ, and then the newest counts."""
    (path := tmp_path / "r.jsonl").write_text("".join(json.dumps({"batch": 1, **of}) + "\n" for of in (older, newer)))
    if wrong is None:
        assert newest(path, "batch", **options) == [{"batch": 1, **newer}]
    else:
        with pytest.raises(ValueError, match=re.escape(f"r.jsonl: lines of batch=1 {wrong}")):
            newest(path, "batch", **options)


# ---- figures

RECORDED = [name for name in DRAWINGS if rows_of(name, ROOT / "benchmarks" / "results")]


@pytest.mark.parametrize("name", RECORDED)
def test_every_figure_can_be_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page shows: drawn from the kept records."""
    plotted: list[Figure] = []
    monkeypatch.setattr(style.plt, "close", plotted.append)
    main([name, f"figures={tmp_path}"])
    monkeypatch.undo()
    (png,) = tmp_path.iterdir()
    height, width, _ = plt.imread(png).shape
    assert png.name == f"{name}.png" and width <= 1500 and height <= 1500
    assert not illegible(plotted[0])
    assert any("better" in f"{panel.get_xlabel()} {panel.get_ylabel()}" for panel in plotted[0].axes)
    plt.close(plotted[0])


def test_a_page_says_under_its_figures_what_is_better() -> None:
    images = re.compile(r"(?:^!\[.*figures/.*\.png\)\n)+\n(.*(?:\n.+)*)", re.M)
    captions = [text for page in (ROOT / "docs").rglob("*.md") for text in images.findall(page.read_text())]
    assert len(captions) >= len(RECORDED)
    assert [text for text in captions if not re.search(r"[Ff]igures? .*(?:is|are)\s+better", text, re.S)] == []


def test_what_cannot_be_read_is_found() -> None:
    figure, axes = style.panels(1)
    style.legend(figure, [{"label": "a line"}])
    assert not illegible(figure)
    axes[0, 0].text(0.5, 0.5, "small", fontsize=style.TEXT - 1)
    axes[0, 0].text(0.1, 0.1, "one over")
    axes[0, 0].text(0.11, 0.11, "another")
    figure.text(0.99, 0.5, "past the right edge")
    problems = " ".join(illegible(figure))
    assert all(word in problems for word in ("small: 8", "one over, another: overlap", "past the right edge"))
    plt.close(figure)


GRIDS = [
    {"model": "qwen3-30b-a3b", "batch": batch, "length": M, "layout": f"helix kvp=4 tpa=2 -> tpf={8 // ep} ep={ep}",
     "ttl_p50_us": 700.0 + ep}
    for batch in (1, 8) for ep in (1, 2, 8)
]  # fmt: skip
GAINED = [
    {"model": "a-70b", "acceptance": 0.8, "batch": 1, "length": 8 * K, "gamma": gamma, "gain": 1.1 + gamma / 9,
     "gain_at_rate": 1 + gamma / 8, "tokens_per_s_user": 70.0 + gamma}
    for gamma in (0, 1, 4)
] + [{"model": "a-70b", "batch": 1, "length": 8 * K, "gamma": 7, "failed": "no room", "acceptance": 0.8}]  # fmt: skip
NEEDLES = [
    {"kvp": kvp, "haystack": "code", "length": 8 * K, "policy": policy, "keys": keys, "distant": 16,
     "distant_hits": hits}
    for kvp, policy, keys, hits in (
        (1, "dense", None, 16), (1, "bounds-8", 1664, 12), (1, "bounds-32", 4736, 16), (1, "mean-8", 1664, 4),
        (1, "window-640", 640, 0), (1, "quest-64", 1552, 15), (1, "int8-32", 4736, 1), (8, "bounds-8", 1664, 0),
    )
]  # fmt: skip
RECALL = [
    {"length": 8 * K, "page": 128, "score": score, "budgets": [512, 4096], "recall": [0.5, 0.75], "mass": [0.9, 1.0]}
    for score in ("bounds", "best", "pairs")
]
BASELINES = [
    {"model": f"m{i}", "batch": batch, "length": K, "layout": layout, "tokens_per_s_user": user,
     "tokens_per_s_gpu": 9.0}
    for i in range(6) for batch in (1, 8)[: 1 + (i > 1)]
    for layout, user in (("helix kvp=2 tpa=4", 100.0), ("helix kvp=8 tpa=1", 110.0), ("tp kvp=1 tpa=8", 120.0))
]  # fmt: skip


@pytest.mark.parametrize(
    "draw, rows, panel, lines",
    [
        (figures.grids, GRIDS, 0, [[(1, 1.0), (2, 702 / 701), (8, 708 / 701)]] * 2),
        (
            figures.speculate,
            GAINED,
            0,
            [[(0, 1), (1, 1.125), (4, 1.5)], [(0, 1.1), (1, 1.1 + 1 / 9), (4, 1.1 + 4 / 9)]],
        ),
        (figures.speculate, GAINED, 1, [[(0, 70.0), (1, 71.0), (4, 74.0)]]),
        (figures.needles, NEEDLES, 0, [[(1664, 0.75), (4736, 1.0)], [(1664, 0.25)], [(1552, 0.9375)], [(640, 0.0)]]),
        (figures.recall, RECALL, 0, [[(512, 0.5), (4096, 0.75)]]),  # those of the best are all found
        (figures.recall, RECALL, 1, [[(512, 0.9), (4096, 1.0)]] * 2),
        (figures.baselines, BASELINES, 0, [[(110.0, 9.0)] * 2, [(120.0, 9.0)] * 2]),  # m0 and m1 have fewest points
    ],
)
def test_lines_are_those_of_the_rows(
    draw: Callable[[list[Row]], Figure], rows: list[Row], panel: int, lines: Any
) -> None:
    figure = draw([dict(row) for row in rows])
    own = [line for line in figure.axes[panel].get_lines() if line.get_transform() == figure.axes[panel].transData]
    assert [points for line in own if (points := [*zip(*line.get_data(), strict=True)])] == lines
    plt.close(figure)


def test_the_foot_says_what_was_emulated() -> None:
    row = {"device": "NVIDIA H200", "commit": "a1"}
    assert footer([row, {**row, "commit": "b2"}]) == "measured on NVIDIA H200, commits a1, b2"
    assert footer([{**row, "emulated_by": 2}]) == "emulated on 2 x NVIDIA H200, commit a1"


@pytest.mark.parametrize(
    "argument, words", [("kernel", "kernel is unknown; known: kernels, "), ("figure=x", "did you mean figures")]
)
def test_a_wrong_argument_names_the_known_ones(argument: str, words: str) -> None:
    with pytest.raises(SystemExit, match=words):
        main(["kernels", argument])
