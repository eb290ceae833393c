"""Times what an indexer adds to a layer: scores of all tokens, top-k, attention over the selected tokens.

Index keys are one GPU's of eight: 128K tokens of a million. A local copy replaces the gather of counts. Each case is
checked first, then timed as CUDA-graph replays over caches that exceed the L2: `helix bench indexer`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.runner import BenchContext, Row
from benchmarks.timer import PAGE, ROTATED, K, seconds
from helix.attention.dense import attend_selected
from kernels.indexer.keys import DIGITS
from kernels.indexer.reference import Shard, ordered
from kernels.indexer.scores import index_scores
from kernels.indexer.select_topk import PLANES, index_topk
from kernels.paged_keys import PagedKeys
from kernels.scaled_keys import quantize_fp8, quantize_latents

WIDTH, TOPK, LATENT, ROPE = 128, 2048, 512, 64


def bf16(*shape: int, device: torch.device) -> Tensor:
    """Returns random bf16."""
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def no_counts(rows: int, device: torch.device) -> Tensor:
    """Returns zeroed digit counts."""
    return torch.zeros(PLANES, rows, DIGITS, dtype=torch.int32, device=device)


def measure_scan(ctx: BenchContext, heads: int, batch: int, queries: int, tokens: int) -> list[Row]:
    """Measures one row: the scores of all tokens, with index keys in bf16 and in e4m3."""
    device, pages, rows = ctx.device, batch * tokens // PAGE, batch * queries
    copies = max(1, -(-ROTATED // (pages * PAGE * WIDTH * 2))) if ctx.gpu else 1
    caches = [bf16(pages, PAGE, WIDTH, device=device) for _ in range(copies)]
    table = torch.randperm(pages, device=device).view(batch, -1).int()
    q, weights = bf16(rows, heads, WIDTH, device=device), torch.randn(rows, heads, device=device)
    hi = torch.full((rows,), tokens, dtype=torch.int32, device=device)
    scores = torch.empty(rows, tokens, device=device)
    counts = no_counts(rows, device) if queries == 1 else None
    row: Row = {"kind": "scan", "heads": heads, "batch": batch, "queries": queries, "tokens": tokens}
    plain: list[tuple[Tensor, ...]] = [(cache,) for cache in caches]
    few: list[tuple[Tensor, ...]] = [quantize_fp8(cache) for cache in caches * 2]
    for name, planes in (("us", plain), ("fp8_us", few)):

        def run(copy: int, planes: list[tuple[Tensor, ...]] = planes) -> None:
            cache, *scales = planes[copy]
            key_scales = scales[0] if scales else None
            index_scores(q, weights, cache, table, hi, None, queries, scores, key_scales, counts)

        run(0)
        numbers, *scales = (x.float()[table[-1].long()].flatten(0, 1)[:4096].double() for x in planes[0])
        keys = numbers * scales[0][:, None] if scales else numbers
        wanted = ((keys @ q[-1].double().T).relu() @ weights[-1].double()).float()
        error = (scores[-1, :4096] - wanted).abs().max() / wanted.abs().max()
        assert error < 1e-5, f"{name}: scores are off by {float(error):.1e} of the largest"  # fp32, 128 x heads terms
        row[name] = seconds(run, len(planes), device) * 1e6
    size = batch * tokens * WIDTH * 2
    target_us = (1.3 if queries == 1 else 1.6) * (size / 4.4e12 * 1e6 + 6) if queries < 16 else None
    tflops = 2 * rows * tokens * heads * WIDTH / row["us"] / 1e6
    return [row | {"tb_per_s": size / row["us"] / 1e6, "tflops": tflops, "bar_us": target_us}]


def measure_choice(ctx: BenchContext, rows: int, ranks: int, tokens: int) -> list[Row]:
    """Measures one row: top-k, with copies for the gathers of counts; a single query's scores come with counts."""
    device = ctx.device
    scores = [torch.randn(rows, tokens, device=device) for _ in range(2)]
    total, pages = tokens * ranks, tokens // PAGE
    positions = torch.full((rows,), total - 1, device=device)
    starts, hi = torch.zeros_like(positions), torch.full((rows,), tokens, dtype=torch.int32, device=device)
    table = torch.arange(pages, dtype=torch.int32, device=device)[None]
    counted = [no_counts(rows, device) for _ in scores]
    for numbers, scored in zip(counted, scores, strict=True):
        numbers[0, 0] = (ordered(scored[0]) >> 24).bincount(minlength=DIGITS)

    def gather(x: Tensor) -> Tensor:
        return x.expand(ranks, *x.shape).contiguous()

    shard = Shard(ranks, 0, 16, PAGE, gather if ranks > 1 else None)

    def run(copy: int) -> tuple[Tensor, Tensor]:
        numbers = counted[copy].clone() if rows == 1 else None
        return index_topk(scores[copy], positions, starts, hi, table, None, TOPK, total, shard, numbers)

    slots, counts = run(0)
    share = TOPK // ranks
    assert int(counts.min()) >= share and int(counts.max()) <= share + 1, f"{counts.tolist()} instead of {share}"
    bound = ordered(scores[0]).topk(share, -1).values[:, -1:]
    selected_scores = ordered(scores[0].gather(1, slots[:, :share].long()))
    assert (selected_scores >= bound).float().mean() > 0.99, "the selected tokens are not the best-scoring ones"
    us = seconds(run, 2, device) * 1e6
    row: Row = {"kind": "choice", "rows": rows, "ranks": ranks, "tokens": tokens, "us": us}
    return [row | {"bar_us": 40.0 if rows < 8 else None}]


