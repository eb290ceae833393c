"""Times prefixes that come back from host memory: `helix bench prefixes`.

Qwen2.5-7B's shape on one GPU with 128K tokens, and GLM-5.2's over eight ranks with 1M; over more than one rank the
second alone. Contexts of 1M are random KV that rank 0 treats as computed. Rows have the time of a context's first
token, and the rates of the copies; rows of `streams` the gaps of four streams of 32K while a prefix of 128K is restored
or stored. Needs 24 GB of host memory for each rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import jobs
from benchmarks.models.workloads import named
from benchmarks.runner import BenchContext, Row

HOST_BYTES = 24e9  # of a rank
CONTEXT = (1 << 20) + 256


def measure(ctx: BenchContext) -> Iterator[Row]:
    """Yields the rows of a model."""
    model, length = ("qwen2.5-7b", 128 << 10) if ctx.ranks == 1 else ("glm-5.2", CONTEXT - 256)
    overrides = [*named(model), f"decode.max_length={length + 256}", f"kv.prefix_host_bytes={HOST_BYTES:g}"]
    if ctx.ranks > 1:
        overrides += [
            f"model.config.max_position_embeddings={CONTEXT}",
            "decode.max_batch=4",
            "kv.memory_fraction=0.95",
        ]
    if not ctx.gpu:
        model, overrides = "demo", [*named("demo"), "kv.prefix_host_bytes=1e8"]
    overrides += [f"layout.kvp={ctx.ranks}", "bench=serve", "bench.traces=[prefixes]"]
    overrides += ["comm.backend=emulated"] * ctx.emulated
    for row in jobs.rows(overrides):
        yield {"model": model, "layout": f"helix kvp={ctx.ranks}", **row}
