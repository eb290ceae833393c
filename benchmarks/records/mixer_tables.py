"""Rows of other mixers: gated delta rule states compared with a peer, and hybrid models with TP."""

from __future__ import annotations

from benchmarks.records.rows import WORKLOAD, Row, check_commit, results

POINT = "kind", "heads", "batch", "queries", "rows", "ranks", "tokens", "length"


def with_peer(kind: str) -> list[Row]:
    """Returns the newest rows, each with fla-core's newest time, possibly of another run."""
    every = results("delta", *POINT, "commit")
    peer = {tuple(r.get(k) for k in POINT): r["fla_us"] for r in every if r["kind"] == kind and r.get("fla_us")}
    newest = results("delta", *POINT, kind=kind)
    return [r | {"fla_us": peer.get(tuple(r.get(k) for k in POINT))} for r in newest]


def hybrids_of_eight() -> list[Row]:
    """Returns decode steps of Qwen3.5-397B on eight emulated ranks in Helix's layout, with plain TP's."""
    every = results("fp8-steps.emulated-8", *WORKLOAD, "commit")
    every = [r for r in every if r["model"].startswith("qwen3.5") and "failed" not in r]
    both = {r["commit"] for r in every if r["layout"].startswith("tp ")}
    every = [r for r in every if r["commit"] in both]  # newer Helix commits were not measured with plain TP
    found = {(r["layout"].split()[0], r["batch"], r["length"]): r for r in every}
    rows = []
    for (mode, *point), r in found.items():
        if mode == "helix":
            tp = found["tp", *point]
            check_commit(r, tp)
            rows.append({**r, "tp_us": tp["ttl_p50_us"], "tp_bytes": max(tp["used_bytes_per_gpu"])})
    return rows
