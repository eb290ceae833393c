"""Tables of `python -m launch.bench sparse`: attention over chosen blocks, and the kernels of sparse drafts."""

from __future__ import annotations

from launch.records.rows import Row, results


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
    lines = ["| layers | KV heads | sequences | choice | target |", "|---|---|---|---|---|"]
    for r in _kind("select", "layers", "kv_heads", "batch", "length"):
        point = f"{r['layers']} | {r['kv_heads']} | {r['batch']} x {_long(r['length'])}"
        lines.append(f"| {point} | {r['us']:.0f} us | {r['target_us']:.0f} us |")
    return lines


def attending() -> list[str]:
    """Attention over keys that lie anywhere."""
    lines = ["| heads q/kv | sequences | keys read | in runs of | attention | target |", "|---|---|---|---|---|---|"]
    for r in _kind("attend", "heads", "batch", "length", "run"):
        point = f"{r['heads']} | {r['batch']} x {_long(r['length'])} | {r['kept']} | {r['run']}"
        lines.append(f"| {point} | {r['us']:.1f} us | {r['target_us']:.1f} us |")
    return lines


PAGE = {"sparse-blocks": blocks, "sparse-collect": collecting, "sparse-choose": choosing, "sparse-attend": attending}
