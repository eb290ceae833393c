"""Times decode steps over a KV cache in host memory: `helix bench offload-steps`.

Qwen2.5-7B's shape with random weights over all GPUs, one sequence of 1M tokens of random data, block-sparse: with the
cache in host memory and a few GB on the GPU, then with the cache on the GPU. Random weights select at random, so
each step repeats a set share of the last one's blocks (`bench.repeat`): these are hits, the others
come over the link. With `prefetch` a layer's blocks are prefetched while the layer before it computes
(`kv.offload_prefetch`), and each prediction is right, since the pattern is known. One rank pins 62 GB, which takes
about half a minute, and the second job needs 76 GB on the GPU. The jobs over host memory may allocate 22 GB of the GPU.

The third job has four sequences of 128K tokens; the fourth is the first one with keys and values in FP8
(`kv.dtype=fp8`).

Then the same kernel fetches blocks alone, 128 and 32 at a time. On one H200 all of it takes some 200 s.

`over_dense`: speed-up over dense attention that reads the whole cache over the link, at a measured 55.5 GB/s.
`predicted_ms`: the planner's prediction, by `conf/hardware/`. `resident`: the hit rate, the share of selected blocks
that were resident on the GPU. `used_gb` is the GPU's memory in use, by its driver.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import torch

from benchmarks import jobs
from benchmarks.models.workloads import K, M, fitting_spec, named, widest
from benchmarks.runner import BenchContext, Row
from benchmarks.schema import compose_config
from helix.layout import HelixLayout
from helix.models import DecoderSpec
from helix.planner.points import Offload, Options, Points, Sparse
from helix.planner.step import predict
from helix.worker.kv_cache_spec import token_bytes
from kernels.offload.copy_blocks import PROGRAMS
from launch.inputs.auto_layout import KV_DTYPES, budget
from launch.inputs.hardware import hardware_of

MODEL = "qwen2.5-7b"
LINK = 55.5e9  # bytes/s of one link, in large copies
TARGETS = {(32, 0.0): 9.8, (32, 0.8): 6.0, (8, 0.0): 6.0}  # ms per token, by selected blocks and the share that repeats
PREFETCH = "kv.offload_prefetch=true"
Choices = tuple[int, float, str]  # selected blocks, the share that repeats, further settings
ON_GPU: list[Choices] = [(32, 1.0, ""), (8, 1.0, "")]
ON_HOST: list[Choices] = [(32, 0.0, ""), (32, 0.8, ""), (8, 0.0, ""), (32, 1.0, "")]
ON_HOST += [(32, 0.0, PREFETCH), (32, 0.8, PREFETCH), (32, 1.0, PREFETCH)]
ON_HOST_BATCHED: list[Choices] = [(32, share, switch) for share in (0.0, 0.8) for switch in ("", PREFETCH)]
CARD = 22e9  # bytes that may be allocated: a card of 24 GB less the driver and loaded kernels
HOST, SHARE = 62e9, 3e9  # bytes of one rank that holds 1M tokens: in host memory, and for the cache on its GPU


def overrides(
    ctx: BenchContext, layout: HelixLayout, batch: int, length: int, cells: list[Choices], host: bool, kv: str
) -> list[str]:
    """Returns the overrides of a job that times all cells over one cache."""
    variants = (f"attention.num_blocks={topk} bench.repeat={repeat} {more}".strip() for topk, repeat, more in cells)
    steps = ",".join(f'"{text}"' for text in variants)
    shared = [
        *named(MODEL if ctx.gpu else "demo"), f"layout.kvp={layout.kvp}", f"layout.tpa={layout.tpa}",
        "attention=block_sparse", f"attention.num_blocks={max(cells)[0]}", f"kv.dtype={kv}",
        "attention.from_tokens=0", "hopb.chunks=none", "decode.prefill_chunk=4096", "bench=decode",
        f"bench.points=[{batch}x{length}]", f"bench.variants=[{steps}]", f"bench.steps={32 if ctx.gpu else 6}",
    ]  # fmt: skip
    if not host:
        return [*shared, "kv.memory_fraction=0.95"]
    offload_bytes = (batch * length / M * HOST / layout.world_size, SHARE) if ctx.gpu else (2e9, 2e8)
    limits = (
        f"kv.offload_host_bytes={offload_bytes[0]:.0f}",
        f"kv.offload_gpu_bytes={offload_bytes[1]:.0f}",
        f"bench.gpu_bytes={CARD:.0f}",
    )
    return [*shared, "kv.offload=host", *limits]


def cases(ctx: BenchContext) -> list[tuple[bool, int, str]]:
    """Returns the jobs: cache in host memory or not, sequences, kv.dtype."""
    return [(True, 1, "auto"), (False, 1, "auto"), (True, 4, "auto"), (True, 1, "fp8")]


def measure(ctx: BenchContext, host: bool, batch: int, kv: str) -> Iterator[Row]:
    """Yields one row per cell of a job."""
    spec, _ = fitting_spec(MODEL if ctx.gpu else "demo", ctx.ranks)
    layout = widest(spec, ctx.ranks)
    length = (M if ctx.gpu else 16 * K) // (8 if batch > 1 else 1)
    cells = ON_GPU if not host else ON_HOST_BATCHED if batch > 1 else ON_HOST
    job_overrides = overrides(ctx, layout, batch, length, cells, host, kv)
    about: Row = {"kind": "offload-steps", "model": MODEL if ctx.gpu else "demo", "layers": len(spec.layers)}
    about |= {"layout": str(layout), "batch": batch, "length": length, "offload": "host" if host else "none"}
    about["kv"] = kv
    try:
        points = jobs.measure(layout.world_size, job_overrides)["points"]
    except jobs.JobError as error:
        points = [{"failed": str(error)}] * len(cells)
    whole = (
        batch
        * length
        * sum(token_bytes(cache_spec) for cache_spec in spec.kv_cache_specs(HelixLayout.create(), 0, "bfloat16", kv))
        / layout.world_size
    )
    for (topk, repeat, more), point in zip(cells, points, strict=True):
        row = about | {"topk": topk, "repeat": repeat, "prefetch": more == PREFETCH} | point
        if "failed" not in point:
            read, offload = _read(job_overrides, topk), Offload(repeat, prefetch=1.0 if more == PREFETCH else None)
            row |= {"sparse": asdict(read), **figures(point, whole)}
            row["predicted_ms"] = predicted_ms(spec, layout, batch, length, read, offload if host else None, kv)
            usual = host and kv == "auto" and layout.world_size == batch == 1
            row["target_ms"] = TARGETS.get((topk, repeat)) if usual else None
        yield row


def _read(job_overrides: list[str], topk: int) -> Sparse:
    read = budget(compose_config([*job_overrides, f"attention.num_blocks={topk}"]))
    assert read is not None
    return read


def predicted_ms(
    spec: DecoderSpec, layout: HelixLayout, batch: int, length: int, read: Sparse, offload: Offload | None, kv: str
) -> float | None:
    """Returns the planner's prediction for such a step on this GPU; None if it does not know the GPU."""
    if not torch.cuda.is_available():
        return None
    try:
        hardware = hardware_of(torch.cuda.get_device_name(0))
        points = Points.of(layout.mode, batch, kvp=layout.kvp, tpa=layout.tpa)
        step = predict(
            spec,
            hardware,
            points,
            length,
            Options("bf16", KV_DTYPES[kv], "bf16", hopb=False, sparse=read, offload=offload),
        )
    except ValueError as error:
        print(f"not predicted: {error}")
        return None
    return 1e3 * float(step.step_s[0])


