"""Tables of HOP-B: steps with it and without it, and the paper's ablation (its figure 7) beside ours."""

from __future__ import annotations

import csv
from collections.abc import Callable
from functools import partial

from benchmarks.ranks.hopb import PEER_MEMORY
from benchmarks.records.columns import Columns, at, lines, page, share, us
from benchmarks.records.rows import Row, grouped, kv, results, shape
from launch.inputs.compose import ROOT

RECORDS = {"hopb": "", "hopb.emulated-8": "8 emulated ranks", "hopb.emulated-16": "16 emulated ranks"}
FIRST = "qwen2.5-7b"  # the model that every machine's first record has
POINT = ("backend", "model", "link", "layout", "batch", "length", "chunks", "regime")
SIMULATED = ROOT / "benchmarks" / "results" / "simulate" / "hopb-lost.csv"


def timed(name: str) -> list[Row]:
    """Timed steps of a record, the newest of each point; older lines do not say their layout and link."""
    kvp = {"hopb": 4}.get(name, 8)
    unsaid = {"link": PEER_MEMORY, "layout": f"helix kvp={kvp} tpa=1 -> tpf={kvp} ep=1"}
    return [unsaid | row | {"older": "link" not in row} for row in results(name, *POINT, kind="ttl")]


def hopb(name: str = "hopb") -> list[str]:
    """Steps of the first model with HOP-B and without it."""
    columns: Columns = {
        "backend": at("backend"),
        "KV": kv,
        "chunks": at("chunks"),
        "off": us("off_us", 0),
        "on": us("on_us", 0),
        "without the exchange": us("without_us", 0),
        "share hidden": share("hidden"),
        "auto": us("auto_us", 0),
    }
    return lines(columns, [row for row in timed(name) if _is_first(row)])


def chunks() -> list[str]:
    """The best of HOP-B's chunk counts beside none, over both backends."""
    ttl = [row for row in timed("hopb") if _is_first(row)]
    table = [["KV"]]
    for name in ("own kernels", "NCCL"):
        table[0] += [f"{name}: no chunks", "best chunks", "difference"]
    for point in dict.fromkeys(kv(r) for r in ttl):
        line = [point]
        for backend in ("symm_mem", "nccl"):
            same = [r for r in ttl if r["backend"] == backend and kv(r) == point]
            off, on = same[0]["off_us"], min(r["on_us"] for r in same)
            line += [f"{off:.0f} us", f"{on:.0f} us", f"{on / off - 1:+.1%}"]
        table.append(line)
    return page(table)


def _is_first(row: Row) -> bool:
    return bool(row["model"] == FIRST and row["older"])  # four GPUs, and eight emulated ranks


def links() -> list[str]:
    """Steps of every model, grid and link."""
    columns: Columns = {
        "model": shape,
        "grid": at("layout"),
        "over": at("link"),
        "backend": at("backend"),
        "KV": kv,
        "chunks": at("chunks"),
        "off": us("off_us", 0),
        "on": us("on_us", 0),
        "exchanges alone": us("exchange_us", 0),
        "share hidden": share("hidden"),
        "auto": us("auto_us", 0),
    }
    return lines(columns, [row for name in RECORDS for row in timed(name) if not row["older"]])


def ablation() -> list[str]:
    """Lists the loss without HOP-B: in the paper (its figure 7), as simulated, and at most as measured on each link."""
    table = [["model", "where", "lost without HOP-B, at most", "there", "share hidden", "lost by auto, at most"]]
    with SIMULATED.open(encoding="utf-8") as file:
        simulated = grouped(csv.DictReader(file), "model")
    for (model,), rows in simulated.items():
        table.append([model, "paper, GB200", f"{float(rows[0]['paper']):.0%}", "1M", "-", "-"])
        for row in rows:
            where = f"simulated, GB200, exchange {row['exchange']}"
            table.append([model, where, f"{float(row['fixed']):.1%}", row["at"], "-", "-"])
        for name, ranks in RECORDS.items():
            ours = [row for row in timed(name) if row["model"] == model and not row["older"]]
            for link, backend in dict.fromkeys((row["link"], row["backend"]) for row in ours):
                of_link = [row for row in ours if (row["link"], row["backend"]) == (link, backend)]
                where = ", ".join(filter(None, ("measured", ranks, link, backend)))
                table.append([model, where, *_most(of_link)])
    return page(table)


def _most(rows: list[Row]) -> list[str]:
    best = min(rows, key=lambda row: float(row["on_us"] / row["off_us"]))
    lost = 1 - best["on_us"] / best["off_us"]
    auto = max(row["auto_us"] / row["off_us"] - 1 for row in rows)
    there = f"{kv(best)}, {best['layout']}, {best['chunks']} chunks"
    return [f"{lost:.1%}", there, f"{best['hidden']:.0%}", f"{max(auto, 0.0):.1%}"]


PAGE: dict[str, Callable[[], list[str]]] = {
    "chunks": chunks,
    "hopb": hopb,
    "hopb.emulated-8": partial(hopb, "hopb.emulated-8"),
    "hopb-links": links,
    "hopb-ablation": ablation,
}
