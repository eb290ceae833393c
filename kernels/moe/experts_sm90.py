"""Hopper variant of `kernels.moe.experts` for few tokens and wide experts: TMA loads, wgmma products.

Bound by reading the active local experts' weights once, so a fixed grid of two programs per SM divides them equally.
Each program finds the active local experts in ids. 64 weight rows (in gate_up 32 of gate and 32 of up, interleaved by
eights) are a tile, 128 columns of it a step; the steps of all tiles form one line, cut into equal runs. Without active
local experts, programs load nothing. Weights are prefetched into all of shared memory; the second launch, which may
read ids at once, does so before the first is done. MMA columns are tokens; a token without the current expert is a zero
column, so a down tile sums over experts in the accumulator.

Programs whose runs share a tile reduce in a tree. Of two that meet at a node, the second adds the first one's sum from
a workspace; an atomic exchange decides which is second. No program waits, and sums do not depend on the order of
arrival. A program begins inside at most one tile, so a node is named by the program where its right half begins. The
last program at the root of an element writes or sends the sum.
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
from kernels.dense.split_k_reduce_sm90 import pairs, reduce_sharers, send_pairs, share_of, workspace
from kernels.moe.expert_lookup_sm90 import active_experts, nth_expert, pairs_with, slots, weights_of
from kernels.overlap import sm_count
from kernels.peers.ll_protocol import EPOCH_UNITS, SumTarget, sum_shape
from kernels.scaled import ScaledMatrix
from kernels.sm90 import COPIED, SHARED

MAX_TOKENS = 8  # minimum MMA columns
# Expert width. On an H200, compared with the other algorithms: 96 is 3 to 7% slower, 256 4%; 360 is 3% faster, 384 from
# 6% slower at one token to 20% faster at four, 512 level, 768 and more 2 to 23% faster.
MIN_WIDTH = 320
MIN_WIDTH_E4M3 = 192  # the other algorithms convert e4m3 more slowly
ROWS, HALF, COLUMNS, BLOCK_K = gl.constexpr(64), gl.constexpr(32), gl.constexpr(MAX_TOKENS), gl.constexpr(128)
STAGES, X_STAGES = gl.constexpr(6), gl.constexpr(3)  # of weights, and of x or h: 102 KB, or 110
GATE_UP = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=5))
DOWN = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3))
E4M3 = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))
E4M3_GATE_UP = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=5))
E4M3_DOWN = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=3))
PRODUCT = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, MAX_TOKENS, 16])
)
CONVERTED = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=PRODUCT, k_width=2))  # from e4m3 to bf16
EACH_ROW = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
SCALES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
NEIGHBORS = gl.constexpr(gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1]))  # rows of down that share a word
WORDS = gl.constexpr(gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1]))


@gluon.jit
def _step(
    at, indices, count, GATE: gl.constexpr, EXPERTS: gl.constexpr, H: gl.constexpr, F: gl.constexpr,
    BEGIN: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """Locates a step: its tile (per expert for gate_up, over all for down), local expert and first column.

    A step is PARTS blocks of columns; the first begins with the first group, BEGIN columns before the weight's first.
    """
    COLUMNS_PER_STEP: gl.constexpr = PARTS * BLOCK_K
    STEPS: gl.constexpr = (BEGIN + (H if GATE else F) + COLUMNS_PER_STEP - 1) // COLUMNS_PER_STEP
    if GATE:
        TILES: gl.constexpr = (F + HALF - 1) // HALF
        tile = at // STEPS
        return tile % TILES, nth_expert(indices, tile // TILES, EXPERTS), at % STEPS * COLUMNS_PER_STEP - BEGIN
    else:
        tile = at // (count * STEPS)
        rest = at % (count * STEPS)
        return tile, nth_expert(indices, rest // STEPS, EXPERTS), rest % STEPS * COLUMNS_PER_STEP - BEGIN


@gluon.jit
def _ask(
    step, begin, w, indices, count, w_shared, ready,
    GATE: gl.constexpr, EXPERTS: gl.constexpr, H: gl.constexpr, F: gl.constexpr, BEGIN: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    tile, e, column = _step(begin + step, indices, count, GATE, EXPERTS, H, F, BEGIN, PARTS)
    here = ready.index(step % STAGES)
    mbarrier.expect(here, PARTS * ROWS * BLOCK_K * w.dtype.primitive_bitwidth // 8)
    for part in gl.static_range(PARTS):
        slot, k = w_shared.index(step % STAGES * PARTS + part), column + part * BLOCK_K
        if GATE:
            slot = slot.reshape([1, HALF // 8, 2, 8, BLOCK_K])
            tma.async_copy_global_to_shared(w, [e, tile * (HALF // 8), 0, 0, k], here, slot)
        else:
            tma.async_copy_global_to_shared(w, [e, tile * ROWS, k], here, slot.reshape([1, ROWS, BLOCK_K]))


@gluon.jit
def _bring(
    step, begin, x, x_n, of, first, indices, count, x_shared,
    GATE: gl.constexpr, TOP_K: gl.constexpr, EXPERTS: gl.constexpr, H: gl.constexpr, F: gl.constexpr,
    BEGIN: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Copies the rows of x, or of h, that a step multiplies; zeros for tokens without the expert."""
    _, e, column = _step(begin + step, indices, count, GATE, EXPERTS, H, F, BEGIN, PARTS)
    n = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, COPIED))
    k = column + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, COPIED))
    pair = pairs_with(of, n, e + first, TOP_K)
    for part in gl.static_range(PARTS):
        if GATE:
            rows = x + n * (x_n * 8)  # makes it known to be a multiple of 8
            inside = k < H
        else:
            rows = x + pair * F
            inside = k < F
        if BEGIN > 0:
            inside = inside & (k >= 0)
        inside = (pair >= 0)[:, None] & inside[None, :]
        slot = x_shared.index(step % X_STAGES * PARTS + part)
        async_copy.async_copy_global_to_shared(slot, rows[:, None] + k[None, :], mask=inside)
        k += BLOCK_K


