"""Times prefill: the kernel beside torch's attention on one GPU, and whole prompts over all GPUs.

`python -m launch.bench prefill`; a prompt is a job of its own (`bench=prefill`) with random weights of the real shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from helix.graphs import seconds_of_each
from kernels.attention.flash_prefill import flash_prefill
from kernels.paged_keys import PagedKeys
from launch.bench.attention import TORCH
from launch.bench.clock import DIM, PAGE
from launch.bench.runner import Benchmark, Given, Part, Row
from launch.job import spawn

K = 1024
KERNELS = [(28, 4, 4 * K, 32 * K), (28, 4, 4 * K, 128 * K), (8, 1, 8 * K, 32 * K), (32, 8, 4 * K, 128 * K)]
PROMPTS = ["1x32768", "1x131072", "1x262144", "1x1048576"]


def measure_kernel(given: Given, q_heads: int, kv_heads: int, queries: int, length: int, rate: float) -> list[Row]:
    """The last `queries` tokens of a prompt of `length`: ours with causal bounds, the peers over all keys."""
    device, gpu = given.device, given.gpu
    dtype = torch.bfloat16 if gpu else torch.float32
    pages = length // PAGE
    shape = (pages, PAGE, kv_heads, DIM)
    k_cache, v_cache = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    table = torch.randperm(pages, device=device).int()[None]
    q = torch.randn(queries, q_heads, DIM, device=device, dtype=dtype)
    hi = (torch.arange(queries, device=device) + length - queries + 1).int()
    cu_q = torch.tensor([0, queries], dtype=torch.int32, device=device)

    def ours() -> torch.Tensor:
        return flash_prefill(q, PagedKeys(k_cache, v_cache, table, torch.zeros_like(hi), hi, DIM**-0.5), cu_q, queries)[
            0
        ]

    k, v = (c[table.long()].flatten(1, 2).transpose(1, 2).contiguous() for c in (k_cache, v_cache))
    last = scaled_dot_product_attention(q[-1, None, :, None].float(), k.float(), v.float(), enable_gqa=True)[0, :, 0]
    error = (ours()[-1].float() - last).norm() / last.norm()
    # bf16 weights and outputs: two roundings of 2^-9 each.
    assert error < 1e-2, f"flash_prefill is off by {float(error):.1e} of its norm"
    work = 4 * q_heads * DIM
    row: dict[str, Any] = {"kind": "kernel", "heads": f"{q_heads}/{kv_heads}", "q_tokens": queries, "length": length}
    row["tflops"] = work * float(hi.double().sum()) / _seconds(ours, device) / 1e12
    peer = partial(scaled_dot_product_attention, q.transpose(0, 1)[None], k, v, enable_gqa=True)
    for name, backend in TORCH.items():
        row[f"{name}_tflops"] = None
        if gpu:
            with sdpa_kernel(backend):
                seconds = _seconds(peer, device)
            row[f"{name}_tflops"] = work * queries * length / seconds / 1e12
    return [row | {"matrix_tflops": rate}]


def matrix_tflops(device: torch.device) -> float:
    """The library's rate on a large bf16 product of random values."""
    gpu = device.type == "cuda"
    n = 8192 if gpu else 256
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16 if gpu else torch.float32) for _ in range(2))
    return 2 * n**3 / _seconds(lambda: a @ b, device) / 1e12


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Median of a few runs, behind one that does not count."""
    run()
    return median(seconds_of_each(run, 5, device))


def kernel_cases(given: Given) -> Iterator[tuple[int, int, int, int, float]]:
    """Shapes and the matrix rate; none where GPUs emulate ranks: the kernel is the same."""
    shapes = [] if given.emulated else KERNELS if given.gpu else [(4, 2, 128, 512)]
    rate = matrix_tflops(given.device) if shapes else 0.0
    return ((*shape, rate) for shape in shapes)


def measure_prompts(given: Given) -> list[Row]:
    """Prompts of Qwen2.5-7B's shape, in one job; on a CPU one of the demo model."""
    model, ranks = "qwen2.5-7b" if given.gpu else "demo", given.ranks
    points = ",".join(PROMPTS if given.gpu else ["1x600"])
    overrides = [f"model={model}", f"layout.kvp={ranks}", "bench=prefill", f"bench.points=[{points}]"]
    done = spawn.measure(ranks, [*overrides, "decode.prefill_chunk=8192"])
    return [{"kind": "prompt", "model": model, "layout": f"helix kvp={ranks}", **point} for point in done["points"]]


BENCHMARK = Benchmark(
    "the prefill kernel beside torch's attention, and whole prompts over all GPUs",
    __doc__,
    (
        Part(kernel_cases, measure_kernel, "heads q_tokens length tflops matrix_tflops cudnn_tflops flash_tflops"),
        Part(lambda given: [()], measure_prompts, "model layout batch length prefill_s tokens_per_s"),
    ),
    emulated=True,
)
