"""Attention Pays Its Bill (Alsufi and Scott, BRL-2026-07): its items beside ours, from records."""

from __future__ import annotations

from benchmarks.papers.items import NOT_RECORDED, Item, Table, span
from benchmarks.records import sparse_bill, sparse_gates
from benchmarks.records.fidelity_tables import KEY, LONGEST, pooled
from benchmarks.records.rows import WORKLOAD, Row, results
from benchmarks.records.serving_tables import tier_steps
from benchmarks.records.sparse_gates import KEEPS, over_dense
from benchmarks.records.tables import TABLES

K, M = 1024, 1 << 20
OPS, STEPS, FIDELITY, TIER = (
    "helix bench sparse",
    "helix bench sparse-steps",
    "helix fidelity",
    "helix bench tier-steps",
)
DENSE = {"dense_us": "ours", "cudnn_us": "cuDNN", "flash_us": "FlashAttention", "flashinfer_us": "FlashInfer"}
LENGTHS = 6  # of the paper's Table 1
KINDS = ("text", "needles", "facts", "hops", "generated", "recall")
# The tables that are reprinted, and what makes their records.
RECORDED = {
    "sparse-blocks": OPS,
    "sparse-steps": STEPS,
    "sparse-steps.emulated-8": f"{STEPS} ranks=8",
    "sparse-policies": "helix bench sparse-policies",
    "sparse-gates": "helix tables sparse-gates",
    "sparse-parts": OPS,
    "sparse-costs": "helix bench sparse-costs",
    "sparse-bill": "helix planner bill",
    "sparse-bill-three": "helix planner bill",
    "sparse-crossover": "helix planner bill",
    **{f"fidelity-{name}": FIDELITY for name in ("policies", "matched", "margins", *KINDS)},
    "tier-steps": TIER,
    "tier-prefill": "helix bench tier-prefill",
    "tier-needles": "helix bench tier-needles",
}


def _ops(batch: int, topk: int) -> list[Row]:
    return results("sparse", "length", kind="sparse", heads="28/4", batch=batch, topk=topk)


def _count(batch: int, topk: int) -> str:
    return f"{len(_ops(batch, topk))} of {LENGTHS} lengths"


def _op(batch: int, topk: int) -> str:
    found = sorted(_ops(batch, topk), key=lambda r: int(r["length"]))
    return ", ".join(f"{r['length'] // K}K {r['best_dense_over_ours']:.1f} x" for r in found) or NOT_RECORDED


def _peers() -> str:
    """The dense backends that the op was timed beside."""
    rows = results("sparse", "heads", "batch", "length", "topk", kind="sparse")
    return ", ".join(name for field, name in DENSE.items() if any(field in r for r in rows)) or NOT_RECORDED


def _step(batch: int, length: int, topk: int) -> str:
    """Time of a dense step over a sparse one's."""
    over = over_dense(batch, length, f"k={topk} of 128")
    return NOT_RECORDED if over is None else f"{over:.2f} x"


def _verdicts() -> str:
    said = [passed for gate in sparse_gates.listed() for _, passed in gate.ours]
    return f"{sum(said)} of {len(said)} figures pass; below"


def _flat(topk: int) -> str:
    """Tokens/s of a sequence alone, shortest and longest context."""
    rows = [r for r in results("sparse-steps", *WORKLOAD, "attention") if r["batch"] == 1 and "failed" not in r]
    found = {r["length"]: r["tokens_per_s_user"] for r in rows if r["attention"] == f"block_sparse, k={topk} of 128"}
    return ", ".join(f"{length // K}K {rate:.0f}" for length, rate in sorted(found.items())) or NOT_RECORDED


def _fidelity(kind: str, **fields: object) -> list[Row]:
    rows = [r for r in results("fidelity", *KEY) if r["kind"] == kind and r["kvp"] == 1]
    return [r for r in rows if all(r[name] == value for name, value in fields.items())]


def _needles(policy: str, length: int, haystack: str, count: int = 200) -> str:
    rows = _fidelity("needles", policy=policy, length=length, haystack=haystack, count=count)
    return f"{policy} {rows[-1]['hits']} of {rows[-1]['count']}" if rows else f"{policy} -"


def _newest(kind: str, *policies: str) -> str:
    """Hits of some policies at 32K in code, on the newest prompts on which parts were measured."""
    rows = [r for r in _fidelity(kind, length=LONGEST, haystack="code") if r["policy"] in policies]
    together = [r["commit"] for r in rows if r["policy"] == KEEPS][-1:]
    found = {r["policy"]: r for r in rows if r["commit"] in together}
    said = [f"{policy} {found[policy]['hits']} of {found[policy]['count']}" for policy in policies if policy in found]
    return ", ".join(said) or NOT_RECORDED


