"""Writes the tables of README.md and docs/ from `benchmarks/results/`, or prints whole ones.

  helix tables              all pages; of a long table of results, eight rows that stand evenly in it
  helix tables NAME ...     these tables, with all rows

A table stands between `<!-- table NAME -->` and `<!-- end -->`; of a point that was measured more than once, the newest
line counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.models.speculate import PARTS, REST
from benchmarks.records import (
    acceptance_tables,
    draft_tables,
    fidelity_tables,
    fp8_tables,
    fronts,
    hopb_tables,
    kernel_tables,
    layer_tables,
    mixer_tables,
    serving_tables,
    sparse_bill,
    sparse_gates,
    sparse_tables,
    step_tables,
    tuned_tables,
)
from benchmarks.records.columns import (
    POINT,
    Cells,
    Columns,
    Show,
    at,
    filled,
    lines,
    ms,
    of,
    page,
    where_it_fits,
)
from benchmarks.records.planner_check import check_table, errors_table, regrets, summary
from benchmarks.records.recorded_steps import Cell, halves, read_cells
from benchmarks.records.rows import kv, results, shape
from benchmarks.records.sparse_bill import Account
from helix.schema import unknown
from launch.client import fields, options
from launch.inputs.arguments import helped, need_checkout
from launch.inputs.compose import ROOT
from launch.inputs.hardware import load_hardware

RESULTS = [
    "8-gpus",
    "4-gpus",
    "emulated",
    "kernels",
    "block-sparse",
    "speculation",
    "hop-b",
    "fidelity",
    "fp8",
    "acceptance",
    "serving",
]
GUIDES = [
    "planner", "sparse", "tiering", "serving", "serving-engine", "speculation", "hybrids", "dsa",
    "reference/prompts-and-results",
]  # fmt: skip
ROWS, MOST_ROWS = 8, 12  # of a table of results on a page
PAGES = ["README.md", *(f"docs/{name}.md" for name in GUIDES), *(f"docs/results/{name}.md" for name in RESULTS)]


def gains() -> list[str]:
    """Tokens/s/user with drafts, over those without, at the acceptance rate."""
    found = results("speculate", "batch", "length", "gamma", kind="synthetic")
    counts = sorted({r["gamma"] for r in found} - {0})
    table = [("KV", *(f"{n} drafts" if n > 1 else "1 draft" for n in counts))]
    for point in dict.fromkeys((shape(r), kv(r)) for r in found if "failed" not in r):
        gain = {r["gamma"]: f"{r['gain_at_rate']:.2f} x" for r in found if (shape(r), kv(r)) == point}
        table.append((point[1], *(gain[n] for n in counts)))
    return page(table)


def speculate() -> list[str]:
    """Steps with synthetic drafts, and the share of each part of a step in its time."""

    def part(name: str) -> Show:
        return lambda r: f"{r['split_us'][name] / sum(r['split_us'].values()):.1%}"

    timed: Columns = {
        "tokens a step": of("tokens_per_step", "", 2),
        "tokens/s/user": lambda r: f"{r['tokens_per_s_user']:.1f}",
        "gain": of("gain", "", 2),
        "gain at the rate": of("gain_at_rate", "", 2),
        **{name: part(name) for name in (*PARTS, REST)},
    }
    columns: Columns = {
        **POINT,
        "drafts": at("gamma"),
        "step p50 (p90)": lambda r: (
            "does not fit" if "failed" in r else f"{ms('ttl_p50_us')(r)} ({r['ttl_p90_us'] / 1e3:.2f})"
        ),
        **{name: where_it_fits(cell) for name, cell in timed.items()},
    }
    found = results("speculate", "model", "layout", "batch", "length", "gamma", kind="synthetic")
    points = [(shape(r), kv(r)) for r in found]
    return lines(columns, sorted(found, key=lambda r: (points.index((shape(r), kv(r))), r["gamma"])))


def edits() -> list[str]:
    """The demo model's copies of files."""
    columns: Columns = {
        "drafts": at("drafting"),
        "layout": at("layout"),
        "tokens a step": of("tokens_per_step", "", 2),
        "step p50": ms("ttl_p50_us"),
        "tokens/s/user": lambda r: f"{r['tokens_per_s_user']:.0f}",
        "gain": of("gain", "", 2),
        "drafts a step": lambda r: f"{r['speculation']['mean_drafts']:.1f}" if r["speculation"] else "-",
        "answers as without": lambda r: f"{r['as_plain']} of {r['prompts']}",
    }
    return lines(columns, results("speculate", "layout", "drafting", kind="edits"))


def planner(*names: str) -> list[str]:
    """The planner's first choice among recorded layouts, with the shipped description of an H200."""
    hardware = load_hardware("h200")
    cells = read_cells([ROOT / "benchmarks" / "results" / f"{name}.jsonl" for name in names])
    rows = regrets([cell for cell in cells if cell.device == hardware.name], lambda device: hardware)
    return [*page(check_table(rows)), "", *(f"- {line}" for line in summary(rows).splitlines())]


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
    return page(errors_table(steps, load_hardware("h200")))