@gluon.jit
def _bring_scales(
    step, begin, scales, indices, count, scales_shared,
    GATE: gl.constexpr, EXPERTS: gl.constexpr, H: gl.constexpr, F: gl.constexpr,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, BEGIN: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    tile, e, column = _step(begin + step, indices, count, GATE, EXPERTS, H, F, BEGIN, PARTS)
    i = gl.arange(0, ROWS, layout=EACH_ROW)
    if GATE:
        f = tile * HALF + i // 16 * 8 + i % 8
        row, inside = i // 8 % 2 * F + f, f < F
    else:
        row, inside = tile * ROWS + i, tile * ROWS + i < H
    for part in gl.static_range(PARTS):
        group = (column + BEGIN + part * BLOCK_K) // GROUP
        at = scales + (e * GROUPS + group) * (2 * F if GATE else H) + row
        slot = scales_shared.index(step % X_STAGES * PARTS + part)
        async_copy.async_copy_global_to_shared(slot, at, mask=inside & (group < GROUPS))


@gluon.jit
def _multiply(w_shared, x_shared, scales_shared, dtype: gl.constexpr):
    """Starts a product of 128 e4m3 columns; returns it, the registers it reads, and its rows' scales."""
    # Via fp32: fp16 to bf16 is a slow instruction.
    w = w_shared.load(CONVERTED).to(gl.float32).to(dtype)
    scale = scales_shared.load(gl.SliceLayout(1, PRODUCT))
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout=PRODUCT)
    return hopper.warpgroup_mma(w, x_shared.permute((1, 0)), acc, use_acc=False, is_async=True), w, scale


