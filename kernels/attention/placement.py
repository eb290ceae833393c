"""Cache slots of a step's tokens on this rank, and the local keys that queries read: one launch each.

`helix.layout` defines the round-robin block arithmetic and is the reference; in torch it takes a dozen launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 128


@triton.jit
def local_length(length, start, KVP: tl.constexpr, RANK: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Returns how many of a sequence's first `length` tokens this rank stores."""
    cycle: tl.constexpr = BLOCK_TOKENS * KVP
    first = (RANK - start + KVP) % KVP * BLOCK_TOKENS
    rest = tl.minimum(tl.maximum(length % cycle - first, 0), BLOCK_TOKENS)
    return length // cycle * BLOCK_TOKENS + rest


@triton.jit
def _local_bounds_kernel(
    positions, starts, live, lo, hi, N,
    KVP: tl.constexpr, RANK: tl.constexpr, BLOCK_TOKENS: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    position = tl.load(positions + n, mask=inside, other=0)
    start = tl.load(starts + n, mask=inside, other=0)
    some = tl.load(live + n, mask=inside, other=0) != 0
    last = local_length(position + 1, start, KVP, RANK, BLOCK_TOKENS)
    first = last * 0
    if WINDOW > 0:
        first = local_length(tl.maximum(position + 1 - WINDOW, 0), start, KVP, RANK, BLOCK_TOKENS)
    tl.store(lo + n, first.to(tl.int32), mask=inside)
    tl.store(hi + n, tl.where(some, last, first).to(tl.int32), mask=inside)


@triton.jit
def _slot_mapping_kernel(
    positions, starts, live, tables, rows, slot_mapping, N, tables_n, P,
    KVP: tl.constexpr, RANK: tl.constexpr, BLOCK_TOKENS: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    position = tl.load(positions + n, mask=inside, other=0)
    start = tl.load(starts + n, mask=inside, other=0)
    some = tl.load(live + n, mask=inside, other=0) != 0
    row = n.to(tl.int64)
    if ROWS:
        row = tl.load(rows + n, mask=inside, other=0)
    mine = (position // BLOCK_TOKENS + start) % KVP == RANK
    local = position // (BLOCK_TOKENS * KVP) * BLOCK_TOKENS + position % BLOCK_TOKENS
    page = tl.load(tables + row * tables_n + local // PAGE, mask=inside & mine & some & (local // PAGE < P), other=0)
    slot = page.to(tl.int64) * PAGE + local % PAGE
    tl.store(slot_mapping + n, tl.where(mine & some, slot, -1), mask=inside)


def local_bounds(
    positions: torch.Tensor,
    starts: torch.Tensor,
    live: torch.Tensor,
    *,
    kvp: int,
    kvp_rank: int,
    append_block: int,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the local key range `[lo, hi)`, int32 [N], of causal queries at `positions`; empty where not `live`.

    Args:
        positions: int64 [N], contiguous.
        starts: int64 [N], contiguous: kvp rank of each sequence's first block.
        live: bool [N], contiguous.
        window: sliding window in tokens, including the query's own; None for all.
    """
    lo, hi = (torch.empty(len(positions), dtype=torch.int32, device=positions.device) for _ in range(2))
    assert positions.is_contiguous() and starts.is_contiguous() and live.is_contiguous()
    _local_bounds_kernel[(triton.cdiv(len(positions), BLOCK),)](
        positions, starts, live.view(torch.uint8), lo, hi, len(positions),
        KVP=kvp, RANK=kvp_rank, BLOCK_TOKENS=append_block, WINDOW=window or 0, BLOCK=BLOCK, num_warps=1,
    )  # fmt: skip
    return lo, hi


def compute_slot_mapping(
    positions: torch.Tensor,
    starts: torch.Tensor,
    live: torch.Tensor,
    block_tables: torch.Tensor,
    rows: torch.Tensor | None,
    *,
    kvp: int,
    kvp_rank: int,
    append_block: int,
    page_size: int,
) -> torch.Tensor:
    """Computes cache slots `page * page_size + offset`, int64 [N]; -1 for other ranks' tokens and where not `live`.

    Args:
        positions, starts, live: as in `local_bounds`.
        block_tables: int32 [n, P], rows contiguous.
        rows: int64 [N], table row of each token; None: row i for token i.
    """
    slot_mapping = torch.empty(len(positions), dtype=torch.int64, device=positions.device)
    assert positions.is_contiguous() and starts.is_contiguous() and live.is_contiguous()
    assert block_tables.stride(1) == 1
    _slot_mapping_kernel[(triton.cdiv(len(positions), BLOCK),)](
        positions, starts, live.view(torch.uint8), block_tables, rows, slot_mapping,
        len(positions), block_tables.stride(0), block_tables.shape[1],
        KVP=kvp, RANK=kvp_rank, BLOCK_TOKENS=append_block, PAGE=page_size, ROWS=rows is not None, BLOCK=BLOCK,
        num_warps=1,
    )  # fmt: skip
    return slot_mapping
