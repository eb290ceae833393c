"""Stream-K split of a batch's keys into equal runs, one per program, and the merge of partial states.

The key tiles of all (sequence, KV head, query tile) items form one line, cut into equal runs. A run that covers a whole
item writes the result; otherwise it writes a partial state to a workspace slot, and a second kernel merges them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from kernels.attention.paged_tiles import with_sink
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor

SLICE = 32  # min head-dim slice per merge program
MERGE_PROGRAMS = 512  # beyond this, each merge program takes a larger slice
MERGE_BYTES = 8192  # bytes of partial states that a merge warp holds at once
LARGE = 4096  # elements of a partial state from which its bytes matter


@triton.jit
def schedule(
    lo, hi, lo_b, lo_t, hi_b, hi_t, B, T: tl.constexpr, ITEMS: tl.constexpr, programs,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Computes each sequence's key range, and where its key tiles lie in the line of all items' tiles.

    ITEMS is the number of items per sequence. Returns starts, stops, tiles, ends [BLOCK_B] and the run length in tiles;
    each item of sequence i has tiles[i] tiles, and its last item ends at ends[i].
    """
    seq = tl.arange(0, BLOCK_B)
    token = tl.arange(0, triton.next_power_of_2(T))
    real = (seq < B)[:, None] & (token < T)[None, :]
    los = tl.load(lo + seq[:, None] * lo_b + token[None, :] * lo_t, mask=real, other=0)
    his = tl.load(hi + seq[:, None] * hi_b + token[None, :] * hi_t, mask=real, other=0)
    stops = tl.max(tl.where(los < his, his, 0), 1)
    starts = tl.min(tl.where(los < his, los, stops[:, None]), 1)
    # At least one tile, so that sequences without keys get written too.
    tiles = tl.where(seq < B, tl.maximum(tl.cdiv(stops, BLOCK_N) - starts // BLOCK_N, 1), 0)
    ends = tl.cumsum(tiles, 0) * ITEMS
    run = tl.maximum(tl.cdiv(tl.max(ends, 0), programs), 1)
    return starts, stops, tiles, ends, run


@triton.jit
def first_slot(item_begin, run):
    """Returns the workspace slot of an item's first part.

    A program has two slots: one for the item at the start of its run, and one for an item that begins inside the
    run. Only the first program of an item uses the second kind.
    """
    program = item_begin // run
    return 2 * program + (item_begin > program * run).to(tl.int32)


@triton.jit
def item_at(at, starts, stops, tiles, ends, ITEMS: tl.constexpr, BLOCK_B: tl.constexpr):
    """Finds the item that contains tile `at`, in a schedule with ITEMS items per sequence.

    Returns its sequence, index in the sequence, tile range, and the sequence's key range [first, last + 1).
    """
    i = tl.sum((ends <= at).to(tl.int32), 0)
    mine = tl.arange(0, BLOCK_B) == i
    length = tl.sum(tl.where(mine, tiles, 0), 0)
    start = tl.sum(tl.where(mine, starts, 0), 0)
    stop = tl.sum(tl.where(mine, stops, 0), 0)
    offset = at - (tl.sum(tl.where(mine, ends, 0), 0) - length * ITEMS)
    item_begin = at - offset % length
    return i, offset // length, item_begin, item_begin + length, start, stop


@triton.jit
def store_item(
    acc, total, peak, begin, end, item_begin, item_end, run, sinks, out, lse, part, part_lse, inside, live,
    D: tl.constexpr, ROWS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Writes a run's share of an item: the result (`out`, `lse`) if [begin, end) covers the item, else a partial state.

    With SINKS, a result includes a sink per row (score at `sinks`, value zero).
    """
    empty = total == 0.0
    acc /= tl.where(empty, 1.0, total)[:, None]
    log2 = tl.where(empty, float("-inf"), peak + tl.log2(total))
    if (item_begin >= begin) & (item_end <= end):
        if SINKS:
            log2, factor = with_sink(log2, tl.load(sinks, mask=live, other=0.0))
            acc *= factor[:, None]
        tl.store(out, acc, mask=inside)
        tl.store(lse, log2 * 0.6931471805599453, mask=live)
    else:
        m = tl.arange(0, acc.shape[0])
        d = tl.arange(0, acc.shape[1])
        slot = tl.where(item_begin >= begin, first_slot(item_begin, run), 2 * tl.program_id(0))
        here = slot.to(tl.int64) * ROWS + m
        tl.store(part + here[:, None] * D + d[None, :], acc, mask=(m < ROWS)[:, None] & (d < D)[None, :])
        tl.store(part_lse + here, log2, mask=m < ROWS)


@triton.jit
def item_of(
    i, t, q_head, tiles, ends, T: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Returns the first tile and number of tiles of the item that holds a query, and the query's row in it."""
    tiles_m: tl.constexpr = (T * GROUP + BLOCK_M - 1) // BLOCK_M
    row = t * GROUP + q_head % GROUP
    item = q_head // GROUP * tiles_m + row // BLOCK_M
    mine = tl.arange(0, BLOCK_B) == i
    length = tl.sum(tl.where(mine, tiles, 0), 0)
    return tl.sum(tl.where(mine, ends, 0), 0) - (HEADS * tiles_m - item) * length, length, row % BLOCK_M


@triton.jit
def merge_states_slice(
    part, part_lse, sink, item_begin, run, first, parts, row, d,
    D: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, SLICE: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merges columns d [SLICE] of an item's row from its parts (and a sink, with SINKS); also its base-2 LSE."""
    acc = tl.zeros([SLICE], tl.float32)
    total = 0.0
    peak = -1.0e38
    for begin in range(0, parts, PARTS):
        p = begin + tl.arange(0, PARTS)
        slot = tl.where(p == 0, first_slot(item_begin, run), 2 * (first + p))
        here = slot.to(tl.int64) * ROWS + row
        logs = tl.load(part_lse + here, mask=p < parts, other=float("-inf"))
        inside = (p < parts)[:, None] & (d < D)[None, :]
        values = tl.load(part + here[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
        new_peak = tl.maximum(peak, tl.max(logs, 0))
        weights = tl.exp2(logs - new_peak)
        rescale = tl.exp2(peak - new_peak)
        acc = acc * rescale + tl.sum(values * weights[:, None], 0)
        total = total * rescale + tl.sum(weights, 0)
        peak = new_peak
    empty = total == 0.0
    acc /= tl.where(empty, 1.0, total)
    log2 = tl.where(empty, float("-inf"), peak + tl.log2(total))
    if SINKS:
        log2, factor = with_sink(log2, tl.load(sink))
        acc *= factor
    return acc, log2


@triton.jit
def load_merged_states(
    out, lse, part, part_lse, sink, item_begin, run, first, parts, row, d, live,
    D: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, SLICE: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Loads columns d [SLICE] of a query's result from `out`, or merges its parts; also its natural-log LSE.

    Zeros and -inf if the query is not `live`.
    """
    if parts > 1:
        values, log2 = merge_states_slice(
            part, part_lse, sink, item_begin, run, first, parts, row, d, D, ROWS, PARTS, SLICE, SINKS
        )
        log = log2 * 0.6931471805599453
    else:  # a single program has written the result
        values = tl.load(out + d, mask=live & (d < D), other=0.0).to(tl.float32)
        log = tl.load(lse, mask=live, other=float("-inf"))
    return values, log


@triton.jit
def _merge_splits_kernel(
    lo, hi, sinks, out, lse, part, part_lse,
    lo_b, lo_t, hi_b, hi_t, out_b, out_t, out_h, lse_b, lse_t, lse_h,
    B, programs, T: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, SLICE: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # The bounds are older than the predecessor: compute the schedule while it runs.
    tiles_m: tl.constexpr = (T * GROUP + BLOCK_M - 1) // BLOCK_M
    _, _, tiles, ends, run = schedule(lo, hi, lo_b, lo_t, hi_b, hi_t, B, T, HEADS * tiles_m, programs, BLOCK_B, BLOCK_N)
    q_head = tl.program_id(0) % (HEADS * GROUP)
    t = tl.program_id(0) // (HEADS * GROUP) % T
    i = tl.program_id(0) // (HEADS * GROUP * T)
    item_begin, length, row = item_of(i, t, q_head, tiles, ends, T, HEADS, GROUP, BLOCK_B, BLOCK_M)
    first = item_begin // run
    parts = (item_begin + length - 1) // run - first + 1
    if parts >= 0:  # always true; keeps the wait after the schedule
        wait_for_predecessor(PDL)
    start_successor(PDL)
    if parts > 1:  # otherwise a single program has written the result
        d = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
        acc, log2 = merge_states_slice(
            part, part_lse, sinks + q_head if SINKS else sinks, item_begin, run, first, parts, row, d,
            D, ROWS, PARTS, SLICE, SINKS,
        )  # fmt: skip
        b = i.to(tl.int64)
        tl.store(out + b * out_b + t * out_t + q_head * out_h + d, acc, mask=d < D)
        if tl.program_id(1) == 0:
            tl.store(lse + b * lse_b + t * lse_t + q_head * lse_h, log2 * 0.6931471805599453)


@cache
def workspace(
    device: torch.device, dtype: torch.dtype, programs: int, rows: int, D: int, lane: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates partial states and their base-2 LSEs; cached, shared by all launches on a stream with this `lane`.

    Large parts have the output's dtype to save bytes; small ones are fp32, which merges faster.
    """
    slots = 2 * programs
    return (
        torch.empty(slots, rows, D, dtype=dtype if rows * D >= LARGE else torch.float32, device=device),
        torch.empty(slots, rows, dtype=torch.float32, device=device),
    )


@dataclass(frozen=True)
class PartialAttention:
    """Attention state over one rank's keys.

    Attributes:
        out: [..., Hq, D] for queries [N] or [B, T].
        lse: [..., Hq] fp32, natural log.
    """

    out: torch.Tensor
    lse: torch.Tensor

    def merge_states(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Merges the parts; returns output [N, Hq, D] and LSE [N, Hq] over the rank's keys."""
        return self.out.flatten(0, -3), self.lse.flatten(0, -2)


@dataclass(frozen=True)
class UnmergedAttention(PartialAttention):
    """Attention before the merge: results of items that one program computed, partial states of all others.

    Attributes:
        out, lse, lo, hi, sinks: see `flash_decode`; queries [B, T].
        part, part_lse: the workspace, valid until the next attention launch with the same lane.
        programs: runs in the schedule.
        heads: KV heads in the schedule.
        block_m, block_n: rows and keys of a tile.
    """

    lo: torch.Tensor
    hi: torch.Tensor
    sinks: torch.Tensor | None
    part: torch.Tensor
    part_lse: torch.Tensor
    programs: int
    heads: int
    block_m: int
    block_n: int

    @property
    def items(self) -> int:
        B, T, Hq, _ = self.out.shape
        return B * self.heads * triton.cdiv(T * (Hq // self.heads), self.block_m)

    def merge_states(self) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, part = self.out, self.lse, self.part
        B, T, Hq, D = out.shape
        parts, width, warps = merge_tile(B * T * Hq, D, part.itemsize, self.items, self.programs)
        _merge_splits_kernel[B * T * Hq, triton.cdiv(D, width)](
            self.lo, self.hi, self.sinks, out, lse, part, self.part_lse,
            *self.lo.stride(), *self.hi.stride(), *out.stride()[:3], *lse.stride(), B, self.programs,
            T=T, HEADS=self.heads, GROUP=Hq // self.heads, D=D, BLOCK_B=triton.next_power_of_2(B),
            BLOCK_M=self.block_m, BLOCK_N=self.block_n, ROWS=part.shape[1], PARTS=parts, SLICE=width,
            SINKS=self.sinks is not None, num_warps=warps, **pdl_options(out),
        )  # fmt: skip
        return super().merge_states()


@cache
def merge_tile(rows: int, D: int, itemsize: int, items: int, programs: int) -> tuple[int, int, int]:
    """Returns a merge program's parts per iteration, head-dim slice, and number of warps."""
    numbers = MERGE_BYTES // itemsize
    # MLA rows are faster with longer slices and a second round.
    longer = 2 if D > 256 else 1
    # For equal lengths; a long sequence among short ones has more parts, and takes several rounds.
    expected = min(512, triton.next_power_of_2(triton.cdiv(programs, items) + 1)) // longer
    width = SLICE
    while width < D and rows * triton.cdiv(D, width) > MERGE_PROGRAMS and expected * width < longer * numbers:
        width *= 2
    parts = max(expected, min(16, numbers // width))
    return parts, width, max(1, min(8 if D > 256 else 4, parts * width // numbers))
