"""Times attention over selected blocks and over selected keys: `helix bench sparse`.

Block-sparse attention, selection included: a query selects, per KV head, `topk` of the blocks of 128 tokens between
the first one and the last four. Each row is checked against torch's selection over the same bounds. It is then timed
as CUDA-graph replays over different sequences of one page pool, and different queries, until four times the L2 has been
read: one sequence's bounds and blocks would stay in it. Dense attention is ours over the same pages, and torch's over
contiguous memory. `target_us` is the bytes of bounds and selected blocks at 4.4 TB/s, plus 12 us.

The same with subblocks of 16 tokens, selected within the best blocks (`candidates`), timed alternately with 32
whole blocks. Subblocks are checked against torch's selection among the candidates that the kernel has selected.

The overhead of sparse drafts (benchmarks/kernels/drafts.py): the scores that verification writes, and its slowdown;
selecting the best 7% of all keys, in all layers; and attention over these, scattered or in runs. All are checked
against torch, then timed in the same way. `target_us`: three times the bytes of scores at 4.4 TB/s and 20 us for
selection, the selected keys at 4.0 TB/s and 6 us for attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels.attention import TORCH
from benchmarks.runner import BenchContext, Row
from benchmarks.timer import DIM, ROTATED, K, seconds
from kernels.attention.flash_decode import flash_decode
from kernels.paged_keys import PagedKeys
from kernels.sparse.block_bounds import fold_blocks
from kernels.sparse.reference import block_scores
from kernels.sparse.select_blocks import select_blocks

PAGE = 128
SINK, LOCAL = 1, 4
MAX_COPIES = 40
TOPKS = (8, 32)
PARTS = 8  # subblocks per block
CANDIDATES = [(128, 256), (128, 128), (64, 64)]  # selected subblocks, and candidate blocks

Ranges = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass
class SparseCase:
    """Sequences of one length in one page pool: `copies` batches of them, each with its own queries."""

    q: list[torch.Tensor]
    k: torch.Tensor
    v: torch.Tensor
    bounds: torch.Tensor
    part_bounds: torch.Tensor
    tables: list[torch.Tensor]
    first: torch.Tensor
    last: torch.Tensor
    pages: torch.Tensor
    counted: torch.Tensor
    lo: torch.Tensor

    def select(self, topk: int, copy: int, **options: Any) -> torch.Tensor:
        """Returns a table [B, Hkv, topk + 8] of the pages to read."""
        ranges, max_pages = (self.first, self.last, self.pages), topk + 8
        return select_blocks(
            self.q[copy], self.bounds, self.tables[copy], *ranges, topk, max_pages, self.counted, **options
        )

    def candidates(self, count: int, copy: int) -> torch.Tensor:
        """Returns a table [B, Hkv, count + 8] of the pages that are always read and of the candidates."""
        return self.select(count, copy, stretches=True)

    def select_parts(self, topk: int, count: int, copy: int, ranges: Ranges) -> torch.Tensor:
        """Returns a table [B, Hkv, topk + 8 * PARTS] of the subblocks to read; `ranges` are the candidates'."""
        return select_blocks(
            self.q[copy], self.part_bounds, self.candidates(count, copy), *ranges, topk, topk + 8 * PARTS, self.counted,
            max_pages=count * PARTS,
        )  # fmt: skip

    def attend(self, table: torch.Tensor, hi: torch.Tensor, copy: int, parts: int = 1) -> torch.Tensor:
        """Attends to the first `hi` keys of a table, for all KV heads jointly or for each."""
        read = PagedKeys(self.k, self.v, table, self.lo, hi, DIM**-0.5).in_parts(parts)
        return flash_decode(self.q[copy][:, None], read, early=True)[0]

    def choose_and_attend(self, topk: int) -> Callable[[int], torch.Tensor]:
        """Returns a function that selects and attends, for one copy, to be captured alone."""
        hi = torch.full_like(self.lo, read_keys(self.tables[0].shape[1], topk))
        return lambda copy: self.attend(self.select(topk, copy), hi, copy)


def read_keys(pages: int, topk: int) -> int:
    """Returns how many keys a query reads of a sequence of full pages."""
    return min(SINK + LOCAL + topk, pages) * PAGE


