"""Tables of the kernels of layers other than plain attention: states of the gated delta rule, and indexers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.records.columns import Columns, at, kilo, lines, ms, of, page, us
from benchmarks.records.rows import WORKLOAD, Row, check_commit, kv, results

POINT = "kind", "heads", "batch", "queries", "rows", "ranks", "tokens", "length"


def _rows(name: str, kind: str) -> list[Row]:
    return results(name, *POINT, kind=kind)


def _with_peer(kind: str) -> list[Row]:
    """Newest rows, each with fla-core's newest time, which may be of another run."""
    every = results("delta", *POINT, "commit")
    peer = {tuple(r.get(k) for k in POINT): r["fla_us"] for r in every if r["kind"] == kind and r.get("fla_us")}
    return [r | {"fla_us": peer.get(tuple(r.get(k) for k in POINT))} for r in _rows("delta", kind)]


def delta_steps() -> list[str]:
    """Decode steps of the gated delta rule: state read and written once, beside fla-core's kernel."""
    columns: Columns = {
        "heads": at("heads"),
        "sequences": at("batch"),
        "queries": at("queries"),
        "Helix": us("us"),
        "target": us("bar_us"),
        "fla-core 0.6.0": us("fla_us"),
    }
    return lines(columns, _with_peer("delta-step"))


def delta_prompts() -> list[str]:
    """Prompts of the gated delta rule in chunks of 64, beside fla-core's kernels."""
    columns: Columns = {
        "heads": at("heads"),
        "tokens": kilo("length"),
        "Helix": us("us"),
        "fla-core 0.6.0": us("fla_us"),
    }
    return lines(columns, _with_peer("delta-prompt"))


def indexer(kind: str) -> list[str]:
    """Parts of a choice of tokens on one rank: scores, the choice itself, attention over chosen tokens."""
    columns: Columns = {
        "scan": {
            "index heads": at("heads"),
            "sequences": at("batch"),
            "queries": at("queries"),
            "tokens": kilo("tokens"),
        },
        "choice": {"queries": at("rows"), "ranks": at("ranks"), "tokens": kilo("tokens")},
        "reads": {"heads": at("heads"), "queries": at("rows"), "tokens": at("tokens")},
    }[kind] | {"takes": us("us")}
    if kind != "choice":
        columns["in FP8"] = us("fp8_us")
    if kind != "reads":
        columns["target"] = lambda row: "-" if row.get("bar_us") is None else f"{row['bar_us']:.1f} us"
    return lines(columns, _rows("indexer", kind))


def hybrid_steps() -> list[str]:
    """Decode steps of a model of such layers on one GPU, with drafts of prompt lookup and without."""
    found = results("hybrid-steps", "kind", "model", "batch", "length", "gamma")
    columns: Columns = {"KV": kv, "drafts": at("gamma"), "a step": ms("ttl_p50_us")}
    return lines(columns, [row for row in found if row["kind"] == "step"])


def hybrids_of_eight() -> list[str]:
    """Decode steps of Qwen3.5-397B on eight emulated ranks: Helix beside plain TP."""
    every = _whole("fp8-steps.emulated-8", "qwen3.5")
    both = {r["commit"] for r in every if r["layout"].startswith("tp ")}
    every = [r for r in every if r["commit"] in both]  # newer steps of Helix have none of plain TP beside them
    found = {(r["layout"].split()[0], r["batch"], r["length"]): r for r in every}
    table: list[tuple[str, ...]] = [
        ("KV", "ideal", "Helix kvp=4 tpa=2", "plain TP=8", "TP / Helix", "memory of a GPU, TP", "Helix")
    ]
    for (mode, *point), r in found.items():
        if mode == "helix":
            tp = found["tp", *point]
            check_commit(r, tp)
            used = (f"{max(of['used_bytes_per_gpu']) / 1e9:.0f} GB" for of in (tp, r))
            times = (ms("floor_us")(r), ms("ttl_p50_us")(r), ms("ttl_p50_us")(tp))
            table.append((kv(r), *times, f"{tp['ttl_p50_us'] / r['ttl_p50_us']:.2f}", *used))
    return page(table)


def dsa_steps() -> list[str]:
    """Decode steps of models that choose tokens, on eight emulated ranks, beside attention to all tokens."""
    kept = {"auto": "bf16", "fp8": "FP8", "fp8_all": "FP8, index keys too", "bf16": "bf16"}
    columns: Columns = {
        "shape": at("model"),
        "KV": kv,
        "latents": lambda r: kept[r.get("kv", "auto")],
        "queries read": lambda r: r["reads"].replace("_", " "),
        "a step": ms("ttl_p50_us"),
        "bytes alone": lambda r: ms("floor_us")(r) if r["reads"].startswith("chosen") else "-",
        "launches a layer": of("launches_per_layer"),
        "memory of a GPU": lambda r: f"{max(r['used_bytes_per_gpu']) / 1e9:.0f} GB",
    }
    return lines(columns, results("dsa-steps.emulated-8", "model", "batch", "length", "kv", "reads"))


def _whole(name: str, model: str) -> list[Row]:
    return [r for r in results(name, *WORKLOAD, "commit") if r["model"].startswith(model) and "failed" not in r]


PAGE: dict[str, Callable[[], list[str]]] = {
    "delta-steps": delta_steps,
    "delta-prompts": delta_prompts,
    "hybrid-steps": hybrid_steps,
    "hybrids-of-8": hybrids_of_eight,
    "dsa-steps": dsa_steps,
    **{f"indexer-{kind}": partial(indexer, kind) for kind in ("scan", "choice", "reads")},
}
