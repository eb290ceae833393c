"""Always-read local pages and candidate pages of each query of a step.

A rank's pages are, in order, those of the sink, candidates, and those of the local window, the unfinished one last.
Sink and window are global: a rank reads the pages that hold some of their tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention.placement import local_length

BLOCK = 128


@triton.jit
def _block_ranges_kernel(
    positions, starts, live, first, last, pages, hi, N, T, sink, local, topk, from_tokens,
    KVP: tl.constexpr, RANK: tl.constexpr, BLOCK_TOKENS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    position = tl.load(positions + n, mask=inside, other=0)
    committed = tl.load(positions + n // T * T, mask=inside, other=0)
    start = tl.load(starts + n, mask=inside, other=0)
    some = tl.load(live + n, mask=inside, other=0) != 0
    length = tl.where(some, local_length(position + 1, start, KVP, RANK, BLOCK_TOKENS), 0)
    held = (length + PAGE - 1) // PAGE
    # Tokens of every query's sink, as the tensor that `local_length` expects.
    sinks = local_length(position * 0 + sink * PAGE, start, KVP, RANK, BLOCK_TOKENS)
    window = tl.maximum(position // PAGE - local + 1, 0) * PAGE
    begin = tl.minimum((sinks + PAGE - 1) // PAGE, held)
    end = tl.minimum(
        local_length(window, start, KVP, RANK, BLOCK_TOKENS), local_length(committed, start, KVP, RANK, BLOCK_TOKENS)
    ) // PAGE  # fmt: skip
    end = tl.minimum(tl.maximum(end, begin), held)
    short = position + 1 < from_tokens
    begin = tl.where(short, held, begin)
    end = tl.where(short, held, end)
    chosen = tl.minimum(end - begin, topk)
    tl.store(first + n, begin.to(tl.int32), mask=inside)
    tl.store(last + n, end.to(tl.int32), mask=inside)
    tl.store(pages + n, held.to(tl.int32), mask=inside)
    tl.store(hi + n, (length - (end - begin - chosen) * PAGE).to(tl.int32), mask=inside)


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes `HelixLayout.block_ranges` for all queries of a step, in one launch; empty ranges if not `live`.

    Args:
        positions, starts: int64 [N], contiguous, `queries` per sequence, the first at the sequence's committed length.
        live: bool [N], contiguous.

    Returns:
        first, last, pages, hi: int32 [N].
    """
    out = tuple(torch.empty(len(positions), dtype=torch.int32, device=positions.device) for _ in range(4))
    assert positions.is_contiguous() and starts.is_contiguous() and live.is_contiguous()
    _block_ranges_kernel[(triton.cdiv(len(positions), BLOCK),)](
        positions, starts, live.view(torch.uint8), *out, len(positions), queries,
        sink_blocks, local_blocks, topk, from_tokens,
        KVP=kvp, RANK=kvp_rank, BLOCK_TOKENS=append_block, PAGE=page_size, BLOCK=BLOCK, num_warps=1,
    )  # fmt: skip
    first, last, pages, hi = out
    return first, last, pages, hi
