"""Tables of block-sparse attention, kernels and whole steps, and of the kernels of sparse drafts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.records.rows import WORKLOAD, Row, results, workload


def _kind(kind: str, *keys: str) -> list[Row]:
    return [row for row in results("sparse", "kind", *keys) if row["kind"] == kind]


def _long(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens < 1 << 20 else f"{tokens >> 20}M"


def blocks() -> list[str]:
    """Choosing and attending blocks, beside dense attention."""
    lines = [
        "| heads q/kv | batch | k | choose | attend | both | target | dense: ours, cuDNN, flash | dense over both |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in _kind("sparse", "heads", "batch", "length", "topk"):
        dense = ", ".join(f"{r[f'{name}_us']:.0f}" for name in ("dense", "cudnn", "flash"))
        lines.append(
            f"| {r['heads']} | {r['batch']} x {_long(r['length'])} | {r['topk']} | {r['select_us']:.1f} us "
            f"| {r['attend_us']:.1f} us | {r['us']:.1f} us | {r['target_us']:.1f} us | {dense} us "
            f"| {r['best_dense_over_ours']:.1f} x |"
        )
    return lines


def collecting() -> list[str]:
    """Verification with scores of its keys, over verification without."""
    lines = [
        "| heads a KV head | head dim | queries | sequences | plain | all rows' mean | of two | best row | each row |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in _kind("collect", "group", "dim", "queries", "batch", "length"):
        ratios = " | ".join(
            "-" if r.get(f"{rows}_over_plain") is None else f"{r[f'{rows}_over_plain']:.2f} x"
            for rows in ("all", "ends", "any", "each")
        )
        point = f"{r['group']} | {r['dim']} | {r['queries']} | {r['batch']} x {_long(r['length'])}"
        lines.append(f"| {point} | {r['plain_us']:.1f} us | {ratios} |")
    return lines


def choosing() -> list[str]:
    """The choice of keys in all layers."""
    lines = ["| layers | KV heads | sequences | guessed right | never right | target |", "|---|---|---|---|---|---|"]
    for r in _kind("select", "layers", "kv_heads", "batch", "length"):
        point = f"{r['layers']} | {r['kv_heads']} | {r['batch']} x {_long(r['length'])}"
        lines.append(f"| {point} | {r['us']:.0f} us | {r['missed_us']:.0f} us | {r['target_us']:.0f} us |")
    return lines


def attending() -> list[str]:
    """Attention over keys that lie anywhere."""
    lines = ["| heads q/kv | sequences | keys read | in runs of | attention | target |", "|---|---|---|---|---|---|"]
    for r in _kind("attend", "heads", "batch", "length", "run"):
        point = f"{r['heads']} | {r['batch']} x {_long(r['length'])} | {r['kept']} | {r['run']}"
        lines.append(f"| {point} | {r['us']:.1f} us | {r['target_us']:.1f} us |")
    return lines


def steps(name: str) -> list[str]:
    """Steps under every attention that was measured beside dense ones, and how many times as fast."""
    found = [r for r in results(name, *WORKLOAD, "attention") if "failed" not in r]
    attentions = list(dict.fromkeys(r["attention"] for r in found))
    took = {(workload(r), r["layout"], r["attention"]): r["ttl_p50_us"] for r in found}
    heads = [attention.replace("block_sparse, ", "") for attention in attentions]
    rows = [f"| shape | KV | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"] if found else []
    for point, layout in dict.fromkeys((workload(r), r["layout"]) for r in found):
        cells = []
        for attention in attentions:
            us, dense = took.get((point, layout, attention)), took.get((point, layout, "dense"))
            over = f" ({dense / us:.2f} x)" if us and dense and attention != "dense" else ""
            cells.append(f"{us / 1e3:.2f} ms{over}" if us else "-")
        rows.append(f"| {point} | {' | '.join(cells)} |")
    return rows


def costs() -> list[str]:
    """Steps of two jobs, one over the other."""
    found = results("sparse-costs", "model", "case", "batch", "length")
    rows = ["| case | shape | KV | one | the other | over |", "|---|---|---|---|---|---|"] if found else []
    for r in found:
        times = " | ".join(f"{r[name] / 1e3:.2f} ms" for name in ("plain_us", "step_us"))
        rows.append(f"| {r['case']} | {workload(r)} | {times} | {r['step_us'] / r['plain_us']:.3f} x |")
    return rows


PAGE: dict[str, Callable[[], list[str]]] = {
    "sparse-blocks": blocks, "sparse-collect": collecting, "sparse-choose": choosing, "sparse-attend": attending,
    "sparse-steps": partial(steps, "sparse-steps"), "sparse-policies": partial(steps, "sparse-policies"),
    "sparse-steps.emulated-8": partial(steps, "sparse-steps.emulated-8"), "sparse-costs": costs,
}  # fmt: skip
