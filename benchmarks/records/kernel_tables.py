"""Tables of what one kernel, one collective or one prompt takes, and of correctness."""

from __future__ import annotations

import json

from benchmarks.records.rows import Row, results, workload
from launch.inputs.compose import ROOT

TIMES = "us", "cudnn_us", "flash_us", "flashinfer_us"


def correctness() -> list[str]:
    """What `benchmarks/correctness.py` recorded."""
    lines = [json.loads(line) for line in (ROOT / "benchmarks/results/correctness.jsonl").read_text().splitlines()]
    rows = []
    for line in lines:
        name = line["name"]
        if name.endswith("-equal"):
            dtype = name.split("-")[2]
            rows.append(
                f"| 50 needles in 32K tokens, {dtype}: answers token for token those of one rank, over {line['over']} "
                f"| {line['as_one_rank']} of {line['needles']} |"
            )
        elif name.startswith("needles"):
            gpus = line["layout"]["world_size"]
            rows.append(
                f"| 50 needles in 32K tokens, {name.split('-')[2]}: found over {gpus} GPU{'s' if gpus > 1 else ''} "
                f"| {line['needles_found']} of {line['needles']} |"
            )
    device = next(line["device"] for line in lines if "device" in line)
    return [f"| on {device} | |", "|---|---|", *rows]


