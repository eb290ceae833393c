"""Write-back of pages full of committed tokens from their rings to the host, before a later page replaces them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.attention.placement import local_length
from kernels.hot_blocks import NOWHERE
from kernels.overlap import overlapped, start_successor, wait_for_predecessor
from kernels.tier.copy_blocks import fence_system
from kernels.tier.reference import write_back as reference

PIECE = 8192  # most words of a block that are copied at once

_NOWHERE = tl.constexpr(NOWHERE)


@triton.jit
def _write_back_kernel(
    placed, kept_on_host, place_of, tables, starts, before, after, tables_n, placed_layer, host_layer, pages, MOST,
    first_row, ring_pages, HEADS: tl.constexpr, KVP: tl.constexpr, RANK: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    PAGE: tl.constexpr, WORDS: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    start_successor(PDL)
    n = tl.program_id(0) // MOST
    head = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    start = tl.load(starts + n)
    full = local_length(tl.load(before + n), start, KVP, RANK, BLOCK_TOKENS) // PAGE
    stop = local_length(tl.load(after + n), start, KVP, RANK, BLOCK_TOKENS) // PAGE
    column = full + tl.program_id(0) % MOST
    if column < stop:
        page = tl.load(tables + n.to(tl.int64) * tables_n + column).to(tl.int64)
        in_ring = ((first_row + n) * ring_pages + column % ring_pages) * HEADS + head
        source = placed + layer * placed_layer + in_ring * WORDS
        target = kept_on_host + layer * host_layer + (page * HEADS + head) * WORDS
        for begin in range(0, WORDS, PIECE):
            w = begin + tl.arange(0, PIECE)
            tl.store(target + w, tl.load(source + w, mask=w < WORDS, other=0), mask=w < WORDS)
        tl.store(place_of + (layer * HEADS + head) * pages + page, _NOWHERE)
        fence_system(PDL)


def write_back(
    places: torch.Tensor,
    host: torch.Tensor,
    place_of: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    most: int,
    first_row: int,
    ring_pages: int,
    *,
    kvp: int,
    kvp_rank: int,
    append_block: int,
    page_size: int,
) -> None:
    """Writes the pages that sequences have newly filled on this rank to the host, in all layers, in one launch.

    A hot place that holds an older copy of such a page is forgotten.

    Args:
        places: [layers, places, ...], each layer contiguous; rings come first.
        host: [layers, pages * Hkv, ...], mapped; each layer contiguous.
        place_of: [layers, Hkv, pages] int32, contiguous, see `HotBlocks`.
        tables: [n, max_pages] int32, rows contiguous: pages on the host.
        starts: [n] int64, contiguous, the kvp rank of each sequence's first block.
        before, after: [n] int64, contiguous, committed tokens of each sequence, over all ranks.
        most: upper bound of the pages that a sequence fills on a rank in between.
        first_row, ring_pages: see `kernels.tier.resolve.resolve`.
    """
    grid = {"kvp": kvp, "kvp_rank": kvp_rank, "append_block": append_block, "page_size": page_size}
    if not dispatch.on_gpu(places):
        reference(places, host, place_of, tables, starts, before, after, first_row, ring_pages, **grid)
        return
    layers, heads, pages = place_of.shape
    from_words, to_words = (t.view(*t.shape[:2], -1).view(torch.int32) for t in (places, host))
    words = from_words.shape[2]
    assert from_words.stride()[1:] == to_words.stride()[1:] == (words, 1)
    assert tables.stride(1) == 1 and all(t.is_contiguous() for t in (place_of, starts, before, after))
    _write_back_kernel[len(tables) * most, heads, layers](
        from_words, to_words, place_of, tables, starts, before, after, tables.stride(0), from_words.stride(0),
        to_words.stride(0), pages, most, first_row, ring_pages, HEADS=heads, KVP=kvp, RANK=kvp_rank,
        BLOCK_TOKENS=append_block, PAGE=page_size, WORDS=words, PIECE=min(PIECE, triton.next_power_of_2(words)),
        num_warps=8, **overlapped(places),
    )  # fmt: skip
