"""Times self-drafting models: `helix bench self-drafts`.

Decode steps of whole models over a cache of random data (`bench=decode speculation=sparse`), with no drafts and with 2
to 11, in one job. Random weights draft nothing useful, so the acceptance rate is fixed; drafts are made,
verified, scored and selected from as usual. The time of an iteration does not depend on the rate: gains at other rates
are computed from the same times. `phase_us` breaks down an iteration.

  helix bench self-drafts
  helix bench self-drafts ranks=8 models=qwen2.5-7b,llama-3.1-8b
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.models.speculate import expected_tokens, with_gains
from benchmarks.models.workloads import K, M, drafted, fitting_spec, over_plain, widest
from benchmarks.runner import BenchContext, Row
from launch.inputs.shapes import spec_of

MODELS = ("qwen2.5-7b", "llama-3.1-8b", "qwen3-4b", "qwen3-8b", "gpt-oss-20b", "qwen3-30b-a3b")
ACCEPTANCE = 0.9  # of each draft after accepted ones; the paper has 0.96
RATES = (0.8, 0.9, 0.96)
SPARSITIES = (0.07, 0.03)
GAMMAS = [0, 2, 4, 6, 8, 11]
STEPS = 16
# What this many GPUs hold; one GPU's points are those of the paper's hardware.
POINTS = {
    1: [(1, 128 * K), (4, 112 * K), (8, 32 * K)],
    2: [(1, 32 * K), (1, 128 * K), (1, M), (8, 128 * K), (4, M)],
    8: [(1, 32 * K), (1, 128 * K), (1, M), (8, 128 * K), (16, 128 * K), (8, M)],
}


def cases(ctx: BenchContext) -> Iterator[tuple[str, float]]:
    """Yields one job per model and share of keys, which does not matter with indexers; on a CPU the smallest."""
    for model in (ctx.models or MODELS) if ctx.gpu else ["demo"]:
        for sparsity in SPARSITIES if ctx.gpu and not spec_of(model).indexers else SPARSITIES[:1]:
            yield model, sparsity


def measure(ctx: BenchContext, model: str, sparsity: float) -> list[Row]:
    """Returns the rows of a job in the widest grid that splits the KV."""
    ranks = ctx.ranks
    near = max((n for n in POINTS if n <= ranks), default=1)
    points, gammas, steps = (POINTS[near], GAMMAS, STEPS) if ctx.gpu else ([(2, 512)], [0, 2], 3)
    spec, overrides = fitting_spec(model, ranks)
    layout = widest(spec, ranks)
    about: dict[str, Any] = {"kind": "self-drafts", "model": model, "layers": len(spec.layers), "layout": str(layout)}
    about |= {"sparsity": sparsity, "acceptance": ACCEPTANCE}
    drafts = ["speculation=sparse", f"speculation.gamma={max(gammas)}", f"speculation.sparsity={sparsity}"]
    drafts += ["kv.page_size=64", "kv.append_block=64"]
    backend, found = drafted(model, layout, points, gammas, steps, ACCEPTANCE, *drafts, *overrides)
    return [about | backend | row | at_rates(row, found) for row in with_gains(found, ACCEPTANCE)]


def at_rates(row: Row, points: list[Row]) -> Row:
    """Returns tokens per second relative to plain steps at the same point, for each acceptance rate of RATES."""
    if "failed" in row:
        return {}
    over = over_plain(row, points)
    return {"gain_at_rates": {str(rate): expected_tokens(row["gamma"], rate) / over for rate in RATES}}
