"""Hopper variant of `kernels.dense.linear` for 1 to 128 rows of x and packed weights, converted in registers.

Bound by conversion and by reads alike: one warp loads, several steps ahead, and the others convert and multiply. With
up to 16 rows of x they do so warp by warp (mma.sync), with few registers, so that latencies of several programs on an
SM overlap; with more, by warpgroups (wgmma), which convert a part while the one before is multiplied.

A fixed grid divides the steps of all tiles equally, and programs that share a tile reduce in a tree. A tile is two
halves of weight rows, `apart` from each other if outputs take row pairs. Of each half a thread owns one row, or two
neighbors: TMA stores even rows before odd ones, so that its words are read without bank conflicts, while one load of a
byte pair has both scales, which are spread to halves of a register that multiplications read.

Scales of groups shorter than a block of 128 columns multiply weights: exactly for e2m1, rounded as in a dequantized
matrix for int4. Those of other groups multiply the fp32 sums of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.attention.kv_append import QKVTarget
from kernels.attention.paged_tiles import SMALL_HEAD_DIM
from kernels.dense.linear_epilogue_sm90 import load_epilogue, store_epilogue
from kernels.dense.split_k_reduce_sm90 import pairs, reduce_sharers, share_of, workspace
from kernels.overlap import sm_count
from kernels.packed_sm90 import E2M1_LIFT, INT4_LIFT, e2m1_factors, e2m1_to_bf16, int4_to_bf16, product_layout
from kernels.peers.ll_protocol import SumTarget, sum_shape
from kernels.scaled import ScaledMatrix
from kernels.sm90 import SHARED

BLOCK_K = gl.constexpr(128)
MAX_ROWS = 128  # of x
MAX_SHARERS = 16  # programs of a tile: leaves of the tree
SHARED_KB = 224  # per SM
SPREAD = gl.constexpr("prmt.b32 $0, $1, 0, 0x4140;")  # puts the two bytes of a 16-bit word into halves of 32 bits


@gluon.constexpr_function
def words_shared(words, rank):
    """Returns the shared layout of rows of 32-bit words."""
    return gl.NVMMASharedLayout(swizzle_byte_width=4 * words, element_bitwidth=32, rank=rank)


@gluon.constexpr_function
def plain_shared(dtype, rank=2):
    """Returns the shared layout of rows as they are."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=dtype.primitive_bitwidth, rank=rank)


@gluon.constexpr_function
def _bases(first, count):
    """Returns first, 2 first, 4 first.. up to `count` values."""
    return [first << i for i in range(count.bit_length() - 1)]


