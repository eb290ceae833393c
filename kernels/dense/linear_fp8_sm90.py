"""Hopper variant of `kernels.dense.linear` for 1 to 128 rows of x and e4m3 weights, converted in registers.

A program owns 64 weight rows (128 from 65 rows of x on, as every program reads x). If outputs take row pairs, it owns
half of each kind, interleaved by eights, so that one thread has both. TMA loads blocks of 128 columns, each within one
group; a block is converted in registers, and its product times the row scales is added. A step is one or two blocks:
the second is converted while the first is multiplied. Programs that share a tile split its steps, and reduce in a tree.
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
from triton.language.extra.cuda import gdc_launch_dependents

from kernels.attention.kv_append import QKVTarget
from kernels.attention.paged_tiles import SMALL_HEAD_DIM
from kernels.dense.linear_epilogue_sm90 import load_epilogue, store_epilogue
from kernels.dense.linear_sm90 import SHARED_KB
from kernels.dense.split_k_reduce_sm90 import pairs, split_k_reduce, workspace
from kernels.overlap import sm_count
from kernels.peers.ll_protocol import SumTarget, sum_shape
from kernels.scaled import ScaledMatrix
from kernels.sm90 import SHARED

E4M3 = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))
E4M3_PAIRS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=5))
SCALES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
BLOCK_K = gl.constexpr(128)
MAX_ROWS = 128  # of x
MAX_SPLIT = 16  # leaves of the tree


@gluon.jit
def _load_weights(weights, head, d, column, w, ready, BYTES: gl.constexpr, PAIRED: gl.constexpr):
    mbarrier.expect(ready, BYTES)
    if PAIRED:
        pairs_of_eights = w.reshape([1, w.shape[0] // 16, 2, 8, w.shape[1]])
        tma.async_copy_global_to_shared(weights, [head, d // 8, 0, 0, column], ready, pairs_of_eights)
    else:
        tma.async_copy_global_to_shared(weights, [d, column], ready, w)


@gluon.jit
def _copy_scales(rows_at, inside, block, blocks, R, to, GROUP: gl.constexpr):
    """Copies the row scales of each block of a step; `block` [parts x rows] are block indices."""
    at = rows_at + block * BLOCK_K // GROUP * R
    async_copy.async_copy_global_to_shared(to, at, mask=inside & (block < blocks))


@gluon.jit
def _multiply(w_shared, x_shared, scales_shared, part: gl.constexpr, PRODUCT: gl.constexpr):
    """Starts the product of a block of a step; returns it, the registers it reads, and its row scales."""
    ROWS: gl.constexpr = w_shared.shape[0]
    N_MAX: gl.constexpr = x_shared.shape[0]
    dtype: gl.constexpr = x_shared.dtype
    # Via fp32: fp16 to bf16 is a slow instruction.
    w = w_shared.slice(part * BLOCK_K, BLOCK_K, dim=1).load(gl.DotOperandLayout(0, PRODUCT, 2)).to(gl.float32).to(dtype)
    x = x_shared.slice(part * BLOCK_K, BLOCK_K, dim=1)
    scale = scales_shared.slice(part * ROWS, ROWS).load(gl.SliceLayout(1, PRODUCT))
    acc = gl.zeros([ROWS, N_MAX], gl.float32, layout=PRODUCT)
    return hopper.warpgroup_mma(w, x.permute((1, 0)), acc, use_acc=False, is_async=True), w, scale


@gluon.jit(do_not_specialize=["N", "R", "blocks", "rank"])
def _linear_fp8_sm90_kernel(
    weights, xs, scales, bias, out, words, peers, count, N, R, blocks, rank,
    cos, sin, slot_mapping, k_cache, v_cache, q, k_page, v_page,
    GROUP: gl.constexpr, BEGIN: gl.constexpr, SPLIT: gl.constexpr, N_MAX: gl.constexpr, ROWS: gl.constexpr,
    PARTS: gl.constexpr, STAGES: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr,
    RANKS: gl.constexpr, PIECES: gl.constexpr, SIZE: gl.constexpr, TWO_SHOT: gl.constexpr,
    Q_HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, SLOT: gl.constexpr,
    HEAD: gl.constexpr,
):  # fmt: skip
    SENDS: gl.constexpr = RANKS > 0  # words of two weight rows, which end in the same program
    EARLY: gl.constexpr = D == 0 or D > SMALL_HEAD_DIM  # see `kernels.attention.kv_append`
    PAIRED: gl.constexpr = GATED or D > 0  # a program has rows `apart` from each other
    WARPS: gl.constexpr = ROWS // 16
    HALF: gl.constexpr = ROWS // 2
    COLUMNS: gl.constexpr = PARTS * BLOCK_K
    BYTES: gl.constexpr = COLUMNS * (ROWS + N_MAX * 2)
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, N_MAX, 16]
    )
    RESULT: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, WARPS], [0, 1])
    dtype: gl.constexpr = xs.dtype
    w_shared = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS, COLUMNS], E4M3)
    x_shared = gl.allocate_shared_memory(dtype, [STAGES, N_MAX, COLUMNS], SHARED)
    scales_shared = gl.allocate_shared_memory(gl.float32, [STAGES, PARTS * ROWS], SCALES)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
    hopper.fence_async_shared()
    tl.debug_barrier()

    part = gl.program_id(0) % SPLIT
    tile = gl.program_id(0) // SPLIT
    row = tile * (HALF if PAIRED else ROWS)  # first output row
    head, d = 0, row
    top, apart = row, R  # first weight row
    if D > 0:
        head, d = row // (D // 2), row % (D // 2)
        top, apart = head * D + d, D // 2
    steps = (blocks + PARTS - 1) // PARTS
    first = part * steps // SPLIT
    steps = (part + 1) * steps // SPLIT - first
    k = first * COLUMNS - BEGIN
    c = gl.arange(0, PARTS * ROWS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    i, block = c % ROWS, first * PARTS + c // ROWS
    if PAIRED:
        r = i // 16 * 8 + i % 8
        rows_at, inside, all_rows = scales + top + i // 8 % 2 * apart + r, row + r < R, 2 * R
    else:
        rows_at, inside, all_rows = scales + row + i, row + i < R, R
    ahead = gl.minimum(steps, STAGES)
    for s in range(ahead):
        _load_weights(weights, head, d, k + s * COLUMNS, w_shared.index(s), ready.index(s), BYTES, PAIRED)
    for s in gl.static_range(STAGES):
        if s < steps:
            _copy_scales(rows_at, inside, block + s * PARTS, blocks, all_rows, scales_shared.index(s), GROUP)
        async_copy.commit_group()
    TILE: gl.constexpr = HALF if PAIRED or SENDS else ROWS  # sums, or pairs of sums, per row of x
    live, y_bias, up_bias, found = load_epilogue(
        bias, count, peers, cos, sin, slot_mapping, top, apart, row, N, R,
        RESULT, TILE, N_MAX, BIAS, PAIRED, RANKS, SIZE, TWO_SHOT, D,
    )  # fmt: skip
    for s in range(ahead):
        tma.async_copy_global_to_shared(xs, [0, k + s * COLUMNS], ready.index(s), x_shared.index(s))
    if steps <= STAGES and EARLY:
        gdc_launch_dependents()

    acc = gl.zeros([ROWS, N_MAX], gl.float32, layout=PRODUCT)
    for step in range(steps):
        slot = step % STAGES
        # One commit group of scales per stage, then one per step: STAGES - 2 may be in flight.
        async_copy.wait_group(STAGES - 2)
        mbarrier.wait(ready.index(slot), step // STAGES % 2)
        tl.debug_barrier()  # all warps have their scales, and are done with the previous step
        w_slot, x_slot, scales_slot = w_shared.index(slot), x_shared.index(slot), scales_shared.index(slot)
        y, w, scale = _multiply(w_slot, x_slot, scales_slot, 0, PRODUCT)
        if PARTS == 2:
            next_y, next_w, next_scale = _multiply(w_slot, x_slot, scales_slot, 1, PRODUCT)
        ahead = step - 1 + STAGES
        if (step > 0) & (ahead < steps):
            last, column = (step - 1) % STAGES, k + ahead * COLUMNS
            _load_weights(weights, head, d, column, w_shared.index(last), ready.index(last), BYTES, PAIRED)
            tma.async_copy_global_to_shared(xs, [0, column], ready.index(last), x_shared.index(last))
            _copy_scales(rows_at, inside, block + ahead * PARTS, blocks, all_rows, scales_shared.index(last), GROUP)
            if ahead == steps - 1 and EARLY:  # the last load has been issued
                gdc_launch_dependents()
        async_copy.commit_group()
        if PARTS == 2:
            y, next_y, _, _ = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[y, next_y, w, next_w])
            acc += scale[:, None] * y + next_scale[:, None] * next_y
        else:
            y, _ = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[y, w])
            acc += scale[:, None] * y
    if PAIRED:
        both = gl.permute(gl.reshape(acc, [HALF // 8, 2, 8, N_MAX]), (0, 2, 3, 1))
        y, up = gl.split(gl.reshape(both, [HALF, N_MAX, 2]))
        y, up = gl.convert_layout(y, RESULT), gl.convert_layout(up, RESULT)
    elif SENDS:
        NEIGHBORS: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, WARPS], [0, 1])
        y, up = pairs(gl.convert_layout(acc, NEIGHBORS), RESULT)
    else:
        y = gl.convert_layout(acc, RESULT)
        up = y
    y, up, live = split_k_reduce(y, up, live, words, tile, part, SPLIT, PAIRED or SENDS)
    store_epilogue(
        y, up, live, y_bias, up_bias, found, out, peers, row, R, rank, k_cache, v_cache, q, k_page, v_page,
        dtype, BIAS, GATED, RANKS, PIECES, SIZE, TWO_SHOT, Q_HEADS, KV_HEADS, D, PAGE, SLOT, HEAD,
    )  # fmt: skip


def split_of(tiles: int, steps: int, parts: int, sms: int) -> int:
    """Chooses split-K, by H100 timings of 24 matrices: within 2% of the best on average.

    Just under two programs per SM, with runs of three steps of two blocks, or five of one; half tiles where more
    programs than fit at once would run one after the other.
    """
    if tiles > 2 * sms:
        return min(2, steps)
    return max(1, min(MAX_SPLIT, int(1.95 * sms) // tiles, steps // (3 if parts == 2 else 5)))


def rows_of(N: int) -> int:
    """Returns weight rows per program for N rows of x."""
    return 64 if N <= 64 else 128


def fits(x: torch.Tensor, weight: ScaledMatrix, half: int | None = None) -> bool:
    """Returns whether `launch` supports these tensors of `kernels.dense.linear.linear`, row pairs `half` apart."""
    N, K = x.shape
    return (
        0 < N <= MAX_ROWS
        and 0 not in weight.shape
        and not weight.packed
        and (half is None or half % 8 == 0)
        # TMA alignment of rows and coordinates
        and K % 16 == weight.begin % 16 == 0
        and (weight.group % BLOCK_K.value == 0 or len(weight.scales) == 1)
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(1) == 1
        and weight.data.is_contiguous()
        and weight.scales.is_contiguous()
        and x.stride(0) % 8 == x.data_ptr() % 16 == weight.data.data_ptr() % 16 == 0
        and torch.cuda.get_device_capability(x.device)[0] == 9
    )


def launch(
    x: torch.Tensor,
    weight: ScaledMatrix,
    bias: torch.Tensor | None,
    out: torch.Tensor | SumTarget | QKVTarget,
    gated: bool,
    split: int | None = None,
    shared_kb: int | None = None,
) -> None:
    """Runs `kernels.dense.linear` into `out`: a contiguous [N, R], an all-reduce's LL buffers, or attention's heads.

    Args:
        split: programs that share K, at most 16 and at most its steps; None chooses the fastest.
        shared_kb: KiB of shared memory for a program's stages; None: half an SM's, or all of it.
    """
    N, K = x.shape
    heads = out if isinstance(out, QKVTarget) else None
    sums = out if isinstance(out, SumTarget) else None
    paired = gated or heads is not None
    R = len(weight) // 2 if paired else len(weight)
    n_max = max(8, triton.next_power_of_2(N))
    parts, rows = 2 if n_max <= 16 else 1, rows_of(N)
    blocks = triton.cdiv(weight.begin + K, BLOCK_K.value)
    steps = triton.cdiv(blocks, parts)
    tiles = triton.cdiv(R, rows // 2 if paired else rows)
    split = split or split_of(tiles, steps, parts, sm_count(x.device) * 64 // rows)
    assert split <= min(MAX_SPLIT, steps), f"{split} programs cannot share {steps} steps of K = {K}"
    columns = parts * BLOCK_K.value
    if paired:
        half = heads.q.shape[2] // 2 if heads else R
        shape, strides = [len(weight) // (2 * half), half // 8, 2, 8, K], [2 * half * K, 8 * K, half * K, K, 1]
        weights = TensorDescriptor(
            weight.data, shape, strides, [1, rows // 16, 2, 8, columns], E4M3_PAIRS.value
        )  # fmt: skip
    else:
        weights = TensorDescriptor(weight.data, [R, K], [K, 1], [rows, columns], E4M3.value)
    xs = TensorDescriptor(x, [N, K], [x.stride(0), 1], [n_max, columns], SHARED.value)
    stage = columns * (rows + 2 * n_max) + 4 * parts * rows
    shared_kb = shared_kb or SHARED_KB * rows // 64
    # At least two stages: one is refilled while the next step is multiplied.
    stages = max(2, min(triton.cdiv(steps, split), (shared_kb - 1) * 1024 // stage))
    words = workspace(x.device, triton.next_power_of_2(max(1, tiles * (split - 1) * rows // 2 * n_max)))
    _linear_fp8_sm90_kernel[(tiles * split,)](
        weights, xs, weight.scales, bias, out if isinstance(out, torch.Tensor) else None,
        words if paired or sums else words.view(torch.int32),
        *(sums.peers, sums.count) if sums else (None, None), N, R, blocks, sums.rank if sums else 0,
        *(*heads.tensors, *heads.strides) if heads else (*[None] * 6, 0, 0),
        GROUP=weight.group, BEGIN=weight.begin, SPLIT=split, N_MAX=n_max, ROWS=rows, PARTS=parts, STAGES=stages,
        BIAS=bias is not None, GATED=gated, **sum_shape(sums),
        **heads.shape if heads else dict(Q_HEADS=0, KV_HEADS=0, D=0, PAGE=0, SLOT=0, HEAD=0),
        num_warps=rows // 16, launch_pdl=True,
    )  # fmt: skip
