"""Compares all drafters and plain steps in one engine: `helix bench drafters`.

Decode steps of whole models over a cache of random data, at each batch and length with 0 to 10 drafts, for each
self-draft policy and for lookup drafts. The time of an iteration does not depend on which drafts are accepted. Random
weights give no acceptance rate: `helix tables drafters` takes tokens per iteration from the records of trained
models (`helix acceptance`), and the gain is tokens per second, from these times and those tokens, over plain steps.
Cells that do not fit say so. Emulated ranks run fewer batches and lengths.

Then generated text by models of random weights, which draft badly: `speculation.adaptive` compared with plain decoding.
The loss there is the cost of finding out.

  helix bench drafters models=qwen3-8b
  helix bench drafters models=qwen3-8b,gpt-oss-20b ranks=8
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import jobs
from benchmarks.models.workloads import K, decoding, failed, fitting_spec, named, widest
from benchmarks.runner import BenchContext, Row
from helix.layout import HelixLayout

MODELS = ("qwen3-8b", "llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b")
POLICIES = ("any", "ngram", "c2q", "quest", "window")
BATCHES = ((1, 4), (8, 20, 32))  # per job
LENGTHS = (8 * K, 32 * K, 112 * K)
EMULATED_BATCHES, EMULATED_LENGTHS = ((1, 8, 32),), LENGTHS[1:]  # at 8K, eight ranks would have 1K each
GAMMAS = [0, 2, 4, 6, 8, 10]
ADAPTIVE_GAMMA = 6
STEPS = 12
SPARSITY = 0.07
STEP_COLUMNS = (
    "batch", "length", "gamma", "sparsity", "ttl_p50_us", "ttl_p90_us", "idle_share", "phase_us", "captured", "failed",
    "used_bytes_per_gpu",
)  # fmt: skip
ACCEPTANCE = 0.9  # of the timed drafts; it changes which KV slots steps write, not their time
PROMPT, NEW_TOKENS = 8 * K, 512


def drafting(policy: str, gamma: int) -> list[str]:
    """Returns the overrides of a job that drafts with a policy, at most `gamma` tokens."""
    if policy == "ngram":
        return ["speculation=ngram", f"speculation.gamma={gamma}"]
    return [
        "speculation=sparse", f"speculation.policy={policy}", f"speculation.sparsity={SPARSITY}",
        f"speculation.gamma={gamma}", "kv.append_block=64",
    ]  # fmt: skip


def cases(ctx: BenchContext) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yields one job per drafter, model and group of batches; on a CPU the smallest."""
    if ctx.gpu:
        return product(POLICIES, ctx.models or MODELS, EMULATED_BATCHES if ctx.emulated else BATCHES)
    return product(["any", "ngram"], ["demo"], [(2,)])


def measure(ctx: BenchContext, policy: str, model: str, batches: tuple[int, ...]) -> Iterator[Row]:
    """Yields the rows of jobs in the widest grid that splits the KV.

    A job has all lengths; with quest it has one, since its share of blocks is relative to the maximum sequence length.
    """
    lengths = (512,) if not ctx.gpu else EMULATED_LENGTHS if ctx.emulated else LENGTHS
    spec, overrides = fitting_spec(model, ctx.ranks)
    layout = widest(spec, ctx.ranks)
    for job_lengths in [(length,) for length in lengths] if policy == "quest" else [lengths]:
        longest = [f"model.config.max_position_embeddings={job_lengths[0] + K}"] if policy == "quest" else []
        yield from _drafter_rows(ctx, model, layout, [*product(batches, job_lengths)], policy, [*overrides, *longest])


def _drafter_rows(
    ctx: BenchContext, model: str, layout: HelixLayout, points: list[tuple[int, int]], policy: str, overrides: list[str]
) -> Iterator[Row]:
    """Rows of each point as it ends, for each gamma; points that a job did not reach get its error."""
    gammas, steps = (GAMMAS, STEPS) if ctx.gpu else ([0, 2], 3)
    layers = len(fitting_spec(model, ctx.ranks)[0].layers)
    about: dict[str, Any] = {"kind": "drafters", "model": model, "layers": layers, "layout": str(layout)}
    about |= {"drafter": policy}
    drafts = [*drafting(policy, max(gammas)), "kv.page_size=64", *overrides]
    job = decoding(model, layout, points, gammas, steps, ACCEPTANCE, *drafts)
    left = [*points]
    try:
        for row in jobs.points(ctx.ranks, job):
            point = row["batch"], row["length"]
            if point in left:
                left.remove(point)
            if "failed" in row:
                yield from (about | one for one in failed([point], gammas, row["failed"]))
            else:
                yield about | {name: row[name] for name in STEP_COLUMNS if name in row}
    except jobs.JobError as error:
        yield from (about | row for row in failed(left, gammas, error))


def adaptive_cases(ctx: BenchContext) -> Iterator[tuple[str, int]]:
    """Returns models and batches of text; none on a CPU, where times mean nothing, or on emulated ranks."""
    return product(ctx.models or MODELS, (1, 4)) if ctx.gpu and not ctx.emulated else iter(())


def adaptively(ctx: BenchContext, model: str, batch: int) -> Iterator[Row]:
    """Yields rows of text without drafts, then with each drafter under adaptive gamma."""
    spec, overrides = fitting_spec(model, ctx.ranks)
    draw = random.Random(0)
    plain = None
    with tempfile.TemporaryDirectory() as directory:
        prompts = Path(directory) / "prompts.jsonl"
        wanted = [
            {"id": i, "prompt_ids": [draw.randrange(spec.vocab // 2) for _ in range(PROMPT)], "ignore_eos": True}
            for i in range(batch)
        ]
        prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in wanted), encoding="utf-8")
        for policy in ("none", "any", "ngram"):
            drafted = ["speculation=none"] if policy == "none" else drafting(policy, ADAPTIVE_GAMMA)
            job = [*named(model), f"layout.kvp={ctx.ranks}", f"decode.prompts={prompts}", "decode.stream=false"]
            row: Row = {"kind": "adaptive", "model": model, "batch": batch, "length": PROMPT, "drafter": policy}
            try:
                record = jobs.measure(ctx.ranks, [*job, f"decode.max_tokens={NEW_TOKENS}", *drafted, *overrides])
            except jobs.JobError as error:
                yield row | {"failed": str(error)}
                continue
            plain = plain or record
            keys = ("backend", "tokens_per_step", "ttl_p50_us", "tokens_per_s_user", "speculation")
            yield (
                row
                | {key: record[key] for key in keys}
                | {"gain": record["tokens_per_s_user"] / plain["tokens_per_s_user"]}
            )