@gluon.jit(do_not_specialize=["x_n", "N", "first", "rank"])
def _moe_sm90_kernel(
    w, scales, x, ids, weights, bias, addend, out, words, peers, epochs, x_n, N, first, clamp_at, rank,
    TOP_K: gl.constexpr, EXPERTS: gl.constexpr, H: gl.constexpr, F: gl.constexpr, BLOCK_P: gl.constexpr,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, BEGIN: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr,
    ADDEND: gl.constexpr, CLAMP: gl.constexpr,
    RANKS: gl.constexpr, PIECES: gl.constexpr, SIZE: gl.constexpr, TWO_SHOT: gl.constexpr,
):  # fmt: skip
    SENDS: gl.constexpr = RANKS > 0  # of two rows of down, in a word
    SCALED: gl.constexpr = GROUPS > 0
    PARTS: gl.constexpr = 2 if SCALED else 1  # per step: 16 KB of weights
    dtype: gl.constexpr = x.dtype.element_ty
    w_shared = gl.allocate_shared_memory(w.dtype, [STAGES * PARTS, ROWS, BLOCK_K], E4M3 if SCALED else SHARED)
    x_shared = gl.allocate_shared_memory(dtype, [X_STAGES * PARTS, COLUMNS, BLOCK_K], SHARED)
    if SCALED:
        scales_shared = gl.allocate_shared_memory(gl.float32, [X_STAGES * PARTS, ROWS], SCALES)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
    hopper.fence_async_shared()
    tl.debug_barrier()
    program, programs = gl.program_id(0), gl.num_programs(0)
    if GATE:
        gdc_wait()
    indices, count = active_experts(ids, N * TOP_K, first, EXPERTS, BLOCK_P)
    if GATE:
        tiles, tile_steps = count * ((F + HALF - 1) // HALF), (BEGIN + H + PARTS * BLOCK_K - 1) // (PARTS * BLOCK_K)
    else:
        tiles = gl.minimum(count, 1) * ((H + ROWS - 1) // ROWS)
        tile_steps = count * ((BEGIN + F + PARTS * BLOCK_K - 1) // (PARTS * BLOCK_K))
    begin, end, active, total = share_of(tiles, tile_steps, program, programs)
    steps = end - begin
    of = slots(ids, gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, COPIED)), N, TOP_K)
    for s in range(gl.minimum(steps, STAGES - 1)):
        _ask(s, begin, w, indices, count, w_shared, ready, GATE, EXPERTS, H, F, BEGIN, PARTS)
    if not GATE:
        gdc_wait()
    if SENDS:
        tag = gl.load(epochs) // EPOCH_UNITS + 1
        ROW_PIECES: gl.constexpr = (H // 2 + SIZE - 1) // SIZE
    if steps <= STAGES - 1:
        gdc_launch_dependents()

    for s in gl.static_range(X_STAGES - 1):
        if s < steps:
            _bring(s, begin, x, x_n, of, first, indices, count, x_shared, GATE, TOP_K, EXPERTS, H, F, BEGIN, PARTS)
            if SCALED:
                _bring_scales(
                    s, begin, scales, indices, count, scales_shared, GATE, EXPERTS, H, F, GROUP, GROUPS, BEGIN, PARTS
                )  # fmt: skip
        async_copy.commit_group()
    at, step = begin, 0
    while at < end:
        stop = gl.minimum(end, (at // tile_steps + 1) * tile_steps)
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout=PRODUCT)
        extra = acc
        for here in range(at, stop):
            if BIAS and not GATE:
                tile, e, column = _step(here, indices, count, GATE, EXPERTS, H, F, BEGIN, PARTS)
                if column == -BEGIN:
                    n = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, PRODUCT))
                    r = tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, PRODUCT))
                    weight = weights_of(slots(ids, n, N, TOP_K), weights, n, e + first, TOP_K)
                    row_bias = gl.load(bias + e * H + r, mask=r < H, other=0.0).to(gl.float32)
                    extra += row_bias[:, None] * weight[None, :]
            async_copy.wait_group(X_STAGES - 2)
            mbarrier.wait(ready.index(step % STAGES), step // STAGES % 2)
            hopper.fence_async_shared()
            tl.debug_barrier()  # all warps are done with the previous step
            slot, x_slot = step % STAGES * PARTS, step % X_STAGES * PARTS
            if SCALED:
                one, one_w, scale = _multiply(
                    w_shared.index(slot), x_shared.index(x_slot), scales_shared.index(x_slot), dtype
                )  # fmt: skip
                two, two_w, next_scale = _multiply(
                    w_shared.index(slot + 1), x_shared.index(x_slot + 1), scales_shared.index(x_slot + 1), dtype
                )  # fmt: skip
            else:
                columns = x_shared.index(x_slot).permute((1, 0))
                acc = hopper.warpgroup_mma(w_shared.index(slot), columns, acc, is_async=True)
            if step - 1 + STAGES < steps:
                _ask(step - 1 + STAGES, begin, w, indices, count, w_shared, ready, GATE, EXPERTS, H, F, BEGIN, PARTS)
                if step + STAGES == steps:  # the last load has been issued
                    gdc_launch_dependents()
            ahead = step - 1 + X_STAGES
            if ahead < steps:
                _bring(
                    ahead, begin, x, x_n, of, first, indices, count, x_shared, GATE, TOP_K, EXPERTS, H, F, BEGIN, PARTS
                )
                if SCALED:
                    _bring_scales(
                        ahead, begin, scales, indices, count, scales_shared, GATE, EXPERTS, H, F,
                        GROUP, GROUPS, BEGIN, PARTS,
                    )  # fmt: skip
            async_copy.commit_group()
            if SCALED:
                one, two, _, _ = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[one, two, one_w, two_w])
                acc += scale[:, None] * one + next_scale[:, None] * two
            else:
                acc = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[acc])
            step += 1
        whole = at // tile_steps
        tile, e, _ = _step(at, indices, count, GATE, EXPERTS, H, F, BEGIN, PARTS)
        if GATE:
            y = gl.permute(gl.reshape(acc, [HALF // 8, 2, 8, COLUMNS]), (0, 2, 3, 1))
            y, up = gl.split(gl.reshape(y, [HALF, COLUMNS, 2]))
        else:
            y = acc + extra if BIAS else acc
            up = y
            if SENDS:
                y, up = pairs(gl.convert_layout(y, NEIGHBORS), WORDS)
        TILE: gl.constexpr = y.shape[0]
        i = gl.arange(0, TILE, layout=gl.SliceLayout(1, y.type.layout))
        n = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, y.type.layout))
        r = tile * TILE + i
        if SENDS:
            r = r * 2
        if GATE:
            experts = slots(ids, n, N, TOP_K)
            pair = pairs_with(experts, n, e + first, TOP_K)
            weight = weights_of(experts, weights, n, e + first, TOP_K)
            live = (r < F)[:, None] & (pair >= 0)[None, :]
            cell = (pair * F)[None, :] + r[:, None]
            if BIAS:
                gate_bias = gl.load(bias + e * (2 * F) + r, mask=r < F, other=0.0).to(gl.float32)
                up_bias = gl.load(bias + e * (2 * F) + F + r, mask=r < F, other=0.0).to(gl.float32)
        else:
            live = (r < H)[:, None] & (n < N)[None, :]
            cell = (n * H)[None, :] + r[:, None]
            if ADDEND:
                summand = gl.load(addend + cell, mask=live, other=0.0).to(gl.float32)
                if SENDS:
                    odd_summand = gl.load(addend + cell + 1, mask=live, other=0.0).to(gl.float32)
            if SENDS:
                column = r[:, None] // 2 + (n * 0)[None, :]
                piece = column // SIZE + n[None, :] * ROW_PIECES
                ll_buffers = gl.load(peers + (piece % RANKS if TWO_SHOT else 0))
        offset = i[:, None] * COLUMNS + n[None, :]
        y, up, live = reduce_sharers(y, up, live, words, offset, whole, tile_steps, active, total, GATE or SENDS)
        if GATE:
            if BIAS:
                y += gate_bias[:, None]
                up += up_bias[:, None]
            y = expert_swiglu(y, up, clamp_at, CLAMP)
            y *= weight[None, :]
        if ADDEND:
            y += summand
            if SENDS:
                up += odd_summand
        if SENDS:
            w_at = column % SIZE
            send_pairs(y, up, live, piece, w_at, ll_buffers, peers, tag, rank, dtype, RANKS, PIECES, SIZE, TWO_SHOT)
        else:
            gl.store(out + cell, y.to(dtype), mask=live)
        at = stop
    async_copy.wait_group(0)
    if not GATE:
        if count == 0:
            FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
            VALUES: gl.constexpr = 2 if SENDS else 1
            c = gl.arange(0, 128, layout=FLAT)
            for i in range(program * 128, N * H // VALUES, programs * 128):
                index = i + c
                left = index < N * H // VALUES
                nothing = gl.zeros([128], dtype, layout=FLAT)
                more = nothing
                if ADDEND:
                    nothing = gl.load(addend + index * VALUES, mask=left, other=0.0)
                if SENDS:
                    if ADDEND:
                        more = gl.load(addend + index * VALUES + 1, mask=left, other=0.0)
                    column = index % (H // 2)
                    piece = column // SIZE + index // (H // 2) * ROW_PIECES
                    ll_buffers = gl.load(peers + (piece % RANKS if TWO_SHOT else 0))
                    even, odd = nothing.to(gl.float32), more.to(gl.float32)
                    w_at = column % SIZE
                    send_pairs(
                        even, odd, left, piece, w_at, ll_buffers, peers, tag, rank, dtype, RANKS, PIECES, SIZE, TWO_SHOT
                    )  # fmt: skip
                else:
                    gl.store(out + index, nothing, mask=left)


def fits(x: torch.Tensor, gate_up: torch.Tensor | ScaledMatrix, down: torch.Tensor | ScaledMatrix) -> bool:
    """Returns whether `launch` supports these tensors of `kernels.moe.experts.RoutedExperts` and is fastest."""
    (N, H), F = x.shape, down.shape[2]
    both = gate_up, down
    if any(isinstance(weight, ScaledMatrix) and (weight.packed or not weight.wide_groups) for weight in both):
        return False
    tensors, groups = zip(*map(stored, both), strict=True)
    run = 16 // tensors[0][0].itemsize  # TMA row alignment
    return (
        0 < N <= MAX_TOKENS
        and (F >= MIN_WIDTH_E4M3 if isinstance(down, ScaledMatrix) else F >= MIN_WIDTH)
        and H % run == F % run == 0
        and x.dtype == torch.bfloat16
        and x.stride(1) == 1
        and x.stride(0) % 8 == x.data_ptr() % 16 == 0
        and all(data.data_ptr() % 16 == 0 for data, *_ in tensors)
        and all(group["BEGIN"] % run == 0 for group in groups)  # and of coordinates
        and torch.cuda.get_device_capability(x.device)[0] == 9
    )


def launch(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor | ScaledMatrix,
    down: torch.Tensor | ScaledMatrix, first: int, gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None,
    clamp_at: float, clamp: int, addend: torch.Tensor | None, h: torch.Tensor, out: torch.Tensor | SumTarget,
) -> None:  # fmt: skip
    """Runs `kernels.moe.experts.RoutedExperts` into out [N, H] or an all-reduce's LL buffers; requires `fits`.

    `h` [N k, F], one row per pair, receives the gated activations; it and `out` are contiguous.
    """
    (N, H), (E, _, F), k = x.shape, down.shape, ids.shape[1]
    (gate_stored, gate_scales, _, _), gate_groups = stored(gate_up)
    (down_stored, down_scales, _, _), down_groups = stored(down)
    scaled = gate_scales is not None
    gates = TensorDescriptor(
        gate_stored, [E, F // 8, 2, 8, H], [2 * F * H, 8 * H, F * H, H, 1],
        [1, HALF.value // 8, 2, 8, BLOCK_K.value], (E4M3_GATE_UP if scaled else GATE_UP).value,
    )  # fmt: skip
    downs = TensorDescriptor(
        down_stored, [E, H, F], [H * F, F, 1], [1, ROWS.value, BLOCK_K.value], (E4M3_DOWN if scaled else DOWN).value
    )
    programs = 2 * sm_count(x.device)
    words = workspace(x.device, programs * ROWS.value * MAX_TOKENS // 2)
    sums = out if isinstance(out, SumTarget) else None
    both = (
        (True, gates, gate_scales, gate_groups, x, gate_up_bias, None, h, None),
        (False, downs, down_scales, down_groups, h, down_bias, addend, out, sums),
    )
    for gate, w, scales, groups, xs, bias, summand, y, to in both:
        _moe_sm90_kernel[(programs,)](
            w, scales, xs, ids, weights, bias, summand, None if to else y,
            words if gate or to else words.view(torch.int32), *(to.peers, to.count) if to else (None, None),
            xs.stride(0) // 8, N, first, clamp_at, to.rank if to else 0,
            TOP_K=k, EXPERTS=E, H=H, F=F, BLOCK_P=max(32, triton.next_power_of_2(N * k)), **groups, GATE=gate,
            BIAS=bias is not None, ADDEND=summand is not None, CLAMP=clamp, **sum_shape(to),
            num_warps=4, launch_pdl=True,
        )  # fmt: skip
