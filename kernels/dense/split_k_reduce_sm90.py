"""Tree reduction among split-K programs on Hopper.

Of two programs that meet at a node, the second adds the sum that the first left in a workspace; an atomic exchange
decides which is second. No program waits, and sums do not depend on the order of arrival.
"""

from __future__ import annotations

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LEVELS = gl.constexpr(4)  # of the tree
EMPTY = gl.constexpr(-1)  # empty word of the workspace: as floats, NaNs that no sum yields


@gluon.jit
def pairs(y, LAYOUT: gl.constexpr):
    """Splits [rows, n] into even rows and odd rows, [rows / 2, n] each."""
    y = gl.permute(gl.reshape(y, [y.shape[0] // 2, 2, y.shape[1]]), (0, 2, 1))
    even, odd = gl.split(y)
    return gl.convert_layout(even, LAYOUT), gl.convert_layout(odd, LAYOUT)


@gluon.jit
def send_pairs(
    even, odd, live, piece, w, ll_buffers, peers, tag, rank, dtype: gl.constexpr,
    RANKS: gl.constexpr, PIECES: gl.constexpr, SIZE: gl.constexpr, TWO_SHOT: gl.constexpr,
):  # fmt: skip
    """Sends two neighboring sums as word `w` of `piece` to the LL buffers of `kernels.peers.all_reduce_norm`."""
    low = even.to(dtype).to(gl.int16, bitcast=True).to(gl.int64) & 0xFFFF
    high = odd.to(dtype).to(gl.int16, bitcast=True).to(gl.int64) & 0xFFFF
    word = (tag << 32) | (high << 16) | low
    at = (((tag & 1) * RANKS + rank) * PIECES + piece) * SIZE + w
    if TWO_SHOT:
        gl.store(ll_buffers.to(gl.pointer_type(gl.int64)) + at, word, mask=live)
    else:
        for step in gl.static_range(RANKS):
            to = gl.load(peers + (rank + 1 + step) % RANKS)
            gl.store(to.to(gl.pointer_type(gl.int64)) + at, word, mask=live)


@gluon.jit
def _word(y, up, TWO: gl.constexpr):
    word = y.to(gl.int32, bitcast=True)
    if TWO:
        word = (up.to(gl.int32, bitcast=True).to(gl.int64) << 32) | (word.to(gl.int64) & 0xFFFFFFFF)
    return word


@gluon.jit
def _float(word):
    return word.to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def reduce_node(at, y, up, live, TWO: gl.constexpr):
    """Leaves sums at a tree node, or adds those already there; returns them, live where they were added."""
    found = gl.atomic_xchg(at, _word(y, up, TWO), mask=live, sem="relaxed")
    live = live & (found != EMPTY)
    gl.store(at, gl.full_like(found, EMPTY), mask=live)
    y += _float(found)
    if TWO:
        up += _float(found >> 32)
    return y, up, live


@gluon.jit
def split_k_reduce(y, up, live, words, tile, part, SPLIT: gl.constexpr, TWO: gl.constexpr):
    """Sums [rows, n] over the (at most 16) SPLIT programs of a tile; live as in `reduce_node`."""
    i = gl.arange(0, y.shape[0], layout=gl.SliceLayout(1, y.type.layout))
    n = gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, y.type.layout))
    cell = words + i[:, None] + (n * y.shape[0])[None, :]
    node = tile * (SPLIT - 1)  # first node of a level of this tile's tree
    for level in gl.static_range(4):
        if ((SPLIT - 1) >> level) > 0:
            at = cell + (node + (part >> (level + 1))) * (y.shape[0] * y.shape[1])
            # The last of an odd number has no partner.
            if ((SPLIT - 1) >> level) % 2 == 1 or (part >> level) < ((SPLIT - 1) >> level):
                y, up, live = reduce_node(at, y, up, live, TWO)
            node += (((SPLIT - 1) >> level) + 1) // 2
    return y, up, live


@gluon.jit
def share_of(tiles, steps, program, programs):
    """Returns this program's run of the steps of all tiles, and the numbers of active programs and of steps.

    Few tiles are split evenly, each among as many programs as the tree has leaves; with more tiles, a run is longer
    than half a tile.
    """
    total = tiles * steps
    active = gl.minimum(programs, total)
    if tiles * 2 <= programs:
        active = tiles * gl.minimum(gl.minimum(programs // gl.maximum(tiles, 1), steps), 1 << LEVELS)
    begin = gl.minimum(program, active) * total // gl.maximum(active, 1)
    end = gl.minimum(program + 1, active) * total // gl.maximum(active, 1)
    return begin, end, active, total


@gluon.jit
def sharers(tile, steps, active, total):
    """Returns the first program with steps of a tile, and the number of such programs."""
    begin = ((tile * steps + 1) * active - 1) // total
    return begin, ((tile + 1) * steps * active - 1) // total - begin + 1


@gluon.jit
def reduce_sharers(y, up, live, words, offset, tile, steps, active, total, GATE: gl.constexpr):
    """Adds other programs' sums of a tile; elements stay live in the program that has their total."""
    begin, count = sharers(tile, steps, active, total)
    me = gl.program_id(0) - begin
    for level in gl.static_range(LEVELS):
        if (me ^ 1) < count:
            right = begin + ((me | 1) << level)
            at = words + right.to(gl.int64) * offset.shape[0] * offset.shape[1] + offset
            y, up, live = reduce_node(at, y, up, live, GATE)
        me = me >> 1
        count = (count + 1) >> 1
    return y, up, live


@cache
def workspace(device: torch.device, words: int) -> torch.Tensor:
    """Allocates the workspace, whose words are empty between launches; cached, shared by launches on one stream."""
    return torch.full((words,), EMPTY.value, dtype=torch.int64, device=device)
