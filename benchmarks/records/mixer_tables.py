"""Tables of the kernels of layers other than plain attention: states of the gated delta rule, and indexers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.records.columns import Columns, at, kilo, lines, ms, us
from benchmarks.records.rows import Row, kv, results

POINT = "kind", "heads", "batch", "queries", "rows", "ranks", "tokens", "length"


def _rows(name: str, kind: str) -> list[Row]:
    return [row for row in results(name, *POINT) if row["kind"] == kind]


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
    return lines(columns, _rows("delta", "delta-step"))


def delta_prompts() -> list[str]:
    """Prompts of the gated delta rule in chunks of 64, beside fla-core's kernels."""
    columns: Columns = {
        "heads": at("heads"),
        "tokens": kilo("length"),
        "Helix": us("us"),
        "fla-core 0.6.0": us("fla_us"),
    }
    return lines(columns, _rows("delta", "delta-prompt"))


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


PAGE: dict[str, Callable[[], list[str]]] = {
    "delta-steps": delta_steps,
    "delta-prompts": delta_prompts,
    "hybrid-steps": hybrid_steps,
    **{f"indexer-{kind}": partial(indexer, kind) for kind in ("scan", "choice", "reads")},
}
