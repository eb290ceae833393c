"""Times steps with HOP-B and without it, a job for each backend and model: `helix bench hopb`."""

from __future__ import annotations

from benchmarks import jobs
from benchmarks.models.workloads import SHAPES, named
from benchmarks.ranks.hopb import STEPS
from benchmarks.runner import Benchmark, Given, Part, Row

K = 1024
# One sequence has nothing to be cut into.
POINTS = [*(f"{batch}x{length}" for length in (8 * K, 128 * K) for batch in (4, 16, 64)), f"4x{K * K}"]
ON_CPU = ["4x64"]


def cases(given: Given) -> list[tuple[str, str]]:
    """A job for each model and backend; on a CPU a tiny one.

    Raises:
        ValueError: there is one rank.
    """
    if given.ranks < 2:
        raise ValueError("one GPU has nobody to exchange with: use two or more")
    backends = ("emulated",) if given.emulated else ("symm_mem", "nccl") if given.gpu else ("gloo",)
    models = (given.models or ["qwen2.5-7b"]) if given.gpu else ["demo"]
    return [(model, backend) for model in models for backend in backends]


def measure(given: Given, model: str, backend: str) -> list[Row]:
    """Rows of a job; what does not depend on a model or on a backend counts once."""
    overrides = [
        *named(model), "bench=hopb", f"layout.kvp={given.ranks}",
        f"bench.points=[{','.join(POINTS if given.gpu else ON_CPU)}]", f"bench.steps={STEPS if given.gpu else 3}",
        *([] if given.emulated else [f"comm.backend={backend}"]),
    ]  # fmt: skip
    rows: list[Row] = jobs.measure(given.ranks, overrides)["hopb"]
    first = cases(given)[0]
    kinds = {"ttl", "failed", *["mla"] * (model == first[0]), *["delay", "timeline"] * ((model, backend) == first)}
    rows = [row | {"model": model} if row["kind"] in ("ttl", "failed") else row for row in rows]
    return [row for row in rows if row["kind"] in kinds]


COLUMNS = "model backend batch length chunks off_us on_us without_us hidden auto_us auto_chunks off_units on_units"
BENCHMARK = Benchmark(
    "decode steps with and without HOP-B, and the paper's example of it, over all GPUs",
    __doc__,
    (Part(cases, measure, COLUMNS),),
    models=SHAPES,
    emulated=True,
)
