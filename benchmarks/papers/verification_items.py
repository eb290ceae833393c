"""Batched Speculative Decoding Verification Kernels (Kolawole, CMU, 2026): its items compared with our records."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.papers.items import NOT_RECORDED, Item, Table, filled_items, span
from benchmarks.papers.verification_figures import KEY, WORST, Records, tables
from benchmarks.records.columns import page
from benchmarks.records.rows import results
from benchmarks.records.tables import TABLES

BENCH = "helix bench verify"
OTHERS = "one_block", "two_step", "two_step_torch", "torch"  # kernels to compare with fused


def records() -> Records:
    """Reads what `helix bench verify` recorded."""
    return Records(results("verify", *KEY))


def _of(kind: str, *point: Any) -> Callable[..., str]:
    """The record's time in us at a point, or the ratio of two."""

    def cell(name: str, over: str | None = None) -> str:
        row = records().us(kind, *point)
        if over is None:
            return f"{row.get(name, 0):.1f}"
        return f"{row[name] / row[over]:.2f} x" if name in row and over in row else NOT_RECORDED

    return cell


def _over(kind: str, name: str, over: str, form: str = ".2f", maximum: float = math.inf, **fields: object) -> str:
    """Ratios of two times, over rows that have both and at most `maximum` sequences."""
    rows = [r for r in records().of(kind, **fields) if {name, over} <= r.keys() and r["batch"] <= maximum]
    return span([r[name] / r[over] for r in rows], form, "x")


def _scans(name: str, maximum: float = math.inf) -> str:
    """Times of a kernel with at most `maximum` drafts."""
    return span([r[name] for r in records().of("scan") if name in r and r["gamma"] <= maximum], ".1f", "us")


def _slope(name: str, gamma: int) -> str:
    low, high = (records().us("scan", 32, gamma, alpha).get(f"{name}_graph_us") for alpha in (0.3, 0.9))
    return NOT_RECORDED if low is None or high is None else f"{high - low:+.1f} us"


def _rate() -> str:
    wide = records().us("pack", *WORST, 2048)
    return f"{2 * wide['packed_bytes'] / wide['fused_graph_us'] / 1e6:.1f} TB/s" if wide else NOT_RECORDED


def _rows(kind: str, above: int = 0) -> str:
    return str(sum(r["batch"] > above for r in records().of(kind)))


def _largest() -> str:
    return str(max((r["batch"] for r in records().of("pack")), default=0))


def _lost() -> str:
    """Rows in which another kernel beats fused, over all batches: in a graph, and launched from Python."""
    parts = []
    for how, suffix in (("in a graph", "_graph_us"), ("launched from Python", "_us")):
        rows = [[r[n + suffix] / r["fused" + suffix] for n in OTHERS if n + suffix in r] for r in records().of("pack")]
        ratios = [min(row) for row in rows if row]
        if ratios:
            num_slower = sum(ratio < 1 for ratio in ratios)
            parts.append(
                f"{how} slower than another kernel in {num_slower} of {len(ratios)} rows, at worst {min(ratios):.2f} x"
            )
    return "; ".join(parts) or NOT_RECORDED


def _dispatched() -> str:
    """Time of the dispatcher over fused: below 1, the dispatcher is faster."""
    parts = []
    for how, suffix in (("in a graph", "_graph_us"), ("launched from Python", "_us")):
        rows = [r for r in records().of("pack") if "dispatcher" + suffix in r]
        ratios = [r["dispatcher" + suffix] / r["fused" + suffix] for r in rows]
        faster = f", faster in {sum(ratio < 1 for ratio in ratios)} of {len(ratios)} rows" if ratios else ""
        parts.append(f"{how} {span(ratios, '.2f', 'x')}{faster}")
    return f"dispatcher over fused {'; '.join(parts)}"


def _launch() -> str:
    """Time of a launch from Python: a short kernel's, less its time in a graph."""
    row = records().us("scan", *WORST)
    return (
        f"{row['scan_us'] - row['scan_graph_us']:.1f} us"
        if {"scan_us", "scan_graph_us"} <= row.keys()
        else NOT_RECORDED
    )


def _commit() -> str:
    rows = [r for r in results("accept", "mode", "rows", "drafts", "columns") if (r["rows"], r["drafts"]) == (8, 8)]
    parts = span([r["us"] for r in rows if r["mode"] == "greedy"], ".1f", "us")
    return f"from logits to tokens, 8 sequences of 8 drafts: {parts}"


FIGURES: dict[str, Callable[..., str]] = {
    "alone": _of("pack_alone", *WORST, 2048),
    "commit": _commit,
    "dispatched": _dispatched,
    "eight": partial(_over, "pack", "two_step_torch_us", "fused_us", ".1f", 32, gamma=8),
    "largest": _largest,
    "launch": _launch,
    "lost": _lost,
    "over": _over,
    "packs": partial(_over, "pack_alone", "pack_us", "pack_torch_us", alpha=0.9),
    "rate": _rate,
    "rows": _rows,
    "scans": _scans,
    "slope": _slope,
    "small": _of("scan", 32, 8, 0.9),
    "wide": _of("pack", *WORST, 2048),
    "waits": partial(_over, "pack_alone", "pack_waiting_us", "pack_torch_us", alpha=0.9),
    "worst": _of("scan", *WORST),
}


def items() -> list[Item]:
    """Lists the paper's items in order."""
    return filled_items("verification", FIGURES)


def tabled() -> dict[str, Table]:
    """Lists the reprinted tables."""
    found = tables(records())
    return {f"table {name}": Table(BENCH, partial(page, cells)) for name, cells in found.items()} | {
        "verify": Table(BENCH, TABLES["verify"])
    }
