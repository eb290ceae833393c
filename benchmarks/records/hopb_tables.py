"""Tables of HOP-B: steps with and without it, and the paper's ablation (its figure 7) compared with ours."""

from __future__ import annotations

from benchmarks.ranks.hopb import PEER_MEMORY
from benchmarks.records.columns import Cells
from benchmarks.records.rows import Row, grouped, kv, results

RECORDS = {"hopb": "", "hopb.emulated-8": "8 emulated ranks", "hopb.emulated-16": "16 emulated ranks"}
POINT = ("backend", "model", "link", "layout", "batch", "length", "chunks", "regime")
HALF = 0.5  # of the fastest speed: the range of the simulated losses


def timed(name: str) -> list[Row]:
    """Reads the newest timed steps of each point; fills in layout and link, which older lines lack."""
    kvp = {"hopb": 4}.get(name, 8)
    unsaid = {"link": PEER_MEMORY, "layout": f"helix kvp={kvp} tpa=1 -> tpf={kvp} ep=1"}
    return [unsaid | row | {"older": "link" not in row} for row in results(name, *POINT, kind="ttl")]


def chunks() -> list[Row]:
    """Returns the first model's steps without HOP-B, and with its best chunk count, over both backends."""
    ttl = [row for row in timed("hopb") if row["model"] == "qwen2.5-7b" and row["older"]]
    rows = []
    for point in dict.fromkeys((r["batch"], r["length"]) for r in ttl):
        row: Row = dict(zip(("batch", "length"), point, strict=True))
        for name, backend in (("symm", "symm_mem"), ("nccl", "nccl")):
            same = [r for r in ttl if (r["backend"], r["batch"], r["length"]) == (backend, *point)]
            row |= {f"{name}_off": same[0]["off_us"], f"{name}_on": min(r["on_us"] for r in same)}
        rows.append(row)
    return rows


def links() -> list[Row]:
    """Returns the steps of every model, grid and link."""
    return [row for name in RECORDS for row in timed(name) if not row["older"]]


def ablation() -> Cells:
    """Tabulates the loss without HOP-B: in the paper (its figure 7), simulated, and at most measured on each link."""
    table = [["model", "where", "lost without HOP-B, at most", "there", "share hidden", "lost by auto, at most"]]
    for (model,), rows in grouped(
        results("simulate", "model", "exchange", kind="hopb-lost", speed=HALF), "model"
    ).items():
        table.append([model, "paper, GB200", f"{rows[0]['paper']:.0%}", "1M", "-", "-"])
        for row in rows:
            where = f"simulated, GB200, exchange {row['exchange']}"
            table.append([model, where, f"{row['fixed']:.1%}", row["at"], "-", "-"])
        for name, ranks in RECORDS.items():
            ours = [row for row in timed(name) if row["model"] == model and not row["older"]]
            for link, backend in dict.fromkeys((row["link"], row["backend"]) for row in ours):
                link_rows = [row for row in ours if (row["link"], row["backend"]) == (link, backend)]
                where = ", ".join(filter(None, ("measured", ranks, link, backend)))
                table.append([model, where, *_largest_loss(link_rows)])
    return table


def _largest_loss(rows: list[Row]) -> list[str]:
    best = min(rows, key=lambda row: float(row["on_us"] / row["off_us"]))
    lost = 1 - best["on_us"] / best["off_us"]
    auto = max(row["auto_us"] / row["off_us"] - 1 for row in rows)
    there = f"{kv(best)}, {best['layout']}, {best['chunks']} chunks"
    return [f"{lost:.1%}", there, f"{best['hidden']:.0%}", f"{max(auto, 0.0):.1%}"]
