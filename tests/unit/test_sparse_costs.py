"""The cost model of block-sparse steps: constants found in steps made with them, tables, the map, the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.constants import MIN_S
from benchmarks.planner import main
from benchmarks.records import sparse_cost_model
from benchmarks.records.recorded_steps import cell_of, read_cells
from benchmarks.records.sparse_cost_model import SparseCostModel, accounts, reads, summary
from helix.planner.points import Sparse

K = 1024
PLANTED = SparseCostModel(4.4e12, 0.7e-3, 0.4e-3, 0.02e-3, 0.5)
ONE, EIGHT = "helix kvp=1 tpa=1 -> tpf=1 ep=1", "helix kvp=2 tpa=4 -> tpf=8 ep=1"
BUDGETS = (None, Sparse(8), Sparse(32))
LENGTHS = (8 * K, 32 * K, 128 * K, 512 * K, 1024 * K)


def row(layout: str, batch: int, length: int, sparse: Sparse | None, seconds: float) -> dict[str, Any]:
    """A row of `benchmarks.bench sparse-steps`."""
    found = {
        "device": "NVIDIA H200", "commit": "a1", "model": "qwen2.5-7b", "layers": 28, "layout": layout, "batch": batch,
        "length": length, "ttl_p50_us": 1e6 * seconds, "sparse": None, "attention": "dense",
    }  # fmt: skip
    if layout == EIGHT:
        found["emulated_by"] = 1
    if sparse is not None:
        of = {"sparse": asdict(sparse), "attention": f"block_sparse, k={sparse.topk}"}
        found |= of | {"blocks_read_per_rank": [float(sparse.blocks(cell_of(found).points.kvp)[0])]}
    return found


def planted(
    costs: SparseCostModel = PLANTED, noise: Callable[[], float] = lambda: 1.0, layout: str = ONE
) -> list[dict[str, Any]]:
    """Rows of all points that fit one GPU, with times made by a cost model."""
    rows = []
    for length in LENGTHS:
        for batch in (1, 2, 4, 8):
            for sparse in BUDGETS if batch * length <= 2048 * K or layout == EIGHT else ():
                made = row(layout, batch, length, sparse, 1.0)
                read = reads(cell_of(made), batch, length, sparse)
                rows.append(made | {"ttl_p50_us": 1e6 * noise() * costs.seconds(read)})
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("layout", [ONE, EIGHT])
def test_planted_constants_are_found(layout: str, tmp_path: Path) -> None:
    found = accounts(read_cells([write(tmp_path / "steps.jsonl", planted(layout=layout))]))
    assert [a.budget for a in found] == ["k=8", "k=32"]
    for a in found:
        assert [*asdict(a.costs).values()] == pytest.approx([*asdict(PLANTED).values()], rel=1e-6)
        assert a.r2() == pytest.approx(1, abs=1e-9) and max(a.errors) < 1e-6 and len(a.errors) > 8
        ours, dense = (PLANTED.seconds(reads(a.dense_cells[0], 4, 128 * K, kind)) for kind in (a.sparse, None))
        assert a.measured[4, 128 * K] == pytest.approx(dense / ours, rel=1e-9)
        free = a.predicted(4, 128 * K, a.without_overhead)
        assert free == pytest.approx((dense - 0.7e-3) / (ours - 0.7e-3), rel=1e-6)
        for batch in (1, 8):
            tokens = a.pays_from(batch)
            assert tokens is not None and a.predicted(batch, tokens) >= 1 > a.predicted(batch, tokens - 1)
    one, more = (found[1].pays_from(batch) for batch in (1, 8))
    assert one is not None and more is not None and one > 3 * more, "more sequences, and it pays earlier"


def test_what_is_held_out_is_not_fitted_on() -> None:
    """Planted: batch 4 and the longest length take a tenth longer."""
    rows = planted()
    for of in rows:
        of["ttl_p50_us"] *= 1.1 if of["batch"] == 4 or of["length"] == 1024 * K else 1.0
    (_, a) = accounts(map(cell_of, rows))
    assert a.errors == pytest.approx([1 - 1 / 1.1] * len(a.errors), rel=1e-6) and "BEYOND" in summary([a])
    assert len(a.errors) == sum(of["sparse"] in (None, asdict(Sparse(32))) for of in rows if of["ttl_p50_us"] and (
        of["batch"] == 4 or of["length"] == 1024 * K
    ))  # fmt: skip
    cheap = accounts(map(cell_of, planted(replace(PLANTED, selection_s=-1e-4))))[1]
    assert cheap.costs.selection_s == MIN_S, "noise makes no price below nothing"
    few = [of for of in rows if of["length"] in LENGTHS[:2] and of["batch"] <= 2]
    (_, a) = accounts(map(cell_of, few))
    assert "held out" not in summary([a]) and a.held_out is None, "nothing would be left to fit on"


# Table 2 of the source: tokens/s on an H100, dense, with 32 blocks, with 8.
H100 = {
    (1, 8 * K): (121.0, 86.2, 101.6), (4, 8 * K): (445.9, 337.1, 397.2), (1, 32 * K): (114.8, 85.6, 100.9),
    (4, 32 * K): (367.9, 336.1, 395.5), (1, 128 * K): (94.5, 84.6, 99.6), (2, 128 * K): (152.0, 169.1, 196.1),
    (4, 128 * K): (221.1, 330.9, 388.7),
}  # fmt: skip


def test_the_bill_of_the_source_comes_out_of_its_table() -> None:
    """Section 9: 3.05 TB/s, 3.2 ms, 1.74 ms (8 blocks), 3.3 ms (32), R² of 0.998 and, with two terms, far less.

    The source counts the embedding as read (1.1 GB, 0.36 ms), which is overhead here.
    """
    rows = [
        row(ONE, *point, sparse, point[0] / rate) | {"device": "NVIDIA H100"}
        for point, rates in H100.items()
        for sparse, rate in zip((None, Sparse(32), Sparse(8)), rates, strict=True)
    ]
    assured, short = accounts(map(cell_of, rows))
    assert short.costs.bytes_per_s == pytest.approx(3.05e12, rel=0.03)
    assert short.costs.overhead_s == pytest.approx(3.2e-3 + 0.36e-3, rel=0.05)
    for a, price in ((short, 1.74e-3), (assured, 3.3e-3)):  # one number there; here the mean over its points
        prices = [a.costs.selection_time(reads(a.sparse_cells[0], *point, a.sparse)) for point in H100]
        assert np.mean(prices) == pytest.approx(price, rel=0.05)
    assert short.r2() > 0.99 and short.r2(short.without_selection) < 0.6


# ---- rows


@pytest.mark.parametrize(
    "change, words",
    [
        ({"blocks_read_per_rank": [64.0]}, r"line 2: a block-sparse step read everything: .*=64 of some 64"),
        ({"blocks_read_per_rank": None}, None),
    ],
)
def test_a_sparse_row_that_read_everything_is_none(change: dict[str, Any], words: str | None, tmp_path: Path) -> None:
    dense, sparse = (row(ONE, 1, 8 * K, kind, 1.0) for kind in BUDGETS[:2])
    changed = {key: value for key, value in (sparse | change).items() if value is not None}
    with pytest.raises(ValueError, match=words or "line 2: not a recorded step: 'blocks_read_per_rank' is missing"):
        read_cells([write(tmp_path / "steps.jsonl", [dense, changed])])
    short = row(ONE, 1, 4 * K, Sparse(32), 1.0) | {"blocks_read_per_rank": [32.0]}  # fewer than are allowed
    assert read_cells([write(tmp_path / "steps.jsonl", [short])])[0].sparse == Sparse(32)


# ---- shown


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    main(["sparse", str(write(tmp_path / "steps.jsonl", planted()))])
    output = capsys.readouterr().out
    assert "finding takes 14.3 us a layer (finding_s), 0.71 a sequence (finding_sequence_s), and goes through" in output
    assert "bounds at 0.50 of the bandwidth (bounds_share); held out: within 3% (median) and 6% (worst)" in output
    assert "projected without overhead" in output and "4.40 TB/s" in output
    monkeypatch.setattr(sparse_cost_model, "RESULTS", tmp_path / "none")
    main(["sparse"])
    assert "nothing to fit: it takes block-sparse steps" in capsys.readouterr().out