def figures(point: Row, whole: float) -> Row:
    """Returns the table's figures of a measured point.

    Args:
        whole: bytes of a rank's cache.
    """
    found: Row = {"ms": point["ttl_p50_us"] / 1e3, "over_dense": whole / LINK * 1e6 / point["ttl_p50_us"]}
    if used := [size for size in point["used_bytes_per_gpu"] if size is not None]:
        found["used_gb"] = max(used) / 1e9
    if "resident_share_per_rank" in point:
        found["resident"] = min(point["resident_share_per_rank"])
        found["link_mb"] = max(point["link_bytes_per_step_per_rank"]) / 1e6
    for name in ("resolve", "copy_blocks", "flash_decode"):
        us = [us for kernel, us in point.get("kernel_us", {}).items() if name in kernel]
        found |= {f"{name}_us": sum(us)} if us else {}
    if found.get("copy_blocks_us"):
        found["link_gbs"] = found["link_mb"] * 1e3 / found["copy_blocks_us"]
    return found


def compared(rows: list[Row]) -> Row:
    """Compares steps with every block resident with those of a cache on the GPU."""
    plain = [row for row in rows if "ms" in row and row["batch"] == 1 and row["kv"] == "auto" and not row["prefetch"]]
    ms = {(row["offload"], row["topk"], row["repeat"]): row["ms"] for row in plain}
    all_resident, on_gpu = ms.get(("host", 32, 1.0)), ms.get(("none", 32, 1.0))
    return {
        "kind": "offload-steps",
        "all_resident_over_gpu": all_resident / on_gpu if all_resident and on_gpu else None,
    }


def fetch_cases(ctx: BenchContext) -> list[tuple[int, int]]:
    """Returns the numbers of blocks and programs of each fetch."""
    return [(n, PROGRAMS) for n in (128, 32)] if ctx.gpu else [(8, 2)]
