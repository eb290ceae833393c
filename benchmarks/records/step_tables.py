"""Tables of decode steps of whole models: measured, emulated, and beside other layouts."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from benchmarks.models.fronts import FP8
from benchmarks.models.workloads import attention_over_reading_s
from benchmarks.records.columns import POINT, Columns, Show, lines, ms, of, page, where_it_fits
from benchmarks.records.rows import WORKLOAD, Row, check_commit, grouped, kv, results, shape
from benchmarks.timer import READ_CEILING
from helix.planner.points import Options, Points, layouts
from helix.planner.step import memory_of, predict
from launch.inputs.hardware import load_hardware
from launch.inputs.shapes import load_spec

HEADLINE: dict[int, list[tuple[Any, ...]]] = {  # by GPUs
    4: [("qwen2.5-7b", 1, 1 << 20, None)],
    8: [
        ("qwen2.5-7b", 1, 1 << 20, None),
        ("llama-3.1-8b", 1, 1 << 20, None),
        ("deepseek-v2-lite", 1, 1 << 20, None),
        ("deepseek-r1", 1, 1 << 20, "fp8"),
        ("glm-5.2", 1, 1 << 20, "fp8"),
    ],
}
WHOLE = "fp8-steps"  # records of models that eight GPUs hold in FP8 alone
BUDGETS_MS = (5, 10, 20, 50)  # of TTL


def _ttl(r: Row) -> str:
    """With a mark where the kernels of that time have been replaced since."""
    return "does not fit" if "failed" in r else ms("ttl_p50_us")(r) + " †" * ("superseded" in r)


def _layout(r: Row) -> str:
    """With the grid of the FFN where there are experts to be shared in several ways."""
    attention, ffn = r["layout"].split(" -> ")
    return f"{attention} {ffn}" if load_spec(r["model"]).experts is not None else attention


def ideal_us(r: Row) -> float:
    """Returns the least time of a step: what reading takes, or where that is longer, the products of attention.

    Records have the time of reading, `floor_us`.
    """
    widths = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", r["layout"])}
    ranks = max(widths.get("kvp", 1) * widths.get("tpa", 1) * widths.get("dp", 1), widths["tpf"] * widths["ep"])
    layers = load_spec(r["model"]).layers[: r.get("layers")]
    return float(r["floor_us"] + 1e6 * attention_over_reading_s(layers, r["batch"], r["length"], ranks))


def _ideal(r: Row) -> str:
    return ms("us")({"us": ideal_us(r)})


def _over_ideal(r: Row) -> str:
    return f"{r['ttl_p50_us'] / ideal_us(r):.2f}"


def _point(r: Row) -> tuple[str, str]:
    return shape(r), kv(r)


LAYOUT: Columns = {**POINT, "layout": _layout}
IDEAL: Columns = {"time per token": _ttl, "ideal": _ideal, "x": _over_ideal}
NO_RECORD = "vLLM 0.25.1, no record"  # constants of `benchmarks/models/workloads.py`
VLLM: Columns = {NO_RECORD: lambda r: f"{r['vllm_ms']:.2f} ms" if r["vllm_ms"] else "-"}


def steps(name: str = "step") -> list[str]:
    """Whole decode steps: every layout of every workload."""
    more: Columns = {
        "ideal": _ideal,
        "x": _over_ideal,
        "target (8 GPUs)": lambda r: str(r["bar"] or "-"),
        **VLLM,
        "launches a layer": of("launches_per_layer"),
    }
    timed = {title: where_it_fits(cell) for title, cell in more.items()}
    return lines({**LAYOUT, "time per token": _ttl, **timed}, results(name, *WORKLOAD))


def _best(*names: str) -> list[Row]:
    """The best Helix layout of each workload."""
    found: dict[tuple[Any, ...], Row] = {}
    for r in (r for name in names or ("step",) for r in results(name, *WORKLOAD)):
        if "failed" not in r and r["layout"].startswith("helix "):
            found[_key(r)] = min(found.get(_key(r), r), r, key=lambda r: r["ttl_p50_us"])
    return list(found.values())


def gap() -> list[str]:
    """What stands between the best steps of dense models and their floors, by the simulator's constants."""
    parts_of = "read more than once", "read below the ceiling", "kernels' fixed parts", "collectives", "not explained"
    table = [(*POINT, "time per token", "ideal", *parts_of)]
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
        table.append((*_point(r), *(f"{us / 1e3:.2f} ms" for us in (r["ttl_p50_us"], r["floor_us"], *parts))))
    return page(table)


