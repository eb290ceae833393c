"""Resolves the pages that queries read to GPU blocks: in a ring, resident, or newly assigned. LRU replacement.

One program per KV head, as heads share no blocks. It marks the GPU blocks of selected pages, and lets the first entry
of each missing page claim it. Then one pass over the head's LRU order moves the selected blocks to the end, and assigns
the first of the others to missing pages: the least recently selected are evicted, and never one of this selection.

A prefetch does not change the order: blocks fetched only for it are the next to be evicted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.attention.placement import local_length
from kernels.offload.reference import resolve as reference
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor
from kernels.resident_blocks import NOT_RESIDENT, FetchList, QueryRanges, ResidentBlocks

MAX_ENTRY_STEP = 1024  # max table entries per iteration
MAX_ORDER_STEP = 4096  # max blocks of an order per iteration

_NOT_RESIDENT = tl.constexpr(NOT_RESIDENT)


@triton.jit
def _entries(
    e, head, table, his, num_pages, positions, starts, gpu_block_of, count, width, first_row, ring_pages, T,
    HEADS: tl.constexpr, KVP: tl.constexpr, RANK: tl.constexpr, BLOCK_TOKENS: tl.constexpr, PAGE: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Loads entries e of one head's tables.

    Returns their offsets, pages (-1: none), subblocks, ring blocks (-1: not in a ring), whether they need a resident
    block, and their `gpu_block_of`.
    """
    n = e // width
    j = e % width
    inside = e < count
    at = (n.to(tl.int64) * HEADS + head) * width + j
    PART: tl.constexpr = PAGE // PARTS
    columns = (tl.load(his + n, mask=inside, other=0) + PART - 1) // PART
    entry = tl.load(table + at, mask=inside & (j < columns), other=-1)
    page = tl.where(entry >= 0, entry // PARTS, -1)
    row = n // T
    committed = tl.load(positions + row * T, mask=inside, other=0)
    start = tl.load(starts + n, mask=inside, other=0)
    full = local_length(committed, start, KVP, RANK, BLOCK_TOKENS) // PAGE
    # Local pages come last in a table, ending with those that are not full of committed tokens.
    column = (tl.load(num_pages + n, mask=inside, other=0) - columns + j) // PARTS
    ring = ((first_row + row) * ring_pages + column % ring_pages) * HEADS + head
    ring = tl.where((page >= 0) & (column >= full), ring, -1)
    seeks = (page >= 0) & (ring < 0)
    gpu_block = tl.load(gpu_block_of + page, mask=seeks, other=0, cache_modifier=".cg")
    return at, page, entry % PARTS, ring, seeks, gpu_block


@triton.jit
def _resolve_kernel(
    table, his, num_pages, positions, starts, gpu_block_of, page_of, lru_order, lru_halves, in_use, miss_blocks,
    miss_targets,
    miss_counts, hit_counts, entries, width, pages, num_blocks, begin, max_blocks, first_row, ring_pages, T,
    HEADS: tl.constexpr,
    KVP: tl.constexpr, RANK: tl.constexpr, BLOCK_TOKENS: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr,
    PART_STRIDE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    start_successor(PDL)
    head = tl.program_id(0)
    gpu_block_of += head.to(tl.int64) * pages
    page_of += head * num_blocks
    in_use += head * num_blocks
    miss_blocks += head * max_blocks
    miss_targets += head * max_blocks
    begin += head * num_blocks
    lane = tl.arange(0, BLOCK)
    for first in range(0, entries, BLOCK):
        e = first + lane
        at, page, part, ring, seeks, gpu_block = _entries(
            e, head, table, his, num_pages, positions, starts, gpu_block_of, entries, width, first_row, ring_pages, T,
            HEADS, KVP, RANK, BLOCK_TOKENS, PAGE, PARTS,
        )  # fmt: skip
        tl.store(in_use + gpu_block, e * 0 + 1, mask=seeks & (gpu_block >= 0))
        tl.atomic_max(gpu_block_of + page, -1 - e, mask=seeks & (gpu_block < 0), sem="relaxed")
    tl.debug_barrier()
    missing = tl.full([], 0, tl.int32)
    num_wanted = tl.full([], 0, tl.int32)
    for first in range(0, entries, BLOCK):
        e = first + lane
        at, page, part, ring, seeks, gpu_block = _entries(
            e, head, table, his, num_pages, positions, starts, gpu_block_of, entries, width, first_row, ring_pages, T,
            HEADS, KVP, RANK, BLOCK_TOKENS, PAGE, PARTS,
        )  # fmt: skip
        claims = seeks & (gpu_block == -1 - e)
        rank = missing + tl.cumsum(claims.to(tl.int32), 0) - 1
        tl.store(miss_blocks + rank, page * HEADS + head, mask=claims)
        missing += tl.sum(claims.to(tl.int32), 0)
        num_wanted += tl.sum(seeks.to(tl.int32), 0)
    tl.store(miss_counts + head, missing)
    tl.atomic_add(hit_counts, (num_wanted - missing).to(tl.int64), sem="relaxed")
    tl.atomic_add(hit_counts + 1, missing.to(tl.int64), sem="relaxed")
    lru_half = tl.load(lru_halves + head)
    old_order = lru_order + (lru_half * HEADS + head) * num_blocks
    new_order = lru_order + ((1 - lru_half) * HEADS + head) * num_blocks
    tl.debug_barrier()
    found = 0
    others = 0
    lane_s = tl.arange(0, BLOCK_S)
    for first in range(0, num_blocks, BLOCK_S):
        i = first + lane_s
        gpu_block = tl.load(old_order + i, mask=i < num_blocks, other=0)
        hit = (i < num_blocks) & (tl.load(in_use + gpu_block, mask=i < num_blocks, other=0, cache_modifier=".cg") != 0)
        tl.store(in_use + gpu_block, i * 0, mask=hit)
        stays = (i < num_blocks) & (hit == 0)
        until = tl.cumsum(stays.to(tl.int64) + (hit.to(tl.int64) << 32), 0)
        nth = others + (until & 0xFFFFFFFF).to(tl.int32) - 1  # among those that stay
        nth_hit = found + (until >> 32).to(tl.int32) - 1
        victim = stays & (nth < missing)
        if not PREFETCH:
            to = tl.where(
                hit, num_blocks - 1 - missing - nth_hit, tl.where(victim, num_blocks - 1 - nth, nth - missing)
            )
            tl.store(new_order + to, gpu_block, mask=i < num_blocks)
        page = tl.load(miss_blocks + nth, mask=victim, other=0, cache_modifier=".cg") // HEADS
        old = tl.load(page_of + gpu_block, mask=victim, other=-1)
        lost = victim & (old >= 0)
        lost = lost & (tl.load(gpu_block_of + old, mask=lost, other=-1, cache_modifier=".cg") == gpu_block)
        tl.store(gpu_block_of + old, i * 0 + _NOT_RESIDENT, mask=lost)
        tl.store(gpu_block_of + page, gpu_block, mask=victim)
        tl.store(page_of + gpu_block, page, mask=victim)
        tl.store(miss_targets + nth, begin + gpu_block, mask=victim)
        others += tl.sum(stays.to(tl.int32), 0)
        found += tl.sum(hit.to(tl.int32), 0)
    tl.debug_barrier()
    if not PREFETCH:
        tl.store(lru_halves + head, 1 - lru_half)
    for first in range(0, entries, BLOCK):
        e = first + lane
        at, page, part, ring, seeks, gpu_block = _entries(
            e, head, table, his, num_pages, positions, starts, gpu_block_of, entries, width, first_row, ring_pages, T,
            HEADS, KVP, RANK, BLOCK_TOKENS, PAGE, PARTS,
        )  # fmt: skip
        gpu_block = tl.where(seeks, begin + gpu_block, ring)
        tl.store(table + at, gpu_block * PART_STRIDE + part, mask=page >= 0)


def resolve(
    table: torch.Tensor,
    query_ranges: QueryRanges,
    resident: ResidentBlocks,
    misses: FetchList,
    *,
    kvp: int,
    kvp_rank: int,
    append_block: int,
    page_size: int,
    parts: int = 1,
    part_stride: int = 1,
) -> None:
    """Replaces the pages that queries read by GPU blocks, and lists the blocks to fetch.

    No shape depends on device data, and the host decides nothing. Deterministic.

    Args:
        table: [N, Hkv, width] int32, contiguous: pages of each query, its last local pages last; negative: none.
            Overwritten with GPU blocks.
        resident: the layer's resident blocks, at least as many per KV head as pages fit all tables together.
        misses: written; its counts are incremented.
        parts: subblocks per page, which entries name: subblock j of a page is `page * parts + j`, and becomes
            `block * part_stride + j`.
    """
    N, heads, width = table.shape
    if not dispatch.on_gpu(table):
        grid = {"kvp": kvp, "kvp_rank": kvp_rank, "append_block": append_block, "page_size": page_size}
        reference(table, query_ranges, resident, misses, parts=parts, part_stride=part_stride, **grid)
        return
    assert all(
        t.is_contiguous()
        for t in (table, *query_ranges[:4], resident.gpu_block_of, resident.page_of, resident.lru_order)
    )
    assert (
        misses.source.stride() == misses.target.stride() == (misses.source.stride(0), 1) and len(misses.source) == heads
    )
    _resolve_kernel[(heads,)](
        table, *query_ranges[:4], resident.gpu_block_of, resident.page_of, resident.lru_order, resident.lru_half,
        resident.in_use,
        misses.source, misses.target, misses.counts, misses.hit_counts, N * width, width,
        resident.gpu_block_of.shape[1],
        resident.num_blocks, resident.begin, misses.source.stride(0), query_ranges.first_row, resident.ring_pages,
        query_ranges.per_sequence,
        HEADS=heads, KVP=kvp, RANK=kvp_rank, BLOCK_TOKENS=append_block, PAGE=page_size,
        PARTS=parts, PART_STRIDE=part_stride,
        BLOCK=min(MAX_ENTRY_STEP, triton.next_power_of_2(N * width)),
        BLOCK_S=min(MAX_ORDER_STEP, triton.next_power_of_2(resident.num_blocks)), PREFETCH=misses.is_prefetch,
        num_warps=8, **pdl_options(table),
    )  # fmt: skip
