"""Sorts pairs by local expert: a counting sort in two launches.

The first counts pairs per expert. In the second, programs add up the counts before an expert, and each pair takes its
expert's next index, by arrival. Results do not depend on that order: a pair is a separate MMA column.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.overlap import pdl_options, start_successor, wait_for_predecessor

BLOCK = 1024  # pairs per program


class PairOrder(NamedTuple):
    """Pairs sorted by local expert.

    Attributes:
        order: [P] int32, pairs; undefined past the local experts'.
        inverse_order: [P] int32, index in `order` of each pair of a local expert.
        bounds: [E + 1] int32, start of each expert's pairs, and the end of all.
        block_ends: [E] int32, cumulative number of blocks per expert.
    """

    order: torch.Tensor
    inverse_order: torch.Tensor
    bounds: torch.Tensor
    block_ends: torch.Tensor


@triton.jit
def _local(ids, p, P, first, E):
    """Loads the local experts of pairs `p`; E for other ranks' and past the last pair."""
    expert = tl.load(ids + p, mask=p < P, other=first - 1) - first
    return tl.where((expert >= 0) & (expert < E), expert, E)


@triton.jit(do_not_specialize=["P", "first", "E"])
def _count_pairs_kernel(ids, counts, P, first, E, BLOCK: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr):
    wait_for_predecessor(PDL)
    start_successor(PDL)
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.histogram(_local(ids, p, P, first, E), BINS)
    e = tl.arange(0, BINS)
    tl.atomic_add(counts + e, found, mask=(found > 0) & (e < E), sem="relaxed")


@triton.jit(do_not_specialize=["P", "first", "E", "each"])
def _order_pairs_kernel(
    ids, counts, next_index, order, inverse_order, bounds, block_ends, P, first, E, each,
    BLOCK: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = _local(ids, p, P, first, E)  # older than the predecessor
    wait_for_predecessor(PDL)
    start_successor(PDL)
    e = tl.arange(0, BINS)
    count = tl.load(counts + e, mask=e < E, other=0)
    end = tl.cumsum(count, 0)
    if tl.program_id(0) == 0:
        tl.store(bounds + e + 1, end, mask=e < E)
        tl.store(bounds, 0)
        tl.store(block_ends + e, tl.cumsum((count + each - 1) // each, 0), mask=e < E)
    local = expert < E
    begin = tl.gather(end - count, expert, 0)
    index = begin + tl.atomic_add(next_index + expert, 1, mask=local, sem="relaxed")
    tl.store(order + index, p, mask=local)
    tl.store(inverse_order + p, index, mask=local)


def pair_order(ids: torch.Tensor, first: int, E: int, each: int) -> PairOrder:
    """Sorts pairs by local expert; pairs of one expert are in any order.

    Args:
        ids: [N, k] int32, contiguous, over all ranks; skips those outside [first, first + E).
        each: pairs per block.
    """
    P = ids.numel()

    def empty(count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int32, device=ids.device)

    found = PairOrder(empty(P), empty(P), empty(E + 1), empty(E))
    counts = torch.zeros(2, E, dtype=torch.int32, device=ids.device)
    shape = dict(BLOCK=BLOCK, BINS=triton.next_power_of_2(E + 1), num_warps=8, **pdl_options(ids))
    grid = (max(1, triton.cdiv(P, BLOCK)),)
    _count_pairs_kernel[grid](ids, counts[0], P, first, E, **shape)
    _order_pairs_kernel[grid](ids, *counts, *found, P, first, E, each, **shape)
    return found
