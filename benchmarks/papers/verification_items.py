"""Batched Speculative Decoding Verification Kernels (Kolawole, CMU, 2026): its items beside ours, from records."""

from __future__ import annotations

from functools import partial

from benchmarks.papers.items import NOT_RECORDED, Item, Table, span
from benchmarks.papers.verification_figures import KEY, WORST, Records, tables
from benchmarks.records.columns import page
from benchmarks.records.rows import Row, results
from benchmarks.records.tables import TABLES

BENCH = "helix bench verify"
OTHERS = "one_block", "two_step", "two_step_torch", "torch"  # kernels beside fused
TESTED = "pytest tests/kernels/test_verify.py"
STEP = "pytest tests/kernels/test_commit.py"


def records() -> Records:
    """Reads what `helix bench verify` recorded."""
    return Records(results("verify", *KEY))


def _slope(found: Records, name: str, gamma: int) -> str:
    low, high = (found.us("scan", 32, gamma, alpha).get(f"{name}_graph_us") for alpha in (0.3, 0.9))
    return NOT_RECORDED if low is None or high is None else f"{high - low:+.1f} us"


def _ratio(row: Row, slow: str, fast: str) -> str:
    return f"{row[slow] / row[fast]:.2f} x" if slow in row and fast in row else NOT_RECORDED


def _lost(found: Records) -> str:
    """Rows in which another kernel is faster than fused, of all batches: in a graph, and launched from Python."""
    said = []
    for how, suffix in (("in a graph", "_graph_us"), ("launched from Python", "_us")):
        rows = [[r[n + suffix] / r["fused" + suffix] for n in OTHERS if n + suffix in r] for r in found.of("pack")]
        ratios = [min(row) for row in rows if row]
        if ratios:
            behind = sum(ratio < 1 for ratio in ratios)
            said.append(
                f"{how} slower than another kernel in {behind} of {len(ratios)} rows, at worst {min(ratios):.2f} x"
            )
    return "; ".join(said) or NOT_RECORDED


def _dispatched(found: Records) -> str:
    """Time of the dispatcher over fused's: below 1, the dispatcher is faster."""
    said = []
    for how, suffix in (("in a graph", "_graph_us"), ("launched from Python", "_us")):
        rows = [r for r in found.of("pack") if "dispatcher" + suffix in r]
        ratios = [r["dispatcher" + suffix] / r["fused" + suffix] for r in rows]
        faster = f", faster in {sum(ratio < 1 for ratio in ratios)} of {len(ratios)} rows" if ratios else ""
        said.append(f"{how} {span(ratios, '.2f', 'x')}{faster}")
    return f"dispatcher over fused {'; '.join(said)}"


def _commit() -> str:
    rows = [r for r in results("accept", "way", "rows", "drafts", "columns") if (r["rows"], r["drafts"]) == (8, 8)]
    said = span([r["us"] for r in rows if r["way"] == "greedy"], ".1f", "us")
    return f"from logits to tokens, 8 sequences of 8 drafts: {said}"


