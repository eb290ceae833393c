"""The gates of a paper on block-sparse attention, and our own: each passed or failed by what is recorded.

Source:
    Attention Pays Its Bill (BRL-2026-07): H1 (section 5), GATE-3 (6), the thresholds of 8, H2 and H3 (9).
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.records import sparse_bill
from benchmarks.records.columns import Cells
from benchmarks.records.fidelity_tables import KEY, LONGEST
from benchmarks.records.rows import WORKLOAD, Row, check_commit, results, tokens

K, M = 1 << 10, 1 << 20
MODEL, HEADS = "qwen2.5-7b", "28/4"
PREDICTED = {(1, 8 * K): 1.02, (1, 128 * K): 1.45, (1, M): 4.6, (4, 128 * K): 2.8, (8, 128 * K): 4.5}  # by its H2
KEEPS, FAST = "parts-128-of-256", "bounds-32"  # the presets `attention=parts` and `attention=block_sparse`
FEW, BLOCKS, PARTS = "k=8 of 128", "k=32 of 128", "k=128 of 16"


class Gate(NamedTuple):
    """Attributes:
    name: the gate, and what it wants.
    paper: what the paper says of itself.
    ours: our figures, each with whether it passes.
    """

    name: str
    paper: str
    ours: list[tuple[str, bool]]


def listed() -> list[Gate]:
    """Lists the gates in the paper's order, then ours."""
    return [*_of_the_op(), *_of_steps(), *_of_the_bill(), *_of_answers(), *_of_parts()]


def gates() -> Cells:
    """Tabulates the gates; those without a record say so."""
    rows = [
        (g.name, g.paper, ", ".join(f"{said}: {'pass' if passed else 'fail'}" for said, passed in g.ours))
        for g in listed()
    ]
    return [("gate", "paper", "here"), *((*row[:2], row[2] or "not recorded") for row in rows)]


def over_dense(batch: int, length: int, blocks: str, name: str = "sparse-steps") -> float | None:
    """Returns the time of a dense step over that of a sparse one; None where either is not recorded."""
    took = {}
    for r in results(name, *WORKLOAD, "attention"):
        if (r["model"], r["batch"], r["length"]) == (MODEL, batch, length) and "failed" not in r:
            took[r["attention"].removeprefix("block_sparse, ")] = r
    if not {"dense", blocks} <= took.keys():
        return None
    check_commit(took["dense"], took[blocks])
    return float(took["dense"]["ttl_p50_us"] / took[blocks]["ttl_p50_us"])


def parts_over_dense(batch: int, length: int) -> float | None:
    """Returns the time of a dense step over that of one with parts, of one pair of jobs; None where not recorded."""
    for r in results("sparse-costs", "model", "case", "batch", "length"):
        if (r["model"], r["case"], r["batch"], r["length"]) == (MODEL, "dense", batch, length):
            return float(r["step_us"] / r["plain_us"])
    return None


def _of_the_op() -> list[Gate]:
    rows = results("sparse", "length", kind="sparse", heads=HEADS, batch=1, topk=8)
    found = {r["length"]: r["best_dense_over_ours"] for r in rows}

    def ours(length: int, least: float) -> list[tuple[str, bool]]:
        return [(f"{found[length]:.1f} x", found[length] >= least)] if length in found else []

    slower = max((length for length, over in found.items() if over < 1), default=0)
    crossed = min((length for length in found if length > slower), default=0)
    crossing = [(f"{slower // K}K to {crossed // K}K", slower >= 8 * K and crossed <= 64 * K)] if crossed else []
    return [
        Gate("H1: the op crosses over between 8K and 64K, batch 1", "above 64K: fail", crossing),
        Gate("H1: the op at 1 x 128K, k=8, at least 1.5 x", "1.53 x: pass", ours(128 * K, 1.5)),
        Gate("H1: the op at 1 x 1M, k=8, at least 8 x", "8.02 x: pass", ours(M, 8)),
    ]


def _of_steps() -> list[Gate]:
    def ours(least: float, length: int, *batches: int) -> list[tuple[str, bool]]:
        said = []
        for batch in batches:
            for name, over in (
                ("32 blocks", over_dense(batch, length, BLOCKS)),
                ("parts", parts_over_dense(batch, length)),
            ):
                if over is not None:
                    said.append((f"batch {batch}, {name} {over:.2f} x", over >= least))
        return said

    eight = over_dense(8, M, BLOCKS, "sparse-steps.emulated-8")
    of_eight = [] if eight is None else [(f"32 blocks {eight:.2f} x", eight >= 5)]
    return [
        Gate("GATE-3: steps at 128K at least 2 x", "at most 1.81 x: fail", ours(2, 128 * K, 1, 2, 4, 8)),
        Gate("GATE-3: steps at 1M at least 5 x", "1.77 x: fail", ours(5, M, 1, 2)),
        Gate("GATE-3: steps at 8 x 1M, eight emulated ranks, at least 5 x", "-", of_eight),
    ]


