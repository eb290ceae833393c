"""Times `mla_decode` against FlashInfer's FlashAttention-3 backend: `helix bench mla`.

Each row is checked first, then timed as CUDA-graph replays over caches that exceed the L2; both read the
same pages in random order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.cases import cases as listed
from benchmarks.runner import BenchContext, Row
from benchmarks.timer import PAGE, READ_CEILING, ROTATED, seconds
from kernels.mla.decode import mla_decode
from kernels.paged_keys import PagedKeys
from kernels.scaled_keys import dequantize_latents, quantize_latents

try:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper
except ImportError:
    BatchMLAPagedAttentionWrapper = None

LATENT, ROPE = 512, 64
SCALE = 192**-0.5  # DeepSeek's head dim before absorption
ROWS, FP8_ROWS = listed("mla"), listed("mla-fp8")


@dataclass
class MLACase:
    """The tensors of one row: `caches` are copies over which runs rotate."""

    q: torch.Tensor
    caches: list[torch.Tensor]
    table: torch.Tensor
    lo: torch.Tensor
    hi: torch.Tensor

    def ours(self, copy: int, **options: Any) -> torch.Tensor:
        cache = self.caches[copy]
        return mla_decode(
            self.q, PagedKeys(cache, cache[..., :LATENT], self.table, self.lo, self.hi, SCALE), **options
        )[0]

    def expected(self, b: int) -> torch.Tensor:
        """Returns the output [T, heads, LATENT] in fp32 of sequence `b` over the first copy, in plain torch."""
        slots = self.caches[0][self.table[b].long()].flatten(0, 1).float()
        scores = torch.einsum("thd,sd->ths", self.q[b].float(), slots) * SCALE
        return torch.einsum("ths,sr->thr", scores.softmax(-1), slots[:, :LATENT])

    def peer(self) -> Callable[[int], torch.Tensor] | None:
        """Returns FlashInfer over the same pages, with latents and rope parts split; None if not installed."""
        if BatchMLAPagedAttentionWrapper is None or not self.q.is_cuda:
            return None
        batch, queries, heads, _ = self.q.shape
        device, pages = self.q.device, self.table.shape[1]
        wrapper = BatchMLAPagedAttentionWrapper(torch.empty(256 << 20, dtype=torch.uint8, device=device), backend="fa3")
        counts = torch.arange(batch + 1, dtype=torch.int32, device=device)
        wrapper.plan(
            counts * queries, counts * pages, self.table.flatten(), torch.full_like(counts[1:], pages * PAGE),
            heads, LATENT, ROPE, PAGE, False, SCALE, self.q.dtype, self.q.dtype,
        )  # fmt: skip
        q_latent, q_rope = (x.contiguous() for x in self.q.flatten(0, 1).split([LATENT, ROPE], -1))
        caches = [[x.contiguous() for x in cache.split([LATENT, ROPE], -1)] for cache in self.caches]
        return lambda copy: wrapper.run(q_latent, q_rope, *caches[copy], return_lse=False).view(
            batch, queries, heads, LATENT
        )


def setting(heads: int, batch: int, length: int, queries: int, device: torch.device) -> MLACase:
    """Returns random tensors of a case."""
    dtype = torch.bfloat16
    pages = batch * length // PAGE
    bytes_each = pages * PAGE * (LATENT + ROPE) * dtype.itemsize
    copies = -(-ROTATED // bytes_each) if device.type == "cuda" else 1
    shape = (pages, PAGE, LATENT + ROPE)
    caches = [torch.randn(shape, device=device, dtype=dtype) for _ in range(copies)]
    table = torch.randperm(pages, device=device).view(batch, -1).int()
    q = torch.randn(batch, queries, heads, LATENT + ROPE, device=device, dtype=dtype)
    hi = torch.full((batch, queries), length, dtype=torch.int32, device=device)  # all keys, as for the peer
    return MLACase(q, caches, table, torch.zeros_like(hi), hi)


def measure(ctx: BenchContext, heads: int, batch: int, length: int, queries: int) -> list[Row]:
    """Measures one row: ours and the peer, in microseconds."""
    device = ctx.device
    s = setting(heads, batch, length, queries, device)
    copies = len(s.caches)
    size = s.caches[0].numel() * s.caches[0].itemsize
    row: dict[str, Any] = {"kind": "mla", "heads": heads, "batch": batch, "length": length, "queries": queries}
    row["kv_bytes"] = size
    peer = s.peer()
    wanted = s.expected(batch - 1)
    for name, run in (("mla_decode", s.ours), ("FlashInfer", peer)):
        if run is not None:
            error = (run(0)[-1].float() - wanted).norm() / wanted.norm()
            # bf16 weights and outputs: two roundings of 2^-9 each.
            assert error < 1e-2, f"{name} is off by {float(error):.1e} of its norm at {row}"
    row["us"] = seconds(s.ours, copies, device) * 1e6
    row["flashinfer_us"] = None if peer is None else seconds(peer, copies, device) * 1e6
    row["peer_over_ours"] = None if peer is None else row["flashinfer_us"] / row["us"]
    row["tb_per_s"] = size / row["us"] / 1e6
    row["of_ceiling"] = row["tb_per_s"] * 1e12 / READ_CEILING
    row["tflops"] = 2 * batch * length * queries * heads * (2 * LATENT + ROPE) / row["us"] / 1e6
    # KV bytes at 4.0 TB/s, launches and the merge; with more rows the kernel is compute-bound.
    row["bar_us"] = size / 4.0e12 * 1e6 + 6 if heads * queries <= 32 else None
    return [row]


def measure_fp8(ctx: BenchContext, heads: int, batch: int, length: int, queries: int) -> list[Row]:
    """Measures one row: latents in bf16 and in e4m3, in microseconds."""
    s = setting(heads, batch, length, queries, ctx.device)
    row: dict[str, Any] = {"kind": "mla-fp8", "heads": heads, "batch": batch, "length": length, "queries": queries}
    row["us"] = seconds(s.ours, len(s.caches), ctx.device) * 1e6
    # 0.57 of the bytes, so twice the copies to exceed the L2.
    few = [_few(s, cache) for cache in s.caches * (2 if len(s.caches) > 1 else 1)]
    scales, rope = few[0].k_scale, few[0].rope
    assert scales is not None and rope is not None
    whole = torch.cat((dequantize_latents(few[0].k, scales), rope), -1).to(s.q.dtype)
    wanted = replace(s, caches=[whole]).ours(0).float()
    error = (mla_decode(s.q, few[0])[0].float() - wanted).norm() / wanted.norm()
    assert error < 1e-2, f"mla_decode is off by {float(error):.1e} of its norm in fp8 at {row}"  # as above
    row["fp8_us"] = seconds(lambda copy: mla_decode(s.q, few[copy])[0], len(few), ctx.device) * 1e6
    # Target: the bytes saved, at the bf16 rate; nothing when compute-bound.
    row["bar_us"] = row["us"] * (0.7 if heads * queries <= 32 else 1.0)
    return [row]


def _few(s: MLACase, cache: torch.Tensor) -> PagedKeys:
    """Quantizes a cache to e4m3, in pieces, since fp32 takes memory."""
    parts = [quantize_latents(pages) for pages in cache[..., :LATENT].split(1024)]
    latents, scales = (torch.cat(planes) for planes in zip(*parts, strict=True))
    bounds = s.table, s.lo, s.hi, SCALE
    return PagedKeys(latents, latents, *bounds, k_scale=scales.mT.contiguous(), rope=cache[..., LATENT:].contiguous())
