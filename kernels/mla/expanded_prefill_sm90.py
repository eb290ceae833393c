"""Hopper variant of `kernels.mla.expanded_prefill` for long chunks: warp-specialized TMA and WGMMA.

Warps as in `kernels.attention.flash_prefill_sm90`. Keys come in two parts: a per-head part, stored next to the values,
and the rope part that all heads share.
"""

from __future__ import annotations

import math

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention.flash_prefill_sm90 import ROWS, attend_rows, tile_of_segment
from kernels.attention.split_prefill import attend_split, tiles_of_rows, tiles_of_split
from kernels.sm90 import COPIED, SHARED, next_stage, pair_barriers

KEYS = 128  # per tile
STAGES = 2  # pairs in shared memory: 80 KB each, plus 48 KB of queries
WIDTHS = 128, 64, 128  # DeepSeek's keys, their rope part, and values
MIN_ROWS = 2 * ROWS.value  # per segment: one program's rows


@gluon.jit
def _load(
    keys, ropes, values, row, column, first, last, pairs,
    KEYS: gl.constexpr, NOPE: gl.constexpr, P: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Producer warp: pair i is the keys of tile i and the values of tile i - 1."""
    k_parts, v_shared, ready, free = pairs
    KEY_BYTES: gl.constexpr = KEYS * (NOPE + P) * 2
    VALUE_BYTES: gl.constexpr = KEYS * V * 2
    if first < last:
        stage = 0
        phase = 1
        for tile in range(first, last + 1):
            here = ready.index(stage)
            mbarrier.wait(free.index(stage), phase)
            if tile == first:
                mbarrier.expect(here, KEY_BYTES)
            elif tile == last:
                mbarrier.expect(here, VALUE_BYTES)
            else:
                mbarrier.expect(here, KEY_BYTES + VALUE_BYTES)
            if tile < last:
                tma.async_copy_global_to_shared(keys, [row + tile * KEYS, column], here, k_parts[0].index(stage))
                tma.async_copy_global_to_shared(ropes, [row + tile * KEYS, 0], here, k_parts[1].index(stage))
            if tile > first:
                before = row + (tile - 1) * KEYS
                tma.async_copy_global_to_shared(values, [before, column + NOPE], here, v_shared.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit(do_not_specialize=["segments", "lse_s", "splits", "room"])  # they change from chunk to chunk
def _expanded_prefill_sm90_kernel(
    keys, ropes, values, q, cu_q, hi, out, lse,
    segments, q_n, q_h, room, out_s, out_n, out_h, lse_s, lse_n, lse_h, splits, scale_log2,
    KEYS: gl.constexpr, NOPE: gl.constexpr, P: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    # Start with the last queries: they read the most keys.
    tile = gl.num_programs(0) - 1 - gl.program_id(0)
    segment, tile_m, begin, length = tile_of_segment(cu_q, segments, tile, 1)
    row_0 = tile_m * 2 * ROWS
    head = gl.program_id(1)
    split = gl.program_id(2)
    if row_0 < length:
        dtype: gl.constexpr = q.dtype.element_ty
        q_shared = gl.allocate_shared_memory(dtype, [2, ROWS, NOPE], SHARED)
        turned = gl.allocate_shared_memory(dtype, [2, ROWS, P], SHARED)
        k_shared = gl.allocate_shared_memory(dtype, [STAGES, KEYS, NOPE], SHARED)
        r_shared = gl.allocate_shared_memory(dtype, [STAGES, KEYS, P], SHARED)
        v_shared = gl.allocate_shared_memory(dtype, [STAGES, KEYS, V], SHARED)
        ready, free = pair_barriers(STAGES)
        c = gl.arange(0, 64, layout=gl.SliceLayout(0, COPIED))
        for side in gl.static_range(2):
            m = row_0 + side * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPIED))
            rows = q + (begin + m).to(gl.int64) * q_n + head * q_h
            inside = (m < length)[:, None]
            for k in gl.static_range(NOPE // 64):
                x = gl.load(rows[:, None] + (k * 64 + c)[None, :], mask=inside, other=0.0)
                q_shared.index(side).slice(k * 64, 64, dim=1).store(x)
            for k in gl.static_range(P // 64):
                x = gl.load(rows[:, None] + (NOPE + k * 64 + c)[None, :], mask=inside, other=0.0)
                turned.index(side).slice(k * 64, 64, dim=1).store(x)
        fence_async_shared()

        row = row_0 + gl.arange(0, 2 * ROWS, layout=gl.BlockedLayout([1], [32], [4], [0]))
        live = row < length
        row_hi = gl.load(hi + begin + row, mask=live, other=0)
        stop = gl.max(row_hi, 0)
        first, last = tiles_of_split(0, (stop + KEYS - 1) // KEYS, split, splits)
        full_stop = gl.min(gl.where(live, row_hi, stop), 0) // KEYS  # every row reads the tiles below in full
        tl.debug_barrier()
        pairs = ((k_shared, r_shared), v_shared, ready, free)
        strides = (out_n, out_h, lse_n, lse_h)
        chunk = (begin, length, row_0, head, split)
        out += split.to(gl.int64) * out_s
        lse += split.to(gl.int64) * lse_s
        tiles = (0, stop, 0, full_stop, first, last)
        gl.warp_specialize(
            [
                (
                    attend_rows,
                    (
                        0, None, hi, None, out, lse, strides, scale_log2, (q_shared.index(0), turned.index(0)), pairs,
                        chunk, tiles, KEYS, V, STAGES, 1, False,
                    ),
                ),
                (
                    attend_rows,
                    (
                        1, None, hi, None, out, lse, strides, scale_log2, (q_shared.index(1), turned.index(1)), pairs,
                        chunk, tiles, KEYS, V, STAGES, 1, False,
                    ),
                ),
                (
                    _load,
                    (
                        keys, ropes, values, segment * room, head * (NOPE + V), first, last, pairs,
                        KEYS, NOPE, P, V, STAGES,
                    ),
                ),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


def fits(q: torch.Tensor, keys: torch.Tensor, ropes: torch.Tensor, max_q: int) -> bool:
    """Returns whether `launch` supports these arguments of `kernels.mla.expanded_prefill` and is faster."""
    rope = ropes.shape[2]
    nope = q.shape[2] - rope
    return (
        max_q >= MIN_ROWS
        and q.dtype in (torch.bfloat16, torch.float16)
        and (nope, rope, keys.shape[3] - nope) == WIDTHS
        and keys.is_contiguous()
        and ropes.stride(0) == ropes.shape[1] * ropes.stride(1)
        and ropes.stride(1) % 8 == 0
        and keys.data_ptr() % 16 == ropes.data_ptr() % 16 == 0
        and torch.cuda.get_device_capability(q.device)[0] == 9
    )


def launch(
    q: torch.Tensor,
    keys: torch.Tensor,
    ropes: torch.Tensor,
    cu_q: torch.Tensor,
    max_q: int,
    hi: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Runs `kernels.mla.expanded_prefill.expanded_prefill`; requires `fits`."""
    sequences, room, heads, width = keys.shape
    nope, rope, value = WIDTHS
    rows = sequences * room

    def tiles(x: torch.Tensor, columns: int) -> TensorDescriptor:
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [KEYS, columns], SHARED.value)

    flat = keys.view(rows, heads * width)
    parts = tiles(flat, nope), tiles(ropes.as_strided((rows, rope), (ropes.stride(1), 1)), rope), tiles(flat, value)

    row_tiles, segments = tiles_of_rows(len(q), max_q, len(cu_q) - 1, MIN_ROWS)

    def attend(part: torch.Tensor, part_lse: torch.Tensor, splits: int) -> None:
        _expanded_prefill_sm90_kernel[row_tiles, heads, splits](
            *parts, q, cu_q, hi, part, part_lse,
            segments, *q.stride()[:2], room, *part.stride()[:3], *part_lse.stride(), splits, scale * math.log2(math.e),
            KEYS=KEYS, NOPE=nope, P=rope, V=value, STAGES=STAGES, num_warps=4,
        )  # fmt: skip

    tile = {"BLOCK_M": MIN_ROWS, "BLOCK_N": KEYS, "num_warps": 8}  # plus the producer warp
    attend_split(out, lse, tile, heads, len(cu_q) - 1, room, attend)