def _beside(mode: str, *names: str) -> Show:
    """A mode's best time per token over eight GPUs at a row's workload, with a mark where it is of another commit."""
    found: dict[tuple[Any, ...], Row] = {}
    for r in (r for name in names for r in results(name, *WORKLOAD) if r["layout"].startswith(f"{mode} ")):
        found[_key(r)] = min(found.get(_key(r), r), r, key=lambda r: r.get("ttl_p50_us", float("inf")))

    def show(r: Row) -> str:
        if (other := found.get(_key(r))) is None:
            return "does not fit, planned" if mode == "tp" and r.get("weights") == "fp8" and _lacks_memory(r) else "-"
        return _ttl(other) + " ‡" * ("failed" not in other and other.get("commit") != r.get("commit"))

    return show


def _lacks_memory(r: Row) -> bool:
    """Whether plain TP over eight H200 does not hold a workload in FP8, by the planner."""
    spec = load_spec(r["model"])
    points = Points.crossed(layouts(spec, (8,), ("tp",), pp=False), np.array([r["batch"]]))
    memory = memory_of(spec, load_hardware("h200"), points, r["length"], FP8)
    return bool((memory.largest_batch < r["batch"]).all())


def _key(r: Row) -> tuple[Any, ...]:
    return r["model"], r["batch"], r["length"], r.get("weights")


def headline() -> list[str]:
    """The best Helix layouts over two, four and eight GPUs, next to plain TP and vLLM on as many GPUs."""
    table: list[tuple[str, ...]] = [("model", "KV heads", "GPUs", "context", "Helix", "plain TP", "vLLM 0.25.1")]

    def add(r: Row, gpus: int, *times: str) -> None:
        spec = load_spec(r["model"])
        heads = "1 latent" if spec.attention.latent is not None else str(spec.attention.kv_heads)
        table.append((_named(r), heads, str(gpus), kv(r), *times))

    for r in (r for r in _splits() if r["gpus"] > 1 and r["length"] == 1_000_000):
        add(r, r["gpus"], *(f"{r[name] / 1e3:.2f} ms" for name in ("helix", "tp", "vllm")))
    four: tuple[tuple[str, ...], ...] = ("step.4gpu",), ("baselines.4gpu",)
    for gpus, (names, baselines) in ((4, four), (8, (("step", WHOLE), ("baselines", WHOLE)))):
        plain = _beside("tp", *baselines)
        for r in (r for r in _best(*names) if _key(r) in HEADLINE[gpus]):
            on = 8 if load_spec(r["model"]).attention.q_heads % 8 == 0 else 4
            add(r, gpus, _ttl(r), plain(r), f"{r['vllm_ms']:.2f} ms §" if r["vllm_ms"] and on == gpus else "-")
    return page(table)


def _splits() -> list[Row]:
    """Steps with one KV head a GPU: us of vLLM with 32 and 128 splits in its decode graphs, and of Helix."""
    names = {32: "splits_32", 128: "splits_128", "helix kvp=1 tpa=1": "tp", "tp kvp=1 tpa=2": "tp"}
    names["helix kvp=2 tpa=1"] = "helix"
    key = "model", "gpus", "batch", "length"
    rows = results("vllm-splits", *key, "engine", "layout", "splits")
    found = []
    for point, timed in grouped(rows, *key).items():
        times = {names[r["splits"] or r["layout"]]: r["ttl_p50_us"] for r in timed}
        found.append(
            dict(zip(key, point, strict=True)) | times | {"vllm": min(times["splits_32"], times["splits_128"])}
        )
    return found


def vllm_splits() -> list[str]:
    """vLLM's decode graphs with one KV head a GPU, next to Helix."""
    columns: Columns = {
        "shape": lambda r: r["model"], "GPUs": lambda r: str(r["gpus"]), "KV": kv,
        "vLLM, 32 splits": ms("splits_32"), "vLLM, 128 splits": ms("splits_128"), "plain TP": ms("tp"),
        "kvp=2": ms("helix"), "vLLM over plain TP": lambda r: f"{r['vllm'] / r['tp']:.2f}",
    }  # fmt: skip
    return lines(columns, _splits())


