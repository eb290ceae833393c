"""Times attention over chosen blocks and over chosen keys: `helix bench sparse`.

Block-sparse attention, choosing included: of each KV head, a query chooses `topk` of the blocks of 128 tokens between
the first one and the last four. Each row is checked against torch's choice over the same bounds. It is then timed as
CUDA-graph replays over other sequences of one pool of pages, and other queries, until four times the L2 has been
read: one sequence's bounds and blocks would stay in it. Dense attention is ours over the same pages and torch's over
contiguous memory. `target_us` is the bytes of bounds and of the blocks that are read, at 4.4 TB/s, and 12 us.

What drafts add (benchmarks/kernels/drafts.py): the scores that verification leaves beside attention, and what it takes
longer for them; the choice of the best 7% of all keys, in all layers; and attention over these, which lie anywhere,
alone or in runs. All are checked against torch, then timed in the same way. `target_us`: three times the bytes of
scores at 4.4 TB/s and 20 us for the choice, the chosen keys at 4.0 TB/s and 6 us for attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels import drafts
from benchmarks.kernels.attention import TORCH
from benchmarks.runner import Benchmark, Given, Part, Row
from benchmarks.timer import DIM, ROTATED, K, seconds
from kernels.attention.flash_decode import flash_decode
from kernels.paged_keys import PagedKeys
from kernels.reference.select_blocks import block_scores
from kernels.sparse.block_bounds import fold_blocks
from kernels.sparse.select_blocks import select_blocks

PAGE = 128
SINK, LOCAL = 1, 4
MOST_COPIES = 40
SHAPES = [(q, kv, batch, n * K) for q, kv in ((28, 4), (8, 1), (32, 8)) for batch in (1, 8) for n in (4, 128, 1024)]
CHOSEN = (8, 32)


@dataclass
class SparseCase:
    """Sequences of one length in one pool of pages: `copies` batches of them, each with queries of its own."""

    q: list[torch.Tensor]
    k: torch.Tensor
    v: torch.Tensor
    bounds: torch.Tensor
    tables: list[torch.Tensor]
    first: torch.Tensor
    last: torch.Tensor
    pages: torch.Tensor
    counted: torch.Tensor
    lo: torch.Tensor

    def select(self, topk: int, copy: int) -> torch.Tensor:
        """A table [B, Hkv, topk + 8] of the pages that are read."""
        ranges = self.first, self.last, self.pages
        return select_blocks(
            self.q[copy], self.bounds, self.tables[copy], *ranges, topk, topk + 8, "bounds", self.counted
        )  # fmt: skip

    def attend(self, table: torch.Tensor, hi: torch.Tensor, copy: int) -> torch.Tensor:
        """Attention over the first keys of a table, of all KV heads together or of each."""
        read = PagedKeys(self.k, self.v, table, self.lo, hi, DIM**-0.5)
        return flash_decode(self.q[copy][:, None], read, early=True)[0]

    def choose_and_attend(self, topk: int) -> Callable[[int], torch.Tensor]:
        """Both of a copy, in a graph without anything else."""
        hi = torch.full_like(self.lo, read_keys(self.tables[0].shape[1], topk))
        return lambda copy: self.attend(self.select(topk, copy), hi, copy)


def read_keys(pages: int, topk: int) -> int:
    """Keys that a query reads of a sequence of full pages."""
    return min(SINK + LOCAL + topk, pages) * PAGE


def bounds_bytes(kv_heads: int, batch: int, length: int) -> int:
    """The bounds of all blocks of each sequence."""
    return batch * kv_heads * DIM * 4 * (length // PAGE)


def read_bytes(kv_heads: int, batch: int, length: int, topk: int) -> int:
    """What a query of each sequence reads: the bounds of all blocks, and the keys and values of those chosen."""
    return bounds_bytes(kv_heads, batch, length) + batch * kv_heads * DIM * 4 * read_keys(length // PAGE, topk)


def setting(q_heads: int, kv_heads: int, batch: int, length: int, device: torch.device) -> SparseCase:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    held = batch * length // PAGE  # pages of a batch
    read = held * kv_heads * 2 * DIM * dtype.itemsize  # of bounds alone
    copies = min(MOST_COPIES, max(4, -(-ROTATED // read))) if device.type == "cuda" else 1
    batches = min(copies, max(1, 8 * K * K // PAGE // held))  # that lie in the pool, so that it fits
    pool = batches * held
    k, v = (torch.randn(pool, PAGE, kv_heads, DIM, device=device, dtype=dtype) for _ in range(2))
    bounds = torch.empty(1, pool, kv_heads, 2, DIM, device=device, dtype=dtype)
    every = torch.arange(pool, dtype=torch.int32, device=device)[None]
    begin = torch.zeros(1, dtype=torch.int64, device=device)
    whole = {"kvp": 1, "kvp_rank": 0, "append_block": PAGE}
    fold_blocks(k[None], None, bounds, every, begin, begin, begin + pool * PAGE, pool, "bounds", **whole)
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
        [tables[i % batches] for i in range(copies)],
        *ranges,
        counted,
        torch.zeros_like(pages)[:, None],
    )


def check(s: SparseCase, topk: int) -> None:
    """Raises AssertionError unless the blocks that are chosen promise as much as the best by torch."""
    table = s.select(topk, 0)
    for b, row in enumerate(s.tables[0].long()):
        scores = block_scores(s.q[0][b], s.bounds[row], "bounds")[:, SINK:-LOCAL]
        count = min(topk, scores.shape[1])
        best = scores.topk(count).values.sort().values
        places = torch.zeros(len(s.k), dtype=torch.long, device=row.device)
        places[row] = torch.arange(len(row), device=row.device)
        mine = scores.gather(1, places[table[b, :, SINK : SINK + count].long()] - SINK).sort().values
        # fp32 sums of 256 products in other orders.
        torch.testing.assert_close(mine, best, rtol=1e-4, atol=1e-4)


def measure(given: Given, q_heads: int, kv_heads: int, batch: int, length: int) -> list[Row]:
    """A row for each of CHOSEN, microseconds."""
    device = given.device
    s = setting(q_heads, kv_heads, batch, length, device)
    copies, shape = len(s.q), {"heads": f"{q_heads}/{kv_heads}", "batch": batch, "length": length}
    all_keys = torch.full_like(s.lo, length)
    dense = {"dense_us": 1e6 * seconds(lambda i: s.attend(s.tables[i], all_keys, i), copies, device)}
    if device.type == "cuda":
        few = min(copies, max(1, ROTATED // (batch * length * kv_heads * DIM * 4)) + 1)
        dense |= torchs(s, few, device)
    rows = []
    for topk in CHOSEN:
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


def torchs(s: SparseCase, copies: int, device: torch.device) -> Row:
    """Torch's dense attention over contiguous copies of as many batches as rotation needs."""
    found: Row = {f"{name}_us": None for name in TORCH}
    k, v = (
        [cache[s.tables[i].long()].flatten(1, 2).transpose(1, 2).contiguous() for i in range(copies)]
        for cache in (s.k, s.v)
    )
    for name, backend in TORCH.items():
        with sdpa_kernel(backend):
            found[f"{name}_us"] = 1e6 * seconds(
                lambda i: scaled_dot_product_attention(s.q[i][:, :, None], k[i], v[i], enable_gqa=True),
                copies,
                device,
            )
    return found


COLUMNS = "heads batch length topk select_us attend_us us target_us dense_us cudnn_us flash_us best_dense_over_ours"
BENCHMARK = Benchmark(
    "block-sparse attention beside dense attention, and the kernels of sparse drafts, on one GPU",
    __doc__ or "",
    (
        Part(lambda given: SHAPES if given.gpu else [(4, 2, 1, 2 * K)], measure, COLUMNS),
        *drafts.PARTS,
    ),
)
