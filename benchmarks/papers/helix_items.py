"""Helix Parallelism (Bhatia et al., NVIDIA, 2025): its items beside ours, from records and the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

from benchmarks.papers.figures import SHORT, Paper
from benchmarks.papers.items import NOT_RECORDED, Item, Table, span
from benchmarks.papers.rows import CLAIMS
from benchmarks.records.columns import page
from benchmarks.records.rows import WORKLOAD, Row, results
from benchmarks.records.step_tables import best_ttl
from benchmarks.records.tables import TABLES

HOPB = "kind", "backend", "model", "batch", "length", "chunks"
FRONTS, HOSTS = "helix bench fronts", "helix bench hosts"
LAYOUT = "pytest tests/unit/test_layout.py"
M = 1 << 20
# The tables that are reprinted, and what makes their records.
RECORDED = {
    "best-steps": "helix bench step",
    "baselines.emulated-8": "helix bench baselines ranks=8",
    "budgets.emulated-8": "helix bench baselines ranks=8",
    "fronts": FRONTS,
    "fronts-budgets": FRONTS,
    "hosts": HOSTS,
    "fp8-steps": "python -m benchmarks.entry",
    "hopb": "helix bench hopb",
    "hopb.emulated-8": "helix bench hopb ranks=8",
}


@cache
def simulated() -> Paper:
    """Computes what the simulator says of the paper's setting."""
    return Paper()


def _over(mode: str, model: str, batch: int, length: int) -> str:
    """Time of a mode over that of the best Helix layout, at a point of eight emulated ranks."""
    rows = [
        r
        for r in results("baselines.emulated-8", *WORKLOAD)
        if (r["model"], r["batch"], r["length"]) == (model, batch, length)
    ]
    ours, theirs = best_ttl(rows, "helix"), best_ttl(rows, mode)
    return f"{theirs / ours:.2f} x" if ours and theirs else "does not fit"


def _modes(mode: str) -> str:
    models = ("qwen2.5-7b", "llama-3.1-8b", "deepseek-v2-lite")
    return "time over Helix's, 1 x 1M: " + ", ".join(f"{model} {_over(mode, model, 1, M)}" for model in models)


def _hopb(name: str) -> str:
    """The least and the most that chunks change a step."""
    rows = [r for r in results(name, *HOPB) if r["kind"] == "ttl"]
    points = {(r["backend"], r["model"], r["batch"], r["length"]): r["off_us"] for r in rows}
    best = [
        min(r["on_us"] for r in rows if (r["backend"], r["model"], r["batch"], r["length"]) == point) / off - 1
        for point, off in points.items()
    ]
    return span(best, "+.1%")


def _timeline() -> str:
    rows = [r for r in results("hopb", "kind", "backend") if r["kind"] == "delay"]
    return f"{rows[0]['off_units']:.1f} to {rows[0]['on_units']:.1f} units" if rows else NOT_RECORDED


def _correct() -> str:
    equal = [r for r in results("correctness", "name") if r["name"].endswith("-equal")]
    held, every = (sum(r[key] for r in equal) for key in ("as_one_rank", "needles"))
    return f"{held} of {every} answers token for token those of one rank"


def _exchange() -> str:
    rows = [r["symm_us"] for r in results("comm", "op", "ranks", "message_bytes") if r["op"] == "exchange"]
    return span(rows, ".1f", "us, 2 KB to 256 KB, at any length")


def _longest(model: str) -> str:
    found = results("fronts", *WORKLOAD, "device")
    rows: Sequence[Row] = [r for r in found if (r["model"], r["batch"], r["length"]) == (model, 1, M)]
    return span([r["ttl_p50_us"] / 1e3 for r in rows], ".1f", "ms")


