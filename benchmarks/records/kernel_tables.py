"""Tables of kernels that summarize several records: correctness, verification, and cases within their targets."""

from __future__ import annotations

import json

from benchmarks.records.columns import Cells
from benchmarks.records.rows import Row, results
from launch.inputs.compose import ROOT


def correctness() -> Cells:
    """Tabulates needles found, and tokens equal to those of one rank."""
    found = [json.loads(line) for line in (ROOT / "benchmarks/results/correctness.jsonl").read_text().splitlines()]
    rows = []
    for r in found:
        name = r["name"]
        if name.endswith("-equal"):
            text = f"same tokens as one rank, over {r['over']}"
            rows.append((f"50 needles in 32K tokens, {name.split('-')[2]}: {text}", r["as_one_rank"], r["needles"]))
        elif name.startswith("needles"):
            gpus = r["layout"]["world_size"]
            text = f"found over {gpus} GPU{'s' if gpus > 1 else ''}"
            rows.append((f"50 needles in 32K tokens, {name.split('-')[2]}: {text}", r["needles_found"], r["needles"]))
    device = next(r["device"] for r in found if "device" in r)
    return [(f"on {device}", ""), *((what, f"{held} of {all_}") for what, held, all_ in rows)]


def verify() -> Cells:
    """Tabulates verification: the paper's findings and ours, and where the fused kernel is not the fastest."""
    found = results("verify", "kind", "batch", "gamma", "alpha", "kv_dim")
    scans = {(r["batch"], r["gamma"], r["alpha"]): r for r in found if r["kind"] == "scan"}
    packs = [r for r in found if r["kind"] == "pack"]
    low, high = scans[32, 128, 0.3], scans[32, 128, 0.9]
    kinds = "_us", "_graph_us"  # launched from Python, and in a graph
    table = [("", "paper, L40S, eager", "ours, eager", "ours, in a graph")]
    for name, paper in (("naive", "14.7 to 23.8 us"), ("scan", "13.0 to 12.9 us")):
        eager, graph = (f"{low[name + kind]:.1f} to {high[name + kind]:.1f} us" for kind in kinds)
        table.append((f"{name}, 32 x 128 tokens, acceptance 0.3 to 0.9", paper, eager, graph))
    for name, paper in (("naive", "1.84 x"), ("torch", "6.56 x")):
        eager, graph = (f"{high[name + kind] / high['scan' + kind]:.2f} x" for kind in kinds)
        table.append((f"{name} over scan, 32 x 128, acceptance 0.9", paper, eager, graph))
    small = [r["two_step_torch_us"] / r["fused_us"] for r in packs if r["gamma"] == 8 and r["batch"] <= 32]
    over = f"{min(small):.1f} to {max(small):.1f} x"
    table.append(("scan and torch's packing over fused, gamma 8", "3.2 to 3.8 x", over, "-"))
    for batch, gamma, width in ((32, 128, 2048), (128, 8, 2048), (512, 8, 2048), (128, 128, 2048)):
        (r,) = [r for r in packs if (r["batch"], r["gamma"], r["alpha"], r["kv_dim"]) == (batch, gamma, 0.9, width)]
        what = f"fused, {batch} x {gamma} x {width}, {r['packed_bytes'] / 1e6:.1f} MB packed"
        paper = "386 us; two steps 109" if (batch, gamma) == (32, 128) else "-"
        graph = f"{r['fused_graph_us']:.1f} us (p95 {r['fused_graph_p95_us']:.1f})"
        graph += f"; our scan and pack {r['two_step_graph_us']:.1f}"
        table.append((what, paper, f"{r['fused_us']:.1f} us", graph))
    for name, kind in (("eager", ""), ("in a graph", "_graph")):
        papers = [n + f"{kind}_us" for n in ("one_block", "two_step_torch", "torch")]
        times = [[r[n] / r[f"fused{kind}_us"] for n in papers if n in r] for r in packs]
        slowest = [min(row) for row in times if row]
        ours = [r[f"two_step{kind}_us"] / r[f"fused{kind}_us"] for r in packs]
        text = [
            f"{whose}: {sum(x < 1 for x in ratios)} of {len(ratios)} (at worst {min(ratios):.2f} x)"
            for whose, ratios in (("the paper's kernels", slowest), ("our scan and pack", ours))
        ]
        table.append((f"rows where fused is behind, {name}", "-", text[0], text[1]))
    return table


def kernels() -> Cells:
    """Counts each kernel's cases that beat their peers, and that meet their target."""
    found = results("kernels", "kind", "heads", "batch", "length", "queries", "matrix", "rows")

    def rows_of_kind(kind: str) -> list[Row]:
        return [r for r in found if r["kind"] == kind]

    kinds: dict[str, tuple[str, list[Row], str | None]] = {
        "attention, one query": ("the fastest peer", rows_of_kind("decode"), "best_peer_over_ours"),
        "MLA attention": ("FlashInfer", results("mla", "heads", "batch", "length", "queries"), "peer_over_ours"),
        "projection": ("cuBLAS", rows_of_kind("linear"), "cublas_us"),
        "projection with append": ("two launches", rows_of_kind("append"), "apart_us"),
        "routed experts": ("-", results("moe", "model", "tpf", "ep", "tokens"), None),
        "collective": ("torch.distributed", results("comm", "op", "ranks", "message_bytes"), "nccl_us"),
    }
    table = [("operation", "cases", "compared with", "faster in", "within target")]
    for name, (peer, cases, key) in kinds.items():
        ours = {"collective": "symm_us"}.get(name, "us")
        faster = sum(r[key] > (1 if "over_ours" in key else r[ours]) for r in cases) if key else "-"
        targets = [r for r in cases if r["bar_us"]]
        within = f"{sum(r[ours] <= r['bar_us'] for r in targets)} of {len(targets)}"
        table.append((name, str(len(cases)), peer, str(faster), within))
    return table
