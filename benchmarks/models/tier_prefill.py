"""Times a long prompt over a cache in host memory, beside one on the GPU: `helix bench tier-prefill`.

Qwen2.5-7B's shape with random weights on one GPU, 256K tokens, block-sparse decode behind them: with 4 GB of the GPU
for the cache, then with the whole cache there. Chunks are chosen by themselves. `turn_ms` is what 100 more tokens take
behind the prompt. On one H200 both jobs take some 130 s.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import jobs
from benchmarks.models.workloads import K, named
from benchmarks.runner import Benchmark, Given, Part, Row

HOST = 20e9  # bytes: keys and values of 256K tokens, and room
GPU = 4e9


def measure(given: Given, host: bool) -> Iterator[Row]:
    """A row of one job."""
    model, length, of_host, of_gpu = ("qwen2.5-7b", 256 * K, HOST, GPU) if given.gpu else ("demo", 2 * K, 1e9, 4e8)
    job = [*named(model), "layout.kvp=1", "attention=block_sparse", "bench=prefill", f"bench.points=[1x{length}]"]
    if host:
        job += ["kv.tier=host", f"kv.host_bytes={of_host:.0f}", f"kv.gpu_bytes={of_gpu:.0f}"]
    row: Row = {"kind": "tier-prefill", "model": model, "tier": "host" if host else "gpu"}
    (point,) = jobs.measure(1, job)["points"]
    yield row | {"gpu_bytes": of_gpu if host else None} | point


BENCHMARK = Benchmark(
    "a prompt of 256K tokens over a cache in host memory, beside one on the GPU",
    __doc__,
    (
        Part(
            lambda given: [(True,), (False,)],
            measure,
            "model tier gpu_bytes length prefill_chunk prefill_s tokens_per_s turn_ms",
        ),
    ),
)
