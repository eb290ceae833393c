"""Tables of decode steps of whole models: measured, emulated, and beside other layouts."""

from __future__ import annotations

import re
from typing import Any

from benchmarks.records.rows import WORKLOAD, Row, results, workload
from benchmarks.timer import READ_CEILING
from helix.simulate.points import Options, Points
from helix.simulate.step import predict
from launch.inputs.hardware import load_hardware
from launch.inputs.shapes import load_spec

HEADLINE = [
    ("qwen2.5-7b", 1, 1 << 20),
    ("llama-3.1-8b", 1, 1 << 20),
    ("deepseek-v2-lite", 1, 1 << 20),
    ("gpt-oss-20b", 1, 1 << 20),
]
BUDGETS_MS = (5, 10, 20, 50)  # of TTL


def _ttl(r: Row) -> str:
    """With a mark where the kernels of that time have been replaced since."""
    return f"{r['ttl_p50_us'] / 1e3:.2f} ms{' †' if 'superseded' in r else ''}"


def _layout(r: Row) -> str:
    """With the grid of the FFN where there are experts to be shared in several ways."""
    attention, ffn = r["layout"].split(" -> ")
    return f"{attention} {ffn}" if load_spec(r["model"]).experts is not None else attention


def steps(name: str = "step") -> list[str]:
    """Whole decode steps: every layout of every workload."""
    rows = [
        "| shape | KV | layout | time per token | ideal | x | target (8 GPUs) | vLLM 0.25.1 | launches a layer |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results(name, *WORKLOAD):
        start = f"| {workload(r)} | {_layout(r)} "
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
        if (spec := load_spec(r["model"])).experts is not None or spec.attention.latent is not None:
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
        rows.append(f"| {workload(r)} | {cells} |")
    return rows


def _plain_tp() -> dict[tuple[Any, ...], str]:
    """Plain TP's time per token over eight GPUs at each workload."""
    return {
        tuple(r[k] for k in WORKLOAD[:3]): "does not fit" if "failed" in r else _ttl(r)
        for r in results("baselines", *WORKLOAD)
        if r["layout"].startswith("tp ")
    }


def headline() -> list[str]:
    """Four of the best Helix layouts over eight GPUs, beside plain TP, and vLLM on as many as divide the heads."""
    plain = _plain_tp()
    rows = ["| model | context | Helix | plain TP=8 | vLLM 0.25.1 |", "|---|---|---|---|---|"]
    for r in _best():
        if (key := tuple(r[k] for k in WORKLOAD[:3])) in HEADLINE:
            heads = load_spec(r["model"]).attention.q_heads
            vllm = f"{r['vllm_ms']:.2f} ms, {8 if heads % 8 == 0 else 4} GPUs" if r["vllm_ms"] else "-"
            rows.append(f"| {workload(r)} | {_ttl(r)} | {plain.get(key, '-')} | {vllm} |")
    return rows


def four_gpus() -> list[str]:
    """The best Helix layout over four GPUs at one sequence of 1M tokens."""
    rows = ["| shape | KV | best Helix layout | time per token | ideal | x |", "|---|---|---|---|---|---|"]
    for r in _best("step.4gpu"):
        if (r["batch"], r["length"]) == (1, 1 << 20):
            times = f"{_ttl(r)} | {r['floor_us'] / 1e3:.2f} ms | {r['ttl_p50_us'] / r['floor_us']:.2f}"
            rows.append(f"| {workload(r)} | {_layout(r).removeprefix('helix ')} | {times} |")
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
            f"| {workload(r)} | {layout} | {_ttl(r)} | {r['floor_us'] / 1e3:.2f} ms | {times:.2f} | {target} "
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
        rows.append(f"| {workload(r)} | {_layout(r)} | {_ttl(r)} | {_ttl(other)} | {apart:+.1%} |")
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
            rows.append(f"| {workload(r)} | {_layout(r)} | {of_four / 1e3:.2f} ms | {cells} |")
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
        start = f"| {workload(r)} | {_layout(r)} "
        if "failed" in r:
            rows.append(f"{start}| does not fit | | |")
            continue
        rates = f"{r['tokens_per_s_user']:.0f} | {r['tokens_per_s_gpu']:.1f}"
        rows.append(f"{start}| {_ttl(r)} | {rates} |")
    return rows
