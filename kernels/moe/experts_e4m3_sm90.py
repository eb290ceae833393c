"""Hopper variant of `kernels.moe.experts` for many pairs and e4m3 weights: grouped GEMMs of e4m3 by e4m3.

Rows of activations are rounded to e4m3 first (`kernels.dense.quantize_rows`). Two numbers an element, whose sum it is,
stand for bf16: two products with the same weights replace one in bf16, and no weight is converted. That is faster than
`kernels.moe.experts_many_sm90` for few pairs of each expert. One number an element is for weights with `fp8_rows`.

A program multiplies 256 weight rows of an expert with some of its pairs. Two consumer warpgroups multiply 128 rows
each, 64 at a time: while one multiplies, the other scales and adds. Tensor cores add e4m3 products in about 14 bits, so
each block of 128 columns is summed apart, and added in fp32 with its scales. The producer warpgroup loads some blocks
ahead: weights by TMA; x rows by 16-byte copies in the first launch; h by TMA in the second.

Rows of a tile alternate by eights, as in `kernels.moe.experts_many_sm90`.

Source:
    DeepSeek-V3 (arXiv:2412.19437), section 3.3.2: sums in fp32 per 128 columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.dense.quantize_rows import QuantizedRows, quantize_rows
from kernels.dense.silu_mul import swiglu
from kernels.moe.experts_scaled_sm90 import MAX_TOKENS
from kernels.moe.pair_order import PairOrder
from kernels.scaled import Matrix, ScaledMatrix

ROWS, HALF, BLOCK_K = gl.constexpr(256), gl.constexpr(64), gl.constexpr(128)
RUN = 6  # down tiles that a program processes consecutively
BEHIND = gl.constexpr(1)  # steps in flight when the next one is issued
STAGE_BYTES = 208 << 10
MAX_PAIRS = 96  # per expert, by H200 timings; with more, one bf16 product takes less than two of e4m3
BYTES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))
WEIGHT_TILES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=5))
PLANE_TILES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=3))
COPIED = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
SCALES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
EACH_PAIR = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.constexpr_function
def _result(pairs):
    """Layout of one of two rows, eights apart, [HALF / 2, pairs], where a product has both."""
    registers = [[0, 1]] + [[0, 1 << i] for i in range(3, pairs.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        registers, [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, pairs]
    )


@gluon.jit
def _load(
    w, x, order, begin, stop, expert, first_tile, tiles, plane_n, w_shared, x_shared, ready, free,
    TOP_K: gl.constexpr, K: gl.constexpr, BEGIN: gl.constexpr, GATED: gl.constexpr, PLANES: gl.constexpr,
):  # fmt: skip
    """Producer warpgroup: loads a tile's columns of the weights and of the pairs' rows."""
    STAGES: gl.constexpr = w_shared.shape[0]
    PAIRS: gl.constexpr = x_shared.shape[1] // PLANES
    BLOCKS: gl.constexpr = (BEGIN + K + BLOCK_K - 1) // BLOCK_K
    W_BYTES: gl.constexpr = ROWS * BLOCK_K
    if GATED:
        lane = begin + gl.arange(0, PAIRS, layout=gl.SliceLayout(1, COPIED))
        c = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, COPIED))
        live = lane < stop
        rows = gl.load(order + lane, mask=live, other=0) // TOP_K * (BLOCKS * BLOCK_K)
        copied = live[:, None] & (c >= 0)[None, :]
    total = tiles * BLOCKS
    for step in range(total):
        slot = step % STAGES
        tile = first_tile + step // BLOCKS
        column = step % BLOCKS * BLOCK_K
        here = ready.index(slot)
        mbarrier.wait(free.index(slot), step // STAGES % 2 ^ 1)
        to = w_shared.index(slot).reshape([1, ROWS // 16, 2, 8, BLOCK_K])
        if GATED:
            mbarrier.expect(here, W_BYTES)
            tma.async_copy_global_to_shared(w, [expert, tile * (ROWS // 16), 0, 0, column - BEGIN], here, to)
            at = rows[:, None] + (column + c)[None, :]
            for plane in gl.static_range(PLANES):
                part = x_shared.index(slot).slice(plane * PAIRS, PAIRS, dim=0)
                async_copy.async_copy_global_to_shared(part, x + plane * plane_n + at, mask=copied)
            async_copy.commit_group()
            async_copy.wait_group(BEHIND)
            fence_async_shared()
            tl.debug_barrier()
            if step >= BEHIND:
                mbarrier.arrive(ready.index((step - BEHIND) % STAGES))
        else:
            mbarrier.expect(here, W_BYTES + PLANES * PAIRS * BLOCK_K)
            tma.async_copy_global_to_shared(w, [expert, tile * (ROWS // 16), 0, 0, column - BEGIN], here, to)
            part = x_shared.index(slot).reshape([PLANES, PAIRS, BLOCK_K])
            tma.async_copy_global_to_shared(x, [0, begin, column], here, part)
    if GATED:
        async_copy.wait_group(0)
        fence_async_shared()
        tl.debug_barrier()
        for step in range(gl.maximum(total - BEHIND, 0), total):
            mbarrier.arrive(ready.index(step % STAGES))


@gluon.jit
def _weight_rows(tile, part: gl.constexpr, R: gl.constexpr, GATED: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns the weight rows [HALF] of a quarter of a tile, in its order, and which of them exist."""
    i = gl.arange(0, HALF, layout=LAYOUT)
    if GATED:
        column = tile * (ROWS // 2) + part * (HALF // 2) + i // 16 * 8 + i % 8
        return column + i // 8 % 2 * (R // 2), column < R // 2
    else:
        row = tile * ROWS + part * HALF + i // 16 * 16 + i % 8 * 2 + i // 8 % 2
        return row, row < R


@gluon.jit
def _product(w, x, part: gl.constexpr, PLANES: gl.constexpr, PRODUCT: gl.constexpr):
    """Multiplies 64 rows with a block of all planes, the small one first."""
    PAIRS: gl.constexpr = x.shape[0] // PLANES
    rows = w.slice(part * HALF, HALF, dim=0)
    acc = gl.zeros([HALF, PAIRS], gl.float32, layout=PRODUCT)
    last = x.slice((PLANES - 1) * PAIRS, PAIRS, dim=0).permute((1, 0))
    acc = warpgroup_mma(rows, last, acc, use_acc=False, is_async=True)
    if PLANES == 2:
        acc = warpgroup_mma(rows, x.slice(0, PAIRS, dim=0).permute((1, 0)), acc, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=[acc])


@gluon.jit
def _store(
    y, out, order, weights, begin, stop, tile, part: gl.constexpr, R: gl.constexpr, GATED: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    PAIRS: gl.constexpr = y.shape[1]
    RESULT: gl.constexpr = _result(PAIRS)
    both = gl.permute(gl.reshape(y, [HALF // 16, 2, 8, PAIRS]), (0, 2, 3, 1))
    left, right = gl.split(gl.reshape(both, [HALF // 2, PAIRS, 2]))
    left, right = gl.convert_layout(left, RESULT), gl.convert_layout(right, RESULT)
    lane = begin + gl.arange(0, PAIRS, layout=gl.SliceLayout(0, RESULT))
    column = tile * (ROWS // 2) + part * (HALF // 2) + gl.arange(0, HALF // 2, layout=gl.SliceLayout(1, RESULT))
    live = (column < R // 2)[:, None] & (lane < stop)[None, :]
    cell = column[:, None] + (lane * (R // 2))[None, :]
    if GATED:
        pair = gl.load(order + lane, mask=lane < stop, other=0)
        weight = gl.load(weights + pair, mask=lane < stop, other=0.0)
        gl.store(out + cell, (swiglu(left, right) * weight[None, :]).to(dtype), mask=live)
    else:
        low = left.to(dtype).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
        high = right.to(dtype).to(gl.int16, bitcast=True).to(gl.int32) << 16
        gl.store(out.to(gl.pointer_type(gl.int32), bitcast=True) + cell, high | low, mask=live)


@gluon.jit
def _multiply(
    scales, x_scales, out, order, weights, begin, stop, expert, first_tile, tiles, x_rows, w_shared, x_shared,
    each_shared, ready, free, TOP_K: gl.constexpr, R: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr,
    GROUPS: gl.constexpr, BEGIN: gl.constexpr, GATED: gl.constexpr, PLANES: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = w_shared.shape[0]
    PAIRS: gl.constexpr = x_shared.shape[1] // PLANES
    BLOCKS: gl.constexpr = (BEGIN + K + BLOCK_K - 1) // BLOCK_K
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PAIRS, 32])
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, PRODUCT)
    PAIR_LAYOUT: gl.constexpr = gl.SliceLayout(0, PRODUCT)
    dtype: gl.constexpr = out.dtype.element_ty
    lane = begin + gl.arange(0, PAIRS, layout=EACH_PAIR)
    live = lane < stop
    if GATED:
        x_scales += gl.load(order + lane, mask=live, other=0) // TOP_K
    else:
        x_scales += lane
    scales += expert.to(gl.int64) * (GROUPS * R)
    step = 0
    for tile in range(first_tile, first_tile + tiles):
        row, inside = _weight_rows(tile, 2 * PART, R, GATED, ROW_LAYOUT)
        next_row, next_inside = _weight_rows(tile, 2 * PART + 1, R, GATED, ROW_LAYOUT)
        scale = gl.load(scales + row, mask=inside, other=0.0)
        next_scale = gl.load(scales + next_row, mask=next_inside, other=0.0)
        x_scale = gl.load(x_scales, mask=live, other=0.0)
        y = gl.zeros([HALF, PAIRS], gl.float32, layout=PRODUCT)
        next_y = gl.zeros([HALF, PAIRS], gl.float32, layout=PRODUCT)
        for block in range(BLOCKS):
            slot = step % STAGES
            each = each_shared.index(2 * PART + step % 2)
            each.store(x_scale)
            tl.debug_barrier()
            after = gl.minimum(block + 1, BLOCKS - 1)
            x_scale = gl.load(x_scales + after * x_rows, mask=live, other=0.0)
            mbarrier.wait(ready.index(slot), step // STAGES % 2)
            acc = _product(w_shared.index(slot), x_shared.index(slot), 2 * PART, PLANES, PRODUCT)
            y += acc * scale[:, None] * each.load(PAIR_LAYOUT)[None, :]
            acc = _product(w_shared.index(slot), x_shared.index(slot), 2 * PART + 1, PLANES, PRODUCT)
            mbarrier.arrive(free.index(slot))
            next_y += acc * next_scale[:, None] * each.load(PAIR_LAYOUT)[None, :]
            if GROUPS > 1:
                group = gl.minimum(after * BLOCK_K // GROUP, GROUPS - 1)
                scale = gl.load(scales + group * R + row, mask=inside, other=0.0)
                next_scale = gl.load(scales + group * R + next_row, mask=next_inside, other=0.0)
            step += 1
        _store(y, out, order, weights, begin, stop, tile, 2 * PART, R, GATED, dtype)
        _store(next_y, out, order, weights, begin, stop, tile, 2 * PART + 1, R, GATED, dtype)


@gluon.jit(do_not_specialize=["E", "runs", "x_rows"])
def _grouped_gemm_kernel(
    w, scales, x, x_scales, out, order, weights, bounds, block_ends, E, runs, x_rows, plane_n,
    TOP_K: gl.constexpr, R: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
    BEGIN: gl.constexpr, GATED: gl.constexpr, PLANES: gl.constexpr, PAIRS: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_E: gl.constexpr,
):  # fmt: skip
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    TILES: gl.constexpr = (R + ROWS - 1) // ROWS
    block, run = gl.program_id(0) // runs, gl.program_id(0) % runs
    first_tile = run * TILES // runs
    tiles = (run + 1) * TILES // runs - first_tile
    EACH_EXPERT: gl.constexpr = gl.BlockedLayout([BLOCK_E // 128], [32], [4], [0])
    e = gl.arange(0, BLOCK_E, layout=EACH_EXPERT)
    ends = gl.load(block_ends + e, mask=e < E, other=0x7FFFFFFF)
    expert = gl.sum((ends <= block).to(gl.int32), 0)  # E past the last block
    before = gl.max(gl.where(ends <= block, ends, 0), 0)
    begin = gl.load(bounds + gl.minimum(expert, E - 1)) + (block - before) * PAIRS
    stop = gl.minimum(gl.load(bounds + gl.minimum(expert + 1, E)), begin + PAIRS)
    if expert < E:
        w_shared = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS, BLOCK_K], BYTES)
        x_shared = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, PLANES * PAIRS, BLOCK_K], BYTES)
        each_shared = gl.allocate_shared_memory(gl.float32, [4, PAIRS], SCALES)  # two for each consumer
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for s in gl.static_range(STAGES):
            mbarrier.init(ready.index(s), count=2 if GATED else 1)
            mbarrier.init(free.index(s), count=2)
        fence_async_shared()
        tl.debug_barrier()
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        scales, x_scales, out, order, weights, begin, stop, expert, first_tile, tiles, x_rows, w_shared,
                        x_shared, each_shared, ready, free, TOP_K, R, K, GROUP, GROUPS, BEGIN, GATED, PLANES, FIRST,
                    ),
                ),
                (
                    _multiply,
                    (
                        scales, x_scales, out, order, weights, begin, stop, expert, first_tile, tiles, x_rows, w_shared,
                        x_shared, each_shared, ready, free, TOP_K, R, K, GROUP, GROUPS, BEGIN, GATED, PLANES, SECOND,
                    ),
                ),
                (
                    _load,
                    (
                        w, x, order, begin, stop, expert, first_tile, tiles, plane_n, w_shared, x_shared, ready, free,
                        TOP_K, K, BEGIN, GATED, PLANES,
                    ),
                ),
            ],
            [4, 4],
            [232, 40],
        )  # fmt: skip


def block_of(P: int, total: int) -> int:
    """Returns pairs per block of P pairs, of `total` experts on all ranks, by H200 timings."""
    return 64 if 24 * total <= P else 32


def fits(x: torch.Tensor, P: int, total: int, gate_up: Matrix, down: Matrix) -> bool:
    """Returns whether `launch` supports P pairs, of `total` experts on all ranks, and is faster, or x is to be rounded.

    Args:
        x, gate_up, down: see `kernels.moe.experts`.
    """
    return (
        isinstance(gate_up, ScaledMatrix)
        and isinstance(down, ScaledMatrix)
        and (gate_up.rounds(len(x)) or (len(x) > MAX_TOKENS and MAX_PAIRS * total > P))
        and x.dtype == torch.bfloat16
        and down.shape[2] > 0
        and all(_fits(matrix, P) for matrix in (gate_up, down))
        and torch.cuda.get_device_capability(x.device)[0] == 9
    )


def _fits(matrix: ScaledMatrix, P: int) -> bool:
    *_, R, K = matrix.shape
    return (
        matrix.kind == "e4m3"
        and matrix.wide_groups
        and matrix.data.is_contiguous()
        # TMA's alignment of strides and coordinates, and whole eights of weight rows.
        and R % 16 == K % 16 == matrix.begin % 16 == matrix.data.data_ptr() % 16 == 0
        and P * max(R, matrix.begin + K + 128) < 1 << 31  # element indices fit int32
    )


def launch(
    x: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ScaledMatrix,
    down: ScaledMatrix,
    pairs: PairOrder,
    block: int,
) -> torch.Tensor:
    """Runs both grouped GEMMs of `kernels.moe.experts`; requires `fits`.

    Args:
        weights: [N, k] fp32.
        pairs: in blocks of `block`, a power of two from 16 to 128.

    Returns:
        [P, H] in x's dtype, written for pairs of local experts in their order.
    """
    (E, H, F), P = down.shape, len(pairs.order)
    planes = 1 if gate_up.rounds(len(x)) else 2
    h = torch.empty(P, F, dtype=x.dtype, device=x.device)
    _launch(quantize_rows(x, planes, gate_up.begin), weights, gate_up, pairs, h, block, gated=True)
    rows = quantize_rows(h, planes, down.begin, pairs.bounds[E:])
    del h  # as large as rows: outputs take its memory
    outputs = torch.empty(P, H, dtype=x.dtype, device=x.device)
    _launch(rows, weights, down, pairs, outputs, block, gated=False)
    return outputs


def _launch(
    x: QuantizedRows, weights: torch.Tensor, matrix: ScaledMatrix, pairs: PairOrder, out: torch.Tensor, block: int, *,
    gated: bool,
) -> None:  # fmt: skip
    """Multiplies each expert's rows of x with its matrix.

    Args:
        x: of tokens if gated, else of pairs in their order.
        out: [P, R]; gated: [P, R / 2], silu of the first half of the columns times the second, times the pair's weight.
    """
    (planes, count, width), (E, R, K) = x.data.shape, matrix.shape
    box = [1, ROWS.value // 16, 2, 8, BLOCK_K.value]
    strides = [R * K, 8 * K, R // 2 * K, K, 1] if gated else [R * K, 16 * K, K, 2 * K, 1]
    tiles = TensorDescriptor(matrix.data, [E, R // 16, 2, 8, K], strides, box, WEIGHT_TILES.value)
    data: torch.Tensor | TensorDescriptor = x.data
    if not gated:
        box, strides = [planes, block, BLOCK_K.value], [count * width, width, 1]
        data = TensorDescriptor(x.data, [planes, count, width], strides, box, PLANE_TILES.value)
    runs = triton.cdiv(triton.cdiv(R, ROWS.value), 1 if gated else RUN)
    # An upper bound: all full blocks, and the last of each expert.
    _grouped_gemm_kernel[((len(out) // block + E) * runs,)](
        tiles, matrix.scales, data, x.scales, out, pairs.order, weights, pairs.bounds, pairs.block_ends, E, runs, count,
        count * width, TOP_K=weights.shape[1], R=R, K=K, GROUP=matrix.group, GROUPS=matrix.scales.shape[-2],
        BEGIN=matrix.begin, GATED=gated, PLANES=planes, PAIRS=block,
        STAGES=min(8, STAGE_BYTES // (BLOCK_K.value * (ROWS.value + planes * block))),
        BLOCK_E=max(128, triton.next_power_of_2(E)), num_warps=4,
    )  # fmt: skip
