"""Tables of an engine that serves, of caches in host memory, and of models that draft for themselves."""

from __future__ import annotations

from collections.abc import Callable

from launch.records.columns import Columns, lines
from launch.records.rows import Row, results

K, M = 1 << 10, 1 << 20


def _shape(r: Row) -> str:
    return f"{r['batch']} x {r['length'] // M}M" if r["length"] >= M else f"{r['batch']} x {r['length'] // K}K"


def _of(name: str, unit: str, digits: int = 1) -> Callable[[Row], str]:
    return lambda r: "-" if r.get(name) is None else f"{r[name]:,.{digits}f} {unit}".strip()


def _set_beside(r: Row) -> str:
    chosen = {"kv.overlap": r["overlap"], "kv.ahead": r["ahead"], "hopb.chunks=2": r["hopb_chunks"] > 1}
    return ", ".join(name for name, is_on in chosen.items() if is_on) or "-"


def tiers() -> list[str]:
    """Steps over host memory beside what the planner says of them."""
    columns: Columns = {
        "KV": _shape,
        "`topk`": lambda r: str(r["topk"]),
        "stays": lambda r: f"{r['repeat']:.0%}",
        "set beside": _set_beside,
        "a token": _of("ms", "ms", 2),
        "predicted": _of("predicted_ms", "ms", 2),
        "over reading all": _of("over_dense", "x", 0),
        "hot": lambda r: f"{r['hot']:.0%}",
        "over the link": _of("link_mb", "MB", 0),
        "at": lambda r: f"{r['link_gbs']:.1f} GB/s" if r["link_gbs"] else "-",
        "GPU in use": _of("used_gb", "GB"),
    }
    key = "kind", "batch", "length", "topk", "repeat", "overlap", "ahead", "hopb_chunks", "pieces"
    found = results("tier-steps", *key)
    return lines(columns, [r for r in found if r["kind"] == "tier-steps" and "ms" in r and r["tier"] == "host"])


def fetches() -> list[str]:
    """Blocks of 64 KB that come alone."""
    columns: Columns = {"blocks": lambda r: str(r["pieces"]), "together": _of("us", "us"), "rate": _of("gbs", "GB/s")}
    return lines(columns, [r for r in results("tier-steps", "kind", "pieces") if r["kind"] == "fetch"])


def served() -> list[str]:
    """What clients inside a job see."""
    columns: Columns = {
        "trace": lambda r: r["trace"],
        "streams": lambda r: _shape(r) if "batch" in r else f"{r['running']} x {r['length'] // K}K",
        "new prompts": lambda r: str(r.get("arrivals", r.get("waiting", "-"))),
        "decision p50": _of("decide_p50_us", "us", 0),
        "mean gap": _of("gap_ms", "ms", 2),
        "first token p50": _of("first_p50_ms", "ms", 0),
        "p99": _of("first_p99_ms", "ms", 0),
        "prompt": _of("prefill_s", "s", 2),
    }
    return lines(columns, results("serve", "trace", "batch", "length", "arrivals"))


def self_drafts() -> list[str]:
    """Iterations of models that draft for themselves, and what they gain where a share of the drafts holds."""

    def gain(rate: str) -> Callable[[Row], str]:
        return lambda r: f"{r['gain_at_rates'][rate]:.2f}"

    def phase(name: str) -> Callable[[Row], str]:
        return lambda r: f"{r['phase_us'][name] / 1e3:.2f} ms" if name in r.get("phase_us", {}) else "-"

    columns: Columns = {
        "model": lambda r: r["model"],
        "KV": _shape,
        "keys": lambda r: "-" if r["sparsity"] is None else f"{r['sparsity']:.0%}",
        "drafts": lambda r: str(r["gamma"]),
        "iteration": lambda r: f"{r['ttl_p50_us'] / 1e3:.2f} ms",
        **{name: phase(name) for name in ("draft", "verify", "choose", "accept")},
        **{f"gain at {rate}": gain(rate) for rate in ("0.8", "0.9", "0.96")},
    }
    found = results("self-drafts", "model", "batch", "length", "sparsity", "gamma")
    return lines(columns, [r for r in found if "failed" not in r])


PAGE: dict[str, Callable[[], list[str]]] = {
    "tier-steps": tiers,
    "tier-fetch": fetches,
    "serve": served,
    "self-drafts": self_drafts,
}
