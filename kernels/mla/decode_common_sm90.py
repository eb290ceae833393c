"""Shared parts of the two Hopper kernels of `kernels.mla.decode`: supported tensors, schedule and slots.

Latents are loaded by the tensor memory accelerator, in tiles of 64 keys and two pieces: the left half of the latents
with the rotated values, and the right half. Runs, parts and merge are those of `kernels.attention.flash_decode`.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from kernels.attention.split_kv import first_slot
from kernels.paged_keys import PagedKeys
from kernels.sm90 import SHARED

TILE = gl.constexpr(64)  # keys per tile


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def schedule_of(bounds, TILES_M: gl.constexpr, T: gl.constexpr, BLOCK_B: gl.constexpr, EARLY: gl.constexpr):
    """Computes `kernels.attention.split_kv.schedule` with one item per sequence, and this program's run of it.

    Also the keys that all queries of a sequence read, which need no mask: [full_from, full_to). If EARLY, bounds and
    block table are older than the predecessor, and the caller waits for it after this call.
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
        full_from = gl.maximum(full_from, first)
        full_to = gl.minimum(full_to, last)
    starts = gl.minimum(starts, stops)
    # At least one tile, so that a sequence without keys is written as well.
    tiles = gl.where(seq < B, gl.maximum((stops + TILE - 1) // TILE - starts // TILE, 1), 0)
    ends = gl.associative_scan(tiles, 0, _sum)
    total = gl.max(ends, 0)
    runs = gl.num_programs(0) // TILES_M
    run = gl.maximum((total + runs - 1) // runs, 1)
    begin = gl.program_id(0) // TILES_M * run
    end = gl.minimum(begin + run, total)
    return seq, starts, stops, full_from, full_to, tiles, ends, begin, end, run


@gluon.jit
def of(values, seq, i):
    return gl.sum(gl.where(seq == i, values, 0), 0)


@gluon.jit
def item_at(at, schedule):
    """Finds the sequence of tile `at` of the row: index, key range, its tiles in the row, and this run's key tiles."""
    seq, starts, stops, _, _, tiles, ends, _, end, _ = schedule
    i = gl.sum((ends <= at).to(gl.int32), 0)
    start, stop = of(starts, seq, i), of(stops, seq, i)
    item_end = of(ends, seq, i)
    item_begin = item_end - of(tiles, seq, i)
    first = start // TILE + at - item_begin
    last = first + gl.minimum(end, item_end) - at
    if stop <= start:
        last = first
    return i, start, stop, item_begin, item_end, first, last


@gluon.jit
def slot_of(begin, item_begin, run, TILES_M: gl.constexpr):
    """Returns the workspace slot of this run's part of an item, int64."""
    return gl.where(item_begin >= begin, first_slot(item_begin, run), gl.program_id(0) // TILES_M * 2).to(gl.int64)


def fits(q: torch.Tensor, keys: PagedKeys) -> bool:
    """Returns whether these kernels support these tensors of `kernels.mla.decode.mla_decode`."""
    planes = (keys.k,) if keys.rope is None else (keys.k, keys.rope)
    return (
        (keys.v.shape[-1], q.shape[3]) == (512, 576)
        and q.dtype in (torch.bfloat16, torch.float16)
        and keys.page_size % TILE.value == 0
        and all(plane.stride(0) % plane.shape[2] == 0 and plane.data_ptr() % 16 == 0 for plane in planes)
        and torch.cuda.get_device_capability(q.device)[0] == 9
    )


def pieces(keys: PagedKeys) -> tuple[int, torch.Tensor | TensorDescriptor, TensorDescriptor]:
    """Returns a page's stride in slots, and what half of a tile's latents and its rotated values are loaded from.

    Descriptors, of the same slots; latents in e4m3: their words, and a descriptor of the plane of rotated values.
    """
    if keys.rope is not None:
        page_rows, slots = _rows(keys.rope)
        return page_rows, keys.k.view(torch.int32), _tiles(slots, slots.shape[1])
    page_rows, slots = _rows(keys.k)
    latent = keys.v.shape[-1]
    return page_rows, _tiles(slots, latent // 2), _tiles(slots, slots.shape[1] - latent)


def _rows(plane: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Returns a page's stride in slots, and the slots as rows of one matrix, including the gaps between pages."""
    width = plane.shape[2]
    page_rows = plane.stride(0) // width
    return page_rows, plane.as_strided(((plane.shape[0] - 1) * page_rows + plane.shape[1], width), (width, 1))


def _tiles(slots: torch.Tensor, columns: int) -> TensorDescriptor:
    return TensorDescriptor(slots, list(slots.shape), [slots.shape[1], 1], [TILE.value, columns], SHARED.value)
