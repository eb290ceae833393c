"""Tables of block-sparse attention, kernels and whole steps, and of the kernels of sparse drafts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.records.columns import POINT, Columns, at, lines, ms, of, page, us
from benchmarks.records.rows import WORKLOAD, Row, check_commit, kv, results, shape
from benchmarks.timer import READ_CEILING


def _kind(kind: str, *keys: str) -> list[Row]:
    return results("sparse", *keys, kind=kind)


def blocks() -> list[str]:
    """Choosing and attending blocks, beside dense attention."""
    columns: Columns = {
        "heads q/kv": at("heads"),
        "batch": kv,
        "k": at("topk"),
        "choose": us("select_us"),
        "attend": us("attend_us"),
        "both": us("us"),
        "target": us("target_us"),
        "dense: ours, cuDNN, flash": lambda r: (
            f"{', '.join(f'{r[name]:.0f}' for name in ('dense_us', 'cudnn_us', 'flash_us'))} us"
        ),
        "dense over both": of("best_dense_over_ours", "x"),
    }
    return lines(columns, _kind("sparse", "heads", "batch", "length", "topk"))


def parts() -> list[str]:
    """Choosing and attending parts of blocks, beside 32 blocks."""
    columns: Columns = {
        "heads q/kv": at("heads"),
        "batch": kv,
        "parts": at("topk"),
        "of blocks": at("candidates"),
        "read": of("read_bytes", "MB", 1, 1e6),
        "candidates": us("candidates_us"),
        "choose": us("select_us"),
        "attend": us("attend_us"),
        "all": us("us"),
        "32 blocks": us("blocks_us"),
        "over": of("over_blocks", "x", 2),
    }
    return lines(columns, _kind("parts", "heads", "batch", "length", "topk", "candidates"))


def collecting() -> list[str]:
    """Verification with scores of its keys, over verification without; plain also by two tiles, each with all keys."""
    ratios = {"all": "all rows' mean", "ends": "of two", "any": "best row", "each": "each row"}
    columns: Columns = {
        "heads a KV head": at("group"),
        "head dim": at("dim"),
        "queries": at("queries"),
        "sequences": kv,
        "plain": us("plain_us"),
        "general kernel": us("general_us"),
        "keys alone": us("keys_us"),
        **{title: of(f"{rows}_over_plain", "x", 2) for rows, title in ratios.items()},
    }
    found = _kind("collect", "group", "dim", "queries", "batch", "length")
    return lines(columns, [r | {"keys_us": r["batch"] * r["length"] * r["dim"] * 4e6 / READ_CEILING} for r in found])


def choosing() -> list[str]:
    """The choice of keys in all layers."""
    columns: Columns = {
        "layers": at("layers"),
        "KV heads": at("kv_heads"),
        "sequences": kv,
        "guessed right": us("us", 0),
        "never right": us("missed_us", 0),
        "target": us("target_us", 0),
    }
    return lines(columns, _kind("select", "layers", "kv_heads", "batch", "length"))


def attending() -> list[str]:
    """Attention over keys that lie anywhere."""
    columns: Columns = {
        "heads q/kv": at("heads"),
        "sequences": kv,
        "keys read": at("kept"),
        "in runs of": at("run"),
        "attention": us("us"),
        "target": us("target_us"),
    }
    return lines(columns, _kind("attend", "heads", "batch", "length", "run"))


def steps(name: str, beside: str | None = None) -> list[str]:
    """Steps under every attention that was measured beside dense ones, and how many times as fast.

    Args:
        beside: another record, of the dense ones.
    """
    found = [r for r in results(name, *WORKLOAD, "attention") if "failed" not in r]
    if beside is not None and found:
        wanted = {tuple(r[k] for k in WORKLOAD) for r in found}
        plain = [r for r in results(beside, *WORKLOAD) if tuple(r[k] for k in WORKLOAD) in wanted and "failed" not in r]
        found = [r | {"attention": "dense"} for r in plain] + found
    attentions = list(dict.fromkeys(r["attention"] for r in found))
    took = {(shape(r), kv(r), r["layout"], r["attention"]): r for r in found}

    def cell(point: tuple[str, str, str], attention: str) -> str:
        own, dense = took.get((*point, attention)), took.get((*point, "dense"))
        if own is None:
            return "-"
        if dense is None or dense is own:
            return ms("ttl_p50_us")(own)
        check_commit(dense, own)
        return f"{ms('ttl_p50_us')(own)} ({dense['ttl_p50_us'] / own['ttl_p50_us']:.2f} x)"

    points = dict.fromkeys((shape(r), kv(r), r["layout"]) for r in found)
    body = [(*point[:2], *(cell(point, attention) for attention in attentions)) for point in points]
    return page([(*POINT, *(a.replace("block_sparse, ", "") for a in attentions)), *body]) if found else []


def costs() -> list[str]:
    """Steps of two jobs, one over the other."""
    columns: Columns = {
        "case": at("case"),
        **POINT,
        "one": ms("plain_us"),
        "the other": ms("step_us"),
        "over": lambda r: f"{r['step_us'] / r['plain_us']:.3f} x",
    }
    return lines(columns, results("sparse-costs", "model", "case", "batch", "length"))


PAGE: dict[str, Callable[[], list[str]]] = {
    "sparse-blocks": blocks, "sparse-parts": parts, "sparse-collect": collecting, "sparse-choose": choosing,
    "sparse-attend": attending,
    "sparse-steps": partial(steps, "sparse-steps"), "sparse-policies": partial(steps, "sparse-policies"),
    "sparse-steps.emulated-8": partial(steps, "sparse-steps.emulated-8"),
    "sparse-steps.8gpu": partial(steps, "sparse-steps.8gpu", "step"), "sparse-costs": costs,
}  # fmt: skip
