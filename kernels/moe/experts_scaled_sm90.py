"""Hopper variant of `kernels.moe.experts` for weights in e4m3 and up to 128 tokens.

As in `kernels.moe.experts_sm90`, a fixed grid divides the steps of all tiles equally, and programs that share a tile
reduce in a tree. But MMA columns are pairs of one expert: each program counts the blocks of pairs per local expert from
ids, and lists the pairs of its own blocks in memory; an expert with several blocks is read again from L2. With no more
tokens than columns no expert has two blocks and latency dominates, so columns are tokens, and a program finds the one
or two experts of its steps in registers. Down writes one output per pair; another launch sums them.

A thread reads what it converts in 16-byte words, and nothing is shuffled: it multiplies 32 neighboring columns, which
in MMA order are pairs 8 apart. Rows of x and h are copied to shared memory in that order, a pair of columns at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dense.scaled_rows import stored
from kernels.dense.silu_mul import expert_swiglu
from kernels.dense.split_k_reduce_sm90 import reduce_sharers, share_of, workspace
from kernels.moe.expert_lookup_sm90 import active_experts, nth_expert, pairs_with, slots
from kernels.overlap import sm_count
from kernels.scaled import Matrix, ScaledMatrix
from kernels.sm90 import SHARED, add

MAX_TOKENS, MAX_PAIRS = 128, 2048
MAX_COLUMNS = 32  # pairs per block
MIN_WIDTH = 128  # columns of an expert: one group
WARPS, ROWS, HALF = gl.constexpr(4), gl.constexpr(64), gl.constexpr(32)
BLOCK_K, PARTS = gl.constexpr(128), gl.constexpr(2)  # columns per product; products per step: 16 KB of weights
WORDS = gl.constexpr(BLOCK_K.value // 4)
SHARED_KB = {2: 104, 3: 68}  # of stages per program, by programs per SM
COPIED = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))
SCALES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


def _e4m3_to_bf16() -> str:
    """Code for a word, via fp16 and fp32: fp16 to bf16 is a slow instruction."""
    lines = [".reg .b16 p<2>; .reg .b32 f, d; .reg .b16 h<2>; .reg .f32 a, b;", "mov.b32 {p0, p1}, $4;"]
    for i in range(2):
        lines += [f"cvt.rn.f16x2.e4m3x2 f, p{i};", "mov.b32 {h0, h1}, f;", "cvt.f32.f16 a, h0;", "cvt.f32.f16 b, h1;"]
        lines += ["cvt.rn.bf16x2.f32 d, b, a;", f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, d;"]
    return "{" + "\n".join(lines) + "}"


E4M3_TO_BF16 = gl.constexpr(_e4m3_to_bf16())


@gluon.constexpr_function
def words_shared(words, rank=2):
    """Returns the shared layout of rows of 32-bit words, for MMA."""
    return gl.NVMMASharedLayout(swizzle_byte_width=4 * words, element_bitwidth=32, rank=rank)


@gluon.constexpr_function
def _words(words):
    """Layout of [ROWS, words] in which a thread has a quarter of its rows, 16 bytes at a time."""
    quarter = words // 4
    registers = [[0, 1 << i] for i in range(quarter.bit_length() - 1)] + [[8, 0]]
    lanes = [[0, quarter], [0, 2 * quarter], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, words])


@gluon.jit
def pairs_of(ids, P, first, EXPERTS: gl.constexpr, BLOCK_P: gl.constexpr, COLUMNS: gl.constexpr):
    """Finds each pair's local expert, or -1, and the running number of the experts' blocks."""
    BINS: gl.constexpr = max(32, triton.next_power_of_2(EXPERTS))
    WARPS: gl.constexpr = gl.num_warps()
    p = gl.arange(0, BLOCK_P, layout=gl.BlockedLayout([max(1, BLOCK_P // (32 * WARPS))], [32], [WARPS], [0]))
    local = gl.load(ids + p, mask=p < P, other=-1) - first
    inside = (p < P) & (local >= 0) & (local < EXPERTS)
    local = gl.where(inside, local, -1)
    each: gl.constexpr = gl.BlockedLayout([BINS // 32], [32], [WARPS], [0])
    counts = gl.histogram(gl.where(inside, local, 0), BINS, mask=inside, layout=each)
    return local, gl.associative_scan((counts + COLUMNS - 1) // COLUMNS, 0, add)


@gluon.jit
def list_pairs(row, block, local, ends, BLOCK_P: gl.constexpr, COLUMNS: gl.constexpr):
    """Lists a block's pairs in memory, -1 past the last one, and behind them its expert."""
    expert = gl.sum((ends <= block).to(gl.int32), 0)
    before = gl.max(gl.where(ends <= block, ends, 0), 0)
    n = gl.arange(0, COLUMNS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    gl.store(row + n, gl.full_like(n, -1))
    gl.store(row + COLUMNS, expert)
    tl.debug_barrier()
    mine = local == expert
    index = gl.associative_scan(mine.to(gl.int32), 0, add) - 1 - (block - before) * COLUMNS
    p = gl.arange(0, BLOCK_P, layout=local.type.layout)
    gl.store(row + index, p, mask=mine & (index >= 0) & (index < COLUMNS))


@gluon.jit
def locate(at, first_block, GATE: gl.constexpr, H: gl.constexpr, F: gl.constexpr, BEGIN: gl.constexpr,
            PARTS: gl.constexpr, ROWS: gl.constexpr):  # fmt: skip
    """Returns a step's tile of the expert's rows, its block among the program's, and its first column."""
    HALF: gl.constexpr = ROWS // 2
    STEPS: gl.constexpr = (BEGIN + (H if GATE else F) + PARTS * BLOCK_K - 1) // (PARTS * BLOCK_K)
    TILES: gl.constexpr = (F + HALF - 1) // HALF if GATE else (H + ROWS - 1) // ROWS
    tile = at // STEPS
    return tile % TILES, tile // TILES - first_block, at % STEPS * (PARTS * BLOCK_K) - BEGIN


@gluon.jit
def select_pair(block, of, FEW: gl.constexpr, COLUMNS: gl.constexpr):
    """Returns the value of one of the program's blocks: one of two values if FEW, else from its list."""
    if FEW:
        return gl.where(block > 0, of[1], of[0])
    else:
        return gl.load(of + block * (COLUMNS + 8))


@gluon.jit
def _load_weights(tile, e, column, w, slots, slot, ready, GATE: gl.constexpr):
    for part in gl.static_range(PARTS):
        mbarrier.expect(ready[part].index(slot), ROWS * WORDS * 4)
    for part in gl.static_range(PARTS):
        to, k = slots[part].index(slot), column // 4 + part * WORDS
        if GATE:
            to = to.reshape([1, HALF // 8, 2, 8, WORDS])
            tma.async_copy_global_to_shared(w, [e, tile * (HALF // 8), 0, 0, k], ready[part].index(slot), to)
        else:
            tma.async_copy_global_to_shared(
                w, [e, tile * ROWS, k], ready[part].index(slot), to.reshape([1, ROWS, WORDS])
            )


@gluon.jit
def _copy_rows(pair, column, x, x_n, to, GATE: gl.constexpr, TOP_K: gl.constexpr, K: gl.constexpr):
    """Copies a step's columns of the pairs' rows, in the order of `_words`; zeros where there is no pair."""
    p = gl.arange(0, to.shape[1], layout=gl.SliceLayout(0, COPIED))
    even = column + (p // BLOCK_K * BLOCK_K + p % 8 // 2 * 32 + p % BLOCK_K // 8 * 2)
    k = gl.max_contiguous(gl.multiple_of(even + p % 2, 2), 2)
    rows = x + (pair // TOP_K if GATE else pair) * (x_n * 8)  # makes it known to be a multiple of 8
    inside = (pair >= 0)[:, None] & gl.max_constancy((even >= 0) & (even < K), 2)[None, :]
    async_copy.async_copy_global_to_shared(to, rows[:, None] + k[None, :], mask=inside)


@gluon.jit
def _copy_scales(
    tile, e, index, scales, to, GATE: gl.constexpr, H: gl.constexpr, F: gl.constexpr,
    GROUP: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Copies the scales of a step's rows, whose groups begin `index` columns after the first."""
    c = gl.arange(0, to.shape[0], layout=gl.BlockedLayout([to.shape[0] // 128], [32], [4], [0]))
    i, group = c % ROWS, (index + c // ROWS * BLOCK_K) // GROUP
    if GATE:
        f = tile * HALF + i // 16 * 8 + i % 8
        r, inside = i // 8 % 2 * F + f, f < F
    else:
        r, inside = tile * ROWS + i, tile * ROWS + i < H
    at = scales + (e * GROUPS + group) * (2 * F if GATE else H) + gl.max_contiguous(gl.multiple_of(r, 4), 4)
    async_copy.async_copy_global_to_shared(to, at, mask=gl.max_constancy((group < GROUPS) & inside, 4))


@gluon.jit
def _numbers(words, A: gl.constexpr):
    """Converts words [ROWS, WORDS] to bf16 [ROWS, BLOCK_K], in the order of `_copy_rows`."""
    a, b, c, d = gl.inline_asm_elementwise(
        E4M3_TO_BF16, "=h,=h,=h,=h,r", [gl.reshape(words, [ROWS, 4, 8])],
        dtype=(gl.int16, gl.int16, gl.int16, gl.int16), is_pure=True, pack=1,
    )  # fmt: skip
    w = gl.permute(gl.join(gl.join(a, b), gl.join(c, d)), (0, 2, 4, 1, 3))
    return gl.convert_layout(gl.reshape(w, [ROWS, BLOCK_K]).to(gl.bfloat16, bitcast=True), A)


@gluon.jit
def _multiply(w_shared, slot, x, scales, part: gl.constexpr, PRODUCT: gl.constexpr):
    """Starts the product of a part of a step; returns it, its weights, and row scales."""
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=PRODUCT, k_width=2)
    w = _numbers(w_shared[part].index(slot).load(_words(w_shared[part].shape[2])), A)
    columns = x.slice(part * BLOCK_K, BLOCK_K, dim=1).permute((1, 0))
    COLUMNS: gl.constexpr = x.shape[0]
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, layout=PRODUCT)
    product = hopper.warpgroup_mma(w, columns, zeros, use_acc=False, is_async=True)
    return product, w, scales.slice(part * ROWS, ROWS).load(gl.SliceLayout(1, PRODUCT))


@gluon.jit(do_not_specialize=["x_n", "P", "first"])
def _moe_scaled_sm90_kernel(
    w, scales, x, ids, weights, bias, out, words, lists, x_n, P, first, clamp_at,
    TOP_K: gl.constexpr, EXPERTS: gl.constexpr, H: gl.constexpr, F: gl.constexpr, BLOCK_P: gl.constexpr,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, BEGIN: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr, LISTS: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr, CLAMP: gl.constexpr,
):  # fmt: skip
    FEW: gl.constexpr = LISTS == 0
    K: gl.constexpr = H if GATE else F
    STEPS: gl.constexpr = (BEGIN + K + PARTS * BLOCK_K - 1) // (PARTS * BLOCK_K)
    TILES: gl.constexpr = (F + HALF - 1) // HALF if GATE else (H + ROWS - 1) // ROWS
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    dtype: gl.constexpr = x.dtype.element_ty
    w_shared, ready = (), ()  # separate per part, so that the compiler puts no barrier between their loads
    for _part in gl.static_range(PARTS):
        words_of_part = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, WORDS], words_shared(WORDS))
        barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        w_shared, ready = w_shared + (words_of_part,), ready + (barriers,)  # type: ignore[assignment]  # noqa: RUF005
    x_shared = gl.allocate_shared_memory(dtype, [STAGES, COLUMNS, PARTS * BLOCK_K], SHARED)
    scales_shared = gl.allocate_shared_memory(gl.float32, [STAGES, PARTS * ROWS], SCALES)
    for part in gl.static_range(PARTS):
        for s in gl.static_range(STAGES):
            mbarrier.init(ready[part].index(s), count=1)
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
    steps = end - begin
    first_block = begin // (STEPS * TILES)
    if FEW:
        experts = nth_expert(indices, first_block, EXPERTS), nth_expert(indices, first_block + 1, EXPERTS)
    else:
        lists += gl.program_id(0) * (LISTS * (COLUMNS + 8))
        if steps > 0:
            for block in range(first_block, (end - 1) // (STEPS * TILES) + 1):
                list_pairs(lists + (block - first_block) * (COLUMNS + 8), block, local, ends, BLOCK_P, COLUMNS)
        tl.debug_barrier()
        experts = lists + COLUMNS
    for s in range(gl.minimum(steps, STAGES - 1)):
        tile, block, column = locate(begin + s, first_block, GATE, H, F, BEGIN, PARTS, ROWS)
        _load_weights(tile, select_pair(block, experts, FEW, COLUMNS), column, w, w_shared, s, ready, GATE)
    index = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, COPIED))
    if FEW:
        of = slots(ids, index, P // TOP_K, TOP_K)
        pairs = pairs_with(of, index, experts[0] + first, TOP_K), pairs_with(of, index, experts[1] + first, TOP_K)
    else:
        pairs = lists + index
    if not GATE:
        gdc_wait()
    if steps < STAGES:
        gdc_launch_dependents()
    for s in range(STAGES - 1):
        if s < steps:
            tile, block, column = locate(begin + s, first_block, GATE, H, F, BEGIN, PARTS, ROWS)
            pair, e = select_pair(block, pairs, FEW, COLUMNS), select_pair(block, experts, FEW, COLUMNS)
            _copy_rows(pair, column, x, x_n, x_shared.index(s), GATE, TOP_K, K)
            _copy_scales(tile, e, column + BEGIN, scales, scales_shared.index(s), GATE, H, F, GROUP, GROUPS)
        async_copy.commit_group()
    at, step = begin, 0
    while at < end:
        stop = gl.minimum(end, (at // STEPS + 1) * STEPS)
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout=PRODUCT)
        for _ in range(at, stop):
            slot, ahead = step % STAGES, step - 1 + STAGES
            tile, block, column = locate(
                gl.minimum(begin + ahead, end - 1), first_block, GATE, H, F, BEGIN, PARTS, ROWS
            )
            pair, e = select_pair(block, pairs, FEW, COLUMNS), select_pair(block, experts, FEW, COLUMNS)
            for part in gl.static_range(PARTS):
                mbarrier.wait(ready[part].index(slot), step // STAGES % 2)
            async_copy.wait_group(STAGES - 2)
            tl.debug_barrier()  # all warps have their rows, and are done with the previous step
            hopper.fence_async_shared()
            x_slot, scales_slot = x_shared.index(slot), scales_shared.index(slot)
            one, one_w, scale = _multiply(w_shared, slot, x_slot, scales_slot, 0, PRODUCT)
            two, two_w, next_scale = _multiply(w_shared, slot, x_slot, scales_slot, 1, PRODUCT)
            if ahead < steps:
                into = ahead % STAGES
                _load_weights(tile, e, column, w, w_shared, into, ready, GATE)
                _copy_rows(pair, column, x, x_n, x_shared.index(into), GATE, TOP_K, K)
                _copy_scales(tile, e, column + BEGIN, scales, scales_shared.index(into), GATE, H, F, GROUP, GROUPS)
                if ahead == steps - 1:  # the last load has been issued
                    gdc_launch_dependents()
            async_copy.commit_group()
            one, two, _, _ = hopper.warpgroup_mma_wait(0, [one, two, one_w, two_w])
            acc += scale[:, None] * one + next_scale[:, None] * two
            step += 1
        whole = at // STEPS
        tile, block, _ = locate(at, first_block, GATE, H, F, BEGIN, PARTS, ROWS)
        pair, e = select_pair(block, pairs, FEW, COLUMNS), select_pair(block, experts, FEW, COLUMNS)
        if GATE:
            y = gl.permute(gl.reshape(acc, [HALF // 8, 2, 8, COLUMNS]), (0, 2, 3, 1))
            y, up = gl.split(gl.reshape(y, [HALF, COLUMNS, 2]))
        else:
            y = acc
            up = y
        LAYOUT: gl.constexpr = y.type.layout
        n = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
        i = gl.arange(0, y.shape[0], layout=gl.SliceLayout(1, LAYOUT))
        r = tile * y.shape[0] + i
        pair = gl.convert_layout(pair, gl.SliceLayout(0, LAYOUT))
        live = (pair >= 0)[None, :] & (r < (F if GATE else H))[:, None]
        if GATE or BIAS:
            weight = gl.load(weights + pair, mask=pair >= 0, other=0.0)
        cell = (i[:, None] * COLUMNS) + n[None, :]
        y, up, live = reduce_sharers(y, up, live, words, cell, whole, STEPS, active, total, GATE)
        if GATE:
            if BIAS:
                y += gl.load(bias + e * (2 * F) + r, mask=r < F, other=0.0).to(gl.float32)[:, None]
                up += gl.load(bias + e * (2 * F) + F + r, mask=r < F, other=0.0).to(gl.float32)[:, None]
            y = expert_swiglu(y, up, clamp_at, CLAMP)
            y *= weight[None, :]
        elif BIAS:
            y += gl.load(bias + e * H + r, mask=r < H, other=0.0).to(gl.float32)[:, None] * weight[None, :]
        gl.store(out + (pair * (F if GATE else H))[None, :] + r[:, None], y.to(dtype), mask=live)
        at = stop
    async_copy.wait_group(0)


def columns_of(pairs: int, experts: int) -> int:
    """Returns pairs per block: twice the mean per expert, so that few experts are read twice."""
    return min(MAX_COLUMNS, max(8, triton.next_power_of_2(2 * pairs // experts)))


def programs_of(columns: int) -> int:
    """Returns programs per SM: three hide more latency, where their stages are small."""
    return 2 if columns > 8 else 3


def stages_of(columns: int) -> int:
    """Returns how many stages fit a program's shared memory."""
    part = BLOCK_K.value * (ROWS.value + 2 * columns) + 256
    return min(8, SHARED_KB[programs_of(columns)] * 1024 // (PARTS.value * part))


def are_few(tokens: int, pairs: int, columns: int, programs: int) -> bool:
    """Returns whether no expert has more than one block of pairs, and no program steps of more than two blocks."""
    return tokens <= columns and pairs <= programs


def fits(x: torch.Tensor, P: int, gate_up: Matrix, down: Matrix) -> bool:
    """Returns whether `launch` supports P pairs and these tensors of `kernels.moe.experts`, and is fastest."""
    if not (isinstance(gate_up, ScaledMatrix) and isinstance(down, ScaledMatrix)):
        return False
    (N, H), F = x.shape, down.shape[2]
    return (
        0 < N <= MAX_TOKENS
        and P <= MAX_PAIRS
        and F >= MIN_WIDTH
        and H % 16 == F % 16 == 0  # TMA row alignment
        and x.dtype == torch.bfloat16
        and x.stride(1) == 1
        and x.stride(0) % 8 == x.data_ptr() % 16 == 0
        and all(
            not matrix.packed and matrix.wide_groups and matrix.data.data_ptr() % 16 == matrix.begin % 16 == 0
            for matrix in (gate_up, down)
        )
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
    (N, H), (E, _, F), k = x.shape, down.shape, ids.shape[1]
    P = N * k
    (gate_data, gate_scales, _, _), gate_groups = stored(gate_up)
    (down_data, down_scales, _, _), down_groups = stored(down)
    gates = TensorDescriptor(
        gate_data.view(torch.int32), [E, F // 8, 2, 8, H // 4], [F * H // 2, 2 * H, F * H // 4, H // 4, 1],
        [1, HALF.value // 8, 2, 8, WORDS.value], words_shared(WORDS.value, 5),
    )  # fmt: skip
    downs = TensorDescriptor(
        down_data.view(torch.int32), [E, H, F // 4], [H * F // 4, F // 4, 1],
        [1, ROWS.value, WORDS.value], words_shared(WORDS.value, 3),
    )  # fmt: skip
    programs = programs_of(columns) * sm_count(x.device)
    few = are_few(N, P, columns, programs)
    block_p = max(32 if few else 128, triton.next_power_of_2(P))
    max_blocks = (
        0 if few else triton.cdiv(min(block_p, E + block_p // columns), programs) + 2
    )  # blocks that a program lists
    lists = torch.empty(2, programs, max_blocks, columns + 8, dtype=torch.int32, device=x.device)
    sums = workspace(x.device, programs * HALF.value * columns)
    both = (
        (True, gates, gate_scales, gate_groups, x, gate_up_bias, h),
        (False, downs, down_scales, down_groups, h, down_bias, outputs),
    )
    for gate, w, scales, groups, xs, bias, y in both:
        _moe_scaled_sm90_kernel[(programs,)](
            w, scales, xs, ids, weights, bias, y, sums if gate else sums.view(torch.int32), lists[int(gate)],
            xs.stride(0) // 8, P, first, clamp_at,
            TOP_K=k, EXPERTS=E, H=H, F=F, BLOCK_P=block_p, **groups, COLUMNS=columns, STAGES=stages_of(columns),
            LISTS=max_blocks, GATE=gate, BIAS=bias is not None, CLAMP=clamp, num_warps=WARPS.value, launch_pdl=True,
        )  # fmt: skip
