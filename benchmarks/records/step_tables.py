"""Rows of decode steps of whole models: measured, emulated, and compared with other layouts."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

from benchmarks.models.pareto import FP8
from benchmarks.models.workloads import attention_over_reading_s
from benchmarks.records.rows import WORKLOAD, Row, check_commit, grouped, results, shape
from benchmarks.timer import READ_CEILING
from helix.planner.points import Options, Points, layouts
from helix.planner.step import memory_of, predict
from launch.inputs.hardware import load_hardware
from launch.inputs.shapes import load_spec

HEADLINE: dict[int, list[tuple[Any, ...]]] = {  # by number of GPUs
    4: [("qwen2.5-7b", 1, 1 << 20, None)],
    8: [
        ("qwen2.5-7b", 1, 1 << 20, None),
        ("llama-3.1-8b", 1, 1 << 20, None),
        ("deepseek-v2-lite", 1, 1 << 20, None),
        ("deepseek-r1", 1, 1 << 20, "fp8"),
        ("glm-5.2", 1, 1 << 20, "fp8"),
    ],
}
WHOLE = "fp8-steps"  # models that eight GPUs hold in FP8 only
OVER_TP = "qwen2.5-7b", "qwen3-30b-a3b", "deepseek-v2-lite", "llama-3.1-8b"
POINTS = (1, 128 << 10), (1, 1 << 20), (8, 128 << 10), (8, 1 << 20)
SPLITS = {32: "splits_32", 128: "splits_128", "helix kvp=1 tpa=1": "tp", "tp kvp=1 tpa=2": "tp"}
SPLITS |= {"helix kvp=2 tpa=1": "helix"}


def ttl(r: Row) -> str:
    """Formats the time per token, marked if its kernels have been replaced since."""
    return "does not fit" if "failed" in r else f"{r['ttl_p50_us'] / 1e3:,.2f} ms" + " †" * ("superseded" in r)


def grid(r: Row) -> str:
    """Returns the layout; with the FFN grid for MoE models."""
    attention, ffn = r["layout"].split(" -> ")
    return f"{attention} {ffn}" if load_spec(r["model"]).experts is not None else attention


def named(r: Row) -> str:
    """Returns a row's model and weight dtype."""
    return f"{shape(r)}{', FP8' if r.get('weights') == 'fp8' else ''}"


def widths(layout: str) -> dict[str, int]:
    """Parses a layout's widths."""
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", layout)}


def points_of(r: Row) -> Points:
    """Returns the planner's point of a row."""
    return Points.of(r["layout"].split()[0], r["batch"], **widths(r["layout"]))


def ideal_us(r: Row) -> float:
    """Returns the minimum time of a step: reading, or attention's GEMMs where these take longer.

    Records have the reading time, `floor_us`.
    """
    of = widths(r["layout"])
    ranks = max(of.get("kvp", 1) * of.get("tpa", 1) * of.get("dp", 1), of["tpf"] * of["ep"])
    layers = load_spec(r["model"]).layers[: r.get("layers")]
    return float(r["floor_us"] + 1e6 * attention_over_reading_s(layers, r["batch"], r["length"], ranks))


def _key(r: Row) -> tuple[Any, ...]:
    return r["model"], r["batch"], r["length"], r.get("weights")


def _fastest(mode: str, *names: str) -> dict[tuple[Any, ...], Row]:
    """The fastest row of a mode at each workload; rows that do not fit count only if no other does."""
    found: dict[tuple[Any, ...], Row] = {}
    for r in (r for name in names for r in results(name, *WORKLOAD) if r["layout"].startswith(f"{mode} ")):
        found[_key(r)] = min(found.get(_key(r), r), r, key=lambda r: r.get("ttl_p50_us", float("inf")))
    return found


def _times_by_point(mode: str, *names: str) -> Callable[[Row], str]:
    """A mode's best time per token over eight GPUs at a row's workload, marked if it is of another commit."""
    found = _fastest(mode, *names)

    def show(r: Row) -> str:
        if (other := found.get(_key(r))) is None:
            return "does not fit, planned" if mode == "tp" and r.get("weights") == "fp8" and _lacks_memory(r) else "-"
        return ttl(other) + " ‡" * ("failed" not in other and other.get("commit") != r.get("commit"))

    return show


def _lacks_memory(r: Row) -> bool:
    """Whether plain TP over eight H200 cannot hold a workload in FP8, by the planner."""
    spec = load_spec(r["model"])
    points = Points.crossed(layouts(spec, (8,), ("tp",), pp=False), np.array([r["batch"]]))
    memory = memory_of(spec, load_hardware("h200"), points, r["length"], FP8)
    return bool((memory.largest_batch < r["batch"]).all())


def best(*names: str) -> list[Row]:
    """Returns the best Helix layout of each workload."""
    return [r for r in _fastest("helix", *names).values() if "failed" not in r]


