"""Times steps with drafts: `helix bench speculate`.

Two kinds of rows. `synthetic`: decode steps of whole models with 0 to 15 drafts at a fixed acceptance rate, over a
cache of random data (`bench=decode`), with a breakdown of the step. `copy_prompts`: the demo model continues copies of
files (`benchmarks.quality.copy_prompts`) with drafts looked up in the prompt.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import jobs
from benchmarks.models.workloads import K, M, drafted, fitting_spec, widest
from benchmarks.quality.copy_prompts import copy_prompts
from benchmarks.runner import BenchContext, Row

MODELS = ["llama-3.1-70b", "demo"]  # the shape of synthetic steps; `demo` selects the copies
ACCEPTANCE = 0.8  # of a draft after accepted drafts
# Of 1, 8, 32 sequences of 8K, 128K, 1M: what four GPUs hold, without 8 x 8K, which is between 1 and 32.
POINTS = [(1, 8 * K), (32, 8 * K), (1, 128 * K), (8, 128 * K), (1, M)]
GAMMAS = [0, 1, 2, 3, 4, 7, 15]
STEPS = 16
EDIT_TOKENS = 256  # of each prompt
# Of `benchmarks.quality.copy_prompts`: plain steps first, the baseline of the others.
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
    "draft": r"^_(replay|find_in_(history|pool)|propose|draft_ranges|select_tokens)_kernel",
    "attention": r"^_(kv_append|flash_decode((_fp8|_many)_sm90)?|mla_\w+|gated_delta_step)_kernel"
    r"|^_(merge_splits|merge_prefixes|angles|local_bounds|slot_mapping|index_append|index_scores|count_(digits|listed)|list_(between|local_topk))_kernel"
    r"|^_write_(topk|listed)_kernel"
    r"|^_(select_(blocks|pages)|keep_best|repeat_blocks|block_ranges|fold_blocks|resolve|copy_blocks|write_back|fetch_tokens)_kernel",
    "exchange": r"^_((merge_states_)?exchange|merge_states(_pack)?|pack_states)_kernel|ncclDevKernel_SendRecv",
    "projections": r"^_(embedding|rms_norm|(scaled_)?linear(_fp8|_packed)?(_sm90)?|qkv_append|each_head)_kernel"
    r"|^_(head_squares|quantize_rows|silu_mul|(gate|sigmoid)_mul|gated_norm|route|moe(_scaled)?_sm90)_kernel"
    r"|^_(experts_(many|packed)|grouped_gemm|(count|order)_pairs|(gate_up|down)(_few)?|sum)_kernel|nvjet|cublas|gemm",
    "all-reduce": r"^_(all_reduce_norm(_rows|_long)?|reduce_scatter)_kernel|ncclDevKernel_(AllReduce|ReduceScatter)",
    "acceptance": r"^_(all_gather|best_of_\w+|kept_mass|accept|gumbel_sample|commit)_kernel|ncclDevKernel_AllGather"
    r"|^_(process_logits|top_of_blocks|merge_tops)_kernel",
}
REST = "rest"  # torch's small kernels around the layers, and copies


def split(kernel_us: Mapping[str, float]) -> dict[str, float]:
    """Sums the microseconds of a step's kernels by part."""
    parts = dict.fromkeys([*PARTS, REST], 0.0)
    for name, us in kernel_us.items():
        parts[next((part for part, names in PARTS.items() if re.search(names, name)), REST)] += us
    return parts


def expected_tokens(gamma: int, acceptance: float) -> float:
    """Returns the expected tokens of a step with `gamma` drafts, by the conditional acceptance of each."""
    return sum(acceptance**accepted for accepted in range(gamma + 1))


def with_gains(points: list[dict[str, Any]], acceptance: float) -> list[dict[str, Any]]:
    """Adds the parts of a step, and the gain in tokens per second over no drafts at the same point.

    `gain` uses the tokens of the timed steps, `gain_at_rate` the expected tokens: over few steps of one sequence,
    `gain` is noisy.
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


def synthetic(ctx: BenchContext, model: str) -> list[Row]:
    """Returns the rows of one job in the widest grid that splits the KV; on a CPU the smallest case."""
    ranks = ctx.ranks
    points, gammas, steps = (POINTS, GAMMAS, STEPS) if ctx.gpu else ([(2, 64)], [0, 2], 3)
    spec, overrides = fitting_spec(model, ranks)
    layout = widest(spec, ranks)
    about: dict[str, Any] = {"kind": "synthetic", "model": model, "layers": len(spec.layers), "layout": str(layout)}
    about |= {"acceptance": ACCEPTANCE}
    drafts = ["speculation=ngram", f"speculation.gamma={max(gammas)}", "kv.page_size=64"]
    backend, found = drafted(model, layout, points, gammas, steps, ACCEPTANCE, *drafts, *overrides)
    return [about | backend | row for row in with_gains(found, ACCEPTANCE)]


def copies(ctx: BenchContext) -> Iterator[Row]:
    """Yields the row of one job per drafter, over the same prompts; on a CPU one short prompt and two drafters."""
    gpu, ranks = ctx.gpu, ctx.ranks
    prompts = copy_prompts(EDIT_TOKENS) if gpu else copy_prompts(16)[:1]
    plain: tuple[list[list[int]], dict[str, Any]] | None = None
    with tempfile.TemporaryDirectory() as directory:
        written, answers = Path(directory) / "prompts.jsonl", Path(directory) / "answers.jsonl"
        written.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), encoding="utf-8")
        job = ["model=demo", f"layout.kvp={ranks}", f"decode.prompts={written}", f"decode.output={answers}"]
        job.append("decode.stream=false")
        for drafting in DRAFTING if gpu else ["none", "4"]:
            record = jobs.measure(ranks, [*job, *DRAFTING[drafting]])
            tokens = [json.loads(line)["token_ids"] for line in answers.read_text("utf-8").strip().split("\n")]
            answers.unlink()
            plain = plain or (tokens, record)
            yield {
                "kind": "edits", "model": "demo", "layout": f"helix kvp={ranks} tpa=1", "drafting": drafting,
                "prompts": len(prompts), "new_tokens": prompts[0]["max_tokens"],
                **{key: record[key] for key in MEASURED},
                "as_plain": sum(ours == theirs for ours, theirs in zip(tokens, plain[0], strict=True)),
                "gain": record["tokens_per_s_user"] / plain[1]["tokens_per_s_user"],
            }  # fmt: skip


def models(ctx: BenchContext) -> list[tuple[str]]:
    """Returns the shapes of synthetic steps."""
    return [(model,) for model in ctx.models or MODELS if model != "demo"] if ctx.gpu else [("demo",)]


def copied(ctx: BenchContext) -> list[tuple[()]]:
    """Returns one case, or none if other models are selected or ranks are emulated: tokens mean nothing there."""
    return [()] if not ctx.gpu or ("demo" in (ctx.models or MODELS) and not ctx.emulated) else []
