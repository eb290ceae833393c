"""Writes the tables of README.md and docs/ from `benchmarks/results/`: `python -m launch.tables`.

A table stands between `<!-- table NAME -->` and `<!-- end -->`; of a point that was measured more than once, the newest
line counts.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from helix.simulate.points import Options, Points
from helix.simulate.step import predict
from launch.bench.clock import READ_CEILING
from launch.bench.speculate import PARTS, REST
from launch.inputs.compose import ROOT, load_spec
from launch.inputs.hardware import load_hardware
from launch.records.planner_check import check_table, regrets, summary
from launch.records.recorded_steps import read_cells

RESULTS = [f"docs/results/{name}.md" for name in ("8-gpus", "4-gpus", "emulated", "kernels", "speculation", "hop-b")]
PAGES = ["README.md", "docs/planner.md", *RESULTS]
TIMES = "us", "cudnn_us", "flash_us", "flashinfer_us"
HEADLINE = [
    ("qwen2.5-7b", 1, 1 << 20),
    ("qwen2.5-7b", 8, 1 << 17),
    ("deepseek-v2-lite", 1, 1 << 20),
    ("gpt-oss-20b", 1, 1 << 20),
]
BUDGETS_MS = (5, 10, 20, 50)  # of TTL
Row = dict[str, Any]


def results(name: str, *key: str) -> list[Row]:
    """The newest line of each point of `benchmarks/results/NAME.jsonl`; none where nothing was recorded yet."""
    path = ROOT / "benchmarks" / "results" / f"{name}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return list({tuple(row.get(k) for k in key): row for row in map(json.loads, lines)}.values())


def correctness() -> list[str]:
    """What `launch/bench/correctness.py` recorded."""
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
    """`flash_decode` beside torch's attention and FlashInfer's, as `python -m launch.bench kernels` recorded it."""
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
    """Collectives, as `python -m launch.bench comm` recorded them."""
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
        judged = [r for r in cases if r["bar_us"]]
        within = f"{sum(r[own] <= r['bar_us'] for r in judged)} of {len(judged)}"
        rows.append(f"| {name} | {len(cases)} | {peer} | {faster} | {within} |")
    return rows


def _point(r: Row) -> str:
    length = f"{r['length'] >> 20}M" if r["length"] >= 1 << 20 else f"{r['length'] >> 10}K"
    name = r["model"]
    if "layers" in r and r["layers"] < (layers := load_spec(name).layers):
        name += f", {r['layers']} of {layers} layers"
    return f"{name} | {r['batch']} x {length}"


def _ttl(r: Row) -> str:
    """With a mark where the kernels of that time have been replaced since."""
    return f"{r['ttl_p50_us'] / 1e3:.2f} ms{' †' if 'superseded' in r else ''}"


def _layout(r: Row) -> str:
    """With the grid of the FFN where there are experts to be shared in several ways."""
    attention, ffn = r["layout"].split(" -> ")
    return f"{attention} {ffn}" if load_spec(r["model"]).moe is not None else attention


WORKLOAD = "model", "batch", "length", "layout"


def steps(name: str = "step") -> list[str]:
    """Whole decode steps: every layout of every workload."""
    rows = [
        "| shape | KV | layout | time per token | ideal | x | target (8 GPUs) | vLLM 0.25.1 | launches a layer |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results(name, *WORKLOAD):
        start = f"| {_point(r)} | {_layout(r)} "
        if "failed" in r:
            rows.append(f"{start}| does not fit | | | | | |")
            continue
        vllm = f"{r['vllm_ms']:.2f} ms" if r["vllm_ms"] else "-"
        launches = f"{r['launches_per_layer']:.1f}" if "launches_per_layer" in r else "-"
        rows.append(
            f"{start}| {_ttl(r)} | {r['floor_us'] / 1e3:.2f} ms "
            f"| {r['ttl_p50_us'] / r['floor_us']:.2f} | {r['bar'] or '-'} | {vllm} | {launches} |"
        )
    return rows


def _best(name: str = "step") -> list[Row]:
    """The best Helix layout of each workload."""
    found: dict[tuple[Any, ...], Row] = {}
    for r in results(name, *WORKLOAD):
        if "failed" not in r:
            key = r["model"], r["batch"], r["length"]
            found[key] = min(found.get(key, r), r, key=lambda r: r["ttl_p50_us"])
    return list(found.values())


def gap() -> list[str]:
    """What stands between the best steps of dense models and their floors, by the simulator's constants."""
    rows = [
        "| shape | KV | time per token | ideal | read more than once | read below the ceiling | kernels' fixed parts "
        "| collectives | not explained |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    hardware = load_hardware("h200")
    options = Options(weights="bf16", kv="bf16", messages="bf16", hopb=False)
    for r in _best():
        if (spec := load_spec(r["model"])).moe is not None or spec.mla is not None:
            continue
        widths = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", r["layout"])}
        step = predict(spec, hardware, Points.of(r["layout"].split()[0], r["batch"], **widths), r["length"], options)
        reading = [phase for phase in step.phases if phase.bytes[0]]
        count = sum(float(phase.bytes[0]) for phase in reading)
        read = count / READ_CEILING * 1e6
        slower = count / hardware.read_bytes_per_s.value * 1e6 - read
        fixed = sum(float(phase.seconds[0]) for phase in reading) * 1e6 - read - slower
        collectives = sum(float(phase.seconds[0]) for phase in step.phases if not phase.bytes[0]) * 1e6
        parts = [read - r["floor_us"], slower, fixed, collectives]
        parts.append(r["ttl_p50_us"] - r["floor_us"] - sum(parts))
        cells = " | ".join(f"{us / 1e3:.2f} ms" for us in (r["ttl_p50_us"], r["floor_us"], *parts))
        rows.append(f"| {_point(r)} | {cells} |")
    return rows


def _plain_tp() -> dict[tuple[Any, ...], str]:
    """Plain TP's time per token over eight GPUs at each workload."""
    return {
        tuple(r[k] for k in WORKLOAD[:3]): "does not fit" if "failed" in r else _ttl(r)
        for r in results("baselines", *WORKLOAD)
        if r["layout"].startswith("tp ")
    }


def headline() -> list[str]:
    """Four of the best Helix layouts over eight GPUs, beside plain TP and vLLM."""
    plain = _plain_tp()
    rows = ["| model | context | Helix | plain TP=8 | vLLM 0.25.1 |", "|---|---|---|---|---|"]
    for r in _best():
        if (key := tuple(r[k] for k in WORKLOAD[:3])) in HEADLINE:
            vllm = f"{r['vllm_ms']:.2f} ms" if r["vllm_ms"] else "-"
            rows.append(f"| {_point(r)} | {_ttl(r)} | {plain[key]} | {vllm} |")
    return rows


def four_gpus() -> list[str]:
    """The best Helix layout over four GPUs at one sequence of 1M tokens."""
    rows = ["| shape | KV | best Helix layout | time per token | ideal | x |", "|---|---|---|---|---|---|"]
    for r in _best("step.4gpu"):
        if (r["batch"], r["length"]) == (1, 1 << 20):
            times = f"{_ttl(r)} | {r['floor_us'] / 1e3:.2f} ms | {r['ttl_p50_us'] / r['floor_us']:.2f}"
            rows.append(f"| {_point(r)} | {_layout(r).removeprefix('helix ')} | {times} |")
    return rows


def best_steps(*only: int) -> list[str]:
    """The best Helix layout over eight GPUs at each workload, beside its target, plain TP and vLLM.

    Args:
        only: the batch and length of the workloads to show; all where there are none.
    """
    plain = _plain_tp()
    rows = [
        "| shape | KV | best Helix layout | time per token | ideal | x | target | plain TP=8 | vLLM 0.25.1 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in (r for r in _best() if not only or (r["batch"], r["length"]) == only):
        layout = r["layout"].split(" ->")[0].removeprefix("helix ")
        vllm = f"{r['vllm_ms']:.2f} ms" if r["vllm_ms"] else "-"
        times = r["ttl_p50_us"] / r["floor_us"]
        target = f"{r['bar']}{'' if times <= r['bar'] else ', not met'}" if r["bar"] else "-"
        rows.append(
            f"| {_point(r)} | {layout} | {_ttl(r)} | {r['floor_us'] / 1e3:.2f} ms | {times:.2f} | {target} "
            f"| {plain.get(tuple(r[k] for k in WORKLOAD[:3]), '-')} | {vllm} |"
        )
    return rows


def _on_eight() -> list[tuple[Row, Row, float]]:
    """Steps over eight GPUs, the same emulated on two, and how far apart they are."""
    both = [r for name in ("step.emulated-8", "baselines.emulated-8") for r in results(name, *WORKLOAD)]
    both.sort(key=lambda r: "superseded" not in r)  # the last counts
    emulated = {tuple(r[k] for k in WORKLOAD): r for r in both}
    found = []
    for r in (r for name in ("step", "baselines") for r in results(name, *WORKLOAD)):
        other = emulated.get(tuple(r[k] for k in WORKLOAD), r)
        if "failed" not in r and "failed" not in other and other is not r:
            found.append((r, other, other["ttl_p50_us"] / r["ttl_p50_us"] - 1))
    return found


def emulated_eight() -> list[str]:
    """Steps over eight GPUs, and emulated on two."""
    rows = ["| shape | KV | layout | eight GPUs | emulated on two | difference |", "|---|---|---|---|---|---|"]
    for r, other, apart in _on_eight():
        rows.append(f"| {_point(r)} | {_layout(r)} | {_ttl(r)} | {_ttl(other)} | {apart:+.1%} |")
    return rows


def agreement() -> list[str]:
    """How far emulated steps are from those over eight GPUs, by model."""
    apart: dict[str, list[float]] = {}
    for r, _, share in _on_eight():
        apart.setdefault(r["model"], []).append(share)
    rows = ["| shape | steps compared | emulated, at the fastest | at the slowest |", "|---|---|---|---|"]
    return rows + [f"| {m} | {len(a)} | {min(a):+.1%} | {max(a):+.1%} |" for m, a in apart.items()]


def emulated_steps() -> list[str]:
    """Four ranks emulated on two GPUs and on one, beside four GPUs with the same kernels."""
    real = {
        tuple(r[k] for k in WORKLOAD): r["ttl_p50_us"] for r in results("step.4gpu", *WORKLOAD) if "failed" not in r
    }
    emulated = {
        (r["emulated_by"], *(r[k] for k in WORKLOAD)): r for r in results("step.emulated-4", "emulated_by", *WORKLOAD)
    }
    rows = [
        "| shape | KV | layout | four GPUs | emulated on two | difference | emulated on one | difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (count, *point), r in emulated.items():
        if count == 2:
            of_four = real[tuple(point)]
            times = [emulated[n, *point]["ttl_p50_us"] for n in (2, 1)]
            cells = " | ".join(f"{us / 1e3:.2f} ms | {us / of_four - 1:+.1%}" for us in times)
            rows.append(f"| {_point(r)} | {_layout(r)} | {of_four / 1e3:.2f} ms | {cells} |")
    return rows


def emulated_comm() -> list[str]:
    """Collectives of emulated ranks, beside those of as many GPUs."""
    key = "op", "ranks", "message_bytes"
    real = {tuple(r[k] for k in key): r["symm_us"] for r in results("comm", *key)}
    of_4, of_8 = (
        {
            (r["emulated_by"], r["op"], r["message_bytes"]): r
            for r in results(f"comm.emulated-{ranks}", "emulated_by", *key)
        }
        for ranks in (4, 8)
    )
    rows = [
        "| collective | message | 4 GPUs | emulated on 2 | emulated on 1 | 8 GPUs | emulated on 2 | emulated on 1 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for count, op, size in of_8:
        if count == 2:
            found = [
                us
                for ranks, of in ((4, of_4), (8, of_8))
                for us in (real.get((op, ranks, size)), *(of.get((n, op, size), {}).get("symm_us") for n in (2, 1)))
            ]
            rows.append(f"| {op} | {size:,} B | {' | '.join(f'{us:.1f} us' if us else '-' for us in found)} |")
    return rows


def largest_batch(rows: list[Row], budget_us: float) -> int | None:
    """The largest batch among measured `rows` of one layout whose TTL is within the budget; None: not one of them."""
    return max((r["batch"] for r in rows if "failed" not in r and r["ttl_p50_us"] <= budget_us), default=None)


def budgets(name: str) -> list[str]:
    """The largest measured batch of each layout within a TTL."""
    limits = " | ".join(f"<= {ms} ms" for ms in BUDGETS_MS)
    rows = [f"| shape | length | layout | {limits} |", "|---" * (3 + len(BUDGETS_MS)) + "|"]
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for r in results(name, *WORKLOAD):
        groups.setdefault((r["model"], r["length"], r["layout"].split(" ->")[0]), []).append(r)
    for (model, length, layout), found in groups.items():
        fitting = [largest_batch(found, 1e3 * ms) or "-" for ms in BUDGETS_MS]
        older = " †" if any("superseded" in r for r in found) else ""
        rows.append(f"| {model} | {length >> 10}K | {layout}{older} | {' | '.join(map(str, fitting))} |")
    return rows


def baselines(name: str) -> list[str]:
    """Helix beside plain TP and Medha's layout."""
    rows = ["| shape | KV | layout | time per token | tokens/s/user | tokens/s/GPU |", "|---|---|---|---|---|---|"]
    for r in results(name, *WORKLOAD):
        start = f"| {_point(r)} | {_layout(r)} "
        if "failed" in r:
            rows.append(f"{start}| does not fit | | |")
            continue
        rates = f"{r['tokens_per_s_user']:.0f} | {r['tokens_per_s_gpu']:.1f}"
        rows.append(f"{start}| {_ttl(r)} | {rates} |")
    return rows


def hopb(name: str = "hopb") -> list[str]:
    """HOP-B on and off."""
    rows = [
        "| backend | KV | chunks | off | on | without the exchange | share hidden | auto |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results(name, "kind", "backend", "model", "batch", "length", "chunks", "regime"):
        if r["kind"] != "ttl":
            continue
        hidden = f"{r['hidden']:.0%}" if r["hidden"] is not None else "-"
        times = " | ".join(f"{r[k]:.0f} us" for k in ("off_us", "on_us", "without_us"))
        point = f"{r['backend']} | {_point(r).split(' | ')[1]} | {r['chunks']}"
        rows.append(f"| {point} | {times} | {hidden} | {r['auto_us']:.0f} us |")
    return rows


def chunks() -> list[str]:
    """The best of HOP-B's chunk counts beside none, over both backends."""
    ttl = [r for r in results("hopb", "kind", "backend", "batch", "length", "chunks") if r["kind"] == "ttl"]
    points = dict.fromkeys((r["batch"], r["length"]) for r in ttl)
    head = " | ".join(f"{name}: no chunks | best chunks | difference" for name in ("own kernels", "NCCL"))
    rows = [f"| KV | {head} |", "|---|---|---|---|---|---|---|"]
    for point in points:
        cells = []
        for backend in ("symm_mem", "nccl"):
            same = [r for r in ttl if r["backend"] == backend and (r["batch"], r["length"]) == point]
            off, on = same[0]["off_us"], min(r["on_us"] for r in same)
            cells.append(f"{off:.0f} us | {on:.0f} us | {on / off - 1:+.1%}")
        rows.append(f"| {_point(same[0]).split(' | ')[1]} | {' | '.join(cells)} |")
    return rows


def gains() -> list[str]:
    """Tokens/s/user with drafts, over those without, at the acceptance rate."""
    found = [r for r in results("speculate", "kind", "batch", "length", "gamma") if r["kind"] == "synthetic"]
    counts = sorted({r["gamma"] for r in found} - {0})
    rows = [
        f"| KV | {' | '.join(f'{n} drafts' if n > 1 else '1 draft' for n in counts)} |",
        "|---" * (len(counts) + 1) + "|",
    ]
    for point in dict.fromkeys(_point(r) for r in found if "failed" not in r):
        gain = {r["gamma"]: f"{r['gain_at_rate']:.2f} x" for r in found if _point(r) == point}
        rows.append(f"| {point.split(' | ')[1]} | {' | '.join(gain[n] for n in counts)} |")
    return rows


def speculate() -> list[str]:
    """Steps with synthetic drafts, and the share of each part of a step in its time."""
    found = results("speculate", "kind", "model", "layout", "batch", "length", "gamma")
    found = [r for r in found if r["kind"] == "synthetic"]
    points = [_point(r) for r in found]
    found.sort(key=lambda r: (points.index(_point(r)), r["gamma"]))
    rows = [
        "| shape | KV | drafts | step p50 (p90) | tokens a step | tokens/s/user | gain | gain at the rate "
        f"| {' | '.join([*PARTS, REST])} |",
        "|---" * (8 + len(PARTS) + 1) + "|",
    ]
    for r in found:
        start = f"| {_point(r)} | {r['gamma']} "
        if "failed" in r:
            rows.append(f"{start}| does not fit {'| ' * (5 + len(PARTS))}|")
            continue
        total = sum(r["split_us"].values())
        shares = " | ".join(f"{us / total:.1%}" for us in r["split_us"].values())
        rows.append(
            f"{start}| {r['ttl_p50_us'] / 1e3:.2f} ms ({r['ttl_p90_us'] / 1e3:.2f}) | {r['tokens_per_step']:.2f} "
            f"| {r['tokens_per_s_user']:.1f} | {r['gain']:.2f} | {r['gain_at_rate']:.2f} | {shares} |"
        )
    return rows if found else []


def edits() -> list[str]:
    """The demo model's copies of files."""
    found = [r for r in results("speculate", "kind", "layout", "drafting") if r["kind"] == "edits"]
    rows = [
        "| drafts | layout | tokens a step | step p50 | tokens/s/user | gain | drafts a step | answers as without |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in found:
        drafts = f"{r['speculation']['mean_drafts']:.1f}" if r["speculation"] else "-"
        rows.append(
            f"| {r['drafting']} | {r['layout']} | {r['tokens_per_step']:.2f} | {r['ttl_p50_us'] / 1e3:.2f} ms "
            f"| {r['tokens_per_s_user']:.0f} | {r['gain']:.2f} | {drafts} | {r['as_plain']} of {r['prompts']} |"
        )
    return rows if found else []


def prefill() -> list[str]:
    """The prefill kernel, and prompts, those of eight ranks too."""
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
    rows += ["", "| prompt | layout | seconds | tokens/s |", "|---|---|---|---|"]
    rows += [
        f"| {_point(r)} | {r['layout']} | {r['prefill_s']:.2f} | {r['tokens_per_s']:,.0f} |".replace(
            " | 1 x ", " 1 x ", 1
        )
        for r in found
        if r["kind"] == "prompt"
    ]
    return rows


def planner(*names: str) -> list[str]:
    """The planner's first choice among recorded layouts, with the shipped description of an H200."""
    hardware = load_hardware("h200")
    cells = read_cells([ROOT / "benchmarks" / "results" / f"{name}.jsonl" for name in names])
    rows = regrets([cell for cell in cells if cell.device == hardware.name], lambda device: hardware)
    head, *body = check_table(rows)
    lines = [head, ["---"] * len(head), *body]
    return [*(f"| {' | '.join(line)} |" for line in lines), "", *(f"- {line}" for line in summary(rows).splitlines())]


TABLES: dict[str, Callable[[], list[str]]] = {
    "headline": headline,
    "best-steps": best_steps,
    "best-steps-1m": partial(best_steps, 1, 1 << 20),
    "steps": steps,
    "steps.4gpu": partial(steps, "step.4gpu"),
    "steps.emulated-8": partial(steps, "step.emulated-8"),
    "four-gpus": four_gpus,
    "gap": gap,
    "agreement": agreement,
    "emulated-eight": emulated_eight,
    "emulated-four": emulated_steps,
    "emulated-comm": emulated_comm,
    "baselines.4gpu": partial(baselines, "baselines.4gpu"),
    "baselines.emulated-8": partial(baselines, "baselines.emulated-8"),
    "budgets.emulated-8": partial(budgets, "baselines.emulated-8"),
    "correctness": correctness,
    "kernels": kernels,
    "decode-kernel": decode_kernel,
    "ragged": ragged,
    "linear": linear,
    "mla": mla,
    "moe": moe,
    "comm": comm,
    "prefill": prefill,
    "gains": gains,
    "speculate": speculate,
    "edits": edits,
    "verify": verify,
    "chunks": chunks,
    "hopb": hopb,
    "hopb.emulated-8": partial(hopb, "hopb.emulated-8"),
    "planner": partial(planner, "step", "baselines"),
    "planner.emulated-8": partial(planner, "step.emulated-8", "baselines.emulated-8"),
}


def with_tables(page: str) -> str:
    """A page's text with its tables as the results have them."""

    def table(match: re.Match[str]) -> str:
        return f"<!-- table {match[1]} -->\n" + "\n".join(TABLES[match[1]]()) + "\n<!-- end -->"

    return re.sub(r"<!-- table (\S+) -->.*?<!-- end -->", table, (ROOT / page).read_text(), flags=re.S)


def main() -> None:
    """Writes all pages' tables."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for page in PAGES:
        (ROOT / page).write_text(with_tables(page))
