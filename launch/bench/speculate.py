"""What drafts gain: `python -m launch.bench speculate`.

Two kinds of rows. `synthetic`: decode steps of whole models with 0 to 15 drafts that are kept at a set rate, over a
cache of random data (`bench=decode`), and where the time of a step goes. `copy_prompts`: the demo model goes on with
copies of files (`launch.bench.copy_prompts`), its drafts looked up in the prompt.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from launch.bench.copy_prompts import copy_prompts
from launch.bench.workloads import fitting_layers, layouts
from launch.inputs import parts as inputs_parts
from launch.inputs.compose import spec_of
from launch.job import spawn

K, M = 1024, 1 << 20
MODELS = ["llama-3.1-70b", "demo"]  # the shape of steps with synthetic drafts; `demo` stands for the copies
ACCEPTANCE = 0.8  # chance of a draft behind drafts that were kept
# Of 1, 8, 32 sequences of 8K, 128K, 1M: those that four GPUs hold, but for 8 x 8K, which is between 1 and 32.
POINTS = [(1, 8 * K), (32, 8 * K), (1, 128 * K), (8, 128 * K), (1, M)]
GAMMAS = [0, 1, 2, 3, 4, 7, 15]
STEPS = 16
EDIT_TOKENS = 256  # of each prompt
# Of `launch.bench.copy_prompts`: plain steps first, which the others are compared with.
DRAFTING = {
    "none": ["speculation=none"],
    "4": ["speculation=ngram", "speculation.gamma=4", "speculation.adaptive=false"],
    "adaptive": ["speculation=ngram", "speculation.gamma=4"],
}
MEASURED = [
    "backend", "prefill_tokens", "decode_steps", "tokens_per_step", "ttl_p50_us", "ttl_p90_us", "tokens_per_s_user",
    "tokens_per_s_gpu", "speculation",
]  # fmt: skip
PARTS = {
    "draft": r"^_(replay|find|propose)_kernel",
    "attention": r"^_(kv_append|flash_decode|merge_parts|mla_\w+|angles|local_bounds|cache_slots)_kernel",
    "exchange": r"^_((merge_)?exchange|lse_combine)_kernel|ncclDevKernel_SendRecv",
    "projections": r"^_(embedding|rms_norm|linear(_sm90)?|qkv_append|each_head|silu_mul|route|moe_sm90)_kernel"
    r"|^_((gate_up|down)(_few)?|sum)_kernel|nvjet|cublas|gemm",
    "all-reduce": r"^_all_reduce_norm_kernel|ncclDevKernel_AllReduce",
    "acceptance": r"^_(all_gather|best_of_\w+|kept_mass|accept|commit)_kernel|ncclDevKernel_AllGather",
}
REST = "rest"  # torch's own small kernels around the layers, and copies


def split(kernel_us: Mapping[str, float]) -> dict[str, float]:
    """Microseconds of a step's parts, from those of its kernels."""
    parts = dict.fromkeys([*PARTS, REST], 0.0)
    for name, us in kernel_us.items():
        parts[next((part for part, names in PARTS.items() if re.search(names, name)), REST)] += us
    return parts


def expected_tokens(gamma: int, acceptance: float) -> float:
    """Tokens of a step with `gamma` drafts, each kept with a chance where those before it were."""
    return sum(acceptance**kept for kept in range(gamma + 1))


def with_gains(points: list[dict[str, Any]], acceptance: float) -> list[dict[str, Any]]:
    """Timed points with the parts of a step, and with tokens per second in those of no drafts at the same point.

    `gain` takes the tokens that came in the timed steps, `gain_at_rate` those expected of so many drafts: of few steps
    of one sequence, the former are as good as its luck.
    """
    plain = {(p["batch"], p["length"]): p for p in points if p["gamma"] == 0}
    rows = []
    for point in points:
        row = dict(point)
        if "failed" not in point:
            base = plain[point["batch"], point["length"]]
            row["gain"] = point["tokens_per_s_user"] / base["tokens_per_s_user"]
            expected = expected_tokens(point["gamma"], acceptance)
            row["gain_at_rate"] = expected * base["ttl_p50_us"] / point["ttl_p50_us"]
            row["split_us"] = split(point.get("kernel_us", {}))
        rows.append(row)
    return rows


def _job(ranks: int, overrides: list[str]) -> dict[str, Any]:
    """The record of a job of its own; raises as `jobs.measure`."""
    return spawn.measure(ranks, [*overrides, "decode.stream=false"])


