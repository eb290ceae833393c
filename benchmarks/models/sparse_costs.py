"""Times the overhead of block-sparse attention, with drafts and with subblocks: `helix bench sparse-costs`.

Decode steps of whole models over a cache of random data (`bench=decode`), as pairs of jobs:

  short    sequences shorter than `attention.from_tokens`, compared with attention=dense: only page bounds are updated
  roomy    4K tokens in an engine made for 1M, compared with one made for 4K: work follows the live length
  drafts   four drafts a step at 1M, each with its own selection, compared with none
  parts    subblocks (attention=parts), compared with 32 blocks
  dense    all keys, compared with subblocks
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from benchmarks import jobs
from benchmarks.models.steps import ROOMY
from benchmarks.models.workloads import K, M, fitting_spec, named, widest
from benchmarks.runner import BenchContext, Row

MODELS = ("qwen2.5-7b",)
SPARSE = ("attention=block_sparse", "attention.from_tokens=0")
PARTS = ("attention=parts", "attention.from_tokens=0")
DRAFTS = ("speculation=ngram", "speculation.gamma=4", "bench.acceptance=0.8")
CostPoint = tuple[int, int]


@dataclass(frozen=True)
class Probe:
    """One job of a pair: settings, and its points."""

    overrides: tuple[str, ...]
    points: tuple[CostPoint, ...]
    gamma: int = 0


SHORT = ((1, 4 * K), (1, 32 * K), (1, 128 * K), (8, 128 * K))
LONG = ((1, 128 * K), (8, 128 * K), (1, M))
ON_GPU = {
    "short": (Probe((), SHORT), Probe(("attention=block_sparse", f"attention.from_tokens={2 * M}"), SHORT)),
    "roomy": (Probe(SPARSE, ((1, 4 * K),)), Probe(SPARSE, ((1, 4 * K), (1, M)))),
    "drafts": (Probe(SPARSE, ((1, 4 * K), (1, M))), Probe((*SPARSE, *DRAFTS), ((1, M),), gamma=4)),
    "parts": (Probe(SPARSE, LONG), Probe(PARTS, LONG)),
    "dense": (Probe(PARTS, LONG), Probe((), LONG)),
}
ON_CPU = {"roomy": (Probe(SPARSE, ((1, K),)), Probe(SPARSE, ((1, K), (1, 8 * K))))}


@cache
def times_us(model: str, ranks: int, steps: int, job: Probe) -> dict[CostPoint, float]:
    """Returns the time of a step at each point of a job, in the widest grid that splits the KV."""
    spec, cut = fitting_spec(model, ranks)
    grid = widest(spec, ranks)
    record = jobs.measure(
        ranks,
        [
            *named(model), f"layout.kvp={grid.kvp}", f"layout.tpa={grid.tpa}", "bench=decode",
            f"bench.points=[{','.join(f'{b}x{length}' for b, length in job.points)}]", f"bench.gammas=[{job.gamma}]",
            f"bench.steps={steps}", *cut, *ROOMY, *job.overrides,
        ],
    )  # fmt: skip
    return {(row["batch"], row["length"]): row["ttl_p50_us"] for row in record["points"]}


def cases(ctx: BenchContext) -> Iterator[tuple[str, str, Probe, Probe]]:
    """Yields one case per model and comparison; on a CPU one."""
    for model in (ctx.models or MODELS) if ctx.gpu else ["demo"]:
        for what, pair in (ON_GPU if ctx.gpu else ON_CPU).items():
            yield model, what, *pair


def measure(ctx: BenchContext, model: str, what: str, one: Probe, other: Probe) -> Iterator[Row]:
    """Yields a row for each point that both jobs have."""
    plain, with_it = (times_us(model, ctx.ranks, 64 if ctx.gpu else 3, job) for job in (one, other))
    for point in plain.keys() & with_it.keys():
        yield {
            "kind": "sparse-costs", "model": model, "case": what, "batch": point[0], "length": point[1],
            "drafts": other.gamma, "plain_us": plain[point], "step_us": with_it[point],
        }  # fmt: skip
