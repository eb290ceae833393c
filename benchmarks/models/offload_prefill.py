"""Times a long prompt over a KV cache in host memory, compared with one on the GPU: `helix bench offload-prefill`.

Qwen2.5-7B's shape with random weights on one GPU, 256K tokens, then block-sparse decode: with 4 GB of GPU memory for
the cache, then with the whole cache on the GPU. Chunk sizes are automatic. `turn_ms` is the time of 100 more tokens
after the prompt. On one H200 both jobs take some 130 s.

Then 1M tokens over host memory on a card of 24 GB: at most 22 GB can be allocated (`bench.gpu_bytes`), and
`used_gb` is the driver's figure at the end of the prompt. It takes some 8 minutes, 370 s of them the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import jobs
from benchmarks.models.offload_steps import CARD
from benchmarks.models.workloads import K, M, named
from benchmarks.runner import BenchContext, Row

HOST = 62e3  # bytes per token: keys and values of 28 layers, and slack
GPU = 4e9
# Buffers take 2.9 GB on top of 15.2 GB of weights; shorter chunks would fetch earlier tokens more often.
CAPPED = ["decode.prefill_chunk=16384", f"bench.gpu_bytes={CARD:.0f}"]
CAPPED_GPU = 2.6e9  # of the card's memory, for the cache


def cases(ctx: BenchContext) -> list[tuple[bool, int, bool]]:
    """Returns the jobs: whether the cache is in host memory, tokens, and whether GPU memory is capped."""
    return [(True, 256 * K, False), (False, 256 * K, False), *[(True, M, True)] * ctx.gpu]


def measure(ctx: BenchContext, host: bool, length: int, capped: bool) -> Iterator[Row]:
    """Yields the row of one job."""
    model, host_bytes = ("qwen2.5-7b", HOST * length) if ctx.gpu else ("demo", 1e9)
    gpu_bytes = (CAPPED_GPU if capped else GPU) if ctx.gpu else 4e8
    length = length if ctx.gpu else length // 128
    job = [*named(model), "layout.kvp=1", "attention=block_sparse", "bench=prefill", f"bench.points=[1x{length}]"]
    if host:
        job += ["kv.offload=host", f"kv.offload_host_bytes={host_bytes:.0f}", f"kv.offload_gpu_bytes={gpu_bytes:.0f}"]
    row: Row = {"kind": "offload-prefill", "model": model, "offload": "host" if host else "none"}
    row["limit_bytes"] = CARD if capped else None
    try:
        (point,) = jobs.measure(1, [*job, *(CAPPED if capped else [])])["points"]
    except jobs.JobError as error:
        point = {"batch": 1, "length": length, "failed": str(error)}
    size = point.get("used_bytes_per_gpu", [None])[0]
    yield row | {"gpu_bytes": gpu_bytes if host else None, "used_gb": size and size / 1e9} | point
