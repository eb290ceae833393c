"""Places of the blocks that queries read: in a ring, in a hot place, or in a newly assigned one.

One program for each KV head, which shares no places with the others. It marks the places of chosen blocks and lets the
first entry of each missing page claim it; then it passes once through the head's places, least recently chosen first:
places of this choice move to the end of the order, and the first of the others are assigned to missing blocks. So the
least recently chosen block loses its place, and never one of this choice.

A guess does not change the order: blocks fetched only for it lie in the places that are reassigned next.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.attention.placement import local_length
from kernels.hot_blocks import NOWHERE, FetchList, HotBlocks, Readers
from kernels.overlap import overlapped, start_successor, wait_for_predecessor
from kernels.tier.reference import resolve as reference

ENTRIES = 1024  # most table entries per iteration
PLACES = 4096  # most places of an order per iteration

_NOWHERE = tl.constexpr(NOWHERE)


@triton.jit
def _entries(
    e, head, table, his, held, positions, starts, place_of, count, width, first_row, ring_pages, T,
    HEADS: tl.constexpr, KVP: tl.constexpr, RANK: tl.constexpr, BLOCK_TOKENS: tl.constexpr, PAGE: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Loads entries e of one head's tables.

    Returns their offsets, pages (-1: none), parts of these, places in a ring (-1: not in one), whether they seek a
    place among the hot blocks, and what `place_of` says of it.
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
    # Local pages come last in a table, after them those that are not full of committed tokens.
    column = (tl.load(held + n, mask=inside, other=0) - columns + j) // PARTS
    ring = ((first_row + row) * ring_pages + column % ring_pages) * HEADS + head
    ring = tl.where((page >= 0) & (column >= full), ring, -1)
    seeks = (page >= 0) & (ring < 0)
    place = tl.load(place_of + page, mask=seeks, other=0, cache_modifier=".cg")
    return at, page, entry % PARTS, ring, seeks, place


@triton.jit
def _resolve_kernel(
    table, his, held, positions, starts, place_of, page_of, order, turns, chosen, miss_blocks, miss_places,
    miss_counts, counted, entries, width, pages, places, begin, most, first_row, ring_pages, T, HEADS: tl.constexpr,
    KVP: tl.constexpr, RANK: tl.constexpr, BLOCK_TOKENS: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr,
    APART: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr, GUESS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    start_successor(PDL)
    head = tl.program_id(0)
    place_of += head.to(tl.int64) * pages
    page_of += head * places
    chosen += head * places
    miss_blocks += head * most
    miss_places += head * most
    begin += head * places
    lane = tl.arange(0, BLOCK)
    for first in range(0, entries, BLOCK):
        e = first + lane
        at, page, part, ring, seeks, place = _entries(
            e, head, table, his, held, positions, starts, place_of, entries, width, first_row, ring_pages, T,
            HEADS, KVP, RANK, BLOCK_TOKENS, PAGE, PARTS,
        )  # fmt: skip
        tl.store(chosen + place, e * 0 + 1, mask=seeks & (place >= 0))
        tl.atomic_max(place_of + page, -1 - e, mask=seeks & (place < 0), sem="relaxed")
    tl.debug_barrier()
    missing = tl.full([], 0, tl.int32)
    sought = tl.full([], 0, tl.int32)
    for first in range(0, entries, BLOCK):
        e = first + lane
        at, page, part, ring, seeks, place = _entries(
            e, head, table, his, held, positions, starts, place_of, entries, width, first_row, ring_pages, T,
            HEADS, KVP, RANK, BLOCK_TOKENS, PAGE, PARTS,
        )  # fmt: skip
        claims = seeks & (place == -1 - e)
        rank = missing + tl.cumsum(claims.to(tl.int32), 0) - 1
        tl.store(miss_blocks + rank, page * HEADS + head, mask=claims)
        missing += tl.sum(claims.to(tl.int32), 0)
        sought += tl.sum(seeks.to(tl.int32), 0)
    tl.store(miss_counts + head, missing)
    tl.atomic_add(counted, (sought - missing).to(tl.int64), sem="relaxed")
    tl.atomic_add(counted + 1, missing.to(tl.int64), sem="relaxed")
    turn = tl.load(turns + head)
    known = order + (turn * HEADS + head) * places
    renewed = order + ((1 - turn) * HEADS + head) * places
    tl.debug_barrier()
    found = 0
    others = 0
    lane_s = tl.arange(0, BLOCK_S)
    for first in range(0, places, BLOCK_S):
        i = first + lane_s
        place = tl.load(known + i, mask=i < places, other=0)
        hit = (i < places) & (tl.load(chosen + place, mask=i < places, other=0, cache_modifier=".cg") != 0)
        tl.store(chosen + place, i * 0, mask=hit)
        stays = (i < places) & (hit == 0)
        # One scan counts both.
        until = tl.cumsum(stays.to(tl.int64) + (hit.to(tl.int64) << 32), 0)
        nth = others + (until & 0xFFFFFFFF).to(tl.int32) - 1  # among those that stay
        nth_hit = found + (until >> 32).to(tl.int32) - 1
        victim = stays & (nth < missing)
        if not GUESS:
            to = tl.where(hit, places - 1 - missing - nth_hit, tl.where(victim, places - 1 - nth, nth - missing))
            tl.store(renewed + to, place, mask=i < places)
        page = tl.load(miss_blocks + nth, mask=victim, other=0, cache_modifier=".cg") // HEADS
        old = tl.load(page_of + place, mask=victim, other=-1)
        lost = victim & (old >= 0)
        lost = lost & (tl.load(place_of + old, mask=lost, other=-1, cache_modifier=".cg") == place)
        tl.store(place_of + old, i * 0 + _NOWHERE, mask=lost)
        tl.store(place_of + page, place, mask=victim)
        tl.store(page_of + place, page, mask=victim)
        tl.store(miss_places + nth, begin + place, mask=victim)
        others += tl.sum(stays.to(tl.int32), 0)
        found += tl.sum(hit.to(tl.int32), 0)
    tl.debug_barrier()
    if not GUESS:
        tl.store(turns + head, 1 - turn)
    for first in range(0, entries, BLOCK):
        e = first + lane
        at, page, part, ring, seeks, place = _entries(
            e, head, table, his, held, positions, starts, place_of, entries, width, first_row, ring_pages, T,
            HEADS, KVP, RANK, BLOCK_TOKENS, PAGE, PARTS,
        )  # fmt: skip
        place = tl.where(seeks, begin + place, ring)
        tl.store(table + at, place * APART + part, mask=page >= 0)


def resolve(
    table: torch.Tensor,
    readers: Readers,
    hot: HotBlocks,
    misses: FetchList,
    *,
    kvp: int,
    kvp_rank: int,
    append_block: int,
    page_size: int,
    parts: int = 1,
    apart: int = 1,
) -> None:
    """Replaces the pages that queries read by places on the GPU, and lists the blocks to fetch.

    No size depends on device data, and the host decides nothing. Deterministic.

    Args:
        table: [N, Hkv, width] int32, contiguous: pages of each query, its last local pages last; negative: none.
            Overwritten with the places of their blocks.
        hot: the layer's hot blocks, with at least as many places per KV head as pages fit all tables together.
        misses: written; its counts are incremented.
        parts: parts of a page, which entries name: part j of a page is `page * parts + j`, that of a place becomes
            `place * apart + j`.
    """
    N, heads, width = table.shape
    if not dispatch.on_gpu(table):
        grid = {"kvp": kvp, "kvp_rank": kvp_rank, "append_block": append_block, "page_size": page_size}
        reference(table, readers, hot, misses, parts=parts, apart=apart, **grid)
        return
    assert all(t.is_contiguous() for t in (table, *readers[:4], hot.place_of, hot.page_of, hot.order))
    assert (
        misses.source.stride() == misses.target.stride() == (misses.source.stride(0), 1) and len(misses.source) == heads
    )
    _resolve_kernel[(heads,)](
        table, *readers[:4], hot.place_of, hot.page_of, hot.order, hot.turn, hot.chosen,
        misses.source, misses.target, misses.counts, misses.counted, N * width, width, hot.place_of.shape[1],
        hot.places, hot.begin, misses.source.stride(0), readers.first_row, hot.ring_pages, readers.of_sequence,
        HEADS=heads, KVP=kvp, RANK=kvp_rank, BLOCK_TOKENS=append_block, PAGE=page_size,
        PARTS=parts, APART=apart,
        BLOCK=min(ENTRIES, triton.next_power_of_2(N * width)),
        BLOCK_S=min(PLACES, triton.next_power_of_2(hot.places)), GUESS=misses.guess, num_warps=8, **overlapped(table),
    )  # fmt: skip