def _of_the_bill() -> list[Gate]:
    share = {point: over_dense(*point, FEW) for point in PREDICTED}
    met = {point: over / PREDICTED[point] for point, over in share.items() if over is not None}
    least = [(f"{min(met.values()):.2f}", min(met.values()) >= 0.7)] if met else []
    accounts = [a for a in sparse_bill.recorded() if "one NVIDIA" in a.machine and a.errors]

    def r2(of: dict[str, float]) -> list[tuple[str, bool]]:
        return [(f"{budget} R² {value:.3f}", value >= 0.95) for budget, value in of.items()]

    return [
        Gate("H2: gains at k=8 at least 0.7 of the paper's predictions", "0.62: fail", least),
        Gate(
            "H3: a bill without finding explains at least 0.95",
            "R² 0.296: fail",
            r2({a.budget: a.r2(a.without_finding) for a in accounts}),
        ),
        Gate(
            "H3 as amended: with finding",
            "R² 0.998: pass",
            r2({a.budget: a.r2() for a in accounts}),
        ),
    ]


def _of_answers() -> list[Gate]:
    """Thresholds of fidelity, on the newest texts on which both presets were compared."""
    rows = [r for r in results("fidelity", *KEY) if r["kvp"] == 1 and r["length"] == LONGEST]
    both = [r["commit"] for r in rows if r.get("policy") == KEEPS]
    rows = [r for r in rows if r["commit"] in both[-1:] and r.get("haystack", "code") == "code"]
    found = {(r["kind"], r.get("policy")): r for r in rows}
    names = {FAST: "32 blocks", KEEPS: "parts"}

    def on_text(name: str) -> list[tuple[str, bool]]:
        texts = {said: found.get(("text", policy)) for policy, said in names.items()}
        return [(f"{said} {r[name]:.3f}", r[name] >= 0.99) for said, r in texts.items() if r is not None]

    def of_dense(kind: str) -> list[tuple[str, bool]]:
        dense = found.get((kind, "dense"))
        if dense is None:
            return []
        own: dict[str, Row | None] = {said: found.get((kind, policy)) for policy, said in names.items()}
        return [
            (f"{said} {r['hits']} beside {dense['hits']} of {r['count']}", r["hits"] >= 0.98 * dense["hits"])
            for said, r in own.items()
            if r is not None
        ]

    return [
        Gate("8: tokens of 32K like dense at least 0.99", "k=8 0.906: fail", on_text("agrees")),
        Gate("8.3: the same where dense is sure", "k=8 0.985: fail, k=32 0.9975: pass", on_text("sure")),
        Gate("8.4: needles at 32K, 98% of dense's", "k=8 0.88: fail, k=32: pass", of_dense("needles")),
        Gate("8.4: facts at 32K, 98% of dense's", "-", of_dense("facts")),
        Gate("8.4: facts that name the next at 32K, 98% of dense's", "-", of_dense("hops")),
    ]


def _steps_with_parts() -> list[tuple[str, bool]]:
    rows = [r for r in results("sparse-costs", "model", "case", "batch", "length") if r["case"] == "parts"]
    over = {(r["batch"], r["length"]): r["step_us"] / r["plain_us"] for r in rows if r["model"] == MODEL}
    return [(f"{b} x {tokens(n)} {times:.2f} x", times <= 1.15) for (b, n), times in over.items()]


def _of_parts() -> list[Gate]:
    """Ours: parts beside 32 blocks, bytes of a KV head and time."""
    rows = {
        (r["batch"], r["length"]): r
        for r in results("sparse", "batch", "length", kind="parts", heads=HEADS, topk=128, candidates=256)
    }
    size = [r["read_bytes"] / int(HEADS.split("/")[1]) for point, r in rows.items() if point == (1, M)]
    said = {point: r["over_blocks"] for point, r in rows.items() if point in ((1, M), (8, 128 * K))}
    times = [(f"{b} x {tokens(n)} {over:.2f} x", over <= 1.15) for (b, n), over in said.items()]
    return [
        Gate(
            "ours: parts read at most 6.6 MB of a KV head at 1M",
            "-",
            [(f"{x / 1e6:.1f} MB", round(x / 1e6, 1) <= 6.6) for x in size],
        ),
        Gate("ours: the op with parts within 1.15 x of 32 blocks", "-", times),
        Gate("ours: steps with parts within 1.15 x of 32 blocks", "-", _steps_with_parts()),
    ]
