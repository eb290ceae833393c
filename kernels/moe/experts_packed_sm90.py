"""Hopper variant of `kernels.moe.experts` for 4-bit weights and few pairs of each expert.

Tiles, shares, pairs and reductions are as in `kernels.moe.experts_scaled_sm90`. Conversion binds, so a warpgroup does
nothing else but to multiply; with few columns warp by warp, as `kernels.dense.linear_packed_sm90` does. A warp loads
several steps ahead, weights by TMA, and by 16-byte copies the rows of x or h and the scales. Scales of groups of up to
64 columns multiply the weights, exactly for e2m1; scales of longer groups multiply sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dense.scaled_rows import stored
from kernels.dense.silu_mul import expert_swiglu
from kernels.dense.split_k_reduce_sm90 import reduce_sharers, share_of, workspace
from kernels.moe.expert_lookup_sm90 import active_experts, nth_expert, pairs_with, slots
from kernels.moe.experts_scaled_sm90 import (
    BLOCK_K,
    are_few,
    list_pairs,
    locate,
    pairs_of,
    select_pair,
)
from kernels.overlap import sm_count
from kernels.packed_sm90 import E2M1_LIFT, INT4_LIFT, e2m1_factors, e2m1_to_bf16, int4_to_bf16, product_layout
from kernels.scaled import PACKED_BLOCK, Matrix, ScaledMatrix
from kernels.sm90 import SHARED

MAX_TOKENS = 2047  # the workspace serves one stream: longer chunks may run as two micro-batches on two
MAX_PAIRS = 16384  # which each program looks through
MAX_EACH = 48  # pairs of each expert, by H200 timings
MIN_WIDTH = 128  # columns of an expert

FEW_COLUMNS = gl.constexpr(8)  # which each warp multiplies; with 16, a warpgroup takes 5% less time
PARTS = 2  # products per step: 16 KB of weights
ROWS = 128  # of a tile: 16 for each warp that multiplies
PROGRAMS, REGISTERS, SHARED_KB = 2, 80, 104  # programs of an SM, registers of a thread, and KB of a program's stages
BLOCKS = gl.constexpr(8)  # of 32 columns in a box of weights
WORDS = gl.constexpr(4 * BLOCKS.value)
BOX = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [1, 1], [1, 0]))
EACH_8 = gl.constexpr(gl.BlockedLayout([8], [32], [1], [0]))
SCALES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def _box_layout(rows):
    """Layout of the words of a box [rows, WORDS], in the order of the tensor cores."""
    warps = [[16 << i, 0] for i in range((rows // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 4], [0, 8], [0, 16], [8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warps, [], [rows, WORDS.value]
    )


@gluon.constexpr_function
def _scale_layout(groups, rows):
    """Layout of the scales [groups x rows] of a product, each where the words are that it multiplies."""
    registers = [[rows << i] for i in range(groups.bit_length() - 1)]
    warps = [[16 << i] for i in range((rows // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout([*registers, [8]], [[0], [0], [1], [2], [4]], warps, [], [groups * rows])


@gluon.jit
def _load_weights(tile, e, column, w, w_shared, slot, ready, BOXES: gl.constexpr, GATE: gl.constexpr):
    ROWS: gl.constexpr = w_shared.shape[1]
    mbarrier.expect(ready, BOXES * ROWS * WORDS * 4)
    for box in gl.static_range(BOXES):
        to, k = w_shared.index(slot * BOXES + box), column // 8 + box * WORDS
        if GATE:
            to = to.reshape([1, ROWS // 16, 2, 8, WORDS])
            tma.async_copy_global_to_shared(w, [e, tile * (ROWS // 16), 0, 0, k], ready, to)
        else:
            tma.async_copy_global_to_shared(w, [e, tile * ROWS, k], ready, to.reshape([1, ROWS, WORDS]))


@gluon.jit
def _copy_rows(pair, column, x, x_n, to, GATE: gl.constexpr, TOP_K: gl.constexpr, K: gl.constexpr):
    """Copies a step's columns of the pairs' rows; zeros where there is no pair, or no column."""
    k = column + gl.arange(0, to.shape[1], layout=gl.SliceLayout(0, COPIED))
    rows = x + (pair // TOP_K if GATE else pair) * (x_n * 8)  # makes it known to be a multiple of 8
    inside = (pair >= 0)[:, None] & gl.max_constancy((k >= 0) & (k < K), 8)[None, :]
    async_copy.async_copy_global_to_shared(to, rows[:, None] + k[None, :], mask=inside)


@gluon.jit
def _copy_scales(
    tile, e, index, scales, to, GATE: gl.constexpr, H: gl.constexpr, F: gl.constexpr,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, SPAN: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Copies the scales of a step's rows, every SPAN columns; the first is `index` columns after the first group's."""
    c = gl.arange(0, to.shape[0], layout=EACH_8)
    i, group = c % ROWS, (index + c // ROWS * SPAN) // GROUP
    if GATE:
        f = tile * (ROWS // 2) + i // 16 * 8 + i % 8
        r, inside = i // 8 % 2 * F + f, f < F
    else:
        r, inside = tile * ROWS + i, tile * ROWS + i < H
    at = scales + (e * GROUPS + group) * (2 * F if GATE else H) + gl.max_contiguous(gl.multiple_of(r, 8), 8)
    async_copy.async_copy_global_to_shared(to, at, mask=gl.max_constancy((group < GROUPS) & inside, 8))


@gluon.jit
def _load(
    w, scales, zeros, x, x_n, ids, tokens, first, lists, experts, first_block, begin, end,
    w_shared, x_shared, scales_shared, zeros_shared, ready, free,
    TOP_K: gl.constexpr, H: gl.constexpr, F: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
    BEGIN: gl.constexpr, SPAN: gl.constexpr, ZEROS: gl.constexpr, FEW: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Producer warp: weights, but for those of the first stages, rows of x or h, and scales."""
    STAGES: gl.constexpr = x_shared.shape[0]
    COLUMNS: gl.constexpr = x_shared.shape[1]
    PARTS: gl.constexpr = x_shared.shape[2] // BLOCK_K
    ROWS: gl.constexpr = w_shared.shape[1]
    BEHIND: gl.constexpr = min(2, STAGES - 2)  # steps in flight when the next one is issued
    index = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, COPIED))
    if FEW:
        of = slots(ids, index, tokens, TOP_K)
        pairs = pairs_with(of, index, experts[0] + first, TOP_K), pairs_with(of, index, experts[1] + first, TOP_K)
    else:
        pairs = lists + index
    if not GATE:
        gdc_wait()
    steps = end - begin
    for step in range(steps):
        slot = step % STAGES
        tile, block, column = locate(begin + step, first_block, GATE, H, F, BEGIN, PARTS, ROWS)
        pair, e = select_pair(block, pairs, FEW, COLUMNS), select_pair(block, experts, FEW, COLUMNS)
        mbarrier.wait(free.index(slot), step // STAGES % 2 ^ 1)
        if step >= STAGES:
            _load_weights(tile, e, column, w, w_shared, slot, ready.index(slot), PARTS // 2, GATE)
        _copy_rows(pair, column, x, x_n, x_shared.index(slot), GATE, TOP_K, H if GATE else F)
        of_step = scales_shared.index(slot)
        _copy_scales(tile, e, column + BEGIN, scales, of_step, GATE, H, F, GROUP, GROUPS, SPAN, ROWS)
        if ZEROS:
            of_step = zeros_shared.index(slot)
            _copy_scales(tile, e, column + BEGIN, zeros, of_step, GATE, H, F, GROUP, GROUPS, SPAN, ROWS)
        async_copy.commit_group()
        async_copy.wait_group(BEHIND)
        hopper.fence_async_shared()
        tl.debug_barrier()
        if step >= BEHIND:
            mbarrier.arrive(ready.index((step - BEHIND) % STAGES))
    gdc_launch_dependents()
    async_copy.wait_group(0)
    hopper.fence_async_shared()
    tl.debug_barrier()
    for step in range(gl.maximum(steps - BEHIND, 0), steps):
        mbarrier.arrive(ready.index(step % STAGES))


@gluon.jit
def _of_blocks(shared, part: gl.constexpr, SPAN: gl.constexpr, words):
    """Loads scales or zero points of a product's blocks of 32 columns: int32 [ROWS, 4], or [ROWS, 4, 2] if of 16."""
    ROWS: gl.constexpr = words.shape[0]
    COUNT: gl.constexpr = BLOCK_K // SPAN
    LAYOUT: gl.constexpr = gl.SliceLayout(2, words.type.layout)
    loaded = shared.slice(part * (COUNT * ROWS), COUNT * ROWS).load(_scale_layout(COUNT, ROWS)).to(gl.int32)
    loaded = gl.permute(gl.reshape(loaded, [COUNT, ROWS]), (1, 0))
    if SPAN == 16:
        return gl.reshape(loaded, [ROWS, 4, 2])
    elif SPAN == 32:
        return gl.convert_layout(loaded, LAYOUT, assert_trivial=True)
    else:
        loaded = gl.convert_layout(gl.reshape(loaded, [ROWS]), gl.SliceLayout(1, LAYOUT))
        return loaded[:, None] + gl.zeros([ROWS, 4], gl.int32, layout=LAYOUT)


@gluon.jit
def _numbers(
    words, scales, zeros, part: gl.constexpr, E2M1: gl.constexpr, ZEROS: gl.constexpr, SPAN: gl.constexpr,
    A: gl.constexpr,
):  # fmt: skip
    """Converts a product's words [ROWS, 16] to bf16 [ROWS, BLOCK_K], low by the type's lift."""
    words = gl.reshape(words, [words.shape[0], 4, 4])  # blocks of 32 columns, and their words
    if E2M1:
        factors = e2m1_factors(_of_blocks(scales, part, SPAN, words), SPAN == 16)
        if SPAN == 16:
            first, second = gl.split(factors)
            w = e2m1_to_bf16(words, first, second)
        else:
            w = e2m1_to_bf16(words, factors, factors)
    elif SPAN == 32:
        scale = _of_blocks(scales, part, SPAN, words)
        if ZEROS:
            w = int4_to_bf16(words, scale, _of_blocks(zeros, part, SPAN, words))
        else:
            w = int4_to_bf16(words, scale, None)
    elif ZEROS:
        w = int4_to_bf16(words, None, _of_blocks(zeros, part, SPAN, words))
    else:
        w = int4_to_bf16(words, None, None)
    return gl.convert_layout(w, A)


@gluon.jit
def _multiply(
    scales, row_scales, bias, weights, out, words, ids, tokens, first, lists, experts, first_block,
    begin, end, active, total, clamp_at, w_shared, x_shared, scales_shared, zeros_shared, ready, free,
    TOP_K: gl.constexpr, H: gl.constexpr, F: gl.constexpr, BEGIN: gl.constexpr, SPAN: gl.constexpr,
    ZEROS: gl.constexpr, FEW: gl.constexpr, E2M1: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr,
    CLAMP: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup: converts and multiplies, and stores finished tiles."""
    STAGES: gl.constexpr = x_shared.shape[0]
    COLUMNS: gl.constexpr = x_shared.shape[1]
    PARTS: gl.constexpr = x_shared.shape[2] // BLOCK_K
    ROWS: gl.constexpr = w_shared.shape[1]
    STEPS: gl.constexpr = (BEGIN + (H if GATE else F) + PARTS * BLOCK_K - 1) // (PARTS * BLOCK_K)
    ASYNC: gl.constexpr = COLUMNS > FEW_COLUMNS
    PRODUCT: gl.constexpr = product_layout(ROWS // 16, COLUMNS, ASYNC)
    B: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=PRODUCT, k_width=2)
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=PRODUCT, k_width=2)
    dtype: gl.constexpr = x_shared.dtype
    index = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, PRODUCT))
    if FEW:
        of = slots(ids, index, tokens, TOP_K)
        pairs = pairs_with(of, index, experts[0] + first, TOP_K), pairs_with(of, index, experts[1] + first, TOP_K)
    else:
        pairs = lists + index
    at, step = begin, 0
    while at < end:
        stop = gl.minimum(end, (at // STEPS + 1) * STEPS)
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout=PRODUCT)
        for _ in range(at, stop):
            slot = step % STAGES
            mbarrier.wait(ready.index(slot), step // STAGES % 2)
            one = acc
            sums, deps, factors = (), (), ()
            for part in gl.static_range(PARTS):
                if part % 2 == 0:
                    box = w_shared.index(slot * (PARTS // 2) + part // 2).load(_box_layout(ROWS))
                    left, right = gl.split(gl.permute(gl.reshape(box, [ROWS, 2, WORDS // 2]), (0, 2, 1)))
                here = _numbers(
                    left if part % 2 == 0 else right, scales_shared.index(slot), zeros_shared.index(slot), part,
                    E2M1, ZEROS, SPAN, A,
                )  # fmt: skip
                columns = x_shared.index(slot).slice(part * BLOCK_K, BLOCK_K, dim=1).permute((1, 0))
                if not ASYNC:
                    if SPAN == BLOCK_K:
                        one = mma_v2(here, columns.load(B), gl.zeros([ROWS, COLUMNS], gl.float32, layout=PRODUCT))
                        scale = scales_shared.index(slot).slice(part * ROWS, ROWS).load(gl.SliceLayout(1, PRODUCT))
                        acc += scale.to(gl.float32)[:, None] * one
                    else:
                        acc = mma_v2(here, columns.load(B), acc)
                elif SPAN == BLOCK_K:
                    one = hopper.warpgroup_mma(here, columns, acc, use_acc=False, is_async=True)
                    scale = scales_shared.index(slot).slice(part * ROWS, ROWS).load(gl.SliceLayout(1, PRODUCT))
                    sums, factors = sums + (one,), factors + (scale.to(gl.float32),)  # type: ignore[assignment]  # noqa: RUF005
                else:
                    one = hopper.warpgroup_mma(here, columns, one, is_async=True)
                deps = deps + (here,)  # type: ignore[assignment]  # noqa: RUF005
            if ASYNC and SPAN == BLOCK_K:
                done = hopper.warpgroup_mma_wait(0, sums + deps)
                for part in gl.static_range(PARTS):
                    acc += factors[part][:, None] * done[part]
            elif ASYNC:
                done = hopper.warpgroup_mma_wait(0, (one,) + deps)  # noqa: RUF005
                acc = done[0]
            mbarrier.arrive(free.index(slot))
            step += 1
        whole = at // STEPS
        tile, block, _ = locate(at, first_block, GATE, H, F, BEGIN, PARTS, ROWS)
        pair, e = select_pair(block, pairs, FEW, COLUMNS), select_pair(block, experts, FEW, COLUMNS)
        if GATE:
            y = gl.permute(gl.reshape(acc, [ROWS // 16, 2, 8, COLUMNS]), (0, 2, 3, 1))
            y, up = gl.split(gl.reshape(y, [ROWS // 2, COLUMNS, 2]))
        else:
            y = acc
            up = y
        LAYOUT: gl.constexpr = y.type.layout
        n = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
        i = gl.arange(0, y.shape[0], layout=gl.SliceLayout(1, LAYOUT))
        r = tile * y.shape[0] + i
        row = e * (2 * F if GATE else H) + r
        pair = gl.convert_layout(pair, gl.SliceLayout(0, LAYOUT))
        inside = r < (F if GATE else H)
        live = (pair >= 0)[None, :] & inside[:, None]
        if GATE or BIAS:
            weight = gl.load(weights + pair, mask=pair >= 0, other=0.0)
        lift = E2M1_LIFT if E2M1 else INT4_LIFT
        cell = (i[:, None] * COLUMNS) + n[None, :]
        y, up, live = reduce_sharers(y, up, live, words, cell, whole, STEPS, active, total, GATE)
        if row_scales is None:
            y *= lift
            up *= lift
        else:
            y *= (gl.load(row_scales + row, mask=inside, other=0.0) * lift)[:, None]
            if GATE:
                up *= (gl.load(row_scales + F + row, mask=inside, other=0.0) * lift)[:, None]
        if GATE:
            if BIAS:
                y += gl.load(bias + row, mask=inside, other=0.0).to(gl.float32)[:, None]
                up += gl.load(bias + F + row, mask=inside, other=0.0).to(gl.float32)[:, None]
            y = expert_swiglu(y, up, clamp_at, CLAMP)
            y *= weight[None, :]
        elif BIAS:
            y += gl.load(bias + row, mask=inside, other=0.0).to(gl.float32)[:, None] * weight[None, :]
        gl.store(out + (pair * (F if GATE else H))[None, :] + r[:, None], y.to(dtype), mask=live)
        at = stop


@gluon.jit(do_not_specialize=["x_n", "P", "first"])
def _experts_packed_kernel(
    w, scales, zeros, row_scales, x, ids, weights, bias, out, words, lists, x_n, P, first, clamp_at,
    TOP_K: gl.constexpr, EXPERTS: gl.constexpr, H: gl.constexpr, F: gl.constexpr, BLOCK_P: gl.constexpr,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, BEGIN: gl.constexpr, SPAN: gl.constexpr, E2M1: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, LISTS: gl.constexpr,
    GATE: gl.constexpr, BIAS: gl.constexpr, CLAMP: gl.constexpr,
):  # fmt: skip
    FEW: gl.constexpr = LISTS == 0
    K: gl.constexpr = H if GATE else F
    STEPS: gl.constexpr = (BEGIN + K + PARTS * BLOCK_K - 1) // (PARTS * BLOCK_K)
    TILES: gl.constexpr = (2 * F + ROWS - 1) // ROWS if GATE else (H + ROWS - 1) // ROWS
    COUNT: gl.constexpr = PARTS * BLOCK_K // SPAN * ROWS  # scales of a step
    w_shared = gl.allocate_shared_memory(gl.int32, [STAGES * PARTS // 2, ROWS, WORDS], BOX)
    x_shared = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, COLUMNS, PARTS * BLOCK_K], SHARED)
    scales_shared = gl.allocate_shared_memory(scales.dtype.element_ty, [STAGES, COUNT], SCALES)
    ZEROS: gl.constexpr = zeros is not None
    zeros_shared = scales_shared
    if ZEROS:
        zeros_shared = gl.allocate_shared_memory(gl.uint8, [STAGES, COUNT], SCALES)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=2)
        mbarrier.init(free.index(s), count=1)
    hopper.fence_async_shared()
    tl.debug_barrier()
    if GATE:
        gdc_wait()
    if FEW:
        indices, blocks = active_experts(ids, P, first, EXPERTS, BLOCK_P)
    else:
        local, ends = pairs_of(ids, P, first, EXPERTS, BLOCK_P, COLUMNS)
        blocks = gl.max(ends, 0)
    begin, end, active, total = share_of(blocks * TILES, STEPS, gl.program_id(0), gl.num_programs(0))
    first_block = begin // (STEPS * TILES)
    if FEW:
        experts = nth_expert(indices, first_block, EXPERTS), nth_expert(indices, first_block + 1, EXPERTS)
    else:
        lists += gl.program_id(0) * (LISTS * (COLUMNS + 8))
        if begin < end:
            for block in range(first_block, (end - 1) // (STEPS * TILES) + 1):
                list_pairs(lists + (block - first_block) * (COLUMNS + 8), block, local, ends, BLOCK_P, COLUMNS)
        tl.debug_barrier()
        experts = lists + COLUMNS
    for s in range(gl.minimum(end - begin, STAGES)):
        tile, block, column = locate(begin + s, first_block, GATE, H, F, BEGIN, PARTS, ROWS)
        e = select_pair(block, experts, FEW, COLUMNS)
        _load_weights(tile, e, column, w, w_shared, s, ready.index(s), PARTS // 2, GATE)
    if not ZEROS:
        zeros = scales  # a partition takes no None
    tokens = P // TOP_K
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    scales, row_scales, bias, weights, out, words, ids, tokens, first, lists, experts, first_block,
                    begin, end, active, total, clamp_at, w_shared, x_shared, scales_shared, zeros_shared, ready, free,
                    TOP_K, H, F, BEGIN, SPAN, ZEROS, FEW, E2M1, GATE, BIAS, CLAMP,
                ),
            ),
            (
                _load,
                (
                    w, scales, zeros, x, x_n, ids, tokens, first, lists, experts, first_block, begin, end,
                    w_shared, x_shared, scales_shared, zeros_shared, ready, free,
                    TOP_K, H, F, GROUP, GROUPS, BEGIN, SPAN, ZEROS, FEW, GATE,
                ),
            ),
        ],
        [1],
        [48],
    )  # fmt: skip


def span_of(matrix: ScaledMatrix) -> int:
    """Returns how many columns share a scale in shared memory: a product's, if it multiplies the sum."""
    return BLOCK_K.value if matrix.kind == "int4" and matrix.wide_groups else min(matrix.group, PACKED_BLOCK)


def stages_of(columns: int, span: int, scale_bytes: int) -> int:
    """Returns how many stages fit a program's shared memory."""
    product = BLOCK_K.value * (ROWS // 2 + 2 * columns) + BLOCK_K.value // span * ROWS * scale_bytes
    return min(6, (SHARED_KB << 10) // (PARTS * product))


def _is_supported(matrix: ScaledMatrix) -> bool:
    dtype = matrix.scales.dtype
    tensors = matrix.data, matrix.scales, matrix.zeros
    return (
        matrix.data.data_ptr() % 16 == matrix.begin % PACKED_BLOCK == matrix.shape[1] % 8 == 0
        and all(t is None or t.data_ptr() % 16 == 0 for t in tensors)
        and (matrix.kind == "e2m1" or matrix.wide_groups or (dtype == torch.bfloat16 and matrix.group % 32 == 0))
    )


def fits(x: torch.Tensor, P: int, total: int, gate_up: Matrix, down: Matrix) -> bool:
    """Returns whether `launch` supports P pairs, of `total` experts on all ranks, and is fastest.

    Args:
        x, gate_up, down: see `kernels.moe.experts`.
    """
    if not (isinstance(gate_up, ScaledMatrix) and isinstance(down, ScaledMatrix) and gate_up.packed and down.packed):
        return False
    return (
        0 < P <= min(MAX_PAIRS, MAX_EACH * total)
        and len(x) <= MAX_TOKENS
        and down.shape[2] >= MIN_WIDTH
        and x.dtype == torch.bfloat16
        and x.stride(1) == 1
        and x.stride(0) % 8 == x.data_ptr() % 16 == 0
        and _is_supported(gate_up)
        and _is_supported(down)
        and torch.cuda.get_device_capability(x.device)[0] == 9
    )


def launch(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor | ScaledMatrix,
    down: torch.Tensor | ScaledMatrix, first: int,
    gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, clamp_at: float, clamp: int,
    h: torch.Tensor, outputs: torch.Tensor, columns: int,
) -> None:  # fmt: skip
    """Computes the outputs [N k, H] of all local pairs, in blocks of `columns` pairs; requires `fits`.

    `h` [N k, F] receives the gated activations; it and `outputs` are contiguous.
    """
    assert isinstance(gate_up, ScaledMatrix) and isinstance(down, ScaledMatrix)
    (N, H), (E, _, F), k = x.shape, down.shape, ids.shape[1]
    P = N * k
    gates = TensorDescriptor(
        gate_up.data, [E, F // 8, 2, 8, H // 8], [2 * F * H // 8, H, F * H // 8, H // 8, 1],
        [1, ROWS // 16, 2, 8, WORDS.value],
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=5),
    )  # fmt: skip
    downs = TensorDescriptor(
        down.data,
        [E, H, F // 8],
        [H * F // 8, F // 8, 1],
        [1, ROWS, WORDS.value],
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=3),
    )
    programs = PROGRAMS * sm_count(x.device)
    few = are_few(N, P, columns, programs)
    # Of pairs that are counted, every thread has one at least.
    block_p = max(32 if few else 2 * ROWS, triton.next_power_of_2(P))
    max_blocks = (
        0 if few else triton.cdiv(min(block_p, E + block_p // columns), programs) + 2
    )  # blocks that a program lists
    lists = torch.empty(2, programs, max_blocks, columns + 8, dtype=torch.int32, device=x.device)
    sums = workspace(x.device, programs * ROWS // 2 * columns)
    for gate, w, matrix, xs, bias, y in (
        (True, gates, gate_up, x, gate_up_bias, h),
        (False, downs, down, h, down_bias, outputs),
    ):
        _, scales, zeros, row_scales = stored(matrix)[0]
        span = span_of(matrix)
        assert scales is not None
        if span < BLOCK_K.value and matrix.kind == "int4":
            scales = scales.view(torch.int16)
        scale_bytes = scales.itemsize + (zeros is not None)
        _experts_packed_kernel[(programs,)](
            w, scales, zeros, row_scales, xs, ids, weights, bias, y, sums if gate else sums.view(torch.int32),
            lists[int(gate)], xs.stride(0) // 8, P, first, clamp_at,
            TOP_K=k, EXPERTS=E, H=H, F=F, BLOCK_P=block_p, **stored(matrix)[1], SPAN=span, E2M1=matrix.kind == "e2m1",
            ROWS=ROWS, COLUMNS=columns, PARTS=PARTS, STAGES=stages_of(columns, span, scale_bytes),
            LISTS=max_blocks, GATE=gate, BIAS=bias is not None, CLAMP=clamp,
            num_warps=ROWS // 16, maxnreg=REGISTERS, launch_pdl=True,
        )  # fmt: skip
