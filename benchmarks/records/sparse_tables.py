"""Rows of whole steps with block-sparse and dense attention."""

from __future__ import annotations

from benchmarks.records.rows import WORKLOAD, Row, check_commit, results


def steps(name: str) -> list[Row]:
    """Returns the steps of every attention, with the speed-up over dense attention where both were measured."""
    found = [r for r in results(name, *WORKLOAD, "attention") if "failed" not in r]
    attentions = list(dict.fromkeys(r["attention"] for r in found))
    dense = {tuple(r[k] for k in WORKLOAD): r for r in found if r["attention"] == "dense"}
    return [_ratio_cell(r, dense.get(tuple(r[k] for k in WORKLOAD)), attentions) for r in found]


def _ratio_cell(r: Row, dense: Row | None, attentions: list[str]) -> Row:
    cell = f"{r['ttl_p50_us'] / 1e3:,.2f} ms"
    if dense is not None and dense is not r:
        check_commit(dense, r)
        cell += f" ({dense['ttl_p50_us'] / r['ttl_p50_us']:.2f} x)"
    named = [attention.replace("block_sparse, ", "") for attention in attentions]
    return {**r, "cell": cell, "order": attentions.index(r["attention"]), "named": named}
