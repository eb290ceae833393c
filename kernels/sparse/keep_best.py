"""Block selection over a kvp group: each rank offers its best blocks, and keeps those among the best of all ranks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor
from kernels.sparse.reference import NONE
from kernels.sparse.reference import keep_best as reference

_NONE = tl.constexpr(NONE)


@triton.jit
def _keep_best_kernel(
    candidates, firsts, starts, table, page_counts, width, rank, N,
    HEADS: tl.constexpr, TOPK: tl.constexpr, RANKS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_ALL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(firsts + n)
    start = tl.load(starts + n).to(tl.int32)
    wait_for_predecessor(PDL)
    start_successor(PDL)
    a = tl.arange(0, BLOCK_ALL)
    source = a // TOPK
    at = candidates + ((source * N + n).to(tl.int64) * HEADS + head) * TOPK * 2 + a % TOPK * 2
    score = tl.load(at, mask=source < RANKS, other=_NONE)
    # Round-robin blocks: map a rank's page to the sequence's block number.
    block = tl.load(at + 1, mask=source < RANKS, other=0) * RANKS + (source - start + RANKS) % RANKS
    i = tl.arange(0, BLOCK_K)
    mine = candidates + ((rank * N + n).to(tl.int64) * HEADS + head) * TOPK * 2 + i * 2
    local_score = tl.load(mine, mask=i < TOPK, other=_NONE)
    local_block = tl.load(mine + 1, mask=i < TOPK, other=0) * RANKS + (rank - start + RANKS) % RANKS
    better = (score[None, :] > local_score[:, None]) | (
        (score[None, :] == local_score[:, None]) & (block[None, :] < local_block[:, None])
    )
    lost = (local_score > _NONE) & (tl.sum(better.to(tl.int32), 1) >= TOPK)
    to = table + (n.to(tl.int64) * HEADS + head) * width + begin + i
    tl.store(to, i * 0 - 1, mask=lost)
    tl.atomic_add(page_counts, -tl.sum(lost.to(tl.int64), 0), sem="relaxed")


def keep_best(
    candidates: torch.Tensor,
    first: torch.Tensor,
    starts: torch.Tensor,
    table: torch.Tensor,
    kvp_rank: int,
    page_counts: torch.Tensor,
) -> None:
    """Drops this rank's selected pages from its table unless they are among the best of all ranks.

    Args:
        candidates: [K, N, Hkv, topk, 2] int32, contiguous: each rank's `candidates` of `select_blocks`; a page is one
            round-robin block.
        first: [N] int32, contiguous: column of this rank's first selected page in its table.
        starts: [N] int64, contiguous: the kvp rank of each sequence's first block.
        table: [N, Hkv, width] int32, contiguous; dropped pages become -1.
        page_counts: [2] int64; dropped pages are subtracted from the first, the pages in tables.
    """
    if not dispatch.on_gpu(candidates):
        reference(candidates, first, starts, table, kvp_rank, page_counts)
        return
    ranks, N, heads, topk, _ = candidates.shape
    assert candidates.is_contiguous() and table.is_contiguous() and first.is_contiguous() and starts.is_contiguous()
    _keep_best_kernel[N, heads](
        candidates, first, starts, table, page_counts, table.shape[2], kvp_rank, N, HEADS=heads, TOPK=topk, RANKS=ranks,
        BLOCK_K=triton.next_power_of_2(topk), BLOCK_ALL=triton.next_power_of_2(ranks * topk),
        num_warps=4, **pdl_options(candidates),
    )  # fmt: skip