def items() -> list[Item]:
    """Lists the paper's items, in its order."""
    found = records()
    worst, small = found.us("scan", *WORST), [r for r in found.of("scan") if r["gamma"] <= 32]
    wide, alone = found.us("pack", *WORST, 2048), found.us("pack_alone", *WORST, 2048)
    eight = [r["two_step_torch_us"] / r["fused_us"] for r in found.of("pack", gamma=8) if r["batch"] <= 32]
    orders = [r["naive_graph_us"] / r["naive_sorted_graph_us"] for r in found.of("sorted")]
    heat = [r["naive_us"] / r["ballot_us"] for r in found.of("scan") if "ballot_us" in r]
    packs = [r["pack_us"] / r["pack_torch_us"] for r in found.of("pack_alone", alpha=0.9)]
    rate = f"{2 * wide['packed_bytes'] / wide['fused_graph_us'] / 1e6:.1f} TB/s" if wide else NOT_RECORDED
    return [
        Item(
            "2.2: compare, next token, compact in one launch",
            "done: any batch, where the paper's takes 32",
            "bit for bit the reference's",
            TESTED,
        ),
        Item(
            "2.2, step 4: append to the cache",
            "done in the step: the destination is the commit; keys and values stay "
            "where they were written, nothing is copied",
            _commit(),
            "helix bench accept",
        ),
        Item(
            "2.4: synthetic workload, Binomial(gamma, alpha)",
            "done",
            f"{len(found.of('scan'))} scans, {len(found.of('pack'))} packs",
            BENCH,
        ),
        Item(
            "3.2: PyTorch baseline, seven launches",
            "done",
            span([r["torch_us"] for r in small], ".1f", "us, paper 84"),
            BENCH,
        ),
        Item(
            "A1, A2: naive kernel, a lane a sequence",
            "done",
            f"84 to 12.6 us; here {_ratio(found.us('scan', 32, 8, 0.9), 'torch_us', 'naive_us')}, paper 6.5 x",
            BENCH,
        ),
        Item(
            "A3: scan by 32-lane ballots",
            "done as a baseline; the product reduces over all drafts at once",
            f"ballot {span([r['ballot_graph_us'] for r in found.of('scan') if 'ballot_graph_us' in r], '.1f', 'us')}, "
            f"reduction {span([r['scan_graph_us'] for r in found.of('scan')], '.1f', 'us')}, in a graph",
            BENCH,
        ),
        Item(
            "A4, A5: a packing kernel alone",
            "partly: a baseline with many programs that waits for no host; the paper's, which loses, is not built",
            f"over torch's mask at width 2048: paper 2.75 x, here {_ratio(alone, 'pack_us', 'pack_torch_us')}",
            BENCH,
        ),
        Item(
            "A6, A7: fused verify and pack in one block",
            "partly: a baseline in one block that copies one sequence after the other, where the paper's has a warp "
            "for each; the product's takes all SMs",
            f"one block over ours at 32 x 128 x 2048: {_ratio(wide, 'one_block_graph_us', 'fused_graph_us')}",
            BENCH,
        ),
        Item(
            "Figure 1, F1: time over gamma", "done", span([r["scan_us"] for r in small], ".1f", "us, paper 12.9"), BENCH
        ),
        Item(
            "Figure 2, F2: divergence over alpha",
            "done",
            f"naive at gamma 64 and 128: paper +4.3 and +9.3 us, here {_slope(found, 'naive', 64)} and "
            f"{_slope(found, 'naive', 128)}",
            BENCH,
        ),
        Item(
            "Figure 3, F3: the worst case",
            "done",
            f"naive over ballot: paper 1.84 x, here {_ratio(worst, 'naive_us', 'ballot_us')} (in a graph "
            f"{_ratio(worst, 'naive_graph_us', 'ballot_graph_us')}); naive over reduction "
            f"{_ratio(worst, 'naive_graph_us', 'scan_graph_us')} in a graph",
            BENCH,
        ),
        Item(
            "Figure 4: heat map of ballot over naive",
            "done",
            f"paper at most 1.84 x, here {span(heat, '.2f', 'x')}",
            BENCH,
        ),
        Item(
            "Figure 5, Table 2, F4: packing alone loses",
            "partly: our packing kernel wins; the paper's is not built",
            f"our pack over torch's: paper 1.06 to 2.75 x, here {span(packs, '.2f', 'x')}",
            BENCH,
        ),
        Item(
            "Figure 6, Table 3, F5: fused against two steps",
            "done",
            f"gamma 8: paper 3.2 to 3.8 x, here {span(eight, '.1f', 'x')}; fused is {_lost(found)}",
            BENCH,
        ),
        Item(
            "Table 1: naive and ballot",
            "done",
            f"naive {worst.get('naive_us', 0):.1f} us, paper 23.8; scan {worst.get('scan_us', 0):.1f} us, paper 12.9",
            BENCH,
        ),
        Item("Table 4: what limits each regime", "done", f"wide rows: bandwidth of all SMs, {rate}", BENCH),
        Item(
            "5.5: dispatcher by bytes",
            "done as a baseline; the product has none, as its steps are graphs",
            _dispatched(found),
            BENCH,
        ),
        Item(
            "5.7: launch and GPU time apart",
            "done by graphs, without Nsight",
            f"reduction {worst.get('scan_graph_us', 0):.1f} us of {worst.get('scan_us', 0):.1f}; paper 1.7 of 12.9",
            BENCH,
        ),
        Item("5.7: hardware counters", "out of reach: the paper has none either, nor has this host", "-", BENCH),
        Item(
            "6: batches beyond 32",
            "done",
            f"{sum(r['batch'] > 32 for r in found.of('pack'))} rows to batch "
            f"{max((r['batch'] for r in found.of('pack')), default=0)}",
            BENCH,
        ),
        Item(
            "6: tokens of real models",
            "done: the step of every drafter ends with this kernel",
            "greedy and sampled rows",
            STEP,
        ),
        Item(
            "7: sorted batches",
            "done, lengths known beforehand; sorting itself not counted",
            f"naive over naive, sorted: {span(orders, '.2f', 'x')}",
            BENCH,
        ),
        Item("L40S, CUDA C++", "out of reach: H100 and H200; Triton", "-", BENCH),
    ]


def tabled() -> dict[str, Table]:
    """Lists the tables that are reprinted."""
    found = tables(records())
    return {f"table {name}": Table(BENCH, partial(page, cells)) for name, cells in found.items()} | {
        "verify": Table(BENCH, TABLES["verify"])
    }
