"""Always-read pages and candidate pages of each query of a step.

A rank's pages are, in order: sink, candidates, local window (the unfinished page last). Sink and window are global: a
rank reads the pages that hold some of their tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention.placement import local_length

BLOCK = 128


@triton.jit
def _block_ranges_kernel(
    positions, starts, live, ranges, N, T, sink, local, topk, candidates, from_tokens,
    KVP: tl.constexpr, RANK: tl.constexpr, BLOCK_TOKENS: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    position = tl.load(positions + n, mask=inside, other=0)
    committed = tl.load(positions + n // T * T, mask=inside, other=0)
    start = tl.load(starts + n, mask=inside, other=0)
    some = tl.load(live + n, mask=inside, other=0) != 0
    length = tl.where(some, local_length(position + 1, start, KVP, RANK, BLOCK_TOKENS), 0)
    num_pages = (length + PAGE - 1) // PAGE
    # a tensor, as `local_length` expects
    sinks = local_length(position * 0 + sink * PAGE, start, KVP, RANK, BLOCK_TOKENS)
    window = tl.maximum(position // PAGE - local + 1, 0) * PAGE
    begin = tl.minimum((sinks + PAGE - 1) // PAGE, num_pages)
    end = tl.minimum(
        local_length(window, start, KVP, RANK, BLOCK_TOKENS), local_length(committed, start, KVP, RANK, BLOCK_TOKENS)
    ) // PAGE  # fmt: skip
    end = tl.minimum(tl.maximum(end, begin), num_pages)
    short = position + 1 < from_tokens
    begin = tl.where(short, num_pages, begin)
    end = tl.where(short, num_pages, end)
    to = ranges + n
    tl.store(to, begin.to(tl.int32), mask=inside)
    tl.store(to + N, end.to(tl.int32), mask=inside)
    tl.store(to + 2 * N, num_pages.to(tl.int32), mask=inside)
    num_skipped = (end - begin) * PARTS - tl.minimum((end - begin) * PARTS, topk)
    if PARTS > 1:  # in a table of all always-read and candidate pages
        num_candidates = tl.minimum(end - begin, candidates)
        num_skipped = (end - begin) * PARTS - tl.minimum(num_candidates * PARTS, topk)
        tl.store(to + 4 * N, (begin * PARTS).to(tl.int32), mask=inside)
        tl.store(to + 5 * N, ((begin + num_candidates) * PARTS).to(tl.int32), mask=inside)
        tl.store(to + 6 * N, ((num_pages - (end - begin) + num_candidates) * PARTS).to(tl.int32), mask=inside)
        PART: tl.constexpr = PAGE // PARTS
        tl.store(to + 7 * N, ((length + PART - 1) // PART).to(tl.int32), mask=inside)
    tl.store(to + 3 * N, (length - num_skipped * (PAGE // PARTS)).to(tl.int32), mask=inside)


def block_ranges(
    positions: torch.Tensor,
    starts: torch.Tensor,
    live: torch.Tensor,
    queries: int,
    *,
    kvp: int,
    kvp_rank: int,
    append_block: int,
    page_size: int,
    sink_blocks: int,
    local_blocks: int,
    topk: int,
    from_tokens: int,
    parts: int = 1,
    candidates: int = 0,
) -> tuple[torch.Tensor, ...]:
    """Computes `HelixLayout.block_ranges` for all queries of a step, in one launch; empty ranges if not `live`.

    Args:
        positions, starts: int64 [N], contiguous, `queries` per sequence, the first at the sequence's committed length.
        live: bool [N], contiguous.

    Returns:
        first, last, pages, hi; with `parts` also part_first, part_last, part_pages, used: int32 [N].
    """
    out = torch.empty(8 if parts > 1 else 4, len(positions), dtype=torch.int32, device=positions.device)
    assert positions.is_contiguous() and starts.is_contiguous() and live.is_contiguous()
    _block_ranges_kernel[(triton.cdiv(len(positions), BLOCK),)](
        positions, starts, live.view(torch.uint8), out, len(positions), queries,
        sink_blocks, local_blocks, topk, candidates, from_tokens,
        KVP=kvp, RANK=kvp_rank, BLOCK_TOKENS=append_block, PAGE=page_size, PARTS=parts, BLOCK=BLOCK, num_warps=1,
    )  # fmt: skip
    return out.unbind()
