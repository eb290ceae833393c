"""Split-KV for prefill: several programs share the keys of a tile of rows when too few tiles would leave the GPU idle.

A short chunk has few tiles of rows, however many keys it reads. `kernels.attention.merge_states` merges the results.
The host chooses the split from sizes alone, so no launch waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import triton
import triton.language as tl

from kernels.attention.merge_states import merge_states
from kernels.overlap import sm_count

# Overheads per program, in key tiles: each is 1-2 us on an H200.
START = 3  # start and end
PART = 2  # store and merge a partial state
MERGE = 3  # launch the merge
ROUNDS = 8  # max waves: beyond, tiles of rows fill the GPU unsplit, and partial states take much memory


@triton.jit
def tiles_of_split(first, last, split, splits):
    """Returns the key tiles of one of the `splits` programs that share tiles first..last-1."""
    run = (last - first + splits - 1) // splits
    begin = tl.minimum(first + split * run, last)
    return begin, tl.minimum(begin + run, last)


@triton.jit
def tile_of_segment(cu_q, segments, tile, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Finds the segment of a tile of rows, the tile's index in it, and the segment's first token and length.

    Tiles are numbered across segments, so the grid is bounded by the total number of rows, not by segments times the
    longest. Tiles past the last segment have no tokens. Without `segments`, each segment has one tile.
    """
    segment = tile * 0
    before = tile * 0  # tiles of the preceding segments
    counted = tile * 0
    for first in range(0, segments, 64):
        s = first + tl.arange(0, 64)
        begin = tl.load(cu_q + s, mask=s < segments, other=0)
        end = tl.load(cu_q + s + 1, mask=s < segments, other=0)
        ends = counted + tl.cumsum(((end - begin) * GROUP + BLOCK_M - 1) // BLOCK_M, 0)
        segment += tl.sum((ends <= tile).to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(ends <= tile, ends, 0), 0))
        counted = tl.max(ends, 0)
    return locate_tile(cu_q, segments, tile, segment, before)


@triton.jit
def locate_tile(cu_q, segments, tile, segment, before):
    """Finishes `tile_of_segment`, given the segment and the number of tiles in front of it."""
    if segments == 0:
        segment = tile
        before = tile
    start = tile * 0
    length = tile * 0
    if (segment < segments) | (segments == 0):
        start = tl.load(cu_q + segment)
        length = tl.load(cu_q + segment + 1) - start
    return segment, tile - before, start, length


def tiles_of_rows(rows: int, longest: int, segments: int, block: int) -> tuple[int, int]:
    """Returns a grid's tiles of `block` rows, and the segments among which `tile_of_segment` searches.

    Args:
        rows: total over all segments.
        longest: upper bound of a segment's rows.
    """
    if longest <= block:
        return segments, 0
    return min(rows // block + segments, segments * triton.cdiv(longest, block)), segments


@lru_cache
def split_count(items: int, tiles: int, max_programs: int) -> int:
    """Chooses how many programs share the keys of each tile of rows, for the least time.

    Args:
        items: tiles of rows, at least one.
        tiles: key tiles per item, an estimate.
        max_programs: programs that run on the GPU at once.
    """

    def cost(splits: int) -> int:
        rounds, length = -(-items * splits // max_programs), -(-tiles // splits) + START
        return rounds * length if splits == 1 else rounds * (length + PART) + MERGE

    return min(range(1, max(1, min(max_programs, tiles, ROUNDS * max_programs // items)) + 1), key=cost)


def attend_split(
    out: torch.Tensor,
    lse: torch.Tensor,
    tile: dict[str, int],
    heads: int,
    segments: int,
    max_k: int,
    attend: Callable[[torch.Tensor, torch.Tensor, int], None],
) -> None:
    """Runs `attend` with the fastest number of splits, and merges into `out` [N, Hq, D] and `lse` [N, Hq].

    Args:
        heads: KV heads; query heads that share one are rows of the same tile.
        segments: number of segments; tiles do not cross them.
        max_k: keys per row, an upper bound or estimate.
        attend: writes each split's partial state into [splits, N, Hq, D] and [splits, N, Hq].
    """
    max_programs = max(1, 8 // tile["num_warps"]) * sm_count(out.device)  # eight warps fill an SM's registers
    N, Hq, _ = out.shape
    # Each segment may end in a partial tile.
    items = heads * (triton.cdiv(N * Hq // heads, tile["BLOCK_M"]) + segments - 1)
    splits = split_count(max(items, 1), triton.cdiv(max_k, tile["BLOCK_N"]), max_programs)
    if splits == 1:
        attend(out[None], lse[None], 1)
        return
    parts, part_lse = out.new_empty(splits, *out.shape), lse.new_empty(splits, *lse.shape)
    attend(parts, part_lse, splits)
    merge_states(parts, part_lse, out=out, out_lse=lse)