def best_steps(records: str, **modes: str) -> list[Row]:
    """Returns the best Helix layout of each workload, with the best times of other modes.

    Args:
        modes: the record of each mode.
    """
    shown = {mode: _times_by_point(mode, record) for mode, record in modes.items()}
    return [{**r, **{mode: show(r) for mode, show in shown.items()}} for r in best(*records.split())]


def gap() -> list[Row]:
    """Explains the gap between the best steps of dense models and their ideals, by the simulator's constants."""
    rows, hardware = [], load_hardware("h200")
    options = Options(weights="bf16", kv="bf16", messages="bf16", hopb=False)
    for r in best("step"):
        if (spec := load_spec(r["model"])).experts is not None or spec.attention.latent is not None:
            continue
        step = predict(spec, hardware, points_of(r), r["length"], options)
        reading = [phase for phase in step.phases if phase.bytes[0]]
        count = sum(float(phase.bytes[0]) for phase in reading)
        read = count / READ_CEILING * 1e6
        slower = count / hardware.read_bytes_per_s.value * 1e6 - read
        fixed = sum(float(phase.seconds[0]) for phase in reading) * 1e6 - read - slower
        collectives = sum(float(phase.seconds[0]) for phase in step.phases if not phase.bytes[0]) * 1e6
        parts = {"more": read - r["floor_us"], "slower": slower, "fixed": fixed, "collectives": collectives}
        rows.append({**r, **parts, "rest": r["ttl_p50_us"] - r["floor_us"] - sum(parts.values())})
    return rows


def headline() -> list[Row]:
    """Returns the best Helix layouts over two, four and eight GPUs, with plain TP and vLLM."""
    rows = []

    def add(r: Row, gpus: int, *times: str) -> None:
        rows.append(
            {**r, "heads": heads_of(r["model"]), "gpus": gpus, **dict(zip(("helix", "tp", "vllm"), times, strict=True))}
        )

    for r in (r for r in vllm_splits() if r["gpus"] > 1 and r["length"] == 1_000_000):
        add(r, r["gpus"], *(f"{r[name] / 1e3:.2f} ms" for name in ("helix", "tp", "vllm")))
    four: tuple[tuple[str, ...], ...] = ("step.4gpu",), ("baselines.4gpu",)
    for gpus, (names, baselines) in ((4, four), (8, (("step", WHOLE), ("baselines", WHOLE)))):
        plain = _times_by_point("tp", *baselines)
        for r in (r for r in best(*names) if _key(r) in HEADLINE[gpus]):
            on = 8 if load_spec(r["model"]).attention.q_heads % 8 == 0 else 4
            add(r, gpus, ttl(r), plain(r), f"{r['vllm_ms']:.2f} ms §" if r["vllm_ms"] and on == gpus else "-")
    return rows


def vllm_splits() -> list[Row]:
    """Returns steps with one KV head per GPU: us of vLLM with 32 and 128 splits in its decode graphs, and of Helix."""
    key = "model", "gpus", "batch", "length"
    found = []
    for point, timed in grouped(results("vllm-splits", *key, "engine", "layout", "splits"), *key).items():
        times = {SPLITS[r["splits"] or r["layout"]]: r["ttl_p50_us"] for r in timed}
        vllm = min(times["splits_32"], times["splits_128"])
        found.append({**dict(zip(key, point, strict=True)), **times, "vllm": vllm})
    return found


def over_tp() -> list[Row]:
    """Returns the best Helix layout's speed-up over plain TP on eight GPUs, by the newest commit that has both."""
    found: dict[tuple[Any, ...], dict[str, list[Row]]] = {}
    for r in (r for name in ("step", "baselines") for r in results(name, *WORKLOAD, "commit")):
        found.setdefault((r["model"], r["batch"], r["length"]), {}).setdefault(r["commit"], []).append(r)
    rows = []
    for batch, length in POINTS:
        of = {model: _over_tp(found.get((model, batch, length), {})) for model in OVER_TP}
        times = {model: text for model, (text, _) in of.items()}
        rows.append({"batch": batch, "length": length, "times": times, "of": [r for _, r in of.values()]})
    return rows


def _over_tp(by_commit: dict[str, list[Row]]) -> tuple[str, Row]:
    both = [(best_step(rows, "helix"), best_step(rows, "tp")) for rows in by_commit.values()]
    over = [(f"{tp['ttl_p50_us'] / helix['ttl_p50_us']:.2f}", helix) for helix, tp in both if helix and tp]
    tried = any(r["layout"].startswith("tp ") for rows in by_commit.values() for r in rows)
    return over[-1] if over else ("plain TP does not fit" if tried else "-", {})