def bounds_bytes(kv_heads: int, batch: int, length: int) -> int:
    """Returns the bytes of all blocks' bounds over all sequences."""
    return batch * kv_heads * DIM * 4 * (length // PAGE)


def read_bytes(kv_heads: int, batch: int, length: int, topk: int) -> int:
    """Returns the bytes that one query per sequence reads: all bounds, and the selected keys and values."""
    return bounds_bytes(kv_heads, batch, length) + batch * kv_heads * DIM * 4 * read_keys(length // PAGE, topk)


def setting(q_heads: int, kv_heads: int, batch: int, length: int, device: torch.device) -> SparseCase:
    """Returns random tensors of a case."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    num_pages = batch * length // PAGE  # pages of a batch
    read = num_pages * kv_heads * 2 * DIM * dtype.itemsize  # of bounds only
    copies = min(MAX_COPIES, max(4, -(-ROTATED // read))) if device.type == "cuda" else 1
    batches = min(copies, max(1, 8 * K * K // PAGE // num_pages))  # batches in the pool, limited so that it fits
    pool = batches * num_pages
    k, v = (torch.randn(pool, PAGE, kv_heads, DIM, device=device, dtype=dtype) for _ in range(2))
    bounds = torch.empty(1, pool, kv_heads, 2, DIM, device=device, dtype=dtype)
    every = torch.arange(pool, dtype=torch.int32, device=device)[None]
    begin = torch.zeros(1, dtype=torch.int64, device=device)
    whole = {"kvp": 1, "kvp_rank": 0, "append_block": PAGE}
    part_bounds = torch.empty(1, pool, kv_heads, PARTS, 2, DIM, device=device, dtype=dtype)
    fold_blocks(
        k[None], None, bounds, every, begin, begin, begin + pool * PAGE, pool, **whole,
        part_bounds=part_bounds,
    )  # fmt: skip
    tables = torch.randperm(pool, device=device).int().view(batches, batch, -1)
    q = [torch.randn(batch, q_heads, DIM, device=device, dtype=dtype) for _ in range(copies)]
    pages = torch.full((batch,), length // PAGE, dtype=torch.int32, device=device)
    ranges = torch.full_like(pages, SINK), pages - LOCAL, pages
    counted = torch.zeros(2, dtype=torch.int64, device=device)
    return SparseCase(
        q,
        k,
        v,
        bounds[0],
        part_bounds[0],
        [tables[i % batches] for i in range(copies)],
        *ranges,
        counted,
        torch.zeros_like(pages)[:, None],
    )


def check(s: SparseCase, topk: int) -> None:
    """Asserts that the selected blocks score as high as torch's best."""
    table = s.select(topk, 0)
    for b, row in enumerate(s.tables[0].long()):
        scores = block_scores(s.q[0][b], s.bounds[row])[:, SINK:-LOCAL]
        count = min(topk, scores.shape[1])
        best = scores.topk(count).values.sort().values
        column_of = torch.zeros(len(s.k), dtype=torch.long, device=row.device)
        column_of[row] = torch.arange(len(row), device=row.device)
        mine = scores.gather(1, column_of[table[b, :, SINK : SINK + count].long()] - SINK).sort().values
        # fp32 sums of 256 products in a different order.
        torch.testing.assert_close(mine, best, rtol=1e-4, atol=1e-4)


def measure(ctx: BenchContext, q_heads: int, kv_heads: int, batch: int, length: int) -> list[Row]:
    """Measures a row for each of TOPKS, in microseconds."""
    device = ctx.device
    s = setting(q_heads, kv_heads, batch, length, device)
    copies, shape = len(s.q), {"heads": f"{q_heads}/{kv_heads}", "batch": batch, "length": length}
    all_keys = torch.full_like(s.lo, length)
    dense = {"dense_us": 1e6 * seconds(lambda i: s.attend(s.tables[i], all_keys, i), copies, device)}
    if device.type == "cuda":
        few = min(copies, max(1, ROTATED // (batch * length * kv_heads * DIM * 4)) + 1)
        dense |= torchs(s, few, device)
    rows = []
    for topk in TOPKS:
        check(s, topk)
        tables = [s.select(topk, i).clone() for i in range(copies)]
        size = read_bytes(kv_heads, batch, length, topk)
        hi = torch.full_like(s.lo, read_keys(length // PAGE, topk))

        def attend(i: int, tables: list[torch.Tensor], hi: torch.Tensor) -> torch.Tensor:
            return s.attend(tables[i], hi, i)

        row: Row = {"kind": "sparse", **shape, "topk": topk, "read_bytes": size}
        row["select_us"] = 1e6 * seconds(partial(s.select, topk), copies, device)
        row["attend_us"] = 1e6 * seconds(partial(attend, tables=tables, hi=hi), copies, device)
        row["us"] = 1e6 * seconds(s.choose_and_attend(topk), copies, device)
        row["target_us"] = size / 4.4e6 + 12
        row |= dense
        row["best_dense_over_ours"] = min(us for us in dense.values() if us) / row["us"]
        rows.append(row)
    return rows


def measure_parts(ctx: BenchContext, q_heads: int, kv_heads: int, batch: int, length: int) -> list[Row]:
    """Measures a row for each of CANDIDATES, in microseconds."""
    device, num_pages = ctx.device, length // PAGE
    s = setting(q_heads, kv_heads, batch, length, device)
    between, rows = num_pages - SINK - LOCAL, []
    for topk, count in CANDIDATES:
        looked_at = min(between, count)
        candidates_end = SINK + looked_at
        first, last, pages = (
            torch.full_like(s.first, n * PARTS) for n in (SINK, candidates_end, candidates_end + LOCAL)
        )
        ranges = first, last, pages
        read = (SINK + LOCAL) * PAGE + min(topk, looked_at * PARTS) * PAGE // PARTS
        hi = torch.full_like(s.lo, read)
        check_parts(s, topk, count, ranges)
        tables = [s.select_parts(topk, count, i, ranges).clone() for i in range(len(s.q))]

        def select(i: int, counts: tuple[int, int] = (topk, count), ranges: Ranges = ranges) -> torch.Tensor:
            return s.select_parts(*counts, i, ranges)

        def attend(i: int, tables: list[torch.Tensor] = tables, hi: torch.Tensor = hi) -> torch.Tensor:
            return s.attend(tables[i], hi, i, PARTS)

        def both(i: int, select: Any = select, hi: torch.Tensor = hi) -> torch.Tensor:
            return s.attend(select(i), hi, i, PARTS)

        size = bounds_bytes(kv_heads, batch, length) + batch * kv_heads * DIM * 4 * (looked_at * PARTS + read)
        blocks_us = 1e6 * seconds(s.choose_and_attend(32), len(s.q), device)
        row: Row = {"kind": "parts", "heads": f"{q_heads}/{kv_heads}", "batch": batch, "length": length, "topk": topk}
        row |= {"candidates": count, "read_bytes": size}
        row |= {"candidates_us": 1e6 * seconds(partial(s.candidates, count), len(s.q), device)}
        row |= {"select_us": 1e6 * seconds(select, len(s.q), device)}
        row |= {"attend_us": 1e6 * seconds(attend, len(s.q), device)}
        row |= {"us": 1e6 * seconds(both, len(s.q), device), "blocks_us": blocks_us}
        rows.append(row | {"over_blocks": row["us"] / blocks_us})
    return rows


def check_parts(s: SparseCase, topk: int, count: int, ranges: Ranges) -> None:
    """Asserts that the selected subblocks score as high as torch's best of the candidates."""
    candidate_tables = s.candidates(count, 0)
    table = s.select_parts(topk, count, 0, ranges)
    first, last = (int(x[0]) // PARTS for x in ranges[:2])
    head = torch.arange(s.bounds.shape[1], device=table.device)[:, None]
    for b, looked_at in enumerate(candidate_tables[:, :, first:last].long()):
        candidate_bounds = s.part_bounds[looked_at, head].flatten(1, 2).transpose(0, 1)  # [n * PARTS, Hkv, 2, D]
        k = min(topk, len(candidate_bounds))
        best = block_scores(s.q[0][b], candidate_bounds).topk(k).values.sort().values
        selected = table[b, :, first * PARTS : first * PARTS + k].long()
        mine = s.part_bounds[selected // PARTS, head, selected % PARTS].transpose(0, 1)
        # fp32 sums of 256 products in a different order.
        torch.testing.assert_close(block_scores(s.q[0][b], mine).sort().values, best, rtol=1e-4, atol=1e-4)


def torchs(s: SparseCase, copies: int, device: torch.device) -> Row:
    """Times torch's dense attention over contiguous copies, as many as rotation needs."""
    found: Row = {f"{name}_us": None for name in TORCH}
    k, v = (
        [cache[s.tables[i].long()].flatten(1, 2).transpose(1, 2).contiguous() for i in range(copies)]
        for cache in (s.k, s.v)
    )
    for name, backend in TORCH.items():
        with sdpa_kernel(backend):
            found[f"{name}_us"] = 1e6 * seconds(
                lambda i: scaled_dot_product_attention(s.q[i][:, :, None], k[i], v[i], enable_gqa=True), copies, device
            )
    return found
