"""Writes the tables of README.md and docs/ from `benchmarks/results/`: `python -m benchmarks.tables`.

A table stands between `<!-- table NAME -->` and `<!-- end -->`; of a point that was measured more than once, the newest
line counts.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.models.speculate import PARTS, REST
from benchmarks.records import (
    acceptance_tables,
    fidelity_tables,
    kernel_tables,
    serving_tables,
    sparse_bill,
    sparse_tables,
    step_tables,
)
from benchmarks.records.planner_check import check_table, errors_table, regrets, summary
from benchmarks.records.recorded_steps import Cell, halves, read_cells
from benchmarks.records.rows import results, workload
from benchmarks.records.sparse_bill import Account, Table
from launch.inputs.arguments import helped, need_checkout
from launch.inputs.compose import ROOT
from launch.inputs.hardware import load_hardware
from launch.serving.fields import table

RESULTS = [
    f"docs/results/{name}.md"
    for name in (
        "8-gpus",
        "4-gpus",
        "emulated",
        "kernels",
        "block-sparse",
        "speculation",
        "hop-b",
        "fidelity",
        "acceptance",
    )
]
PAGES = [
    "README.md",
    "docs/planner.md",
    "docs/sparse.md",
    "docs/tiering.md",
    "docs/serving.md",
    "docs/serving-engine.md",
    "docs/speculation.md",
    *RESULTS,
]


def hopb(name: str = "hopb") -> list[str]:
    """HOP-B on and off."""
    rows = [
        "| backend | KV | chunks | off | on | without the exchange | share hidden | auto |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results(name, "kind", "backend", "model", "batch", "length", "chunks", "regime"):
        if r["kind"] != "ttl":
            continue
        hidden = f"{r['hidden']:.0%}" if r["hidden"] is not None else "-"
        times = " | ".join(f"{r[k]:.0f} us" for k in ("off_us", "on_us", "without_us"))
        point = f"{r['backend']} | {workload(r).split(' | ')[1]} | {r['chunks']}"
        rows.append(f"| {point} | {times} | {hidden} | {r['auto_us']:.0f} us |")
    return rows


def chunks() -> list[str]:
    """The best of HOP-B's chunk counts beside none, over both backends."""
    ttl = [r for r in results("hopb", "kind", "backend", "batch", "length", "chunks") if r["kind"] == "ttl"]
    points = dict.fromkeys((r["batch"], r["length"]) for r in ttl)
    head = " | ".join(f"{name}: no chunks | best chunks | difference" for name in ("own kernels", "NCCL"))
    rows = [f"| KV | {head} |", "|---|---|---|---|---|---|---|"]
    for point in points:
        cells = []
        for backend in ("symm_mem", "nccl"):
            same = [r for r in ttl if r["backend"] == backend and (r["batch"], r["length"]) == point]
            off, on = same[0]["off_us"], min(r["on_us"] for r in same)
            cells.append(f"{off:.0f} us | {on:.0f} us | {on / off - 1:+.1%}")
        rows.append(f"| {workload(same[0]).split(' | ')[1]} | {' | '.join(cells)} |")
    return rows


def gains() -> list[str]:
    """Tokens/s/user with drafts, over those without, at the acceptance rate."""
    found = [r for r in results("speculate", "kind", "batch", "length", "gamma") if r["kind"] == "synthetic"]
    counts = sorted({r["gamma"] for r in found} - {0})
    rows = [
        f"| KV | {' | '.join(f'{n} drafts' if n > 1 else '1 draft' for n in counts)} |",
        "|---" * (len(counts) + 1) + "|",
    ]
    for point in dict.fromkeys(workload(r) for r in found if "failed" not in r):
        gain = {r["gamma"]: f"{r['gain_at_rate']:.2f} x" for r in found if workload(r) == point}
        rows.append(f"| {point.split(' | ')[1]} | {' | '.join(gain[n] for n in counts)} |")
    return rows


def speculate() -> list[str]:
    """Steps with synthetic drafts, and the share of each part of a step in its time."""
    found = results("speculate", "kind", "model", "layout", "batch", "length", "gamma")
    found = [r for r in found if r["kind"] == "synthetic"]
    points = [workload(r) for r in found]
    found.sort(key=lambda r: (points.index(workload(r)), r["gamma"]))
    rows = [
        "| shape | KV | drafts | step p50 (p90) | tokens a step | tokens/s/user | gain | gain at the rate "
        f"| {' | '.join([*PARTS, REST])} |",
        "|---" * (8 + len(PARTS) + 1) + "|",
    ]
    for r in found:
        start = f"| {workload(r)} | {r['gamma']} "
        if "failed" in r:
            rows.append(f"{start}| does not fit {'| ' * (5 + len(PARTS))}|")
            continue
        total = sum(r["split_us"].values())
        shares = " | ".join(f"{us / total:.1%}" for us in r["split_us"].values())
        rows.append(
            f"{start}| {r['ttl_p50_us'] / 1e3:.2f} ms ({r['ttl_p90_us'] / 1e3:.2f}) | {r['tokens_per_step']:.2f} "
            f"| {r['tokens_per_s_user']:.1f} | {r['gain']:.2f} | {r['gain_at_rate']:.2f} | {shares} |"
        )
    return rows if found else []


