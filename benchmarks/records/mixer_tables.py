"""Rows of layers other than plain attention: states of the gated delta rule beside a peer, and hybrids beside TP."""

from __future__ import annotations

from benchmarks.records.rows import WORKLOAD, Row, check_commit, results

POINT = "kind", "heads", "batch", "queries", "rows", "ranks", "tokens", "length"


def with_peer(kind: str) -> list[Row]:
    """Newest rows, each with fla-core's newest time, which may be of another run."""
    every = results("delta", *POINT, "commit")
    peer = {tuple(r.get(k) for k in POINT): r["fla_us"] for r in every if r["kind"] == kind and r.get("fla_us")}
    newest = results("delta", *POINT, kind=kind)
    return [r | {"fla_us": peer.get(tuple(r.get(k) for k in POINT))} for r in newest]


def hybrids_of_eight() -> list[Row]:
    """Decode steps of Qwen3.5-397B on eight emulated ranks in Helix's layout, with those of plain TP."""
    every = results("fp8-steps.emulated-8", *WORKLOAD, "commit")
    every = [r for r in every if r["model"].startswith("qwen3.5") and "failed" not in r]
    both = {r["commit"] for r in every if r["layout"].startswith("tp ")}
    every = [r for r in every if r["commit"] in both]  # newer steps of Helix have none of plain TP beside them
    found = {(r["layout"].split()[0], r["batch"], r["length"]): r for r in every}
    rows = []
    for (mode, *point), r in found.items():
        if mode == "helix":
            tp = found["tp", *point]
            check_commit(r, tp)
            rows.append({**r, "tp_us": tp["ttl_p50_us"], "tp_bytes": max(tp["used_bytes_per_gpu"])})
    return rows