def decode_kernel() -> list[str]:
    """`flash_decode` beside torch's attention and FlashInfer's, as `python -m benchmarks.bench kernels` recorded it."""
    rows = [
        "| heads q/kv | batch | KV | queries | ours | cuDNN | flash | FlashInfer | of the read ceiling | target |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results("kernels", "kind", "heads", "batch", "length", "queries"):
        if r["kind"] not in ("decode", "verify"):
            continue
        times = " | ".join(f"{r[key]:.1f} us" if r[key] else "-" for key in TIMES)
        point = f"{r['heads']} | {r['batch']} | {r['length'] // 1024}K | {r['queries']}"
        rows.append(f"| {point} | {times} | {r['of_ceiling']:.0%} | {r['bar_us']:.1f} us |")
    return rows


def ragged() -> list[str]:
    """The mixed batch."""
    (r,) = [r for r in results("kernels", "kind") if r["kind"] == "ragged"]
    return [
        f"100 sequences of 1K tokens with 4 of 128K (8/1 heads) take {r['us']:.1f} us, equal lengths of as many bytes "
        f"{r['uniform_us']:.1f} us: {r['us'] / r['uniform_us']:.2f} x."
    ]


def linear() -> list[str]:
    """`linear` beside cuBLAS, and `qkv_append` beside `linear` and `kv_append`."""
    rows = [
        "| matrix | rows of x | ours | cuBLAS (append: two launches) | target: bytes / 4.3 TB/s + 2.5 us |",
        "|---|---|---|---|---|",
    ]
    for r in results("kernels", "kind", "matrix", "rows"):
        if r["kind"] not in ("linear", "append"):
            continue
        name, other = (r["matrix"], "cublas_us") if r["kind"] == "linear" else (f"{r['matrix']}, append", "apart_us")
        rows.append(f"| {name} | {r['rows']} | {r['us']:.1f} us | {r[other]:.1f} us | {r['bar_us']:.1f} us |")
    return rows


def mla() -> list[str]:
    """`mla_decode` beside FlashInfer."""
    rows = [
        "| heads | batch | latents | queries | ours | FlashInfer 0.6.13, fa3 | TB/s | target |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results("mla", "heads", "batch", "length", "queries"):
        target = f"{r['bar_us']:.1f} us" if r["bar_us"] else "-"
        rows.append(
            f"| {r['heads']} | {r['batch']} | {r['length'] // 1024}K | {r['queries']} | {r['us']:.1f} us "
            f"| {r['flashinfer_us']:.1f} us | {r['tb_per_s']:.2f} | {target} |"
        )
    return rows


def verify() -> list[str]:
    """Verification: the paper's findings beside ours, and the fused kernel's rows that are not the fastest."""
    found = results("verify", "kind", "batch", "gamma", "alpha", "kv_dim")
    scans = {(r["batch"], r["gamma"], r["alpha"]): r for r in found if r["kind"] == "scan"}
    packs = [r for r in found if r["kind"] == "pack"]
    low, high = scans[32, 128, 0.3], scans[32, 128, 0.9]
    small = [r["two_step_torch_us"] / r["fused_us"] for r in packs if r["gamma"] == 8 and r["batch"] <= 32]
    rows = ["| | paper, L40S, eager | ours, eager | ours, in a graph |", "|---|---|---|---|"]
    for name in ("naive", "scan"):
        cells = (f"{low[name + kind]:.1f} to {high[name + kind]:.1f} us" for kind in ("_us", "_graph_us"))
        paper = {"naive": "14.7 to 23.8 us", "scan": "13.0 to 12.9 us"}[name]
        rows.append(f"| {name}, 32 x 128 tokens, acceptance 0.3 to 0.9 | {paper} | {' | '.join(cells)} |")
    for name, paper in (("naive", "1.84 x"), ("torch", "6.56 x")):
        cells = (f"{high[name + kind] / high['scan' + kind]:.2f} x" for kind in ("_us", "_graph_us"))
        rows.append(f"| {name} over scan, 32 x 128, acceptance 0.9 | {paper} | {' | '.join(cells)} |")
    rows.append(
        f"| scan and torch's packing over fused, gamma 8 | 3.2 to 3.8 x | {min(small):.1f} to {max(small):.1f} x | - |"
    )
    for batch, gamma, width in ((32, 128, 2048), (128, 8, 2048), (512, 8, 2048), (128, 128, 2048)):
        (r,) = [r for r in packs if (r["batch"], r["gamma"], r["alpha"], r["kv_dim"]) == (batch, gamma, 0.9, width)]
        paper = "386 us; two steps 109" if (batch, gamma) == (32, 128) else "-"
        graph = f"{r['fused_graph_us']:.1f} us (p95 {r['fused_graph_p95_us']:.1f})"
        rows.append(
            f"| fused, {batch} x {gamma} x {width}, {r['packed_bytes'] / 1e6:.1f} MB packed | {paper} "
            f"| {r['fused_us']:.1f} us | {graph}; our scan and pack {r['two_step_graph_us']:.1f} |"
        )
    for name, kind in (("eager", ""), ("in a graph", "_graph")):
        papers = [n + f"{kind}_us" for n in ("one_block", "two_step_torch", "torch")]
        times = [[r[n] / r[f"fused{kind}_us"] for n in papers if n in r] for r in packs]
        behind = [min(of_row) for of_row in times if of_row]
        own = [r[f"two_step{kind}_us"] / r[f"fused{kind}_us"] for r in packs]
        rows.append(
            f"| rows where fused is behind, {name} | - | the paper's kernels: {sum(x < 1 for x in behind)} of "
            f"{len(behind)} (at worst {min(behind):.2f} x) | our scan and pack: {sum(x < 1 for x in own)} of "
            f"{len(own)} (at worst {min(own):.2f} x) |"
        )
    return rows


def moe() -> list[str]:
    """A rank's routed experts, routing included: microseconds (share of the target), by tokens."""
    found = results("moe", "model", "tpf", "ep", "tokens")
    counts = sorted({r["tokens"] for r in found})
    rows = [f"| experts | tpf x ep | {' | '.join(map(str, counts))} |", "|---|---" + "|---" * len(counts) + "|"]
    for model, tpf, ep in dict.fromkeys((r["model"], r["tpf"], r["ep"]) for r in found):
        cells = {
            r["tokens"]: f"{r['us']:.1f} ({r['us'] / r['bar_us']:.2f})"
            for r in found
            if (r["model"], r["tpf"], r["ep"]) == (model, tpf, ep)
        }
        rows.append(f"| {model} | {tpf} x {ep} | {' | '.join(cells.get(n, '-') for n in counts)} |")
    return rows


def comm() -> list[str]:
    """Collectives, as `python -m benchmarks.bench comm` recorded them."""
    rows = [
        "| collective | GPUs | message | ours p50 (p90) | torch.distributed | its bare transfer | target (8 GPUs) |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results("comm", "op", "ranks", "message_bytes"):
        target = f"{r['bar_us']:.0f} us" if r["bar_us"] else "-"
        rows.append(
            f"| {r['op']} | {r['ranks']} | {r['message_bytes']:,} B | {r['symm_us']:.1f} us ({r['symm_p90_us']:.1f}) "
            f"| {r['nccl_us']:.1f} us | {r['nccl_bare_us']:.1f} us | {target} |"
        )
    return rows


def kernels() -> list[str]:
    """How many cases of each kernel are faster than their peers, and within their target."""
    found = results("kernels", "kind", "heads", "batch", "length", "queries", "matrix", "rows")
    kinds: dict[str, tuple[str, list[Row], str | None]] = {
        "attention, one query": (
            "the fastest peer",
            [r for r in found if r["kind"] == "decode"],
            "best_peer_over_ours",
        ),
        "MLA attention": ("FlashInfer", results("mla", "heads", "batch", "length", "queries"), "peer_over_ours"),
        "projection": ("cuBLAS", [r for r in found if r["kind"] == "linear"], "cublas_us"),
        "projection with append": ("two launches", [r for r in found if r["kind"] == "append"], "apart_us"),
        "routed experts": ("-", results("moe", "model", "tpf", "ep", "tokens"), None),
        "collective": ("torch.distributed", results("comm", "op", "ranks", "message_bytes"), "nccl_us"),
    }
    rows = ["| operation | cases | compared with | faster in | within target |", "|---|---|---|---|---|"]
    for name, (peer, cases, key) in kinds.items():
        own = {"collective": "symm_us"}.get(name, "us")
        faster = sum(r[key] > (1 if "over_ours" in key else r[own]) for r in cases) if key else "-"
        targets = [r for r in cases if r["bar_us"]]
        within = f"{sum(r[own] <= r['bar_us'] for r in targets)} of {len(targets)}"
        rows.append(f"| {name} | {len(cases)} | {peer} | {faster} | {within} |")
    return rows


def prefill() -> list[str]:
    """The prefill kernel, chunks of several lengths at the end of a prompt, and prompts, those of eight ranks too."""
    found = [
        r
        for name in ("prefill", "prefill.emulated-8")
        for r in results(name, "kind", "heads", "q_tokens", "length", "layout")
    ]
    rows = ["| heads | queries | keys | ours | of the matrix rate | cuDNN | flash |", "|---|---|---|---|---|---|---|"]
    for r in found:
        if r["kind"] == "kernel":
            rates = " | ".join(f"{r[f'{p}_tflops']:.0f}" for p in ("cudnn", "flash"))
            share = r["tflops"] / r["matrix_tflops"]
            rows.append(
                f"| {r['heads']} | {r['q_tokens'] // 1024}K | {r['length'] // 1024}K | {r['tflops']:.0f} TFLOP/s "
                f"| {share:.0%} | {rates} |"
            )
    rows += ["", "| heads | keys | chunk | rate | of the longest chunk's |", "|---|---|---|---|---|"]
    rows += [
        f"| {r['heads']} | {r['length'] // 1024}K | {r['q_tokens']:,} | {r['tflops']:.0f} TFLOP/s "
        f"| {r['of_largest']:.2f} |"
        for r in found
        if r["kind"] == "chunk"
    ]
    rows += ["", "| prompt | layout | seconds | tokens/s |", "|---|---|---|---|"]
    rows += [
        f"| {workload(r)} | {r['layout']} | {r['prefill_s']:.2f} | {r['tokens_per_s']:,.0f} |".replace(
            " | 1 x ", " 1 x ", 1
        )
        for r in found
        if r["kind"] == "prompt"
    ]
    return rows