@gluon.constexpr_function
def _words_layout(rows, words, owned, warps):
    """Layout of half a tile's words [rows, words]: a thread has one of four, of `owned` rows, all even ones first."""
    registers = [[0, c] for c in _bases(4, words // 4)] + [[r, 0] for r in _bases(rows // 2, owned)]
    lanes = [[0, 1], [0, 2]] + [[r, 0] for r in _bases(1, 8)]
    return gl.DistributedLinearLayout(registers, lanes, [[r, 0] for r in _bases(8, warps)], [], [rows, words])


@gluon.constexpr_function
def _scales_layout(groups, rows, warps, owned=1):
    """Layout of scales [groups, rows] of half a tile: a thread has `owned` neighboring rows."""
    registers = [[0, r] for r in _bases(1, owned)] + [[g, 0] for g in _bases(1, groups)]
    lanes = [[0, 0], [0, 0]] + [[0, r] for r in _bases(owned, 8)]
    return gl.DistributedLinearLayout(registers, lanes, [[0, r] for r in _bases(8 * owned, warps)], [], [groups, rows])


@gluon.jit
def _load_both(shared, slot, OWNED: gl.constexpr, WARPS: gl.constexpr):
    """Loads values of 8 or 16 bits of both halves of a tile -> int32 [groups, HALF / OWNED, 2], a row's in each half.

    With one row per thread, only low halves of a word are valid.
    """
    GROUPS: gl.constexpr = shared[0].shape[1]
    COUNT: gl.constexpr = shared[0].shape[2] // OWNED
    LAYOUT: gl.constexpr = _scales_layout(GROUPS, COUNT, WARPS)
    BITS: gl.constexpr = shared[0].dtype.primitive_bitwidth * OWNED
    DTYPE: gl.constexpr = gl.int32 if BITS == 32 else gl.uint16 if BITS == 16 else gl.uint8
    first = shared[0].index(slot)._reinterpret(DTYPE, [GROUPS, COUNT], plain_shared(DTYPE)).load(LAYOUT)
    second = shared[1].index(slot)._reinterpret(DTYPE, [GROUPS, COUNT], plain_shared(DTYPE)).load(LAYOUT)
    both = gl.join(first, second).to(gl.int32)
    if shared[0].dtype.primitive_bitwidth == 8:
        both = gl.inline_asm_elementwise(SPREAD, "=r,r", [both], dtype=gl.int32, is_pure=True, pack=1)
    return both


@gluon.jit
def _in_mma_order(values, OWNED: gl.constexpr, WARPS: gl.constexpr):
    """Brings values [groups, HALF / OWNED, 2] to low halves [ROWS, groups], rows as the tensor cores'."""
    GROUPS: gl.constexpr = values.shape[0]
    if OWNED == 1:
        values = gl.reshape(values, [GROUPS, WARPS, 8, 2])
        return gl.reshape(gl.permute(values, (1, 3, 2, 0)), [WARPS * 16, GROUPS])
    else:
        each = gl.join(values, values >> 16)
        each = gl.reshape(each, [GROUPS, WARPS, 8, 2, 2])
        return gl.reshape(gl.permute(each, (4, 1, 3, 2, 0)), [WARPS * 32, GROUPS])


@gluon.jit
def _of_part(values, part: gl.constexpr, COUNT: gl.constexpr):
    """Selects the groups of one of two parts from [ROWS, loaded groups], of which a step has the first COUNT."""
    LOADED: gl.constexpr = values.shape[1]
    if LOADED == 1:
        return values
    else:
        first, second = gl.split(gl.permute(gl.reshape(values, [values.shape[0], 2, LOADED // 2]), (0, 2, 1)))
        if LOADED > COUNT:
            return _of_part(first, part, COUNT)
        else:
            return first if part == 0 else second


@gluon.jit
def _per_block(values, BLOCKS: gl.constexpr):
    """Repeats values of groups [ROWS, 1, 2 or more] for each of 2 or 4 blocks of 32 columns."""
    if values.shape[1] == 1:
        values = gl.reshape(gl.join(values, values), [values.shape[0], 2])
    if values.shape[1] < BLOCKS:
        values = gl.reshape(gl.join(values, values), [values.shape[0], 4])
    return values


@gluon.jit
def _load_words(w, slot, part: gl.constexpr, OWNED: gl.constexpr, WARPS: gl.constexpr):
    """Loads the words of a part of a step -> [ROWS, blocks of 32 columns, 4], rows in the tensor cores' order."""
    HALF: gl.constexpr = w[0].shape[1]
    COUNT: gl.constexpr = w[0].shape[2] // 2
    LAYOUT: gl.constexpr = _words_layout(HALF, COUNT, OWNED, WARPS)
    first = w[0].index(slot).slice(part * COUNT, COUNT, dim=1).load(LAYOUT)
    second = w[1].index(slot).slice(part * COUNT, COUNT, dim=1).load(LAYOUT)
    both = gl.reshape(gl.join(first, second), [OWNED, WARPS, 8, COUNT // 4, 4, 2])
    return gl.reshape(gl.permute(both, (0, 1, 5, 2, 3, 4)), [2 * HALF, COUNT // 4, 4])


@gluon.jit
def _sum_scales(s, slot, part: gl.constexpr, COUNT: gl.constexpr, PRODUCT: gl.constexpr):
    """Loads the scales of a part's rows, in groups of at least a block -> fp32 [ROWS]."""
    HALF: gl.constexpr = s[0].shape[2]
    WARPS: gl.constexpr = PRODUCT.warps_per_cta[0]
    OWNED: gl.constexpr = HALF // (8 * WARPS)
    LAYOUT: gl.constexpr = _scales_layout(s[0].shape[1], HALF, WARPS, OWNED)
    both = gl.join(s[0].index(slot).load(LAYOUT), s[1].index(slot).load(LAYOUT)).to(gl.float32)
    both = gl.permute(gl.reshape(both, [s[0].shape[1], WARPS, 8, OWNED, 2]), (3, 1, 4, 2, 0))
    both = gl.reshape(_of_part(gl.reshape(both, [2 * HALF, s[0].shape[1]]), part, COUNT), [2 * HALF])
    return gl.convert_layout(both, gl.SliceLayout(1, PRODUCT), assert_trivial=True)


@gluon.jit
def _weights_of(
    w, s, z, slot, part: gl.constexpr, COUNT: gl.constexpr, GROUP: gl.constexpr, WIDE: gl.constexpr,
    PRODUCT: gl.constexpr,
):  # fmt: skip
    """Converts a part of a step to bf16 [ROWS, columns], scaled unless groups are wide."""
    WARPS: gl.constexpr = PRODUCT.warps_per_cta[0]
    OWNED: gl.constexpr = w[0].shape[1] // (8 * WARPS)
    words = _load_words(w, slot, part, OWNED, WARPS)
    BLOCKS: gl.constexpr = words.shape[1]
    if s[0].dtype == gl.uint8:
        codes = e2m1_factors(_load_both(s, slot, OWNED, WARPS), GROUP == 16)
        first = _of_part(_in_mma_order(codes, OWNED, WARPS), part, COUNT)
        last = first
        if GROUP == 16:
            first, last = gl.split(gl.reshape(first, [words.shape[0], BLOCKS, 2]))
        w = e2m1_to_bf16(words, first, last)
    else:
        if not WIDE:
            scale = _in_mma_order(_load_both(s, slot, OWNED, WARPS), OWNED, WARPS)
            scale = _per_block(_of_part(scale, part, COUNT), BLOCKS)
        if len(z) > 0:
            zero = _in_mma_order(_load_both(z, slot, OWNED, WARPS), OWNED, WARPS)
            zero = _per_block(_of_part(zero, part, COUNT), BLOCKS)
        w = int4_to_bf16(words, None if WIDE else scale, None if len(z) == 0 else zero)
    return gl.convert_layout(w, gl.DotOperandLayout(operand_index=0, parent=PRODUCT, k_width=2), assert_trivial=True)


@gluon.jit
def _place(tile, R, HALF: gl.constexpr, PAIRED: gl.constexpr, D: gl.constexpr):
    """Returns a tile's first output row and weight row, and how far its second half is from the first."""
    if D > 0:
        row = tile * HALF
        return row, row + row // (D // 2) * (D // 2), D // 2
    elif PAIRED:
        return tile * HALF, tile * HALF, R
    else:
        return tile * (2 * HALF), tile * (2 * HALF), HALF


@gluon.jit
def _multiply(w, x, part: gl.constexpr, acc, ADDS: gl.constexpr):
    """Starts the product of a part of a step; if ADDS, it adds to `acc`."""
    columns = x.slice(part * w.shape[1], w.shape[1], dim=1).permute((1, 0))
    return hopper.warpgroup_mma(w, columns, acc, use_acc=ADDS, is_async=True)


@gluon.jit
def _next(tile, step, steps):
    """Returns the next step's tile and its number in it."""
    ends = step + 1 == steps
    return gl.where(ends, tile + 1, tile), gl.where(ends, 0, step + 1)


@gluon.jit
def _load_weights(
    weights, scales, zeros, tile, step, R, w, s, z, slot, ready, X_BYTES: gl.constexpr, GROUP: gl.constexpr,
    BEGIN: gl.constexpr, OWNED: gl.constexpr, PAIRED: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Loads words, scales and zero points of a step of both halves of a tile; the stage also awaits x."""
    HALF: gl.constexpr = w[0].shape[1]
    WORDS: gl.constexpr = w[0].shape[2]  # of a step
    ZERO_BYTES: gl.constexpr = zeros.block_type.nbytes if len(z) > 0 else 0
    mbarrier.expect(ready, X_BYTES + 2 * (HALF * WORDS * 4 + scales.block_type.nbytes + ZERO_BYTES))
    _, top, apart = _place(tile, R, HALF, PAIRED, D)
    group = step * (WORDS * 8) // GROUP if GROUP > 0 else 0
    for half in gl.static_range(2):
        row = top + half * apart
        rows = w[half].index(slot).reshape([OWNED, HALF // OWNED, WORDS])
        tma.async_copy_global_to_shared(weights, [0, row // OWNED, step * WORDS - BEGIN // 8], ready, rows)
        tma.async_copy_global_to_shared(scales, [group, row], ready, s[half].index(slot))
        if len(z) > 0:
            tma.async_copy_global_to_shared(zeros, [group, row], ready, z[half].index(slot))


@gluon.jit
def _load(
    weights, xs, scales, zeros, at, run, steps, R, w, x, s, z, ready, free, GROUP: gl.constexpr, BEGIN: gl.constexpr,
    OWNED: gl.constexpr, PAIRED: gl.constexpr, D: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Producer warp: loads steps in order; x, only once the predecessor is done."""
    STAGES: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[2]
    X_BYTES: gl.constexpr = x.shape[1] * COLUMNS * 2
    tile, step = at // steps, at % steps
    x_step = step
    for stage in range(gl.minimum(run, STAGES)):
        _load_weights(
            weights, scales, zeros, tile, step, R, w, s, z, stage, ready.index(stage), X_BYTES, GROUP, BEGIN, OWNED,
            PAIRED, D,
        )  # fmt: skip
        tile, step = _next(tile, step, steps)
    gdc_wait()
    slot, phase = 0, 1
    for i in range(run):
        if i >= STAGES:
            mbarrier.wait(free.index(slot), phase)
            _load_weights(
                weights, scales, zeros, tile, step, R, w, s, z, slot, ready.index(slot), X_BYTES, GROUP, BEGIN, OWNED,
                PAIRED, D,
            )  # fmt: skip
            tile, step = _next(tile, step, steps)
        tma.async_copy_global_to_shared(xs, [0, x_step * COLUMNS - BEGIN], ready.index(slot), x.index(slot))
        _, x_step = _next(0, x_step, steps)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    if EARLY:
        gdc_launch_dependents()


@gluon.jit
def _consume(
    xs, scales, row_scales, bias, out, words, peers, count, N, R, steps, rank,
    cos, sin, slot_mapping, k_cache, v_cache, q, k_page, v_page, at, end, active, total,
    w_shared, x_shared, s_shared, z_shared, ready, free,
    GROUP: gl.constexpr, N_MAX: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, COLUMNS: gl.constexpr,
    ASYNC: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr,
    RANKS: gl.constexpr, PIECES: gl.constexpr, SIZE: gl.constexpr, TWO_SHOT: gl.constexpr,
    Q_HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, SLOT: gl.constexpr,
    HEAD: gl.constexpr,
):  # fmt: skip
    """Consumer warps: convert and multiply, and store finished tiles."""
    STAGES: gl.constexpr = x_shared.shape[0]
    SENDS: gl.constexpr = RANKS > 0  # words of two weight rows, which end in the same program
    PAIRED: gl.constexpr = GATED or D > 0
    E2M1: gl.constexpr = scales.dtype == gl.uint8
    WIDE: gl.constexpr = GROUP >= BLOCK_K or GROUP == 0  # scales multiply sums
    OWNED: gl.constexpr = ROWS // (16 * WARPS)  # rows of a thread in each half
    HALF: gl.constexpr = ROWS // 2
    COUNT: gl.constexpr = max(1, COLUMNS // GROUP) if GROUP > 0 else 1  # groups of a step
    PRODUCT: gl.constexpr = product_layout(WARPS, N_MAX, ASYNC)
    B: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=PRODUCT, k_width=2)
    RESULT: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, WARPS], [0, 1])
    TILE: gl.constexpr = HALF if PAIRED or SENDS else ROWS  # sums, or pairs of sums, per row of x
    dtype: gl.constexpr = xs.dtype
    run = end - at
    if ASYNC:
        mbarrier.wait(ready.index(0), 0, pred=run > 0)
        w = _weights_of(w_shared, s_shared, z_shared, 0, 0, COUNT, GROUP, WIDE, PRODUCT)
    step, slot, phase = 0, 0, 0
    while at < end:
        tile = at // steps
        stop = gl.minimum(end, (tile + 1) * steps)
        row, top, apart = _place(tile, R, HALF, PAIRED, D)
        if N_MAX <= 16:
            live, y_bias, up_bias, found = load_epilogue(
                bias, count, peers, cos, sin, slot_mapping, top, apart, row, N, R,
                RESULT, TILE, N_MAX, BIAS, PAIRED, RANKS, SIZE, TWO_SHOT, D,
            )  # fmt: skip
        i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, PRODUCT))
        factor = gl.full_like(i, 1).to(gl.float32)
        if row_scales is not None:
            r = top + i // 8 % 2 * apart + (i // 16 % WARPS * 8 + i % 8) * OWNED + i // (16 * WARPS)
            factor = gl.load(row_scales + r, mask=r < (2 * R if PAIRED else R), other=0.0)
        acc = gl.zeros([ROWS, N_MAX], gl.float32, layout=PRODUCT)
        if not ASYNC:
            for _ in range(at, stop):
                mbarrier.wait(ready.index(slot), phase)
                for part in gl.static_range(2):
                    columns = x_shared.index(slot).slice(part * (COLUMNS // 2), COLUMNS // 2, dim=1)
                    x = columns.permute((1, 0)).load(B)
                    w = _weights_of(w_shared, s_shared, z_shared, slot, part, COUNT, GROUP, WIDE, PRODUCT)
                    if WIDE:
                        y = mma_v2(w, x, gl.zeros([ROWS, N_MAX], gl.float32, layout=PRODUCT))
                        acc += _sum_scales(s_shared, slot, part, COUNT, PRODUCT)[:, None] * y
                    else:
                        acc = mma_v2(w, x, acc)
                mbarrier.arrive(free.index(slot))
                phase = gl.where(slot + 1 == STAGES, phase ^ 1, phase)
                slot = gl.where(slot + 1 == STAGES, 0, slot + 1)
        else:
            none = gl.zeros([ROWS, N_MAX], gl.float32, layout=PRODUCT)
            next_w = w
            for _ in range(at, stop):
                # A part is converted while the one before is multiplied. Its end is awaited after the next one's start:
                # the compiler would move an earlier wait before the conversion.
                x_slot = x_shared.index(slot)
                y = _multiply(w, x_slot, 0, none if WIDE else acc, not WIDE)
                if not WIDE:
                    acc, next_w = hopper.warpgroup_mma_wait(1, [y, next_w])  # type: ignore[misc]
                mbarrier.arrive(free.index(gl.where(slot == 0, STAGES - 1, slot - 1)), pred=step > 0)
                next_w = _weights_of(w_shared, s_shared, z_shared, slot, 1, COUNT, GROUP, WIDE, PRODUCT)
                if not WIDE:
                    acc = _multiply(next_w, x_slot, 1, acc, True)
                    acc, w = hopper.warpgroup_mma_wait(1, [acc, w])  # type: ignore[misc]
                elif COUNT == 1:  # both parts have one scale
                    y = _multiply(next_w, x_slot, 1, y, True)
                    y, w, next_w = hopper.warpgroup_mma_wait(0, [y, w, next_w])  # type: ignore[misc]
                    acc += _sum_scales(s_shared, slot, 0, COUNT, PRODUCT)[:, None] * y
                else:
                    next_y = _multiply(next_w, x_slot, 1, none, False)
                    y, next_y, w, next_w = hopper.warpgroup_mma_wait(0, [y, next_y, w, next_w])  # type: ignore[misc]
                    scale = _sum_scales(s_shared, slot, 0, COUNT, PRODUCT)
                    next_scale = _sum_scales(s_shared, slot, 1, COUNT, PRODUCT)
                    acc += scale[:, None] * y + next_scale[:, None] * next_y
                step += 1
                phase = gl.where(slot + 1 == STAGES, phase ^ 1, phase)
                slot = gl.where(slot + 1 == STAGES, 0, slot + 1)
                mbarrier.wait(ready.index(slot), phase, pred=step < run)
                w = _weights_of(w_shared, s_shared, z_shared, slot, 0, COUNT, GROUP, WIDE, PRODUCT)
            if not WIDE:
                acc, next_w = hopper.warpgroup_mma_wait(0, [acc, next_w])  # type: ignore[misc]
        if N_MAX > 16:  # before the loop, this would take its registers
            live, y_bias, up_bias, found = load_epilogue(
                bias, count, peers, cos, sin, slot_mapping, top, apart, row, N, R,
                RESULT, TILE, N_MAX, BIAS, PAIRED, RANKS, SIZE, TWO_SHOT, D,
            )  # fmt: skip
        acc *= (factor * (E2M1_LIFT if E2M1 else INT4_LIFT))[:, None]
        each = gl.reshape(acc, [OWNED, WARPS, 2, 8, N_MAX])
        if PAIRED:
            y, up = gl.split(gl.reshape(gl.permute(each, (1, 3, 0, 4, 2)), [HALF, N_MAX, 2]))
            y, up = gl.convert_layout(y, RESULT), gl.convert_layout(up, RESULT)
        else:
            each = gl.reshape(gl.permute(each, (2, 1, 3, 0, 4)), [ROWS, N_MAX])
            if SENDS:
                NEIGHBORS: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, WARPS], [0, 1])
                y, up = pairs(gl.convert_layout(each, NEIGHBORS), RESULT)
            else:
                y = gl.convert_layout(each, RESULT)
                up = y
        cell = gl.arange(0, TILE, layout=gl.SliceLayout(1, RESULT))[:, None]
        cell += (gl.arange(0, N_MAX, layout=gl.SliceLayout(0, RESULT)) * TILE)[None, :]
        y, up, live = reduce_sharers(y, up, live, words, cell, tile, steps, active, total, PAIRED or SENDS)
        store_epilogue(
            y, up, live, y_bias, up_bias, found, out, peers, row, R, rank, k_cache, v_cache, q, k_page, v_page,
            dtype, BIAS, GATED, RANKS, PIECES, SIZE, TWO_SHOT, Q_HEADS, KV_HEADS, D, PAGE, SLOT, HEAD,
        )  # fmt: skip
        at = stop


@gluon.jit(do_not_specialize=["N", "R", "steps", "rank"])
def _linear_packed_sm90_kernel(
    weights, xs, scales, zeros, row_scales, bias, out, words, peers, count, N, R, steps, rank,
    cos, sin, slot_mapping, k_cache, v_cache, q, k_page, v_page,
    GROUP: gl.constexpr, BEGIN: gl.constexpr, N_MAX: gl.constexpr, ROWS: gl.constexpr,
    WARPS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, ASYNC: gl.constexpr,
    BIAS: gl.constexpr, GATED: gl.constexpr,
    RANKS: gl.constexpr, PIECES: gl.constexpr, SIZE: gl.constexpr, TWO_SHOT: gl.constexpr,
    Q_HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, SLOT: gl.constexpr,
    HEAD: gl.constexpr,
):  # fmt: skip
    EARLY: gl.constexpr = D == 0 or D > SMALL_HEAD_DIM  # see `kernels.attention.kv_append`
    PAIRED: gl.constexpr = GATED or D > 0
    HALF: gl.constexpr = ROWS // 2
    w_shared, s_shared, z_shared = (), (), ()
    for _half in gl.static_range(2):
        of_half = gl.allocate_shared_memory(gl.int32, [STAGES, HALF, COLUMNS // 8], words_shared(COLUMNS // 8, 2))
        w_shared = w_shared + (of_half,)  # type: ignore[assignment]  # noqa: RUF005
        of_half = gl.allocate_shared_memory(scales.dtype, [STAGES, scales.block_type.shape[0], HALF], scales.layout)
        s_shared = s_shared + (of_half,)  # type: ignore[assignment]  # noqa: RUF005
        if zeros is not None:
            of_half = gl.allocate_shared_memory(gl.uint8, [STAGES, zeros.block_type.shape[0], HALF], zeros.layout)
            z_shared = z_shared + (of_half,)  # type: ignore[assignment]  # noqa: RUF005
    x_shared = gl.allocate_shared_memory(xs.dtype, [STAGES, N_MAX, COLUMNS], SHARED)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    hopper.fence_async_shared()
    tl.debug_barrier()

    tiles = (R + (HALF if PAIRED else ROWS) - 1) // (HALF if PAIRED else ROWS)
    at, end, active, total = share_of(tiles, steps, gl.program_id(0), gl.num_programs(0))
    if zeros is None:
        zeros = scales  # a partition takes no None
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    xs, scales, row_scales, bias, out, words, peers, count, N, R, steps, rank,
                    cos, sin, slot_mapping, k_cache, v_cache, q, k_page, v_page, at, end, active, total,
                    w_shared, x_shared, s_shared, z_shared, ready, free,
                    GROUP, N_MAX, ROWS, WARPS, COLUMNS, ASYNC, BIAS, GATED,
                    RANKS, PIECES, SIZE, TWO_SHOT, Q_HEADS, KV_HEADS, D, PAGE, SLOT, HEAD,
                ),
            ),
            (
                _load,
                (
                    weights, xs, scales, zeros, at, end - at, steps, R, w_shared, x_shared, s_shared, z_shared,
                    ready, free, GROUP, BEGIN, ROWS // (16 * WARPS), PAIRED, D, EARLY,
                ),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip


class Tile(NamedTuple):
    """How a launch divides its work.

    Attributes:
        rows, columns: of the weight, of a tile and of a step.
        is_async: whether warpgroups multiply; else each warp does, and converts a little at a time.
        programs: per SM.
        places: for programs on an SM, by registers and shared memory: the next kernel's may come early.
    """

    rows: int
    warps: int
    columns: int
    is_async: bool
    programs: int
    places: int


def tile_of(N: int, heads: bool, weight: ScaledMatrix) -> Tile:
    """Chooses a tile for N rows of x; a half of an attention head holds 64 rows.

    Every program reads x, so more rows of x need more rows of the weight.
    """
    wide = 256 % weight.group == 0 or weight.group % 256 == 0 or len(weight.scales) == 1
    columns = 256 if N <= 16 and wide else 128
    if N <= 16:
        return Tile(128, 4, columns, False, 3, 3)
    if N <= 32 or (heads and N <= 64):
        return Tile(128, 4, columns, True, 2, 2)
    return Tile(256, 8, columns, True, 1, 1) if N <= 64 else Tile(128, 8, columns, True, 1, 1)


def programs_of(tiles: int, steps: int, columns: int, slots: int) -> int:
    """Returns how many programs share the steps of all tiles: those that fit at once, with runs of a few steps."""
    if 2 * tiles > slots:
        return slots
    return tiles * max(1, min(slots // tiles, MAX_SHARERS, steps // (3 if columns == 256 else 5)))


def fits(x: torch.Tensor, weight: ScaledMatrix, half: int | None = None) -> bool:
    """Returns whether `launch` supports these tensors of `kernels.dense.linear.linear`, row pairs `half` apart."""
    stored = [weight.data, weight.scales, *(() if weight.zeros is None else (weight.zeros,))]
    return (
        0 < len(x) <= MAX_ROWS
        and 0 not in weight.shape
        and weight.packed
        and (half is None or all(half * t.itemsize % 16 == 0 for t in stored[1:]))  # TMA alignment of coordinates
        and (weight.kind == "e2m1" or weight.wide_groups or weight.scales.dtype == torch.bfloat16)
        # TMA alignment of rows
        and all(t.is_contiguous() and t.data_ptr() % 16 == t.stride(-2) * t.itemsize % 16 == 0 for t in stored)
        and x.dtype == torch.bfloat16
        and x.stride(1) == 1
        and x.stride(0) % 8 == x.data_ptr() % 16 == 0
        and torch.cuda.get_device_capability(x.device)[0] == 9
    )


def launch(
    x: torch.Tensor,
    weight: ScaledMatrix,
    bias: torch.Tensor | None,
    out: torch.Tensor | SumTarget | QKVTarget,
    gated: bool,
    programs: int | None = None,
    shared_kb: int = SHARED_KB,
) -> None:
    """Runs `kernels.dense.linear` into `out`: a contiguous [N, R], an all-reduce's LL buffers, or attention's heads.

    Args:
        programs: that share the steps of all tiles; None chooses the fastest.
        shared_kb: KiB of shared memory for all programs of an SM.
    """
    N, K = x.shape
    heads = out if isinstance(out, QKVTarget) else None
    sums = out if isinstance(out, SumTarget) else None
    paired = gated or heads is not None
    R = len(weight) // 2 if paired else len(weight)
    n_max = max(8, triton.next_power_of_2(N))
    rows, warps, columns, is_async, per_sm, places = tile_of(N, heads is not None, weight)
    half, owned = rows // 2, rows // (16 * warps)
    tiles, steps = triton.cdiv(R, half if paired else rows), triton.cdiv(weight.begin + K, columns)
    programs = programs or programs_of(tiles, steps, columns, per_sm * sm_count(x.device))
    weights = TensorDescriptor(
        weight.data, [owned, len(weight) // owned, K // 8], [K // 8, owned * (K // 8), 1],
        [owned, half // owned, columns // 8], words_shared(columns // 8, 3),
    )  # fmt: skip
    xs = TensorDescriptor(x, [N, K], [x.stride(0), 1], [n_max, columns], SHARED.value)
    single = len(weight.scales) == 1 and weight.kind == "int4"  # group
    groups = 1 if single else max(1, columns // weight.group)
    # At least 128 bytes: of a group that has less, the next is loaded, too.
    scales, zeros = (
        None if t is None else TensorDescriptor(
            t, [*t.shape], [*t.stride()], [max(groups, 128 // (half * t.itemsize)), half],
            gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * t.itemsize, rank=2),
        )
        for t in (weight.scales, weight.zeros)
    )  # fmt: skip
    stage = columns * (rows // 2 + 2 * n_max)
    stage += sum(2 * d.block_shape[0] * half * d.base.itemsize for d in (scales, zeros) if d is not None)
    room = shared_kb * 1024 // places - 2048 - rows * n_max * 4  # sums go through shared memory in the end
    # At least two stages: one is refilled while the next step is multiplied.
    stages = max(2, min(triton.cdiv(tiles * steps, programs), room // stage))
    words = workspace(x.device, triton.next_power_of_2(programs * half * n_max))
    _linear_packed_sm90_kernel[(programs,)](
        weights, xs, scales, zeros, weight.row_scales, bias, out if isinstance(out, torch.Tensor) else None,
        words if paired or sums else words.view(torch.int32),
        *(sums.peers, sums.count) if sums else (None, None), N, R, steps, sums.rank if sums else 0,
        *(*heads.tensors, *heads.strides) if heads else (*[None] * 6, 0, 0),
        GROUP=0 if single else weight.group, BEGIN=weight.begin, N_MAX=n_max, ROWS=rows, WARPS=warps,
        COLUMNS=columns, STAGES=stages, ASYNC=is_async, BIAS=bias is not None, GATED=gated, **sum_shape(sums),
        **heads.shape if heads else dict(Q_HEADS=0, KV_HEADS=0, D=0, PAGE=0, SLOT=0, HEAD=0),
        num_warps=warps, maxnreg=min(248, 2048 // ((warps + 4) * places) // 8 * 8), launch_pdl=True,
    )  # fmt: skip