def _margins() -> str:
    """Shares of steps that hold where dense attention is sure, of all recorded texts together."""
    rows = {r["policy"]: r for r in pooled() if r["policy"] in ("bounds-8", "bounds-32", KEEPS)}
    return ", ".join(f"{policy} {r['sure']:.4f} of {r['sure_steps']}" for policy, r in rows.items())


def _text(policy: str, length: int, name: str) -> str:
    rows = [r for r in _fidelity("text", policy=policy, length=length) if r["windows"] == 5]
    return f"{policy} {rows[-1][name]:.3f}" if rows else f"{policy} -"


def _bill(one: str) -> str:
    accounts = [a for a in sparse_bill.recorded() if one in a.machine]
    said = [
        f"{a.budget}: {a.bill.bytes_per_s / 1e12:.2f} TB/s, {1e3 * a.bill.overhead_s:.2f} ms, "
        f"{1e3 * a.bill.finding_s:.2f} ms, R² {a.r2():.3f}, held out at most {max(a.errors):.1%}"
        for a in accounts
        if a.errors
    ]
    return "; ".join(said) or NOT_RECORDED


def _tier() -> str:
    """Tokens/s of 1 x 1M over host memory, with keys and values in bf16, as in the paper, and in FP8."""
    rows = [r for r in tier_steps() if r.get("ttl_p50_us") and (r["batch"], r["length"]) == (1, M)]
    rates = {kv: [1e6 / r["ttl_p50_us"] for r in rows if r["kv"] == kv] for kv in ("auto", "fp8")}
    return f"{span(rates['auto'], '.0f', 'tokens/s')} in bf16, {span(rates['fp8'], '.0f')} in FP8, 1 x 1M"


def _prefill() -> str:
    rows = [r for r in results("tier-prefill", "tier", "length") if r.get("prefill_s")]
    return ", ".join(f"{r['length'] // K}K in {r['prefill_s']:.0f} s ({r['tier']})" for r in rows) or NOT_RECORDED


