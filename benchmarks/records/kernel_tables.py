"""Tables of what one kernel, one collective or one prompt takes, and of correctness."""

from __future__ import annotations

import json

from benchmarks.records.columns import Columns, at, kilo, lines, of, page, us
from benchmarks.records.rows import Row, results
from launch.inputs.compose import ROOT


def correctness() -> list[str]:
    """Tabulates the runs that `benchmarks/correctness.py` recorded."""
    found = [json.loads(line) for line in (ROOT / "benchmarks/results/correctness.jsonl").read_text().splitlines()]
    rows = []
    for r in found:
        name = r["name"]
        if name.endswith("-equal"):
            said = f"same tokens as one rank, over {r['over']}"
            rows.append((f"50 needles in 32K tokens, {name.split('-')[2]}: {said}", r["as_one_rank"], r["needles"]))
        elif name.startswith("needles"):
            gpus = r["layout"]["world_size"]
            said = f"found over {gpus} GPU{'s' if gpus > 1 else ''}"
            rows.append((f"50 needles in 32K tokens, {name.split('-')[2]}: {said}", r["needles_found"], r["needles"]))
    device = next(r["device"] for r in found if "device" in r)
    return page([(f"on {device}", ""), *((what, f"{held} of {all_}") for what, held, all_ in rows)])


def decode_kernel() -> list[str]:
    """`flash_decode` beside torch's attention and FlashInfer's, as `helix bench kernels` recorded it."""
    columns: Columns = {
        "heads q/kv": at("heads"),
        "batch": at("batch"),
        "KV": kilo("length"),
        "queries": at("queries"),
        "ours": us("us"),
        "cuDNN": us("cudnn_us"),
        "flash": us("flash_us"),
        "FlashInfer": us("flashinfer_us"),
        "of the read ceiling": lambda r: f"{r['of_ceiling']:.0%}",
        "target": us("bar_us"),
    }
    key = "kind", "heads", "batch", "length", "queries"
    return lines(columns, [r for kind in ("decode", "verify") for r in results("kernels", *key, kind=kind)])


def shapes() -> list[str]:
    """`flash_decode` beside torch's attention, of other head dims and groups."""
    columns: Columns = {
        "heads q/kv": at("heads"),
        "head dim": at("dim"),
        "batch": at("batch"),
        "KV": kilo("length"),
        "ours": us("us"),
        "cuDNN": us("cudnn_us"),
        "flash": us("flash_us"),
        "ours over cuDNN's": lambda r: f"{r['us'] / r['cudnn_us']:.2f}",
    }
    return lines(columns, results("kernels", "heads", "batch", "length", "queries", kind="shape"))


def mla_prefill() -> list[str]:
    """Attention of MLA's prompts over latents, and over keys and values that are expanded of them."""
    columns: Columns = {
        "heads": at("heads"),
        "queries": of("queries", "", 0),
        "keys": kilo("length"),
        "over latents": us("absorbed_us"),
        "expanded": us("us"),
        "rate": of("tflops", "TFLOP/s", 0),
        "times as fast": lambda r: f"{r['absorbed_us'] / r['us']:.1f}",
    }
    return lines(columns, results("mla-prefill", "heads", "queries", "length"))


def ragged() -> list[str]:
    """The mixed batch."""
    (r,) = results("kernels", kind="ragged")
    return [
        f"100 sequences of 1K tokens with 4 of 128K (8/1 heads) take {r['us']:.1f} us, equal lengths of as many bytes "
        f"{r['uniform_us']:.1f} us: {r['us'] / r['uniform_us']:.2f} x."
    ]


def linear() -> list[str]:
    """`linear` beside cuBLAS, and `qkv_append` beside `linear` and `kv_append`."""
    columns: Columns = {
        "matrix": lambda r: r["matrix"] + ", append" * (r["kind"] == "append"),
        "rows of x": at("rows"),
        "ours": us("us"),
        "cuBLAS (append: two launches)": lambda r: us("cublas_us" if r["kind"] == "linear" else "apart_us")(r),
        "target: bytes / 4.3 TB/s + 2.5 us": us("bar_us"),
    }
    kinds = "linear", "append"
    return lines(columns, [r for kind in kinds for r in results("kernels", "kind", "matrix", "rows", kind=kind)])


def mla() -> list[str]:
    """`mla_decode` beside FlashInfer."""
    columns: Columns = {
        "heads": at("heads"),
        "batch": at("batch"),
        "latents": kilo("length"),
        "queries": at("queries"),
        "ours": us("us"),
        "FlashInfer 0.6.13, fa3": us("flashinfer_us"),
        "TB/s": of("tb_per_s", "", 2),
        "target": us("bar_us"),
    }
    return lines(columns, results("mla", "heads", "batch", "length", "queries"))


def verify() -> list[str]:
    """Verification: the paper's findings beside ours, and the fused kernel's rows that are not the fastest."""
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
        behind = [min(of_row) for of_row in times if of_row]
        own = [r[f"two_step{kind}_us"] / r[f"fused{kind}_us"] for r in packs]
        said = [
            f"{whose}: {sum(x < 1 for x in ratios)} of {len(ratios)} (at worst {min(ratios):.2f} x)"
            for whose, ratios in (("the paper's kernels", behind), ("our scan and pack", own))
        ]
        table.append((f"rows where fused is behind, {name}", "-", said[0], said[1]))
    return page(table)


