"""Times prefill: the kernel against torch and by chunk length on one GPU, and whole prompts over all GPUs.

`helix bench prefill`, or `prefill-kernels` without the prompts. A prompt is a separate job
(`bench=prefill`) with random weights of the real shape. Over two GPUs its time is compared with vLLM 0.25.1 with
TP=2, as measured on two H200 on 2026-11-22.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import jobs
from benchmarks.cases import cases as listed
from benchmarks.kernels.attention import TORCH
from benchmarks.models.workloads import named
from benchmarks.runner import BenchContext, Row
from benchmarks.timer import DIM, PAGE, replays
from helix.worker.clock import time_each
from kernels.attention import flash_prefill_sm90
from kernels.attention.flash_prefill import flash_prefill
from kernels.paged_keys import PagedKeys

K = 1024
# Query and KV heads of a rank, keys, and chunk lengths: the first is the baseline of the others.
CHUNKS = [
    (28, 4, 512 * K, (8 * K, K, 256, 100, 16)),
    (28, 4, 64 * K, (8 * K, K, 256, 100, 16)),
    (28, 4, 16 * K, (8 * K, K, 256, 100, 16)),
    (28, 4, 4 * K, (4 * K, K, 256)),
    (8, 1, 128 * K, (8 * K, K, 256, 100)),
    (7, 1, 256 * K, (8 * K, 256)),
]
TOGETHER = [(32, 512), (16, 1024), (8, 2 * K), (4, 4 * K)]  # prompts in a chunk, and the tokens of each
PROMPTS = ["1x32768", "1x131072", "1x262144", "1x1048576"]
VLLM_TP2_S = {32 * K: 0.572, 128 * K: 4.46, 256 * K: 14.6}
WORK = 4 * DIM  # FLOPs per query, head and key


class Chunk:
    """The last `queries` tokens of each of `prompts` prompts of `length`, paged, with causal bounds.

    Raises:
        AssertionError: the kernel's last row differs from torch's attention in fp32.
    """

    def __init__(
        self, ctx: BenchContext, q_heads: int, kv_heads: int, queries: int, length: int, prompts: int = 1
    ) -> None:
        device, pages = ctx.device, -(-length // PAGE)
        dtype = torch.bfloat16 if ctx.gpu else torch.float32
        shape = (prompts * pages, PAGE, kv_heads, DIM)
        k_cache, v_cache = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        table = torch.randperm(prompts * pages, device=device).int().view(prompts, pages)
        hi = (torch.arange(queries, device=device) + length - queries + 1).int().repeat(prompts)
        self.q = torch.randn(prompts * queries, q_heads, DIM, device=device, dtype=dtype)
        self.keys = PagedKeys(k_cache, v_cache, table, torch.zeros_like(hi), hi, DIM**-0.5)
        self.cu_q = torch.arange(prompts + 1, dtype=torch.int32, device=device) * queries
        self.queries = queries
        self.work = WORK * q_heads * float(hi.double().sum())
        self.length = length
        k, v = self.contiguous()
        k, v = k[-1:].float(), v[-1:].float()
        last = scaled_dot_product_attention(self.q[-1, None, :, None].float(), k, v, enable_gqa=True)
        error = (self.attend()[-1].float() - last[0, :, 0]).norm() / last.norm()
        # bf16 weights, partials and outputs: three roundings of 2^-9 each.
        assert error < 1e-2, f"flash_prefill is off by {float(error):.1e} of its norm"

    def attend(self) -> torch.Tensor:
        return flash_prefill(self.q, self.keys, self.cu_q, self.queries, self.length)[0]

    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values [B, Hkv, S, D]."""
        k, v = (c[self.keys.table.long()].flatten(1, 2).transpose(1, 2) for c in (self.keys.k, self.keys.v))
        return k[:, :, : self.length].contiguous(), v[:, :, : self.length].contiguous()


def measure_kernel(ctx: BenchContext, q_heads: int, kv_heads: int, queries: int, length: int, rate: float) -> list[Row]:
    """Measures ours with causal bounds, the peers over all keys."""
    chunk = Chunk(ctx, q_heads, kv_heads, queries, length)
    row: Row = {"kind": "kernel", "heads": f"{q_heads}/{kv_heads}", "q_tokens": queries, "length": length}
    row["tflops"] = chunk.work / _seconds(chunk.attend, ctx.device) / 1e12
    peer = partial(scaled_dot_product_attention, chunk.q.transpose(0, 1)[None], *chunk.contiguous(), enable_gqa=True)
    for name, backend in TORCH.items():
        row[f"{name}_tflops"] = None
        if ctx.gpu:
            with sdpa_kernel(backend):
                seconds = _seconds(peer, ctx.device)
            row[f"{name}_tflops"] = WORK * q_heads * queries * length / seconds / 1e12
    return [row | {"matrix_tflops": rate}]


