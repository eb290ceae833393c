"""Gluon version of the split-KV schedule in `kernels.attention.split_kv`, for the Hopper decode kernels."""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from kernels.attention.split_kv import first_slot
from kernels.sm90 import add

TILE = gl.constexpr(64)


def block_of(sequences: int) -> int:
    """Returns BLOCK_B, at least 32: the compiler then knows that a reduction over a warp is uniform."""
    return max(32, triton.next_power_of_2(sequences))


@gluon.jit
def schedule_of(
    bounds, TILES_M: gl.constexpr, T: gl.constexpr, BLOCK_B: gl.constexpr, EARLY: gl.constexpr,
    HEADS: gl.constexpr = 1, TILE_N: gl.constexpr = TILE, ALL: gl.constexpr = True,
):  # fmt: skip
    """Computes `kernels.attention.split_kv.schedule` with HEADS items per sequence, and this program's run.

    Also returns [full_from, full_to), the keys that all queries of a sequence read (no mask); not ALL: all queries that
    read any key, and the caller drops what it computes for the others. If EARLY, bounds and block table are older than
    the predecessor, and the caller waits for it after this call.
    """
    lo, hi, lo_b, lo_t, hi_b, hi_t, B = bounds
    if not EARLY:
        gdc_wait()
    seq = gl.arange(0, BLOCK_B, layout=gl.BlockedLayout([BLOCK_B // 32], [32], [gl.num_warps()], [0]))
    none = gl.full_like(seq, 0x7FFFFFFF)
    starts, stops = none, gl.zeros_like(seq)
    full_from, full_to = gl.zeros_like(seq), none
    for token in gl.static_range(T):
        first = gl.load(lo + seq * lo_b + token * lo_t, mask=seq < B, other=0)
        last = gl.load(hi + seq * hi_b + token * hi_t, mask=seq < B, other=0)
        stops = gl.maximum(stops, gl.where(first < last, last, 0))
        starts = gl.minimum(starts, gl.where(first < last, first, none))
        full_from = gl.maximum(full_from, first if ALL else gl.where(first < last, first, 0))
        full_to = gl.minimum(full_to, last if ALL else gl.where(first < last, last, none))
    starts = gl.minimum(starts, stops)
    # At least one tile, so that sequences without keys get written too.
    tiles = gl.where(seq < B, gl.maximum((stops + TILE_N - 1) // TILE_N - starts // TILE_N, 1), 0)
    ends = gl.associative_scan(tiles, 0, add) * HEADS
    total = gl.max(ends, 0)
    runs = gl.num_programs(0) // TILES_M
    run = gl.maximum((total + runs - 1) // runs, 1)
    begin = gl.program_id(0) // TILES_M * run
    end = gl.minimum(begin + run, total)
    return seq, starts, stops, full_from, full_to, tiles, ends, begin, end, run


@gluon.jit
def of(values, seq, i):
    """Returns the value of sequence i, a scalar, from a vector over sequences."""
    return gl.sum(gl.where(seq == i, values, 0), 0)


@gluon.jit
def item_at(at, schedule, HEADS: gl.constexpr = 1):
    """Finds the item that contains tile `at`, with HEADS items per sequence.

    Returns its sequence, index in the sequence, key range, tile range, and this run's tiles of it.
    """
    seq, starts, stops, _, _, tiles, ends, _, end, _ = schedule
    i = gl.sum((ends <= at).to(gl.int32), 0)
    start, stop = of(starts, seq, i), of(stops, seq, i)
    item_end = of(ends, seq, i)
    length = of(tiles, seq, i)
    item_begin = item_end - length * HEADS
    head = 0
    if HEADS > 1:
        head = (at - item_begin) // length
        item_begin += head * length
        item_end = item_begin + length
    first = start // TILE + at - item_begin
    last = first + gl.minimum(end, item_end) - at
    if stop <= start:
        last = first
    return i, head, start, stop, item_begin, item_end, first, last


@gluon.jit
def slot_of(begin, item_begin, run, TILES_M: gl.constexpr):
    """Returns the workspace slot (int64) of this run's part of an item."""
    return gl.where(item_begin >= begin, first_slot(item_begin, run), gl.program_id(0) // TILES_M * 2).to(gl.int64)