def moe() -> list[str]:
    """A rank's routed experts, routing included: microseconds (share of the target), by tokens."""
    found = results("moe", "model", "tpf", "ep", "tokens")
    ranks: dict[tuple[str, str], dict[int, str]] = {}
    for r in found:
        own = ranks.setdefault((r["model"], f"{r['tpf']} x {r['ep']}"), {})
        own[r["tokens"]] = f"{r['us']:.1f} ({r['us'] / r['bar_us']:.2f})"
    counts = sorted({r["tokens"] for r in found})
    body = [(*point, *(own.get(n, "-") for n in counts)) for point, own in ranks.items()]
    return page([("experts", "tpf x ep", *map(str, counts)), *body])


def comm() -> list[str]:
    """Collectives, as `helix bench comm` recorded them."""
    columns: Columns = {
        "collective": at("op"),
        "GPUs": at("ranks"),
        "message": of("message_bytes", "B", 0),
        "ours p50 (p90)": lambda r: f"{r['symm_us']:.1f} us ({r['symm_p90_us']:.1f})",
        "torch.distributed": us("nccl_us"),
        "its bare transfer": us("nccl_bare_us"),
        "target (8 GPUs)": us("bar_us", 0),
    }
    return lines(columns, results("comm", "op", "ranks", "message_bytes"))


def kernels() -> list[str]:
    """Counts the cases of each kernel that are faster than their peers, and within their target."""
    found = results("kernels", "kind", "heads", "batch", "length", "queries", "matrix", "rows")

    def of_kind(kind: str) -> list[Row]:
        return [r for r in found if r["kind"] == kind]

    kinds: dict[str, tuple[str, list[Row], str | None]] = {
        "attention, one query": ("the fastest peer", of_kind("decode"), "best_peer_over_ours"),
        "MLA attention": ("FlashInfer", results("mla", "heads", "batch", "length", "queries"), "peer_over_ours"),
        "projection": ("cuBLAS", of_kind("linear"), "cublas_us"),
        "projection with append": ("two launches", of_kind("append"), "apart_us"),
        "routed experts": ("-", results("moe", "model", "tpf", "ep", "tokens"), None),
        "collective": ("torch.distributed", results("comm", "op", "ranks", "message_bytes"), "nccl_us"),
    }
    table = [("operation", "cases", "compared with", "faster in", "within target")]
    for name, (peer, cases, key) in kinds.items():
        own = {"collective": "symm_us"}.get(name, "us")
        faster = sum(r[key] > (1 if "over_ours" in key else r[own]) for r in cases) if key else "-"
        targets = [r for r in cases if r["bar_us"]]
        within = f"{sum(r[own] <= r['bar_us'] for r in targets)} of {len(targets)}"
        table.append((name, str(len(cases)), peer, str(faster), within))
    return page(table)


PREFILL: dict[str, Columns] = {
    "kernel": {
        "heads": at("heads"),
        "queries": kilo("q_tokens"),
        "keys": kilo("length"),
        "ours": of("tflops", "TFLOP/s", 0),
        "of the matrix rate": lambda r: f"{r['tflops'] / r['matrix_tflops']:.0%}",
        "cuDNN": of("cudnn_tflops", "", 0),
        "flash": of("flash_tflops", "", 0),
    },
    "chunk": {
        "heads": at("heads"),
        "keys": kilo("length"),
        "chunk": of("q_tokens", "", 0),
        "rate": of("tflops", "TFLOP/s", 0),
        "of the longest chunk's": of("of_largest", "", 2),
    },
    "together": {
        "heads": at("heads"),
        "prompts": lambda r: f"{r['prompts']} x {r['length']:,}",
        "rate": of("tflops", "TFLOP/s", 0),
        "the general kernel": us("general_us", 0),
        "Hopper's": us("sm90_us", 0),
    },
    "prompt": {
        "model": at("model"),
        "prompt": lambda r: f"1 x {kilo('length')(r)}",
        "layout": lambda r: f"{r['layout']}{', emulated' * ('emulated_by' in r)}",
        "seconds": of("prefill_s", "", 2),
        "tokens/s": of("tokens_per_s", "", 0),
    },
}


def prefill(kind: str) -> list[str]:
    """Tabulates one kind of what `helix bench prefill` recorded, eight emulated ranks' too."""
    key = "kind", "model", "heads", "q_tokens", "prompts", "batch", "length", "layout", "note"
    free = "prefill_chunk", "halves", "ahead", "emulated_by"  # of a prompt the newest way counts
    names = "prefill", "prefill.emulated-8"
    found = [r for name in names for r in results(name, *key, free=free, kind=kind)]
    # Notes are of other trees. Of several prompts at once only the chunk is timed warm.
    return lines(PREFILL[kind], [r for r in found if "note" not in r and r.get("batch", 1) == 1])


def hosts() -> list[str]:
    """Tabulates exchanges over sockets between two agents, measured and predicted, as `helix bench hosts` recorded."""
    columns: Columns = {
        "model": at("model"),
        "batch": at("batch"),
        "message": lambda r: f"{r['message_bytes']:,} B",
        "bytes of a step": lambda r: f"{r['exchange_bytes']:,}",
        "predicted": lambda r: f"{r['predicted_bytes'] / r['exchange_bytes'] - 1:+.1%}",
        "latency": us("latency_us", 0),
        "bandwidth": of("gb_per_s", "GB/s", 2),
        "exchange": us("exchange_us", 0),
        "predicted from pings": us("predicted_us", 0),
        "off": lambda r: f"{r['error']:+.1%}",
        "in a step": us("step_exchange_us", 0),
        "time per token": of("ttl_us", "ms", 2, 1e3),
    }
    found = results("hosts", "model", "backend", "batch", "length")
    return lines(columns, [r for r in found if "failed" not in r])