def edits() -> list[str]:
    """The demo model's copies of files."""
    found = [r for r in results("speculate", "kind", "layout", "drafting") if r["kind"] == "edits"]
    rows = [
        "| drafts | layout | tokens a step | step p50 | tokens/s/user | gain | drafts a step | answers as without |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in found:
        drafts = f"{r['speculation']['mean_drafts']:.1f}" if r["speculation"] else "-"
        rows.append(
            f"| {r['drafting']} | {r['layout']} | {r['tokens_per_step']:.2f} | {r['ttl_p50_us'] / 1e3:.2f} ms "
            f"| {r['tokens_per_s_user']:.0f} | {r['gain']:.2f} | {drafts} | {r['as_plain']} of {r['prompts']} |"
        )
    return rows if found else []


def planner(*names: str) -> list[str]:
    """The planner's first choice among recorded layouts, with the shipped description of an H200."""
    hardware = load_hardware("h200")
    cells = read_cells([ROOT / "benchmarks" / "results" / f"{name}.jsonl" for name in names])
    rows = regrets([cell for cell in cells if cell.device == hardware.name], lambda device: hardware)
    head, *body = check_table(rows)
    lines = [head, ["---"] * len(head), *body]
    return [*(f"| {' | '.join(line)} |" for line in lines), "", *(f"- {line}" for line in summary(rows).splitlines())]


def planner_errors() -> list[str]:
    """Errors of recorded steps that the shipped description of an H200 was not fitted on, dense ones and others."""
    steps: dict[str, list[Cell]] = {}
    for where, suffix in (("over eight GPUs", ""), ("emulated on two GPUs", ".emulated-8")):
        files = [ROOT / "benchmarks" / "results" / f"{name}{suffix}.jsonl" for name in ("step", "baselines")]
        cells = read_cells(files)
        dense = [cell for cell in cells if cell.is_dense]
        name = f"{where}: dense" + ("" if suffix else ", the half that was not fitted on")
        steps[name] = dense if suffix else halves(dense)[1]
        steps[f"{where}: with experts or latents"] = [cell for cell in cells if not cell.is_dense]
    head, *body = errors_table(steps, load_hardware("h200"))
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body)]


def bill(table: Callable[[Sequence[Account]], Table]) -> list[str]:
    """A table of what block-sparse steps pay; nothing where none are recorded."""
    found = sparse_bill.recorded()
    if not found:
        return []
    head, *body = table(found)
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body)]


TABLES: dict[str, Callable[[], list[str]]] = {
    "headline": step_tables.headline,
    "best-steps": step_tables.best_steps,
    "best-steps-1m": partial(step_tables.best_steps, 1, 1 << 20),
    "steps": step_tables.steps,
    "steps.4gpu": partial(step_tables.steps, "step.4gpu"),
    "steps.emulated-8": partial(step_tables.steps, "step.emulated-8"),
    "four-gpus": step_tables.four_gpus,
    "gap": step_tables.gap,
    "agreement": step_tables.agreement,
    "emulated-eight": step_tables.emulated_eight,
    "emulated-four": step_tables.emulated_steps,
    "emulated-comm": step_tables.emulated_comm,
    "baselines.4gpu": partial(step_tables.baselines, "baselines.4gpu"),
    "baselines.emulated-8": partial(step_tables.baselines, "baselines.emulated-8"),
    "budgets.emulated-8": partial(step_tables.budgets, "baselines.emulated-8"),
    "correctness": kernel_tables.correctness,
    "kernels": kernel_tables.kernels,
    "decode-kernel": kernel_tables.decode_kernel,
    "ragged": kernel_tables.ragged,
    "linear": kernel_tables.linear,
    "mla": kernel_tables.mla,
    "moe": kernel_tables.moe,
    "comm": kernel_tables.comm,
    "prefill": kernel_tables.prefill,
    "gains": gains,
    "speculate": speculate,
    "edits": edits,
    "verify": kernel_tables.verify,
    "fidelity-policies": fidelity_tables.policies,
    **{f"fidelity-{name}": partial(fidelity_tables.table, name) for name in fidelity_tables.COLUMNS},
    **{f"acceptance-{name}": make for name, make in acceptance_tables.PAGE.items()},
    "chunks": chunks,
    "hopb": hopb,
    "hopb.emulated-8": partial(hopb, "hopb.emulated-8"),
    **sparse_tables.PAGE,
    **serving_tables.PAGE,
    "sparse-bill": partial(bill, sparse_bill.bill_table),
    "sparse-crossover": partial(bill, sparse_bill.crossover_table),
    "request-fields": table,
    "planner": partial(planner, "step", "baselines"),
    "planner-errors": planner_errors,
    "planner.emulated-8": partial(planner, "step.emulated-8", "baselines.emulated-8"),
}


def with_tables(page: str) -> str:
    """A page's text with its tables as the results have them."""

    def table(match: re.Match[str]) -> str:
        return f"<!-- table {match[1]} -->\n" + "\n".join(TABLES[match[1]]()) + "\n<!-- end -->"

    return re.sub(r"<!-- table (\S+) -->.*?<!-- end -->", table, (ROOT / page).read_text(), flags=re.S)


def main() -> None:
    """Writes all pages' tables."""
    if not helped(sys.argv[1:], __doc__):
        need_checkout("helix tables")
        for page in PAGES:
            (ROOT / page).write_text(with_tables(page))