def items() -> list[Item]:
    """Lists the paper's items, in its order."""
    paper = simulated()
    claims: dict[str, list[str]] = {}
    for model, claim in CLAIMS.items():
        row = paper.headlines[model]
        lost = [x for x in paper.lost if x["model"] == model]
        claims[model] = [
            f"paper {claim.user:g} x, here {row['user_gain']:.2f} x",
            f"paper {claim.batch:g} x, here {row['batch_gain']:g} x at the baseline's fastest, "
            f"{paper.curves[model][3]['batch_gain']:g} x at 80% of it",
            f"paper {claim.hopb_off:.0%}, here " + " and ".join(f"{x['fixed']:.1%} ({x['exchange']})" for x in lost),
        ]
    r1, dense = "deepseek-r1", "llama-3.1-405b"
    ends = [max(row["end"] for row in paper.csv()["figure-3"] if row["hopb"] == on) for on in ("off", "on")]
    return [
        Item(
            "2.1.1: attention over KVP x TPA, TPA at most K, no copies",
            "done",
            "heads and tokens of each rank are tested",
            LAYOUT,
        ),
        Item(
            "2.1.1: every rank projects the whole batch",
            "done; of MLA a rank may make its share of queries, and gather",
            "reads of QKV as in appendix A",
            LAYOUT,
        ),
        Item(
            "2.1.1: partial output and LSE, one all-to-all, exact",
            "done",
            _correct(),
            "python -m benchmarks.correctness",
        ),
        Item("2.1.2: bytes of the exchange independent of S", "done", _exchange(), "helix bench comm"),
        Item(
            "2.1.3: HOP-B, chunks of the batch",
            "done: by chunks, not by tokens; a user sets their number, or `auto` does",
            f"best chunks on NVLink {_hopb('hopb')}: they cost more than they hide",
            "helix bench hopb",
        ),
        Item(
            "2.2: output projection with TP = N, all-reduce", "done", "hidden columns of each rank are tested", LAYOUT
        ),
        Item("2.2: dense FFN with TPF = N", "done", "FFN columns of each rank are tested", LAYOUT),
        Item(
            "2.2: MoE on TPF x EP",
            "done, by one all-reduce over all ranks in place of one within experts and a gather",
            "tpf x ep on eight ranks, every grid measured",
            "helix bench step ranks=8",
        ),
        Item(
            "2.3: append of 16 tokens in turns",
            "done: `kv.append_block`, 16; the first rank differs by sequence",
            "local lengths are a closed formula",
            LAYOUT,
        ),
        Item(
            "3.1: simulator of GB200",
            "done, with constants of our choice: the paper's are not published",
            "roofline",
            "helix papers",
        ),
        Item(
            "3.1: GB200 NVL72, FP4",
            "out of reach: Hopper has neither; bf16 and FP8, eight GPUs at most",
            "simulated",
            "helix papers",
        ),
        Item("3.1: baseline TP", "done", _modes("tp"), "helix bench baselines ranks=8"),
        Item("3.1: baseline Medha (KVP, FFN on TP)", "done", _modes("medha"), "helix bench baselines ranks=8"),
        Item(
            "3.1: baseline EP with data-parallel attention",
            "done: `layout.mode=dp`, whose rows go to all ranks; the fronts are simulated",
            f"simulated: {claims[r1][0]}",
            "helix bench modes",
        ),
        Item(
            "3.1: baseline PP",
            "partly: simulated; the runtime has no pipeline",
            "a part of the baseline's front",
            "helix papers",
        ),
        Item(
            "3.1: 1 to 64 GPUs",
            "partly: one to eight real ones, ranks of up to 64 emulated on one or two",
            f"{len(results('fronts', *WORKLOAD, 'device'))} points of fronts recorded",
            FRONTS,
        ),
        Item(
            "3.1: lengths of a million and more",
            "done",
            f"Llama-405B at 1 x 1M, FP8: {_longest('llama-3.1-405b')}; DeepSeek-R1: {_longest('deepseek-r1')}",
            FRONTS,
        ),
        Item(
            "3.1: batch within a TTL",
            "done: measured, and by the planner",
            "one table",
            "helix tables budgets.emulated-8",
        ),
        Item(
            "3.2: over 100,000 configurations",
            "partly: batches and GPUs are powers of two",
            f"{paper.searched:,} points that fit, and again for each of {len(paper.sensitivity[r1]) - 1} changes",
            "helix papers",
        ),
        Item(
            "Figure 1: roofline of reads; appendix A",
            "done",
            f"{len(paper.csv()['figure-1'])} points, the paper's formulas",
            "helix papers",
        ),
        Item(
            "Figures 2, 4: sharding and workflow",
            "done: they are the runtime's layout",
            "docs/concepts.md has an example",
            LAYOUT,
        ),
        Item(
            "Figure 3: 25.6 to 17 units",
            "done",
            f"exact {ends[0]:g} to {ends[1]:g}; measured {_timeline()}",
            "helix bench hopb",
        ),
        Item(
            "Figure 5: front of DeepSeek-R1",
            "simulated; measured on Hopper beside it",
            claims[r1][0],
            FRONTS,
        ),
        Item("3.2: R1 serves 32 x as many", "simulated", claims[r1][1], "helix papers"),
        Item(
            "Figure 6: front of Llama-405B",
            "simulated; measured on Hopper beside it",
            claims[dense][0],
            FRONTS,
        ),
        Item("3.2: 405B serves 4 x as many", "simulated", claims[dense][1], "helix papers"),
        Item(
            "3.2: Medha does not suit MLA",
            "done: one rank would hold all experts",
            _over("medha", "deepseek-v2-lite", 1, M),
            "helix bench baselines ranks=8",
        ),
        Item("Figure 7, R1: 1% lost without HOP-B", "simulated", claims[r1][2], "helix papers"),
        Item("Figure 7, 405B: 12% lost without HOP-B", "simulated", claims[dense][2], "helix papers"),
        Item(
            "Figure 7, measured",
            "partly: eight emulated ranks, two links",
            f"best chunks {_hopb('hopb.emulated-8')} of a step",
            "helix bench hopb ranks=8",
        ),
        Item(
            "5: short contexts are DP attention and TP FFN",
            "done: `layout.mode=dp`",
            "tokens of transformers on every number of ranks",
            "pytest tests/e2e/test_dp.py",
        ),
        Item(
            "6: sparse attention",
            "done, though the paper leaves it open",
            "the page's last table",
            "helix papers gather",
        ),
        Item(
            "Several hosts",
            "not in the paper: agents over sockets, exchange predicted",
            hosts_said(),
            HOSTS,
        ),
    ]


def hosts_said() -> str:
    """Says how far predicted exchanges between hosts are off."""
    rows = [r for r in results("hosts", "model", "backend", "batch", "length") if "failed" not in r]
    return span([r["error"] for r in rows], "+.1%", "off")


def tabled() -> dict[str, Table]:
    """Lists the tables that are reprinted."""
    paper = simulated().tables()
    made = {
        f"{SHORT.get(name, name)}, simulated": Table("helix papers", partial(page, paper[name]))
        for name in ("paper", "gain", "sensitivity")
    }
    return made | {name: Table(command, TABLES[name]) for name, command in RECORDED.items()}