def whole() -> list[str]:
    """Models that eight GPUs hold in FP8 alone: the best Helix layout, plain TP, and attention of whole sequences."""
    columns: Columns = {
        "model": _named,
        "KV": kv,
        "best Helix layout": lambda r: _layout(r).removeprefix("helix "),
        **IDEAL,
        "plain TP=8": _beside("tp", WHOLE),
        "dp=8": _beside("dp", WHOLE),
        "most memory of a GPU": lambda r: f"{max(r['used_bytes_per_gpu']) / 1e9:.0f} GB",
    }
    return lines(columns, _best(WHOLE))


def modes() -> list[str]:
    """Every layout of the workloads that were timed in mode dp too."""
    return lines({**LAYOUT, "time per token": _ttl}, results("modes", *WORKLOAD))


def over_tp() -> list[str]:
    """Plain TP's time over the best Helix layout's over eight GPUs, of the newest commit that has both."""
    models = "qwen2.5-7b", "qwen3-30b-a3b", "deepseek-v2-lite", "llama-3.1-8b"
    heads = (load_spec(model).attention for model in models)
    kinds = ("1 latent" if a.latent is not None else f"{a.kv_heads} KV heads" for a in heads)
    table = [("KV", *(f"{model}, {kind}" for model, kind in zip(models, kinds, strict=True)))]
    found: dict[tuple[Any, ...], dict[str, list[Row]]] = {}
    for r in (r for name in ("step", "baselines") for r in results(name, *WORKLOAD, "commit")):
        found.setdefault((r["model"], r["batch"], r["length"]), {}).setdefault(r["commit"], []).append(r)
    for batch, length in ((1, 128 << 10), (1, 1 << 20), (8, 128 << 10), (8, 1 << 20)):
        cells = (_over_tp(found.get((model, batch, length), {})) for model in models)
        table.append((kv({"batch": batch, "length": length}), *cells))
    return page(table)


def _over_tp(by_commit: dict[str, list[Row]]) -> str:
    both = [(best_step(rows, "helix"), best_step(rows, "tp")) for rows in by_commit.values()]
    over = [tp["ttl_p50_us"] / helix["ttl_p50_us"] for helix, tp in both if helix and tp]
    tried = any(r["layout"].startswith("tp ") for rows in by_commit.values() for r in rows)
    return f"{over[-1]:.2f}" if over else "plain TP does not fit" if tried else "-"


def _named(r: Row) -> str:
    return f"{shape(r)}{', FP8' if r.get('weights') == 'fp8' else ''}"


def four_gpus() -> list[str]:
    """The best Helix layout over four GPUs at one sequence of 1M tokens."""
    columns = {**POINT, "best Helix layout": lambda r: _layout(r).removeprefix("helix "), **IDEAL}
    return lines(columns, [r for r in _best("step.4gpu") if (r["batch"], r["length"]) == (1, 1 << 20)])


def best_steps(*only: int) -> list[str]:
    """The best Helix layout over eight GPUs at each workload, beside its target, plain TP and vLLM.

    Args:
        only: the batch and length of the workloads to show; all where there are none.
    """

    def target(r: Row) -> str:
        met = r["bar"] and r["ttl_p50_us"] / ideal_us(r) <= r["bar"]
        return f"{r['bar']}{'' if met else ', not met'}" if r["bar"] else "-"

    columns: Columns = {
        **POINT,
        "best Helix layout": lambda r: r["layout"].split(" ->")[0].removeprefix("helix "),
        **IDEAL,
        "target": target,
        "plain TP=8": _beside("tp", "baselines"),
        **VLLM,
    }
    return lines(columns, [r for r in _best() if not only or (r["batch"], r["length"]) == only])


def _on_eight() -> list[tuple[Row, Row, float]]:
    """Steps over eight GPUs, the same emulated on two with the same code, and how far apart they are."""
    names, key = ("step", "baselines", WHOLE), (*WORKLOAD, "commit")
    emulated = {tuple(r[k] for k in key): r for name in names for r in results(f"{name}.emulated-8", *key)}
    found = []
    for r in (r for name in names for r in results(name, *key)):
        same = emulated.get(tuple(r[k] for k in key))
        if same is not None and "failed" not in r and "failed" not in same:
            found.append((r, same, same["ttl_p50_us"] / r["ttl_p50_us"] - 1))
    return found