def over_emulated() -> list[Row]:
    """Returns the times of plain TP and of Medha's layout over Helix's on eight emulated ranks, one sequence."""
    rows = []
    for (model,), same in grouped(results("baselines.emulated-8", *WORKLOAD), "model").items():
        row: Row = {**same[0], "heads": heads_of(model)}
        for mode, length in product(("tp", "medha"), (128 << 10, 1 << 20)):
            row[f"{mode}_{length >> 10}"] = over_helix(
                [r for r in same if (r["batch"], r["length"]) == (1, length)], mode
            )
        rows.append(row)
    return rows


def over_helix(rows: list[Row], mode: str) -> str:
    """Returns a mode's best time at a point over the best Helix layout's, or that one does not fit."""
    ours, theirs = best_step(rows, "helix"), best_step(rows, mode)
    if ours is None or theirs is None:
        return "does not fit"
    check_commit(ours, theirs)
    return f"{theirs['ttl_p50_us'] / ours['ttl_p50_us']:.2f}"


def heads_of(model: str) -> str:
    """Returns how many KV heads a model has."""
    attention = load_spec(model).attention
    return "1 latent" if attention.latent is not None else str(attention.kv_heads)


def emulated_eight() -> list[Row]:
    """Returns steps over eight GPUs, their emulation on two with the same code, and the difference."""
    names, key = ("step", "baselines", WHOLE), (*WORKLOAD, "commit")
    emulated = {tuple(r[k] for k in key): r for name in names for r in results(f"{name}.emulated-8", *key)}
    found = []
    for r in (r for name in names for r in results(name, *key)):
        same = emulated.get(tuple(r[k] for k in key))
        if same is not None and "failed" not in r and "failed" not in same:
            found.append({**r, "emulated": ttl(same), "apart": same["ttl_p50_us"] / r["ttl_p50_us"] - 1})
    return found


def agreement() -> list[Row]:
    """Returns the difference between emulated steps and those over eight GPUs, by model."""
    models: dict[str, list[Row]] = {}
    for r in emulated_eight():
        models.setdefault(r["model"], []).append(r)
    return [{"model": model, "apart": [r["apart"] for r in of], "of": of} for model, of in models.items()]


def emulated_steps() -> list[Row]:
    """Returns four ranks emulated on two GPUs and on one, and four GPUs; no commit has both."""
    real = {tuple(r[k] for k in WORKLOAD): r for r in results("step.4gpu", *WORKLOAD)}
    key = "emulated_by", *WORKLOAD
    emulated = {tuple(r[k] for k in key): r for r in results("step.emulated-4", *key)}
    rows = []
    for (count, *point), r in emulated.items():
        if count == 2:
            four, one = real[tuple(point)], emulated[1, *point]
            check_commit(r, one)
            over = one["ttl_p50_us"] / r["ttl_p50_us"] - 1
            rows.append({**r, "four": ttl(four), "four_commit": four["commit"], "one": ttl(one), "over": over})
    return rows


def emulated_comm() -> list[Row]:
    """Returns collectives of emulated ranks, and of that many GPUs."""
    key = "op", "ranks", "message_bytes"
    found = {(8, *(r[k] for k in key)): r["symm_us"] for r in results("comm", *key)}
    emulated = [r for n in (4, 8) for r in results(f"comm.emulated-{n}", "emulated_by", *key)]
    found |= {(r["emulated_by"], *(r[k] for k in key)): r["symm_us"] for r in emulated}

    def times(op: str, size: int) -> dict[str, float | None]:
        columns = {f"{n}_on_{m}": (m, op, n, size) for n in (4, 8) for m in (8, 2, 1)}
        return {name: found.get(column) for name, column in columns.items()}

    shown = [r for r in emulated if r["ranks"] == 8 and r["emulated_by"] == 2]
    return [{**r, "us": times(r["op"], r["message_bytes"])} for r in shown]


def largest_batch(rows: list[Row], budget_us: float) -> int | None:
    """Returns the largest batch among `rows` of one layout whose TTL is within the budget; None if none is."""
    return max((r["batch"] for r in rows if "failed" not in r and r["ttl_p50_us"] <= budget_us), default=None)


def budgets(record: str) -> list[Row]:
    """Groups the measured rows by layout."""
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for r in results(record, *WORKLOAD):
        groups.setdefault((r["model"], r["length"], r["layout"].split(" ->")[0]), []).append(r)
    return [
        {"model": model, "length": length, "layout": layout + " †" * any("superseded" in r for r in of), "of": of}
        for (model, length, layout), of in groups.items()
    ]


def best_step(rows: list[Row], mode: str) -> Row | None:
    """Returns the fastest row of a mode; None if none fits."""
    found = [r for r in rows if "failed" not in r and r["layout"].startswith(f"{mode} ")]
    return min(found, key=lambda r: float(r["ttl_p50_us"]), default=None)