def items() -> list[Item]:
    """Lists the report's items, in its order."""
    return [
        Item(
            "3.2: selection by blocks of 128, sink, last four, top k",
            "done, one kernel a layer",
            "as a masked reference",
            "pytest tests/kernels/test_select_blocks.py",
        ),
        Item(
            "3.2: fused gather-attend, heads of a group share a tile",
            "done: the decode kernel follows a table of pages",
            "as a masked reference",
            "pytest tests/e2e/test_block_sparse.py",
        ),
        Item("3.2: one CUDA graph a step", "done", "both modes", "pytest tests/e2e/test_launches.py"),
        Item("3.3: dense prefill", "done", "-", "pytest tests/e2e/test_block_sparse.py"),
        Item(
            "4: the best of all dense backends",
            "partly: the fastest counts of those that were timed",
            _peers(),
            OPS,
        ),
        Item(
            "4: vLLM as an anchor",
            "partly: eight GPUs, other layouts; constants without a record",
            "table headline",
            "helix tables headline",
        ),
        Item("Table 1, H1: op at batch 1, 10.2 x at 1M (k=8)", "done but for 512K; one kernel", _op(1, 8), OPS),
        Item("Table 1: op at batch 8, 41.9 x at 1M (k=8)", f"partly: {_count(8, 8)}; one kernel", _op(8, 8), OPS),
        Item(
            "5: a selector in one kernel (left open there)",
            "done: 5 to 14 us a layer at batch 1, there 56",
            "column choose",
            OPS,
        ),
        Item("Figure 1: tokens/s over length", "done", f"k=32: {_flat(32)}", STEPS),
        Item(
            "Table 2: steps at 8K to 128K, batch 4 at 128K 1.76 x (k=8)",
            "done",
            f"k=8 {_step(4, 128 * K, 8)}, k=32 {_step(4, 128 * K, 32)}",
            STEPS,
        ),
        Item("Table 3: 1M, batch 1, 1.77 x (k=32)", "done", _step(1, M, 32), STEPS),
        Item("Table 3: 128K, batch 8, 1.81 x (k=32)", "done", _step(8, 128 * K, 32), STEPS),
        Item(
            "GATE-3, H1 to H3, thresholds of fidelity: pass or fail", "done", _verdicts(), "helix tables sparse-gates"
        ),
        Item(
            "Table 4: window, ours, Quest's pages",
            "partly: speed on Qwen2.5-7B's shape, needles on the demo model; parts of blocks beside them",
            f"32K, code: {_newest('needles', 'dense', 'bounds-32', KEEPS, 'quest-64')}, "
            f"{_needles('window-4736', 32 * K, 'code')}",
            FIDELITY,
        ),
        Item(
            "Table 5: mean against bounds",
            "done, on the demo model; bounds find more needles, means follow text better",
            f"8K, code: {_needles('mean-8', 8 * K, 'code')}, {_needles('bounds-8', 8 * K, 'code')}",
            FIDELITY,
        ),
        Item(
            "8.2: KL, TV, perplexity on true text",
            "done, on sources of this repository",
            f"KL at 8K: {_text('bounds-8', 8 * K, 'kl')}, {_text('bounds-32', 8 * K, 'kl')}",
            FIDELITY,
        ),
        Item("8.2: five windows of text", "done", "spread by text in the table", FIDELITY),
        Item(
            "8.2: long generation keeps its bounds",
            "done: bounds follow each append; `frozen` is without",
            "table fidelity-generated",
            FIDELITY,
        ),
        Item(
            "8.2: a second family, 14B",
            "out of reach: no trained weights here but the demo model's and SmolLM2's",
            "-",
            FIDELITY,
        ),
        Item(
            "8.3: agreement 0.906 (k=8), where sure 0.985; k=32 0.9975",
            "done, on the demo model",
            f"32K where sure: {_text('bounds-8', 32 * K, 'sure')}, {_text('bounds-32', 32 * K, 'sure')}",
            FIDELITY,
        ),
        Item(
            "8.3: margins of misses, pooled",
            "done: all texts of a policy together",
            _margins(),
            FIDELITY,
        ),
        Item(
            "8.4, Figure 2: needles over budget and length",
            "partly: demo model to 32K; Qwen2.5-7B-1M out of reach",
            f"32K, loop: {_needles('bounds-8', 32 * K, 'loop')}, {_needles('bounds-32', 32 * K, 'loop')}",
            FIDELITY,
        ),
        Item("8.4: 500 trials, lower bounds", "partly: 200 prompts a cell", "Wilson's ranges in the table", FIDELITY),
        Item(
            "8.4: real prose is harder, 0.58 at k=8",
            "done: code is harder here",
            f"32K, code: {_needles('bounds-8', 32 * K, 'code')}, "
            f"{_needles('bounds-32', 32 * K, 'code')}, {_needles('dense', 32 * K, 'code')}",
            FIDELITY,
        ),
        Item(
            "8.4: several facts, multi-hop",
            "done: four facts, `task=hops`: a fact that names another",
            f"facts: {_newest('facts', 'dense', 'bounds-32', KEEPS, 'quest-64')}; "
            f"hops: {_newest('hops', 'dense', 'bounds-32', KEEPS, 'quest-64')}",
            FIDELITY,
        ),
        Item("8.4: 512K and 1M needles", "out of reach: no model of that context here", "-", FIDELITY),
        Item(
            "9, equation 2, Figure 3: the bill; 3.05 TB/s, 3.2 ms, 1.7 ms, R² 0.998",
            "done, with two more terms",
            _bill("one NVIDIA"),
            "helix planner bill",
        ),
        Item("9: crossover and regime map", "done", "table sparse-crossover", "helix planner bill"),
        Item(
            "9: prefill of 1M, 833 s",
            "done: 256K over host memory, and 976K where no more than 22 GB of the GPU can be allocated",
            _prefill(),
            "helix bench tier-prefill",
        ),
        Item(
            "10: cache in host memory, 24 GB card, 6.1 tokens/s",
            "done: no more than 22 GB of the GPU can be allocated (`bench.gpu_bytes`); PCIe 5",
            _tier(),
            TIER,
        ),
        Item(
            "10: needle over host memory at 128K",
            "partly: 32K, the demo model",
            "table tier-needles",
            "helix bench tier-needles",
        ),
        Item("11: read, find, store", "done: bill and tier", "table sparse-bill", "helix planner bill"),
        Item("13: sampling", "done: any request may be sampled", "-", "pytest tests/e2e/test_fuzz.py"),
    ]


def tabled() -> dict[str, Table]:
    """Lists the tables that are reprinted."""
    return {name: Table(command, TABLES[name]) for name, command in RECORDED.items()}