def emulated_eight() -> list[str]:
    """Steps over eight GPUs, and emulated on two."""
    body = [(*_point(r), _layout(r), _ttl(r), _ttl(other), f"{apart:+.1%}") for r, other, apart in _on_eight()]
    return page([(*LAYOUT, "eight GPUs", "emulated on two", "difference"), *body]) if body else []


def agreement() -> list[str]:
    """How far emulated steps are from those over eight GPUs, by model."""
    apart: dict[str, list[float]] = {}
    for r, _, share in _on_eight():
        apart.setdefault(r["model"], []).append(share)
    body = [(m, str(len(a)), f"{min(a):+.1%}", f"{max(a):+.1%}") for m, a in apart.items()]
    return page([("shape", "steps compared", "emulated, at the fastest", "at the slowest"), *body])


def emulated_steps() -> list[str]:
    """Four ranks emulated on two GPUs and on one, and four GPUs; no commit was timed on four and emulated."""
    real = {tuple(r[k] for k in WORKLOAD): r for r in results("step.4gpu", *WORKLOAD)}
    emulated = {
        (r["emulated_by"], *(r[k] for k in WORKLOAD)): r for r in results("step.emulated-4", "emulated_by", *WORKLOAD)
    }
    table = [(*LAYOUT, "four GPUs", "commit", "emulated on two", "on one", "commit", "one over two")]
    for (count, *point), r in emulated.items():
        if count == 2:
            four, one = real[tuple(point)], emulated[1, *point]
            check_commit(r, one)
            cells = _ttl(four), four["commit"][:7], _ttl(r), _ttl(one), r["commit"][:7]
            table.append((*_point(r), _layout(r), *cells, f"{one['ttl_p50_us'] / r['ttl_p50_us'] - 1:+.1%}"))
    return page(table)


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
    table = [("collective", "message", *(f"{n} GPUs" if n > 2 else f"emulated on {n}" for n in (4, 2, 1, 8, 2, 1)))]
    for count, op, size in of_8:
        if count == 2:
            found = [
                us
                for ranks, of in ((4, of_4), (8, of_8))
                for us in (real.get((op, ranks, size)), *(of.get((n, op, size), {}).get("symm_us") for n in (2, 1)))
            ]
            table.append((op, f"{size:,} B", *(f"{us:.1f} us" if us else "-" for us in found)))
    return page(table)


def largest_batch(rows: list[Row], budget_us: float) -> int | None:
    """The largest batch among measured `rows` of one layout whose TTL is within the budget; None: not one of them."""
    return max((r["batch"] for r in rows if "failed" not in r and r["ttl_p50_us"] <= budget_us), default=None)


def budgets(name: str) -> list[str]:
    """The largest measured batch of each layout within a TTL."""
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for r in results(name, *WORKLOAD):
        groups.setdefault((r["model"], r["length"], r["layout"].split(" ->")[0]), []).append(r)
    table = [("shape", "length", "layout", *(f"<= {ms} ms" for ms in BUDGETS_MS))]
    for (model, length, layout), found in groups.items():
        fitting = [largest_batch(found, 1e3 * ms) or "-" for ms in BUDGETS_MS]
        older = " †" if any("superseded" in r for r in found) else ""
        table.append((model, f"{length >> 10}K", f"{layout}{older}", *map(str, fitting)))
    return page(table)


def baselines(name: str) -> list[str]:
    """Helix beside plain TP and Medha's layout."""
    rates: Columns = {
        "tokens/s/user": lambda r: f"{r['tokens_per_s_user']:.0f}",
        "tokens/s/GPU": lambda r: f"{r['tokens_per_s_gpu']:.1f}",
    }
    timed = {title: where_it_fits(cell) for title, cell in rates.items()}
    return lines({**LAYOUT, "time per token": _ttl, **timed}, results(name, *WORKLOAD))


def best_step(rows: list[Row], mode: str) -> Row | None:
    """Finds the fastest of a mode among measured `rows`; None: none of them fits."""
    found = [r for r in rows if "failed" not in r and r["layout"].startswith(f"{mode} ")]
    return min(found, key=lambda r: float(r["ttl_p50_us"]), default=None)
