"""Hopper variant of `kernels.dense.linear` for 2 to 32 rows of x: TMA loads, wgmma products.

No kernel writes weights, so a program prefetches as many as fit its shared memory before its predecessor is done. It
owns 32 weight rows, few enough for all programs to share a matrix, but wgmma needs 64: each row, and each row of x, is
cut into 2 slices of K that count as rows. Products of unequal slices are dropped: free while bound by weights.

If a matrix has few tiles, programs split K: into more slices or, if these would not be 16-byte aligned, into runs of
steps, with a tree reduction (`kernels.dense.split_k_reduce_sm90`).

Partial sums of an all-reduce go directly to the LL buffers of `kernels.peers.all_reduce_norm`, heads to the
destinations of `kernels.dense.qkv_append`.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents

from kernels.attention.kv_append import QKVTarget
from kernels.attention.paged_tiles import SMALL_HEAD_DIM
from kernels.dense.linear_epilogue_sm90 import load_epilogue, store_epilogue
from kernels.dense.split_k_reduce_sm90 import pairs, split_k_reduce, workspace
from kernels.overlap import sm_count
from kernels.peers.ll_protocol import SumTarget, sum_shape

SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3))
ROWS, SLICES = gl.constexpr(32), gl.constexpr(2)  # per tile; 64 rows to the tensor cores
MIN_ROWS, MAX_ROWS = 2, 32  # of x; one row is as fast without tensor cores, and more rows go to cuBLAS
SHARED_KB = 108  # per program: two fit an SM
STREAMED_KB = 100  # a matrix with more KB per SM runs two programs on most SMs


@gluon.jit
def _load_weights(weights, row, apart, part, column, w, ups, ready, PAIRED: gl.constexpr, BYTES: gl.constexpr):
    mbarrier.expect(ready, BYTES)
    tma.async_copy_global_to_shared(weights, [row, part * w.shape[1], column], ready, w)
    if PAIRED:
        tma.async_copy_global_to_shared(weights, [row + apart, part * w.shape[1], column], ready, ups)


@gluon.jit
def _load_x(xs, row, part, column, x, ready):
    tma.async_copy_global_to_shared(xs, [row, part * x.shape[1], column], ready, x)


@gluon.jit
def _multiply(w, x, acc):
    columns = x.reshape([x.shape[0] * x.shape[1], x.shape[2]]).permute((1, 0))
    return warpgroup_mma(w.reshape([w.shape[0] * w.shape[1], w.shape[2]]), columns, acc, is_async=True)


@gluon.jit
def _wait(acc, ups, STEPS: gl.constexpr, PAIRED: gl.constexpr):
    if PAIRED:
        return warpgroup_mma_wait(num_outstanding=2 * STEPS, deps=[acc, ups])
    else:
        return warpgroup_mma_wait(num_outstanding=STEPS, deps=[acc]), ups


@gluon.jit
def _sum_slices(acc, LAYOUT: gl.constexpr):
    """Sums the products of equal slices -> [rows, rows of x]."""
    row = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, acc.type.layout))
    column = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
    acc = gl.where((row % SLICES)[:, None] == (column % SLICES)[None, :], acc, 0.0)
    acc = gl.reshape(acc, [acc.shape[0] // SLICES, SLICES, acc.shape[1] // SLICES, SLICES])
    return gl.convert_layout(gl.sum(gl.sum(acc, 3), 1), LAYOUT)


@gluon.jit(do_not_specialize=["N", "R", "steps", "rank"])
def _linear_sm90_kernel(
    weights, xs, bias, out, words, peers, count, N, R, steps, rank,
    cos, sin, slot_mapping, k_cache, v_cache, q, k_page, v_page,
    SPLIT: gl.constexpr, SLICED: gl.constexpr, N_MAX: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    BIAS: gl.constexpr, GATED: gl.constexpr,
    RANKS: gl.constexpr, PIECES: gl.constexpr, SIZE: gl.constexpr, TWO_SHOT: gl.constexpr,
    Q_HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, SLOT: gl.constexpr,
    HEAD: gl.constexpr,
):  # fmt: skip
    SENDS: gl.constexpr = RANKS > 0  # words of two weight rows, which end in the same program
    HEADS: gl.constexpr = D > 0
    EARLY: gl.constexpr = not HEADS or D > SMALL_HEAD_DIM  # see `kernels.attention.kv_append`
    PAIRED: gl.constexpr = GATED or HEADS  # a program has rows `apart` from each other
    M: gl.constexpr = ROWS * SLICES
    COLUMNS: gl.constexpr = N_MAX * SLICES
    BYTES: gl.constexpr = ((2 if PAIRED else 1) * M + COLUMNS) * BLOCK_K * 2
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    LANES: gl.constexpr = [16, 2] if SENDS else [32, 1]
    RESULT: gl.constexpr = gl.BlockedLayout([1, 1], LANES, [1, 4], [0, 1])
    dtype: gl.constexpr = weights.dtype
    w_shared = gl.allocate_shared_memory(dtype, [STAGES, ROWS, SLICES, BLOCK_K], SHARED)
    x_shared = gl.allocate_shared_memory(dtype, [STAGES, N_MAX, SLICES, BLOCK_K], SHARED)
    up_shared = w_shared
    if PAIRED:
        up_shared = gl.allocate_shared_memory(dtype, [STAGES, ROWS, SLICES, BLOCK_K], SHARED)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    tl.debug_barrier()

    part = gl.program_id(0) % SPLIT
    row = gl.program_id(0) // SPLIT * ROWS  # first output row
    top, apart = row, R  # first weight row
    if HEADS:
        top, apart = row + row // (D // 2) * (D // 2), D // 2
    local_slice = part  # this program's slices, and its first column in them
    k = 0
    if not SLICED:
        local_slice = 0
        first = part * steps // SPLIT
        k = first * BLOCK_K
        steps = (part + 1) * steps // SPLIT - first
    ahead = gl.minimum(steps, STAGES)
    for s in range(ahead):
        w, up, here = w_shared.index(s), up_shared.index(s), ready.index(s)
        _load_weights(weights, top, apart, local_slice, k + s * BLOCK_K, w, up, here, PAIRED, BYTES)
    TILE: gl.constexpr = ROWS // 2 if SENDS else ROWS  # sums, or pairs of sums, per row of x
    live, y_bias, up_bias, found = load_epilogue(
        bias, count, peers, cos, sin, slot_mapping, top, apart, row, N, R,
        RESULT, TILE, N_MAX, BIAS, PAIRED, RANKS, SIZE, TWO_SHOT, D,
    )  # fmt: skip
    for s in range(ahead):
        _load_x(xs, 0, local_slice, k + s * BLOCK_K, x_shared.index(s), ready.index(s))
    if steps <= STAGES and EARLY:
        gdc_launch_dependents()

    # Peel the first step: accumulators initialized by MMAs on only some paths keep ptxas from overlapping.
    acc = gl.zeros([M, COLUMNS], gl.float32, layout=PRODUCT)
    ups = acc
    mbarrier.wait(ready.index(0), 0)
    acc = _multiply(w_shared.index(0), x_shared.index(0), acc)
    if PAIRED:
        ups = _multiply(up_shared.index(0), x_shared.index(0), ups)
    acc, ups = _wait(acc, ups, 1, PAIRED)
    last = 0
    phase = 0
    for step in range(1, steps):
        slot = gl.where(last == STAGES - 1, 0, last + 1)
        phase = gl.where(slot == 0, phase ^ 1, phase)
        mbarrier.wait(ready.index(slot), phase)
        acc = _multiply(w_shared.index(slot), x_shared.index(slot), acc)
        if PAIRED:
            ups = _multiply(up_shared.index(slot), x_shared.index(slot), ups)
        acc, ups = _wait(acc, ups, 1, PAIRED)
        ahead = step - 1 + STAGES
        if ahead < steps:
            tl.debug_barrier()  # all warps are done with the previous step
            w, up, x, here = w_shared.index(last), up_shared.index(last), x_shared.index(last), ready.index(last)
            _load_weights(weights, top, apart, local_slice, k + ahead * BLOCK_K, w, up, here, PAIRED, BYTES)
            _load_x(xs, 0, local_slice, k + ahead * BLOCK_K, x, here)
            if ahead == steps - 1 and EARLY:  # the last load has been issued
                gdc_launch_dependents()
        last = slot
    acc, ups = _wait(acc, ups, 0, PAIRED)
    if SENDS:
        NEIGHBORS: gl.constexpr = gl.BlockedLayout([2, 1], LANES, [1, 4], [0, 1])
        y, up = pairs(_sum_slices(acc, NEIGHBORS), RESULT)
    else:
        y = _sum_slices(acc, RESULT)
        up = _sum_slices(ups, RESULT)

    y, up, live = split_k_reduce(y, up, live, words, gl.program_id(0) // SPLIT, part, SPLIT, PAIRED or SENDS)
    store_epilogue(
        y, up, live, y_bias, up_bias, found, out, peers, row, R, rank, k_cache, v_cache, q, k_page, v_page,
        dtype, BIAS, GATED, RANKS, PIECES, SIZE, TWO_SHOT, Q_HEADS, KV_HEADS, D, PAGE, SLOT, HEAD,
    )  # fmt: skip


@cache
def split_of(R: int, K: int, paired: bool, sms: int) -> int:
    """Chooses split-K, by H200 timings over matrices of 3 to 120 MB.

    One program per SM, as far as K can be halved; two on most SMs if each SM reads more than two programs' stages hold;
    then any split rather than leaving a third of the SMs idle.
    """
    tiles = triton.cdiv(R, ROWS.value)
    splits = [split for split in (1, 2, 4, 8) if K % (8 * SLICES.value * split) == 0]  # 16-byte aligned slices
    once = max((split for split in splits if tiles * split <= sms), default=1)
    if R * K * (4 if paired else 2) > STREAMED_KB * 1024 * sms:
        twice = [split for split in splits if 1.5 * sms <= tiles * split <= 2 * sms]
        if twice:
            return twice[-1]
        if 3 * tiles * once < 2 * sms:
            return min(8, 2 * sms // tiles)
    return once


def fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Returns whether `launch` supports these tensors of `kernels.dense.linear.linear` and is faster."""
    N, K = x.shape
    return (
        MIN_ROWS <= N <= MAX_ROWS
        and len(weight) > 0
        and K > 0
        and K % (8 * SLICES.value) == 0
        and x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(1) == 1
        and weight.is_contiguous()
        and x.stride(0) % 8 == x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
        and torch.cuda.get_device_capability(x.device)[0] == 9
    )


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | SumTarget | QKVTarget,
    gated: bool,
    split: int | None = None,
    shared_kb: int = SHARED_KB,
) -> None:
    """Runs `kernels.dense.linear` into `out`: a contiguous [N, R], an all-reduce's LL buffers, or attention's heads.

    Args:
        split: programs that share K, at most 8 and at most its steps; None chooses the fastest.
        shared_kb: KiB of shared memory for a program's stages.
    """
    N, K = x.shape
    heads = out if isinstance(out, QKVTarget) else None
    paired = gated or heads is not None
    R = len(weight) // 2 if paired else len(weight)
    split = split or split_of(R, K, paired, sm_count(x.device))
    n_max = max(8, triton.next_power_of_2(N))
    sliced = K % (8 * SLICES.value * split) == 0
    slices = SLICES.value * (split if sliced else 1)
    columns = K // slices
    block_k = 64 if paired or n_max > 16 or not sliced else 128
    steps = triton.cdiv(columns, block_k)
    max_steps = steps if sliced else triton.cdiv(steps, split)
    assert sliced or split <= steps, f"{split} programs cannot share {steps} steps of K = {K}"
    stage = ((2 if paired else 1) * ROWS.value + n_max) * SLICES.value * block_k * 2
    weights, xs = (
        TensorDescriptor(
            t, [len(t), slices, columns], [t.stride(0), columns, 1], [rows, SLICES.value, block_k], SHARED.value
        )
        for t, rows in ((weight, ROWS.value), (x, n_max))
    )  # fmt: skip
    # At least two stages: one is refilled while the next step is multiplied.
    stages = min(max_steps, max(2, (shared_kb - 1) * 1024 // stage))
    tiles = triton.cdiv(R, ROWS.value)
    words = workspace(x.device, triton.next_power_of_2(max(1, tiles * (split - 1) * ROWS.value * n_max)))
    sums = out if isinstance(out, SumTarget) else None
    _linear_sm90_kernel[(tiles * split,)](
        weights, xs, bias, out if isinstance(out, torch.Tensor) else None,
        words if paired or sums else words.view(torch.int32),
        *(sums.peers, sums.count) if sums else (None, None), N, R, steps, sums.rank if sums else 0,
        *(*heads.tensors, *heads.strides) if heads else (*[None] * 6, 0, 0),
        SPLIT=split, SLICED=sliced, N_MAX=n_max, BLOCK_K=block_k, STAGES=stages, BIAS=bias is not None, GATED=gated,
        **sum_shape(sums),
        **heads.shape if heads else dict(Q_HEADS=0, KV_HEADS=0, D=0, PAGE=0, SLOT=0, HEAD=0),
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