def measure_reads(ctx: BenchContext, heads: int, rows: int, tokens: int) -> list[Row]:
    """Measures one row: attention over selected tokens, of latents in bf16 and in e4m3."""
    device, width = ctx.device, LATENT + ROPE
    pages = 128 * K // PAGE if ctx.gpu else 4 * K // PAGE
    cache = bf16(pages, PAGE, width, device=device)
    parts = [quantize_latents(some) for some in cache[..., :LATENT].split(256)]
    latents, scales = (torch.cat(planes) for planes in zip(*parts, strict=True))
    flat, few = cache.flatten(0, 1).unsqueeze(1), latents.flatten(0, 1).unsqueeze(1)
    ropes = cache[..., LATENT:].contiguous().flatten(0, 1).unsqueeze(1)
    q = bf16(rows, heads, width, device=device)
    tables = [
        torch.stack([torch.randperm(pages * PAGE, device=device)[:tokens].sort().values.int() for _ in range(rows)])
        for _ in range(4)
    ]
    hi = torch.full((rows,), tokens, dtype=torch.int32, device=device)
    row: Row = {"kind": "reads", "heads": heads, "rows": rows, "tokens": tokens}
    for name, more in (("us", {}), ("fp8_us", {"k_scale": scales.mT.contiguous(), "rope": ropes})):
        planes: Any = few if more else flat

        def run(copy: int, planes: Tensor = planes, more: dict[str, Tensor] = more) -> Tensor:
            keys = PagedKeys(planes, planes[..., :LATENT], tables[copy], hi * 0, hi, width**-0.5, **more)
            return attend_selected(q, keys, prefill=rows > 64, sms=_sms(device), lane=0).merge_states()[0]

        selected = cache.flatten(0, 1)[tables[0][-1].long()].float()
        weights = (q[-1].float() @ selected.T * width**-0.5).softmax(-1)
        wanted = weights @ selected[:, :LATENT]
        error = (run(0)[-1].float() - wanted).norm() / wanted.norm()
        assert error < (0.1 if more else 1e-2), f"off by {float(error):.1e} of its norm at {row}"
        row[name] = seconds(run, len(tables), device) * 1e6
    row["tflops"] = 2 * rows * tokens * heads * (LATENT + width) / row["us"] / 1e6
    return [row]


def _sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
