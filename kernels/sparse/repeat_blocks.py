"""Benchmark selection of blocks: each step keeps a fixed share of the last one's blocks, regardless of scores.

Random weights choose at random, so that a cache of hot blocks would be timed with meaningless hit rates. Here each of
the `topk` entries of a table has its own range of the sequence's blocks, and walks through it. Steps renew the entries
in turn. The choice depends only on the token's position: no state is kept between steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.overlap import overlapped, start_successor, wait_for_predecessor
from kernels.reference.repeat_blocks import SHARES, STRIDE
from kernels.reference.repeat_blocks import repeat_blocks as reference

_SHARES = tl.constexpr(SHARES)
_STRIDE = tl.constexpr(STRIDE)


@triton.jit
def _repeat_blocks_kernel(
    table, block_table, firsts, lasts, positions, table_b, width, topk, renewed, T, HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    start_successor(PDL)
    n = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    begin = tl.load(firsts + n)
    each = (tl.load(lasts + n) - begin) // topk
    if each > 0:
        lane = tl.arange(0, BLOCK_K)
        turns = (tl.load(positions + n) * renewed // _SHARES + topk - 1 - lane) // topk
        column = begin + lane * each + (turns + lane + head) * _STRIDE % each
        page = tl.load(block_table + n // T * table_b + column, mask=lane < topk, other=0)
        tl.store(table + (n * HEADS + head) * width + begin + lane, page, mask=lane < topk)


def repeat_blocks(
    table: torch.Tensor,
    block_table: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    positions: torch.Tensor,
    topk: int,
    repeat: float,
) -> None:
    """Overwrites chosen pages with others, so that consecutive positions have a share `repeat` of them in common.

    Pages ascend and are distinct. A renewed page does not occur again until its whole range has occurred.

    Args:
        table: [N, Hkv, width] int32, contiguous, the result of `kernels.sparse.select_blocks`.
        block_table: [B, max_pages] int32, rows contiguous.
        first, last: [N] int32, contiguous: candidates are `[first, last)` of a row of `block_table`; if they are fewer
            than `topk`, nothing is overwritten.
        positions: [N] int64, contiguous.
        topk: at least 1.
        repeat: share from 0 to 1, an average over steps.
    """
    if not dispatch.on_gpu(table):
        reference(table, block_table, first, last, positions, topk, repeat)
        return
    N, heads, width = table.shape
    assert table.is_contiguous() and block_table.stride(1) == 1
    assert all(t.is_contiguous() for t in (first, last, positions))
    _repeat_blocks_kernel[N, heads](
        table, block_table, first, last, positions, block_table.stride(0), width, topk,
        round((1 - repeat) * topk * SHARES), N // len(block_table), HEADS=heads,
        BLOCK_K=triton.next_power_of_2(topk), num_warps=1, **overlapped(table),
    )  # fmt: skip