def measure_chunks(
    ctx: BenchContext, q_heads: int, kv_heads: int, length: int, chunks: tuple[int, ...]
) -> Iterator[Row]:
    """Measures chunks of several lengths at the end of one prompt, by the selected kernel and by the general one."""
    first: float | None = None
    for queries in chunks:
        chunk = Chunk(ctx, q_heads, kv_heads, queries, length)
        uses_sm90 = ctx.gpu and flash_prefill_sm90.fits(chunk.q, chunk.keys, queries, length)
        tflops = chunk.work / _replayed(chunk.attend, ctx.device) / 1e12
        first = first or tflops
        row: Row = {"kind": "chunk", "heads": f"{q_heads}/{kv_heads}", "q_tokens": queries, "length": length}
        row |= {"us": chunk.work / tflops / 1e6, "tflops": tflops, "of_largest": tflops / first}
        row |= {"kernel": "sm90" if uses_sm90 else "general", "general_us": None, "sm90_us": None}
        for name, rows in (("general", 1 << 40), ("sm90", 0)) if ctx.gpu else ():
            row[f"{name}_us"] = 1e6 * _replayed(partial(_by, rows, chunk), ctx.device)
        yield row


def measure_together(ctx: BenchContext, q_heads: int, kv_heads: int, prompts: int, length: int) -> list[Row]:
    """Measures a chunk of several whole prompts, by the selected kernel, the general one and the SM90 one."""
    chunk = Chunk(ctx, q_heads, kv_heads, length, length, prompts)
    row: Row = {"kind": "together", "heads": f"{q_heads}/{kv_heads}", "prompts": prompts, "length": length}
    row["us"] = 1e6 * _replayed(chunk.attend, ctx.device)
    row |= {"tflops": chunk.work / row["us"] / 1e6, "general_us": None, "sm90_us": None}
    for name, rows in (("general", 1 << 40), ("sm90", 0)) if ctx.gpu else ():
        row[f"{name}_us"] = 1e6 * _replayed(partial(_by, rows, chunk), ctx.device)
    return [row]


def _by(min_rows: int, chunk: Chunk) -> None:
    """Attends with the SM90 kernel for chunks of at least `min_rows` rows."""
    with patch.multiple(flash_prefill_sm90, MIN_ROWS=min_rows, MIN_KEYS_MANY_ROWS=0, MIN_KEYS=1 << 40):
        chunk.attend()


def matrix_tflops(device: torch.device) -> float:
    """Returns cuBLAS's TFLOP/s on a large bf16 product of random values."""
    gpu = device.type == "cuda"
    n = 8192 if gpu else 256
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16 if gpu else torch.float32) for _ in range(2))
    return 2 * n**3 / _seconds(lambda: a @ b, device) / 1e12


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    run()
    return median(time_each(run, 5, device))


def _replayed(run: Callable[[], Any], device: torch.device) -> float:
    """Median seconds in a graph: short chunks would wait for the host."""
    return median(replays(lambda _: run(), 1, device, min_launches=3, times=3))


def kernel_cases(ctx: BenchContext) -> Iterator[tuple[int, int, int, int, float]]:
    """Yields shapes and the matrix rate; none when GPUs emulate ranks: the kernel is the same."""
    shapes = [] if ctx.emulated else listed("prefill") if ctx.gpu else [(4, 2, 128, 512)]
    rate = matrix_tflops(ctx.device) if shapes else 0.0
    return ((*shape, rate) for shape in shapes)


def chunk_cases(ctx: BenchContext) -> list[tuple[int, int, int, tuple[int, ...]]]:
    """Returns heads, keys and chunk lengths."""
    return [] if ctx.emulated else CHUNKS if ctx.gpu else [(4, 2, 512, (128, 16))]


def together_cases(ctx: BenchContext) -> list[tuple[int, int, int, int]]:
    """Returns heads, prompts and the tokens of each."""
    if ctx.emulated:
        return []
    heads = [(28, 4), (32, 8), (14, 2), (8, 1)] if ctx.gpu else [(4, 2)]
    return [(*of, *sizes) for of in heads for sizes in (TOGETHER if ctx.gpu else [(3, 20)])]


def measure_prompts(ctx: BenchContext) -> list[Row]:
    """Measures prompts of Qwen2.5-7B's shape in one job; on a CPU one of the demo model."""
    model, ranks = "qwen2.5-7b" if ctx.gpu else "demo", ctx.ranks
    points = ",".join(PROMPTS if ctx.gpu else ["1x600"])
    overrides = [*named(model), f"layout.kvp={ranks}", "bench=prefill", f"bench.points=[{points}]"]
    done = jobs.measure(ranks, overrides)
    rows = [{"kind": "prompt", "model": model, "layout": f"helix kvp={ranks}", **point} for point in done["points"]]
    vllm_s = VLLM_TP2_S if ctx.gpu and ranks == 2 and not ctx.emulated else {}
    for row in rows:
        row["vllm_tp2_s"] = vllm_s.get(row["length"])
    return rows
