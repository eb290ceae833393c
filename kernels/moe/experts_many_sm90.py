"""Hopper variant of `kernels.moe.experts` for many pairs and quantized weights: both grouped GEMMs over sorted pairs.

A program multiplies 256 weight rows of an expert with up to 128 of its pairs. Two consumer warpgroups multiply 128 rows
each: one converts 64 weight columns in registers while the tensor cores serve the other. The producer warpgroup loads
several steps ahead: weights by TMA; x rows by 16-byte copies in the first launch; h by TMA in the second, as the first
wrote it in pair order. Scales, which it copies if weights are packed, are applied to the weights, which are rounded to
x's dtype: per-group accumulators would not fit into registers.

Rows of a tile alternate by eights, so that one thread has what it stores together: gate and up of a column, or two
neighboring rows of down, which share a word.
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

from kernels.dense.scaled_rows import stored
from kernels.dense.silu_mul import expert_swiglu
from kernels.moe.pair_order import PairOrder
from kernels.packed_sm90 import E2M1_LIFT, INT4_LIFT, e2m1_factors, e2m1_to_bf16, int4_to_bf16
from kernels.scaled import PACKED_BLOCK, Matrix, ScaledMatrix
from kernels.sm90 import COPIED, SHARED

ROWS, HALF, PAIRS, BLOCK_K = gl.constexpr(256), gl.constexpr(128), gl.constexpr(128), gl.constexpr(64)
STAGES = gl.constexpr(6)  # 32 KB each
BEHIND = gl.constexpr(2)  # steps in flight when the next one is issued
RUN = 6  # down tiles that a program processes consecutively
# Per expert, by H200 timings: fewer leave most of a block empty, which costs less than to unpack in Triton's kernels.
MIN_PAIRS, MIN_PAIRS_PACKED = 48, 16
WEIGHTS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2))
WEIGHT_TILES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=5))
WORDS = gl.constexpr(BLOCK_K.value // 8)
PACKED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=32, rank=2))
PACKED_TILES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=32, rank=5))
SCALES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
EACH_8 = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
# Words of a warpgroup's rows, in the order of the tensor cores.
LOADED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 4], [8, 0], [64, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [128, WORDS.value]
    )
)  # fmt: skip
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
CONVERTED = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=PRODUCT, k_width=2))
# Layout of one of two rows, eights apart: [HALF / 2, PAIRS], where PRODUCT has both.
RESULT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [0, 16], [0, 32], [0, 64], [32, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [16, 0]], [], [64, 128],
    )
)  # fmt: skip


@gluon.constexpr_function
def _scale_layout(groups, gated):
    """Layout of scales [groups, HALF] in shared memory, each where the weights are that it multiplies."""
    registers = [[1 << i, 0] for i in range(groups.bit_length() - 1)]
    row, eight = ([1, 2, 4], 8) if gated else ([2, 4, 8], 1)  # neighbors of down are eights apart
    lanes = [[0, 0], [0, 0], *([0, r] for r in row)]
    return gl.DistributedLinearLayout(
        [*registers, [0, eight], [0, 64]], lanes, [[0, 16], [0, 32]], [], [groups, HALF.value]
    )


@gluon.jit
def _copy_scales(
    scales, tile, index, to, R: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, SPAN: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Copies the scales of a tile's rows, every SPAN columns; the first is `index` columns after the first group's."""
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(0, EACH_8))
    group = (index + gl.arange(0, to.shape[0], layout=gl.SliceLayout(1, EACH_8)) * SPAN) // GROUP
    if GATED:
        column = tile * (ROWS // 2) + i // 16 * 8 + i % 8
        row, inside = column + i // 8 % 2 * (R // 2), column < R // 2
    else:
        row, inside = tile * ROWS + i, tile * ROWS + i < R
    at = scales + (group * R)[:, None] + gl.max_contiguous(gl.multiple_of(row, 8), 8)[None, :]
    mask = (group < GROUPS)[:, None] & gl.max_constancy(inside, 8)[None, :]
    async_copy.async_copy_global_to_shared(to, at, mask=mask)


@gluon.jit
def _load(
    w, scales, zeros, x, order, begin, stop, expert, first_tile, tiles, x_n,
    w_shared, x_shared, scales_shared, zeros_shared, ready, free,
    TOP_K: gl.constexpr, R: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
    BEGIN: gl.constexpr, SPAN: gl.constexpr, ZEROS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Producer warpgroup: loads a tile's columns of weights and of the pairs' rows, and scales of packed weights."""
    STEPS: gl.constexpr = (BEGIN + K + 2 * BLOCK_K - 1) // (2 * BLOCK_K) * 2
    COPIES: gl.constexpr = GATED or SPAN > 0
    A_WORD: gl.constexpr = BLOCK_K // w_shared.shape[2]  # columns per element of w
    W_BYTES: gl.constexpr = ROWS * BLOCK_K // (2 if SPAN > 0 else 1)
    X_BYTES: gl.constexpr = 0 if GATED else PAIRS * BLOCK_K * 2
    scales += expert.to(gl.int64) * (GROUPS * R)
    zeros += expert.to(gl.int64) * (GROUPS * R)
    if GATED:
        lane = begin + gl.arange(0, PAIRS, layout=gl.SliceLayout(1, COPIED))
        c = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, COPIED))
        live = lane < stop
        token = gl.load(order + lane, mask=live, other=0) // TOP_K
        rows = token * (x_n * 8)  # makes it known to be a multiple of 8
    total = tiles * STEPS
    for step in range(total):
        slot = step % STAGES
        tile = first_tile + step // STEPS
        column = step % STEPS * BLOCK_K - BEGIN
        here = ready.index(slot)
        mbarrier.wait(free.index(slot), step // STAGES % 2 ^ 1)
        to = w_shared.index(slot).reshape([1, ROWS // 16, 2, 8, BLOCK_K // A_WORD])
        mbarrier.expect(here, W_BYTES + X_BYTES)
        tma.async_copy_global_to_shared(w, [expert, tile * (ROWS // 16), 0, 0, column // A_WORD], here, to)
        if GATED:
            inside = live & (column >= 0) & (column < K)
            copied = inside[:, None] & (c >= 0)[None, :]
            at = rows[:, None] + (column + c)[None, :]
            async_copy.async_copy_global_to_shared(x_shared.index(slot), x + at, mask=copied)
        else:
            tma.async_copy_global_to_shared(x, [begin, column], here, x_shared.index(slot))
        if SPAN > 0:
            index = column + BEGIN
            _copy_scales(scales, tile, index, scales_shared.index(slot), R, GROUP, GROUPS, SPAN, GATED)
            if ZEROS:
                _copy_scales(zeros, tile, index, zeros_shared.index(slot), R, GROUP, GROUPS, SPAN, GATED)
        if COPIES:
            async_copy.commit_group()
            async_copy.wait_group(BEHIND)
            fence_async_shared()
            tl.debug_barrier()
            if step >= BEHIND:
                mbarrier.arrive(ready.index((step - BEHIND) % STAGES))
    if COPIES:
        async_copy.wait_group(0)
        fence_async_shared()
        tl.debug_barrier()
        for step in range(gl.maximum(total - BEHIND, 0), total):
            mbarrier.arrive(ready.index(step % STAGES))


@gluon.jit
def _weight_rows(tile, PART: gl.constexpr, R: gl.constexpr, GATED: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns the weight rows [HALF] of a warpgroup's half of a tile, in its order, and which of them exist."""
    i = gl.arange(0, HALF, layout=LAYOUT)
    if GATED:
        column = tile * (ROWS // 2) + PART * (HALF // 2) + i // 16 * 8 + i % 8
        return column + i // 8 % 2 * (R // 2), column < R // 2
    else:
        row = tile * ROWS + PART * HALF + i // 16 * 16 + i % 8 * 2 + i // 8 % 2
        return row, row < R


@gluon.jit
def _converted(w_shared, ready, step, scale, PART: gl.constexpr, dtype: gl.constexpr):
    mbarrier.wait(ready.index(step % STAGES), step // STAGES % 2)
    w = w_shared.index(step % STAGES).slice(PART * HALF, HALF, dim=0).load(CONVERTED)
    # Via fp32: fp16 to bf16 is a slow instruction.
    return (w.to(gl.float32) * scale[:, None]).to(dtype)


@gluon.jit
def _of_rows(shared, PART: gl.constexpr, GATED: gl.constexpr):
    """Loads a step's scales or zero points of a warpgroup's rows -> int32 [HALF, groups]."""
    COUNT: gl.constexpr = shared.shape[0]
    loaded = shared.slice(PART * HALF, HALF, dim=1).load(_scale_layout(COUNT, GATED)).to(gl.int32)
    if not GATED:  # row 16 m + 2 b + h is multiplied as 16 m + 8 h + b
        loaded = gl.reshape(loaded, [COUNT, HALF // 16, 8, 2])
        loaded = gl.reshape(gl.permute(loaded, (0, 1, 3, 2)), [COUNT, HALF])
    return gl.permute(loaded, (1, 0))


@gluon.jit
def _unpacked(
    w_shared, scales_shared, zeros_shared, ready, step, PART: gl.constexpr, SPAN: gl.constexpr, ZEROS: gl.constexpr,
    E2M1: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Converts a step of packed weights, low by the type's lift."""
    slot = step % STAGES
    mbarrier.wait(ready.index(slot), step // STAGES % 2)
    words = w_shared.index(slot).slice(PART * HALF, HALF, dim=0).load(LOADED)
    words = gl.reshape(words, [HALF, WORDS // 4, 4])  # blocks of 32 columns, and their words
    LAYOUT: gl.constexpr = gl.SliceLayout(2, words.type.layout)
    scale = _of_rows(scales_shared.index(slot), PART, GATED)
    if SPAN == 16:
        first, second = gl.split(gl.reshape(e2m1_factors(scale, True), [HALF, WORDS // 4, 2]))
        w = e2m1_to_bf16(words, gl.convert_layout(first, LAYOUT), gl.convert_layout(second, LAYOUT))
    elif E2M1:
        factor = gl.convert_layout(e2m1_factors(scale, False), LAYOUT)
        w = e2m1_to_bf16(words, factor, factor)
    elif ZEROS:
        zero = gl.convert_layout(_of_rows(zeros_shared.index(slot), PART, GATED), LAYOUT)
        w = int4_to_bf16(words, gl.convert_layout(scale, LAYOUT), zero)
    else:
        w = int4_to_bf16(words, gl.convert_layout(scale, LAYOUT), None)
    return gl.convert_layout(w, CONVERTED, assert_trivial=True)


@gluon.jit
def _multiply(
    scales, row_scales, bias, out, order, weights, begin, stop, expert, first_tile, tiles, clamp_at,
    w_shared, x_shared, scales_shared, zeros_shared, ready, free,
    R: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, BEGIN: gl.constexpr,
    SPAN: gl.constexpr, ZEROS: gl.constexpr, E2M1: gl.constexpr, ROW_SCALES: gl.constexpr, BIAS: gl.constexpr,
    CLAMP: gl.constexpr, GATED: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    BLOCKS: gl.constexpr = (BEGIN + K + 2 * BLOCK_K - 1) // (2 * BLOCK_K)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, CONVERTED)
    PAIR_LAYOUT: gl.constexpr = gl.SliceLayout(0, RESULT)
    dtype: gl.constexpr = x_shared.dtype
    step = 0
    for tile in range(first_tile, first_tile + tiles):
        if SPAN == 0:
            row, inside = _weight_rows(tile, PART, R, GATED, ROW_LAYOUT)
            scales_at = scales + expert.to(gl.int64) * (GROUPS * R) + row
            scale = gl.load(scales_at, mask=inside, other=0.0)
        y = gl.zeros([HALF, PAIRS], gl.float32, layout=PRODUCT)
        for block in range(BLOCKS):
            one_slot, two_slot = step % STAGES, (step + 1) % STAGES
            if SPAN == 0:
                group = gl.minimum((block + 1) * (2 * BLOCK_K) // GROUP, GROUPS - 1)
                one = _converted(w_shared, ready, step, scale, PART, dtype)
            else:
                one = _unpacked(
                    w_shared, scales_shared, zeros_shared, ready, step, PART, SPAN, ZEROS, E2M1, GATED
                )  # fmt: skip
            acc = warpgroup_mma(one, x_shared.index(one_slot).permute((1, 0)), y, is_async=True)
            if SPAN == 0:
                two = _converted(w_shared, ready, step + 1, scale, PART, dtype)
                scale = gl.load(scales_at + group * R, mask=inside, other=0.0)  # of the next block
            else:
                two = _unpacked(
                    w_shared, scales_shared, zeros_shared, ready, step + 1, PART, SPAN, ZEROS, E2M1, GATED
                )  # fmt: skip
            # In the same iteration: otherwise registers that an MMA reads would be written before it is done.
            y, one = warpgroup_mma_wait(num_outstanding=0, deps=[acc, one])
            mbarrier.arrive(free.index(one_slot))
            acc = warpgroup_mma(two, x_shared.index(two_slot).permute((1, 0)), y, is_async=True)
            y, two = warpgroup_mma_wait(num_outstanding=0, deps=[acc, two])
            mbarrier.arrive(free.index(two_slot))
            step += 2

        both = gl.permute(gl.reshape(y, [HALF // 16, 2, 8, PAIRS]), (0, 2, 3, 1))
        left, right = gl.split(gl.reshape(both, [HALF // 2, PAIRS, 2]))
        left, right = gl.convert_layout(left, RESULT), gl.convert_layout(right, RESULT)
        lane = begin + gl.arange(0, PAIRS, layout=PAIR_LAYOUT)
        column = tile * (ROWS // 2) + PART * (HALF // 2) + gl.arange(0, HALF // 2, layout=gl.SliceLayout(1, RESULT))
        live = (column < R // 2)[:, None] & (lane < stop)[None, :]
        cell = column[:, None] + (lane * (R // 2))[None, :]
        APART: gl.constexpr = R // 2 if GATED else 1  # rows of left and right
        row = expert * R + (column if GATED else 2 * column)
        if SPAN > 0:
            left *= E2M1_LIFT if E2M1 else INT4_LIFT
            right *= E2M1_LIFT if E2M1 else INT4_LIFT
        if ROW_SCALES:
            left *= gl.load(row_scales + row, mask=column < R // 2, other=0.0)[:, None]
            right *= gl.load(row_scales + APART + row, mask=column < R // 2, other=0.0)[:, None]
        if GATED or BIAS:
            pair = gl.load(order + lane, mask=lane < stop, other=0)
            weight = gl.load(weights + pair, mask=lane < stop, other=0.0)
        if BIAS:
            left_bias = gl.load(bias + row, mask=column < R // 2, other=0.0).to(gl.float32)
            right_bias = gl.load(bias + APART + row, mask=column < R // 2, other=0.0).to(gl.float32)
            if GATED:
                left, right = left + left_bias[:, None], right + right_bias[:, None]
            else:
                left += left_bias[:, None] * weight[None, :]
                right += right_bias[:, None] * weight[None, :]
        if GATED:
            value = expert_swiglu(left, right, clamp_at, CLAMP) * weight[None, :]
            gl.store(out + cell, value.to(dtype), mask=live)
        else:
            low = left.to(dtype).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
            high = right.to(dtype).to(gl.int16, bitcast=True).to(gl.int32) << 16
            gl.store(out.to(gl.pointer_type(gl.int32), bitcast=True) + cell, high | low, mask=live)


@gluon.jit(do_not_specialize=["E", "runs"])
def _experts_many_kernel(
    w, scales, zeros, row_scales, bias, x, out, order, weights, bounds, block_ends, E, runs, x_n, clamp_at,
    TOP_K: gl.constexpr, R: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
    BEGIN: gl.constexpr, SPAN: gl.constexpr, E2M1: gl.constexpr, CLAMP: gl.constexpr, GATED: gl.constexpr,
    BLOCK_E: gl.constexpr,
):  # fmt: skip
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    TILES: gl.constexpr = (R + ROWS - 1) // ROWS
    EACH_EXPERT: gl.constexpr = gl.BlockedLayout([BLOCK_E // 128], [32], [4], [0])
    ZEROS: gl.constexpr = zeros is not None
    ROW_SCALES: gl.constexpr = row_scales is not None
    BIAS: gl.constexpr = bias is not None
    if not ZEROS:  # a partition takes no None
        zeros = scales
    if not ROW_SCALES:
        row_scales = weights
    if not BIAS:
        bias = weights
    block, run = gl.program_id(0) // runs, gl.program_id(0) % runs
    first_tile = run * TILES // runs
    tiles = (run + 1) * TILES // runs - first_tile
    e = gl.arange(0, BLOCK_E, layout=EACH_EXPERT)
    ends = gl.load(block_ends + e, mask=e < E, other=0x7FFFFFFF)
    expert = gl.sum((ends <= block).to(gl.int32), 0)  # E past the last block
    before = gl.max(gl.where(ends <= block, ends, 0), 0)
    if expert < E:
        begin = gl.load(bounds + expert) + (block - before) * PAIRS
        stop = gl.minimum(gl.load(bounds + expert + 1), begin + PAIRS)
        if SPAN == 0:
            w_shared = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS, BLOCK_K], WEIGHTS)
        else:
            w_shared = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, WORDS], PACKED)
        x_shared = gl.allocate_shared_memory(out.dtype.element_ty, [STAGES, PAIRS, BLOCK_K], SHARED)
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        scales_shared = ready
        zeros_shared = ready
        if SPAN > 0:
            A_STEP: gl.constexpr = BLOCK_K // SPAN
            scales_shared = gl.allocate_shared_memory(scales.dtype.element_ty, [STAGES, A_STEP, ROWS], SCALES)
            if ZEROS:
                zeros_shared = gl.allocate_shared_memory(gl.uint8, [STAGES, A_STEP, ROWS], SCALES)
        for s in gl.static_range(STAGES):
            mbarrier.init(ready.index(s), count=2 if GATED or SPAN > 0 else 1)
            mbarrier.init(free.index(s), count=2)
        fence_async_shared()
        tl.debug_barrier()
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        scales, row_scales, bias, out, order, weights, begin, stop, expert, first_tile, tiles, clamp_at,
                        w_shared, x_shared, scales_shared, zeros_shared, ready, free,
                        R, K, GROUP, GROUPS, BEGIN, SPAN, ZEROS, E2M1, ROW_SCALES, BIAS, CLAMP, GATED, FIRST,
                    ),
                ),
                (
                    _multiply,
                    (
                        scales, row_scales, bias, out, order, weights, begin, stop, expert, first_tile, tiles, clamp_at,
                        w_shared, x_shared, scales_shared, zeros_shared, ready, free,
                        R, K, GROUP, GROUPS, BEGIN, SPAN, ZEROS, E2M1, ROW_SCALES, BIAS, CLAMP, GATED, SECOND,
                    ),
                ),
                (
                    _load,
                    (
                        w, scales, zeros, x, order, begin, stop, expert, first_tile, tiles, x_n,
                        w_shared, x_shared, scales_shared, zeros_shared, ready, free,
                        TOP_K, R, K, GROUP, GROUPS, BEGIN, SPAN, ZEROS, GATED,
                    ),
                ),
            ],
            [4, 4],
            [232, 40],
        )  # fmt: skip


def _is_supported(matrix: ScaledMatrix) -> bool:
    """Returns whether scales are of whole blocks of columns, in the dtype of the conversion."""
    if not matrix.packed:
        return matrix.wide_groups
    columns = matrix.group % PACKED_BLOCK == 0 or matrix.scales.shape[-2] == 1
    return matrix.kind == "e2m1" or (columns and matrix.scales.dtype == torch.bfloat16)


def fits(x: torch.Tensor, P: int, total: int, gate_up: Matrix, down: Matrix) -> bool:
    """Returns whether `launch` supports P pairs, of `total` experts on all ranks, and is faster.

    Args:
        x, gate_up, down: see `kernels.moe.experts`.
    """
    if isinstance(gate_up, torch.Tensor) or isinstance(down, torch.Tensor):
        return False
    (_, H, F), K = down.shape, BLOCK_K.value
    aligned = PACKED_BLOCK if down.packed else 16
    return (
        gate_up.packed == down.packed
        and _is_supported(gate_up)
        and _is_supported(down)
        and (MIN_PAIRS_PACKED if down.packed else MIN_PAIRS) * total <= P
        and P * max(H // 2, F) < 1 << 31 > len(x) * x.stride(0)  # element indices fit int32
        # Whole steps of x's columns, and TMA's alignment of strides and coordinates.
        and H % K == gate_up.begin % K == F % aligned == down.begin % aligned == 0
        and F > 0
        and x.dtype == torch.bfloat16
        and x.stride(1) == 1
        and x.stride(0) % 8 == x.data_ptr() % 16 == gate_up.data.data_ptr() % 16 == down.data.data_ptr() % 16 == 0
        and gate_up.data.is_contiguous()
        and down.data.is_contiguous()
        and torch.cuda.get_device_capability(x.device)[0] == 9
    )


def launch(
    x: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ScaledMatrix,
    down: ScaledMatrix,
    pairs: PairOrder,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    clamp_at: float,
    clamp: int,
    outputs: torch.Tensor,
) -> None:
    """Runs both grouped GEMMs of `kernels.moe.experts`; requires `fits`.

    Args:
        weights: [N, k] fp32.
        pairs: in blocks of PAIRS.
        outputs: [P, H] in x's dtype, written for pairs of local experts in their order.
    """
    (E, H, F), P, top_k = down.shape, len(pairs.order), weights.shape[1]
    h = torch.empty(P, F, dtype=x.dtype, device=x.device)
    a_word, layout = (8, PACKED_TILES.value) if down.packed else (1, WEIGHT_TILES.value)
    block_shape = [1, ROWS.value // 16, 2, 8, BLOCK_K.value // a_word]
    H_words, F_words = H // a_word, F // a_word
    gate_up_tiles = TensorDescriptor(
        gate_up.data, [E, F // 8, 2, 8, H_words], [2 * F * H_words, 8 * H_words, F * H_words, H_words, 1],
        block_shape, layout,
    )  # fmt: skip
    down_tiles = TensorDescriptor(
        down.data,
        [E, H // 16, 2, 8, F_words],
        [H * F_words, 16 * F_words, F_words, 2 * F_words, 1],
        block_shape,
        layout,
    )
    rows = TensorDescriptor(h, [P, F], [F, 1], [PAIRS.value, BLOCK_K.value], SHARED.value)
    blocks = P // PAIRS.value + E  # upper bound: all full blocks, and the last of each expert
    for w, matrix, given, x_n, out, bias, R, K in (
        (gate_up_tiles, gate_up, x, x.stride(0) // 8, h, gate_up_bias, 2 * F, H),
        (down_tiles, down, rows, 0, outputs, down_bias, H, F),
    ):
        tiles = triton.cdiv(R, ROWS.value)
        runs = tiles if matrix is gate_up else triton.cdiv(tiles, RUN)
        (_, scales, zeros, row_scales), groups = stored(matrix)
        assert scales is not None
        if matrix.kind == "int4":
            scales = scales.view(torch.int16)
        _experts_many_kernel[(blocks * runs,)](
            w, scales, zeros, row_scales, bias, given, out, pairs.order, weights, pairs.bounds, pairs.block_ends,
            E, runs, x_n, clamp_at,
            TOP_K=top_k, R=R, K=K, **groups, SPAN=min(matrix.group, PACKED_BLOCK) if matrix.packed else 0,
            E2M1=matrix.kind == "e2m1", CLAMP=clamp, GATED=matrix is gate_up,
            BLOCK_E=max(128, triton.next_power_of_2(E)), num_warps=4,
        )  # fmt: skip
