"""Helix Parallelism (Bhatia et al., NVIDIA, 2025): its items beside ours, from records and the simulator."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache, partial

from benchmarks.papers.figures import SHORT, Paper
from benchmarks.papers.items import NOT_RECORDED, Item, Table, span
from benchmarks.papers.rows import CLAIMS
from benchmarks.records.columns import page
from benchmarks.records.hopb_tables import timed
from benchmarks.records.rows import WORKLOAD, Row, check_commit, grouped, kv, results
from benchmarks.records.step_tables import best_step
from benchmarks.records.tables import TABLES
from launch.inputs.shapes import load_spec

FRONTS, HOSTS = "helix bench fronts", "helix bench hosts"
LAYOUT = "pytest tests/unit/test_layout.py"
M = 1 << 20
CHOSEN = "simulated, with constants chosen so that the headlines agree"
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
    ours, theirs = best_step(rows, "helix"), best_step(rows, mode)
    if ours is None or theirs is None:
        return "does not fit"
    check_commit(ours, theirs)
    return f"{theirs['ttl_p50_us'] / ours['ttl_p50_us']:.2f} x"


def _modes(mode: str) -> str:
    models = ("qwen2.5-7b", "llama-3.1-8b", "deepseek-v2-lite")
    return "time over Helix's, 1 x 1M, emulated on two GPUs: " + ", ".join(
        f"{model} {_over(mode, model, 1, M)}" for model in models
    )


def _hopb(name: str) -> str:
    """The least and the most that the best number of chunks changes a step, by link, kvp and commit."""
    best: dict[tuple[str, ...], dict[tuple[str, ...], float]] = {}
    for r in timed(name):
        (kvp,) = re.findall(r"kvp=\d+", r["layout"])
        group, point = (r["link"], kvp, r["commit"][:7]), (r["backend"], r["model"], kv(r))
        changes = best.setdefault(group, {})
        changes[point] = min(changes.get(point, math.inf), r["on_us"] / r["off_us"] - 1)
    return "; ".join(f"{', '.join(group)}: {span([*of.values()], '+.1%')}" for group, of in best.items())


def _grids() -> str:
    """The expert grids that were timed behind each attention grid, of models with experts on eight emulated ranks."""
    found: dict[str, dict[str, None]] = {}
    for r in results("step.emulated-8", *WORKLOAD):
        attention, ffn = r["layout"].removeprefix("helix ").split(" -> ")
        if load_spec(r["model"]).experts is not None:
            found.setdefault(f"{r['model']} {attention}", {})[ffn.split("ep=")[1]] = None
    grids: dict[str, list[str]] = {}
    for name, eps in found.items():
        grids.setdefault("ep=" + ", ".join(sorted(eps)), []).append(name)
    return "emulated on two GPUs: " + "; ".join(f"{eps} of {', '.join(names)}" for eps, names in grids.items())


def _dp() -> str:
    """Times of data-parallel attention and of Helix, DeepSeek-R1 in FP8 over eight GPUs."""
    rows = results("fp8-steps", *WORKLOAD, model="deepseek-r1", batch=8, length=M >> 3)
    found = {mode: r for mode in ("dp", "helix") if (r := best_step(rows, mode))}
    said = (f"{mode} {r['ttl_p50_us'] / 1e3:.2f} ms ({r['commit'][:7]})" for mode, r in found.items())
    return f"eight GPUs, deepseek-r1, 8 x 128K: {', '.join(said)}" if found else NOT_RECORDED


def _measured(model: str) -> str:
    """What of a front was measured: how many points, of which modes, by how many GPUs."""
    rows = [r for r in results("fronts", *WORKLOAD, "device", model=model) if "failed" not in r]
    modes = " and ".join(dict.fromkeys(r["layout"].split()[0] for r in rows))
    gpus = ", ".join(dict.fromkeys(f"{r['emulated_by']} {r['device'].removeprefix('NVIDIA ')}" for r in rows))
    return f"{len(rows)} points of {modes} on {gpus} that emulates a rank" if rows else "none measured"


def _timeline() -> str:
    rows = results("hopb", "backend", kind="delay")
    return f"{rows[0]['off_units']:.1f} to {rows[0]['on_units']:.1f} units" if rows else NOT_RECORDED


def _correct() -> str:
    """Answers equal to one rank's by dtype, over GPUs (with NCCL) and over loopback ranks (threads, no link)."""
    equal = [r for r in results("correctness", "name", "over") if r["name"].endswith("-equal")]
    said = []
    for (over,), rows in grouped(equal, "over").items():
        held = ", ".join(f"{r['as_one_rank']} of {r['needles']} in {r['name'].split('-')[2]}" for r in rows)
        said.append(f"over {over} {held}")
    return f"same tokens as one rank: {'; '.join(said)}" if said else NOT_RECORDED


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
            "helix needles",
        ),
        Item("2.1.2: bytes of the exchange independent of S", "done", _exchange(), "helix bench comm"),
        Item(
            "2.1.3: HOP-B, chunks of the batch",
            "done: by chunks, not by tokens; a user sets their number, or `auto` does",
            f"best chunks on NVLink cost more than they hide; {_hopb('hopb')}",
            "helix bench hopb",
        ),
        Item(
            "2.2: output projection with TP = N, all-reduce", "done", "hidden columns of each rank are tested", LAYOUT
        ),
        Item("2.2: dense FFN with TPF = N", "done", "FFN columns of each rank are tested", LAYOUT),
        Item(
            "2.2: MoE on TPF x EP",
            "done, by one all-reduce over all ranks in place of one within experts and a gather",
            _grids(),
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
        Item(
            "3.1: baseline TP",
            "done, but the paper's overlaps some of its communication",
            _modes("tp"),
            "helix bench baselines ranks=8",
        ),
        Item("3.1: baseline Medha (KVP, FFN on TP)", "done", _modes("medha"), "helix bench baselines ranks=8"),
        Item(
            "3.1: baseline EP with data-parallel attention",
            "partly: `layout.mode=dp`, which sends rows to all ranks, not only to those of their experts; "
            "no front is measured, and nothing at 1M",
            _dp(),
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
            "partly: 2^20 tokens at most; 4M are simulated",
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
            f"{CHOSEN}; {_measured(r1)}",
            claims[r1][0],
            FRONTS,
        ),
        Item("3.2: R1 serves 32 x as many", CHOSEN, claims[r1][1], "helix papers"),
        Item(
            "Figure 6: front of Llama-405B",
            f"{CHOSEN}; {_measured(dense)}",
            claims[dense][0],
            FRONTS,
        ),
        Item("3.2: 405B serves 4 x as many", CHOSEN, claims[dense][1], "helix papers"),
        Item(
            "3.2: Medha does not suit MLA",
            "done: one rank would hold all experts",
            _over("medha", "deepseek-v2-lite", 1, M),
            "helix bench baselines ranks=8",
        ),
        Item("Figure 7, R1: 1% lost without HOP-B", CHOSEN, claims[r1][2], "helix papers"),
        Item("Figure 7, 405B: 12% lost without HOP-B", f"{CHOSEN}; not reproduced", claims[dense][2], "helix papers"),
        Item(
            "Figure 7, measured",
            "partly: eight emulated ranks, two links",
            f"best chunks, of a step; {_hopb('hopb.emulated-8')}",
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
