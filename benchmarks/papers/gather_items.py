"""Attention Pays Its Bill (Alsufi and Scott, BRL-2026-07): its items compared with our records."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.papers.items import NOT_RECORDED, Item, Table, filled_items, span
from benchmarks.records import sparse_cost_model, sparse_criteria
from benchmarks.records.fidelity_tables import KEY, MAX_LENGTH, pooled
from benchmarks.records.rows import WORKLOAD, Row, results
from benchmarks.records.serving_tables import compared_servers, offload_steps
from benchmarks.records.sparse_criteria import KEEPS, over_dense
from benchmarks.records.tables import TABLES

K, M = 1024, 1 << 20
OPS, STEPS, FIDELITY, OFFLOAD = (
    "helix bench sparse",
    "helix bench sparse-steps",
    "helix fidelity",
    "helix bench offload-steps",
)
DENSE = {"dense_us": "ours", "cudnn_us": "cuDNN", "flash_us": "FlashAttention", "flashinfer_us": "FlashInfer"}
_CACHE = {"none": "GPU", "host": "host memory"}  # by kv.offload
KINDS = ("text", "needles", "facts", "hops", "generated", "recall")
# Reprinted tables, and the command of their records.
RECORDED = {
    "sparse-blocks": OPS,
    "sparse-steps": STEPS,
    "sparse-steps.emulated-8": f"{STEPS} ranks=8",
    "sparse-policies": "helix bench sparse-policies",
    "sparse-gates": "helix tables sparse-gates",
    "sparse-parts": OPS,
    "sparse-costs": "helix bench sparse-costs",
    "sparse-cost": "helix planner sparse",
    "sparse-cost-three": "helix planner sparse",
    "sparse-crossover": "helix planner sparse",
    **{f"fidelity-{name}": FIDELITY for name in ("policies", "matched", "margins", *KINDS)},
    "offload-steps": OFFLOAD,
    "offload-prefill": "helix bench offload-prefill",
    "offload-needles": "helix bench offload-needles",
}


def _ops(batch: int, topk: int) -> list[Row]:
    return results("sparse", "length", kind="sparse", heads="28/4", batch=batch, topk=topk)


def _anchor() -> str:
    """A plain token behind 8K, of ours and of vLLM."""
    rows = [r for r in compared_servers(1) if r["trace"] == "1 x 8K"]
    parts = (f"{r['helix']['p50_itl_ms']:.2f} ms, vLLM {r['other']['p50_itl_ms']:.2f}" for r in rows)
    return "; ".join(parts) or NOT_RECORDED


def _op(batch: int, topk: int) -> str:
    found = sorted(_ops(batch, topk), key=lambda r: int(r["length"]))
    return ", ".join(f"{r['length'] // K}K {r['best_dense_over_ours']:.1f} x" for r in found) or NOT_RECORDED


def _peers() -> str:
    rows = results("sparse", "heads", "batch", "length", "topk", kind="sparse")
    return ", ".join(name for field, name in DENSE.items() if any(field in r for r in rows)) or NOT_RECORDED


def _step(batch: int, length: int, topk: int) -> str:
    over = over_dense(batch, length, f"k={topk} of 128")
    return NOT_RECORDED if over is None else f"{over:.2f} x"


def _verdicts() -> str:
    parts = [passed for gate in sparse_criteria.listed() for _, passed in gate.ours]
    return f"{sum(parts)} of {len(parts)} figures pass; below"


def _flat(topk: int) -> str:
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
    """Hits of policies at 32K in code, on the newest prompts that subblocks were measured on."""
    rows = [r for r in _fidelity(kind, length=MAX_LENGTH, haystack="code") if r["policy"] in policies]
    together = [r["commit"] for r in rows if r["policy"] == KEEPS][-1:]
    found = {r["policy"]: r for r in rows if r["commit"] in together}
    parts = [f"{policy} {found[policy]['hits']} of {found[policy]['count']}" for policy in policies if policy in found]
    return ", ".join(parts) or NOT_RECORDED


def _margins() -> str:
    """Agreement in steps where dense attention is sure, pooled over all texts."""
    rows = {r["policy"]: r for r in pooled() if r["policy"] in ("bounds-8", "bounds-32", KEEPS)}
    return ", ".join(f"{policy} {r['sure']:.4f} of {r['sure_steps']}" for policy, r in rows.items())


def _text(policy: str, length: int, name: str) -> str:
    rows = [r for r in _fidelity("text", policy=policy, length=length) if r["windows"] == 5]
    return f"{policy} {rows[-1][name]:.3f}" if rows else f"{policy} -"


def _sparse_cost(one: str) -> str:
    accounts = [a for a in sparse_cost_model.recorded() if one in a.machine]
    parts = [
        f"{a.budget}: {a.costs.bytes_per_s / 1e12:.2f} TB/s, {1e3 * a.costs.overhead_s:.2f} ms, "
        f"{1e3 * a.costs.selection_s:.2f} ms, R² {a.r2():.3f}, held out at most {max(a.errors):.1%}"
        for a in accounts
        if a.errors
    ]
    return "; ".join(parts) or NOT_RECORDED


def _offload() -> str:
    """Tokens/s of 1 x 1M over host memory, with a bf16 cache, as in the paper, and an FP8 one."""
    rows = [r for r in offload_steps() if r.get("ttl_p50_us") and (r["batch"], r["length"]) == (1, M)]
    rates = {kv: [1e6 / r["ttl_p50_us"] for r in rows if r["kv"] == kv] for kv in ("auto", "fp8")}
    return f"{span(rates['auto'], '.0f', 'tokens/s')} in bf16, {span(rates['fp8'], '.0f')} in FP8, 1 x 1M"


def _prefill() -> str:
    rows = [r for r in results("offload-prefill", "offload", "length") if r.get("prefill_s")]
    return (
        ", ".join(f"{r['length'] // K}K in {r['prefill_s']:.0f} s ({_CACHE[r['offload']]})" for r in rows)
        or NOT_RECORDED
    )


FIGURES: dict[str, Callable[..., str]] = {
    "sparse_cost": partial(_sparse_cost, "one NVIDIA"),
    "anchor": _anchor,
    "flat": _flat,
    "margins": _margins,
    "needles": _needles,
    "newest": _newest,
    "op": _op,
    "peers": _peers,
    "prefill": _prefill,
    "step": _step,
    "text": _text,
    "offload": _offload,
    "verdicts": _verdicts,
}


def items() -> list[Item]:
    """Lists the paper's items in order."""
    return filled_items("gather", FIGURES)


def tabled() -> dict[str, Table]:
    """Lists the reprinted tables."""
    return {name: Table(command, TABLES[name]) for name, command in RECORDED.items()}