def synthetic(model: str, ranks: int) -> list[dict[str, Any]]:
    """One job of a model over the grid with the widest tpa that splits the KV; on a CPU the tiniest case."""
    gpu = torch.cuda.is_available()
    points, gammas, steps = (POINTS, GAMMAS, STEPS) if gpu else ([(2, 64)], [0, 2], 3)
    spec, overrides = spec_of(model), []
    if gpu:
        layers = fitting_layers(spec, ranks, torch.cuda.get_device_properties(0).total_memory)
        if layers < spec.layers:
            overrides = [f"model.config.num_hidden_layers={layers}"]
            print(f"{model}: the first {layers} of {spec.layers} layers, which is what fits")
            spec = spec_of(model, *overrides)
    layout = [grid for grid in layouts(spec, ranks, baselines=False) if grid.ep == 1][-1]
    about: dict[str, Any] = {"kind": "synthetic", "model": model, "layers": spec.layers, "layout": str(layout)}
    about |= {"acceptance": ACCEPTANCE}
    try:
        record = _job(
            ranks,
            [
                f"model={model}", f"layout.kvp={layout.kvp}", f"layout.tpa={layout.tpa}", "kv.page_size=64",
                "hopb=none", "bench=decode", f"bench.points=[{','.join(f'{b}x{length}' for b, length in points)}]",
                f"bench.gammas={gammas}", f"bench.steps={steps}", "speculation=synthetic",
                f"speculation.gamma={max(gammas)}", f"speculation.acceptance={ACCEPTANCE}", *overrides,
            ],
        )  # fmt: skip
    except spawn.JobError as error:
        of = [{"batch": batch, "length": length, "gamma": gamma} for batch, length in points for gamma in gammas]
        return [about | row | {"failed": str(error)} for row in of]
    about |= {"backend": record["backend"]}
    return [about | row for row in with_gains(record["points"], ACCEPTANCE)]


def copies(ranks: int) -> Iterator[dict[str, Any]]:
    """A job for each way of drafting, over the same prompts; on a CPU one short prompt, two ways."""
    gpu = torch.cuda.is_available()
    prompts = copy_prompts(EDIT_TOKENS) if gpu else copy_prompts(16)[:1]
    plain: tuple[list[list[int]], dict[str, Any]] | None = None
    with tempfile.TemporaryDirectory() as directory:
        questions, answers = Path(directory) / "prompts.jsonl", Path(directory) / "answers.jsonl"
        questions.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), encoding="utf-8")
        job = ["model=demo", f"layout.kvp={ranks}", f"decode.prompts={questions}", f"decode.output={answers}"]
        for drafting in DRAFTING if gpu else ["none", "4"]:
            record = _job(ranks, [*job, *DRAFTING[drafting]])
            tokens = [json.loads(line)["output_ids"] for line in answers.read_text("utf-8").strip().split("\n")]
            answers.unlink()
            plain = plain or (tokens, record)
            yield {
                "kind": "edits", "model": "demo", "layout": f"helix kvp={ranks} tpa=1", "drafting": drafting,
                "prompts": len(prompts), "new_tokens": prompts[0]["max_new_tokens"],
                **{key: record[key] for key in MEASURED},
                "as_plain": sum(ours == theirs for ours, theirs in zip(tokens, plain[0], strict=True)),
                "gain": record["tokens_per_s_user"] / plain[1]["tokens_per_s_user"],
            }  # fmt: skip


def run(ranks: int, models: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Rows of both kinds, of `models` only if given, and tables of them; on a CPU the tiniest case of each."""
    gpu = torch.cuda.is_available()
    chosen = models or MODELS
    terminal = Console(width=150)
    rows = []
    for model in [model for model in chosen if model != "demo"] if gpu else ["demo"]:
        for row in synthetic(model, ranks):
            rows.append(row)
            yield row
    terminal.print(_synthetic_table(rows))
    if gpu and ("demo" not in chosen or inputs_parts.is_emulated(ranks)):
        return
    table = Table("drafts", "tok/step", "tok/s/user", "gain", "as without", title="copies of files by the demo model")
    for row in copies(ranks):
        yield row
        cells = f"{row['tokens_per_step']:.2f}", f"{row['tokens_per_s_user']:.1f}", f"{row['gain']:.2f}"
        table.add_row(row["drafting"], *cells, f"{row['as_plain']} of {row['prompts']}")
    terminal.print(table)


def _synthetic_table(rows: list[dict[str, Any]]) -> Table:
    heads = ["model", "batch", "length", "drafts", "step p50", "tok/step", "tok/s/user", "gain", "at the rate"]
    table = Table(*heads, *PARTS, REST, title=f"drafts kept at a rate of {ACCEPTANCE}; parts in % of a traced step")
    for r in rows:
        cells = ["failed"]
        if "failed" not in r:
            total = sum(r["split_us"].values())
            cells = [
                f"{r['ttl_p50_us'] / 1e3:.2f} ms", f"{r['tokens_per_step']:.2f}", f"{r['tokens_per_s_user']:.1f}",
                f"{r['gain']:.2f}", f"{r['gain_at_rate']:.2f}",
                *(f"{us / total:.1%}" if total else "-" for us in r["split_us"].values()),
            ]  # fmt: skip
        table.add_row(r["model"], str(r["batch"]), str(r["length"]), str(r["gamma"]), *cells)
    return table
