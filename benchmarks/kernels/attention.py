"""Times `flash_decode` against torch's attention: `helix bench kernels`.

Each row is checked first, then timed as CUDA-graph replays over caches that exceed the L2: ours over
pages in random order, torch's over contiguous memory (which is easier), FlashInfer's, if installed, over the
same pages as ours.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.cases import cases as listed
from benchmarks.runner import BenchContext, Row
from benchmarks.timer import DIM, PAGE, READ_CEILING, ROTATED, K, seconds
from kernels.attention.flash_decode import flash_decode
from kernels.paged_keys import PagedKeys
from kernels.scaled_keys import quantize_fp8

TORCH = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
PEERS = (*TORCH, "flashinfer")
ROWS = listed("attention")


@dataclass
class AttentionCase:
    """The tensors of one row: `copies` caches over which runs rotate."""

    q: torch.Tensor
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    table: torch.Tensor
    lo: torch.Tensor
    hi: torch.Tensor

    def ours(self, copy: int, **options: Any) -> torch.Tensor:
        keys = PagedKeys(*self.caches[copy], self.table, self.lo, self.hi, self.q.shape[-1] ** -0.5)
        return flash_decode(self.q, keys, **options)[0]

    def contiguous(self, copy: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the same keys and values as [B, Hkv, S, D]."""
        k, v = (c[self.table.long()].flatten(1, 2).transpose(1, 2).contiguous() for c in self.caches[copy])
        return k, v