def bill(table: Callable[[Sequence[Account]], Cells]) -> list[str]:
    """A table of what block-sparse steps pay; nothing where none are recorded."""
    found = sparse_bill.recorded()
    return page(table(found)) if found else []


TABLES: dict[str, Callable[[], list[str]]] = {
    "headline": step_tables.headline,
    "best-steps": step_tables.best_steps,
    "best-steps-1m": partial(step_tables.best_steps, 1, 1 << 20),
    "steps": step_tables.steps,
    "steps.4gpu": partial(step_tables.steps, "step.4gpu"),
    "steps.emulated-8": partial(step_tables.steps, "step.emulated-8"),
    "four-gpus": step_tables.four_gpus,
    "vllm-splits": step_tables.vllm_splits,
    "gap": step_tables.gap,
    "agreement": step_tables.agreement,
    "emulated-eight": step_tables.emulated_eight,
    "whole": step_tables.whole,
    "over-tp": step_tables.over_tp,
    "modes": step_tables.modes,
    "emulated-four": step_tables.emulated_steps,
    "emulated-comm": step_tables.emulated_comm,
    "baselines.4gpu": partial(step_tables.baselines, "baselines.4gpu"),
    "baselines.emulated-8": partial(step_tables.baselines, "baselines.emulated-8"),
    "budgets.emulated-8": partial(step_tables.budgets, "baselines.emulated-8"),
    "correctness": kernel_tables.correctness,
    "kernels": kernel_tables.kernels,
    "decode-kernel": kernel_tables.decode_kernel,
    "shapes": kernel_tables.shapes,
    "ragged": kernel_tables.ragged,
    "linear": kernel_tables.linear,
    "mla": kernel_tables.mla,
    "moe": kernel_tables.moe,
    "comm": kernel_tables.comm,
    "hosts": kernel_tables.hosts,
    "prefill": partial(kernel_tables.prefill, "kernel"),
    "prefill-chunks": partial(kernel_tables.prefill, "chunk"),
    "prefill-together": partial(kernel_tables.prefill, "together"),
    "prefill-prompts": partial(kernel_tables.prefill, "prompt"),
    "mla-prefill": kernel_tables.mla_prefill,
    "gains": gains,
    "speculate": speculate,
    "edits": edits,
    "verify": kernel_tables.verify,
    "fidelity-policies": fidelity_tables.policies,
    "fidelity-matched": fidelity_tables.matched,
    "fidelity-margins": fidelity_tables.margins,
    **{f"fidelity-{name}": partial(fidelity_tables.table, name) for name in fidelity_tables.COLUMNS},
    **{f"smollm2-{name}": partial(fidelity_tables.table, name, "fidelity-smollm2") for name in ("text", "needles")},
    **{f"acceptance-{name}": make for name, make in acceptance_tables.PAGE.items()},
    **hopb_tables.PAGE,
    **mixer_tables.PAGE,
    **fp8_tables.PAGE,
    **fronts.PAGE,
    **sparse_tables.PAGE,
    **draft_tables.PAGE,
    **layer_tables.PAGE,
    **tuned_tables.PAGE,
    **serving_tables.PAGE,
    "sparse-gates": sparse_gates.gates,
    "sparse-bill": partial(bill, sparse_bill.bill_table),
    "sparse-bill-three": partial(bill, sparse_bill.three_terms_table),
    "sparse-crossover": partial(bill, sparse_bill.crossover_table),
    "request-fields": fields.table,
    "options": options.table,
    "planner": partial(planner, "step", "baselines"),
    "planner-errors": planner_errors,
    "planner.emulated-8": partial(planner, "step.emulated-8", "baselines.emulated-8"),
}


def some(name: str, table: Sequence[str]) -> list[str]:
    """Keeps eight rows of a table of more than twelve: the first, the last, and those evenly between."""
    head, rows = list(table[:2]), [line for line in table[2:] if line.startswith("|")]
    if len(rows) <= MOST_ROWS:
        return list(table)
    kept = [rows[round(i * (len(rows) - 1) / (ROWS - 1))] for i in range(ROWS)]
    rest = list(table[2 + len(rows) :])
    return [*head, *kept, "", f"{ROWS} of {len(rows)} rows; all: `helix tables {name}`", *rest]


def with_tables(name: str) -> str:
    """Returns a page's text with its tables as the results have them."""
    whole = not name.startswith("docs/results/")
    return filled((ROOT / name).read_text(), lambda table: TABLES[table]() if whole else some(table, TABLES[table]()))


def main() -> None:
    """Writes all pages' tables, or prints those that are named."""
    if helped(names := sys.argv[1:], f"{__doc__}\ntables: {', '.join(TABLES)}"):
        return
    need_checkout("helix tables")
    if wrong := [name for name in names if name not in TABLES]:
        sys.exit(f"error: {unknown(wrong[0], TABLES)}")
    for name in names:
        print("\n".join(TABLES[name]()))
    for name in [] if names else PAGES:
        (ROOT / name).write_text(with_tables(name))
