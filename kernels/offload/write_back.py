"""Write-back of full committed pages from their rings to the host, before a later page overwrites them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.attention.placement import local_length
from kernels.offload.copy_blocks import fence_system
from kernels.offload.reference import write_back as reference
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor
from kernels.resident_blocks import NOT_RESIDENT

PIECE = 8192  # max words of a block that are copied at once

_NOT_RESIDENT = tl.constexpr(NOT_RESIDENT)


@triton.jit
def _write_back_kernel(
    gpu_blocks, host_blocks, gpu_block_of, tables, starts, before, after, tables_n, gpu_layer, host_layer, pages,
    MAX_PAGES,
    first_row, ring_pages, HEADS: tl.constexpr, KVP: tl.constexpr, RANK: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    PAGE: tl.constexpr, WORDS: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    start_successor(PDL)
    n = tl.program_id(0) // MAX_PAGES
    head = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    start = tl.load(starts + n)
    full = local_length(tl.load(before + n), start, KVP, RANK, BLOCK_TOKENS) // PAGE
    stop = local_length(tl.load(after + n), start, KVP, RANK, BLOCK_TOKENS) // PAGE
    column = full + tl.program_id(0) % MAX_PAGES
    if column < stop:
        page = tl.load(tables + n.to(tl.int64) * tables_n + column).to(tl.int64)
        ring_block = ((first_row + n) * ring_pages + column % ring_pages) * HEADS + head
        source = gpu_blocks + layer * gpu_layer + ring_block * WORDS
        target = host_blocks + layer * host_layer + (page * HEADS + head) * WORDS
        for begin in range(0, WORDS, PIECE):
            w = begin + tl.arange(0, PIECE)
            tl.store(target + w, tl.load(source + w, mask=w < WORDS, other=0), mask=w < WORDS)
        tl.store(gpu_block_of + (layer * HEADS + head) * pages + page, _NOT_RESIDENT)
        fence_system(PDL)


def write_back(
    gpu_blocks: torch.Tensor,
    host: torch.Tensor,
    gpu_block_of: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    max_pages: int,
    first_row: int,
    ring_pages: int,
    *,
    kvp: int,
    kvp_rank: int,
    append_block: int,
    page_size: int,
) -> None:
    """Writes the pages that sequences newly filled on this rank to the host, for all layers in one launch.

    Drops a resident block that holds an older copy of such a page.

    Args:
        gpu_blocks: [layers, blocks, ...], each layer contiguous; rings come first.
        host: [layers, pages * Hkv, ...], mapped; each layer contiguous.
        gpu_block_of: [layers, Hkv, pages] int32, contiguous, see `ResidentBlocks`.
        tables: [n, max_pages] int32, rows contiguous: pages on the host.
        starts: [n] int64, contiguous, the kvp rank of each sequence's first block.
        before, after: [n] int64, contiguous, committed tokens of each sequence, over all ranks.
        max_pages: upper bound of the pages that a sequence fills on a rank in between.
        first_row, ring_pages: see `kernels.offload.resolve.resolve`.
    """
    grid = {"kvp": kvp, "kvp_rank": kvp_rank, "append_block": append_block, "page_size": page_size}
    if not dispatch.on_gpu(gpu_blocks):
        reference(gpu_blocks, host, gpu_block_of, tables, starts, before, after, first_row, ring_pages, **grid)
        return
    layers, heads, pages = gpu_block_of.shape
    from_words, to_words = (t.view(*t.shape[:2], -1).view(torch.int32) for t in (gpu_blocks, host))
    words = from_words.shape[2]
    assert from_words.stride()[1:] == to_words.stride()[1:] == (words, 1)
    assert tables.stride(1) == 1 and all(t.is_contiguous() for t in (gpu_block_of, starts, before, after))
    _write_back_kernel[len(tables) * max_pages, heads, layers](
        from_words, to_words, gpu_block_of, tables, starts, before, after, tables.stride(0), from_words.stride(0),
        to_words.stride(0), pages, max_pages, first_row, ring_pages, HEADS=heads, KVP=kvp, RANK=kvp_rank,
        BLOCK_TOKENS=append_block, PAGE=page_size, WORDS=words, PIECE=min(PIECE, triton.next_power_of_2(words)),
        num_warps=8, **pdl_options(gpu_blocks),
    )  # fmt: skip