def setting(
    q_heads: int, kv_heads: int, batch: int, length: int, queries: int, device: torch.device, dim: int = DIM
) -> AttentionCase:
    """Returns random tensors of a case."""
    dtype = torch.bfloat16
    bytes_each = 2 * batch * length * kv_heads * dim * dtype.itemsize
    copies = -(-ROTATED // bytes_each) if device.type == "cuda" else 1
    pages = batch * length // PAGE
    shape = (pages, PAGE, kv_heads, dim)
    caches = [
        (torch.randn(shape, device=device, dtype=dtype), torch.randn(shape, device=device, dtype=dtype))
        for _ in range(copies)
    ]
    table = torch.randperm(pages, device=device).view(batch, -1).int()
    q = torch.randn(batch, queries, q_heads, dim, device=device, dtype=dtype)
    hi = torch.full((batch, queries), length, dtype=torch.int32, device=device)  # all keys, as for the peers
    return AttentionCase(q, caches, table, torch.zeros_like(hi), hi)


def flashinfer(s: AttentionCase) -> Callable[[int], torch.Tensor]:
    """Returns a function from the copy's index to the output of FlashInfer's paged attention, tensor cores on."""
    module = importlib.import_module("flashinfer")  # optional: a peer, not a dependency
    batch, queries, q_heads, dim = s.q.shape
    pages, page_size, kv_heads, _ = s.caches[0][0].shape
    device = s.q.device
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=device)
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=device) * (pages // batch)
    last = torch.full((batch,), page_size, dtype=torch.int32, device=device)
    kinds = {"q_data_type": s.q.dtype, "kv_data_type": s.q.dtype}
    if queries == 1:
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(indptr, s.table.flatten(), last, q_heads, kv_heads, dim, page_size, **kinds)
    else:
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        rows = torch.arange(batch + 1, dtype=torch.int32, device=device) * queries
        wrapper.plan(rows, indptr, s.table.flatten(), last, q_heads, kv_heads, dim, page_size, causal=False, **kinds)
    q = s.q.flatten(0, 1)
    return lambda i: wrapper.run(q, s.caches[i])


def measure_shape(ctx: BenchContext, dim: int, q_heads: int, kv_heads: int, batch: int, length: int) -> list[Row]:
    """Measures one row with one query and this head dim."""
    return [row | {"kind": "shape", "dim": dim} for row in measure(ctx, q_heads, kv_heads, batch, length, 1, dim)]


def measure(
    ctx: BenchContext, q_heads: int, kv_heads: int, batch: int, length: int, queries: int, dim: int = DIM
) -> list[Row]:
    """Measures one row: ours and the peers, in microseconds."""
    device = ctx.device
    s = setting(q_heads, kv_heads, batch, length, queries, device, dim)
    copies = len(s.caches)
    size = 2 * s.caches[0][0].numel() * 2
    row: dict[str, Any] = {"kind": "decode" if queries == 1 else "verify", "heads": f"{q_heads}/{kv_heads}"}
    row |= {"batch": batch, "length": length, "queries": queries, "kv_bytes": size}
    q = s.q.transpose(1, 2)
    k, v = s.contiguous(0)
    wanted = scaled_dot_product_attention(q.float(), k.float(), v.float(), enable_gqa=True) if size < 1 << 30 else None
    if wanted is not None:
        error = (s.ours(0).transpose(1, 2).float() - wanted).norm() / wanted.norm()
        # bf16 weights and outputs: two roundings of 2^-9 each.
        assert error < 1e-2, f"flash_decode is off by {error:.1e} of its norm at {row}"
    row["us"] = seconds(s.ours, copies, device) * 1e6
    # As few contiguous copies as rotation needs: they share memory with ours.
    peers = [(k, v), *(s.contiguous(i) for i in range(1, copies))]
    row |= {f"{name}_us": None for name in PEERS}
    if device.type == "cuda":
        for name, backend in TORCH.items():
            with sdpa_kernel(backend):
                row[f"{name}_us"] = 1e6 * seconds(
                    lambda i: scaled_dot_product_attention(q, *peers[i], enable_gqa=True), copies, device
                )
        del peers
        if importlib.util.find_spec("flashinfer"):
            theirs = flashinfer(s)
            error = (theirs(0).view_as(s.q).float() - s.ours(0).float()).norm() / s.ours(0).float().norm()
            assert error < 1e-2, f"FlashInfer and flash_decode differ by {error:.1e} of their norm at {row}"
            row["flashinfer_us"] = 1e6 * seconds(theirs, copies, device)
    row["tb_per_s"] = size / row["us"] / 1e6
    row["of_ceiling"] = row["tb_per_s"] * 1e12 / READ_CEILING
    best = min((row[f"{p}_us"] for p in PEERS if row[f"{p}_us"]), default=None)
    row["best_peer_over_ours"] = best / row["us"] if best else None
    row["bar_us"] = size / 4.4e12 * 1e6 + 5  # KV bytes at 4.4 TB/s and a launch
    return [row]


def measure_kv(ctx: BenchContext, q_heads: int, kv_heads: int, batch: int, length: int, queries: int) -> Iterator[Row]:
    """Yields one row: keys and values in bf16, both in e4m3, and only values in e4m3, in microseconds."""
    device = ctx.device
    s = setting(q_heads, kv_heads, batch, length, queries, device)
    row: dict[str, Any] = {"kind": "decode-kv", "heads": f"{q_heads}/{kv_heads}", "batch": batch, "length": length}
    row |= {"queries": queries, "kv_bytes": 2 * s.caches[0][0].numel() * 2}
    row["us"] = seconds(s.ours, len(s.caches), device) * 1e6
    few = [(_few(k), _few(v)) for k, v in s.caches]
    few *= 2 if len(few) > 1 else 1  # half the bytes
    bounds = s.table, s.lo, s.hi, DIM**-0.5, None
    keys = {
        "fp8": [PagedKeys(k[0], v[0], *bounds, k[1], v[1]) for k, v in few],
        "k16v8": [PagedKeys(k, v[0], *bounds, None, v[1]) for (k, _), (_, v) in zip(s.caches, few, strict=False)],
    }
    for name, given_keys in keys.items():
        wanted = flash_decode(s.q, given_keys[0].dequantize(s.q.dtype))[0].float()
        error = (flash_decode(s.q, given_keys[0])[0].float() - wanted).norm() / wanted.norm()
        assert error < 1e-2, f"flash_decode is off by {error:.1e} of its norm in {name} at {row}"  # as above
        row[f"{name}_us"] = seconds(partial(_decode, s.q, given_keys), len(given_keys), device) * 1e6
    saved = row["kv_bytes"] * (1 - (DIM + 4) / (2 * DIM))
    row["bar_us"] = row["us"] - 0.85 * saved / READ_CEILING * 1e6 if kv_heads == 1 else 0.6 * row["us"]
    yield row


def _decode(q: torch.Tensor, keys: list[PagedKeys], copy: int) -> torch.Tensor:
    return flash_decode(q, keys[copy])[0]


def _few(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes a cache to e4m3 with scales, in pieces, since fp32 takes memory."""
    data, scales = (
        torch.cat(parts) for parts in zip(*(quantize_fp8(pages) for pages in cache.split(1024)), strict=True)
    )
    return data, scales.transpose(1, 2).contiguous()


def measure_ragged(ctx: BenchContext) -> list[Row]:
    """Measures a batch of mixed lengths against equal lengths; 8/1 heads."""
    device = ctx.device
    lengths = [K] * 100 + [128 * K] * 4 if device.type == "cuda" else [64] * 5 + [256]
    batch, pages = len(lengths), sum(lengths) // PAGE
    dtype = torch.bfloat16
    caches = [torch.randn(pages, PAGE, 1, DIM, device=device, dtype=dtype) for _ in range(2)]
    order = torch.randperm(pages, device=device).int()
    q = torch.randn(batch, 1, 8, DIM, device=device, dtype=dtype)
    equal = pages // batch
    times = {}
    for name, counts in (("ragged", [n // PAGE for n in lengths]), ("uniform", [equal] * batch)):
        table = torch.zeros(batch, max(counts), dtype=torch.int32, device=device)
        begin = 0
        for i, count in enumerate(counts):
            table[i, :count] = order[begin : begin + count]
            begin += count
        hi = torch.tensor(counts, dtype=torch.int32, device=device)[:, None] * PAGE
        s = AttentionCase(q, [(caches[0], caches[1])], table, torch.zeros_like(hi), hi)
        times[name] = seconds(s.ours, 1, device) * 1e6
    return [{"kind": "ragged", "heads": "8/1", "us": times["ragged"], "uniform_us": times["uniform"]}]
