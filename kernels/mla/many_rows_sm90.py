"""One item of MLA attention on Hopper: 64 query rows and the key tiles that they read, in two consumer warpgroups.

The left warpgroup scores a tile, computes the softmax, and accumulates the left half of the output. The right one
accumulates the right half with the weights passed through shared memory. The producer fills two stages, piece by piece:
a piece is free again as soon as the matmuls that read it as values are done.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.attention.schedule_sm90 import TILE
from kernels.mla.decode_common_sm90 import key_scores_of, score_page_of, store_scores
from kernels.sm90 import COPIED, SHARED, zero_dead_keys

# Layouts of scores (TILE query rows x TILE keys) and values (rows x half of the latents).
SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
VALUES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16]))
# VALUES as stored, in whole 32-byte sectors. (Eight elements per thread instead of four would need shared memory, which
# is full.)
STORED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64], [0, 128]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], [64, 256],
    )
)  # fmt: skip


@gluon.jit
def allocate_shared(dtype: gl.constexpr, R: gl.constexpr, P: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocates shared memory: a tile of queries, two of keys, weights and factors to pass on, and all barriers.

    Args:
        ARRIVALS: loads that complete a left half.
    """
    H: gl.constexpr = R // 2
    queries = (
        gl.allocate_shared_memory(dtype, [TILE, H], SHARED),
        gl.allocate_shared_memory(dtype, [TILE, H], SHARED),
        gl.allocate_shared_memory(dtype, [TILE, P], SHARED),
    )
    keys = (
        gl.allocate_shared_memory(dtype, [2, TILE, H], SHARED),
        gl.allocate_shared_memory(dtype, [2, TILE, H], SHARED),
        gl.allocate_shared_memory(dtype, [2, TILE, P], SHARED),
    )
    weights = gl.allocate_shared_memory(dtype, [TILE, TILE], SHARED)
    factors = gl.allocate_shared_memory(gl.float32, [TILE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    left_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    right_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    left_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    right_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    weights_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    weights_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(2):
        mbarrier.init(left_ready.index(s), count=ARRIVALS)
        mbarrier.init(right_ready.index(s), count=1)
        mbarrier.init(left_free.index(s), count=1)
        mbarrier.init(right_free.index(s), count=1)
    mbarrier.init(weights_ready, count=1)
    mbarrier.init(weights_free, count=1)
    fence_async_shared()
    tl.debug_barrier()
    return (
        queries,
        keys,
        (left_ready, right_ready),
        (left_free, right_free),
        (weights, factors, weights_ready, weights_free),
    )


@gluon.jit
def load_queries(q_left, q_right, q_rope, rows, live, R: gl.constexpr):
    """Copies a tile of query rows from pointers `rows` [TILE]; zeros where not `live`."""
    c = gl.arange(0, 64, layout=gl.SliceLayout(0, COPIED))
    for k in gl.static_range(R // 128):
        left = gl.load(rows[:, None] + (k * 64 + c)[None, :], mask=live[:, None], other=0.0)
        q_left.slice(k * 64, 64, dim=1).store(left)
        right = gl.load(rows[:, None] + (R // 2 + k * 64 + c)[None, :], mask=live[:, None], other=0.0)
        q_right.slice(k * 64, 64, dim=1).store(right)
    q_rope.store(gl.load(rows[:, None] + (R + c)[None, :], mask=live[:, None], other=0.0))
    fence_async_shared()
    tl.debug_barrier()


@gluon.jit
def _score(queries, keys, ready, loaded, scores):
    q_left, q_right, q_rope = queries
    k_left, k_right, k_rope = keys
    left_ready, right_ready = ready
    slot = loaded % 2
    phase = loaded // 2 % 2
    mbarrier.wait(left_ready.index(slot), phase)
    scores = warpgroup_mma(q_rope, k_rope.index(slot).permute((1, 0)), scores, use_acc=False, is_async=True)
    scores = warpgroup_mma(q_left, k_left.index(slot).permute((1, 0)), scores, is_async=True)
    mbarrier.wait(right_ready.index(slot), phase)
    return warpgroup_mma(q_right, k_right.index(slot).permute((1, 0)), scores, is_async=True)


@gluon.jit
def _weigh(scores, total, peak, scale_log2, key, full_from, full_to, row_lo, row_hi):
    scores = scores * scale_log2
    if (key < full_from) | (key + TILE > full_to):
        n = key + gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORES))
        reads = (n[None, :] >= row_lo[:, None]) & (n[None, :] < row_hi[:, None])
        scores = gl.where(reads, scores, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(scores, 1))
    rescale = gl.exp2(peak - new_peak)
    weights = gl.exp2(scores - new_peak[:, None])
    return weights, rescale, total * rescale + gl.sum(weights, 1), new_peak


@gluon.jit
def _hand_over(weights, factors, handed, weights_shared, factors_shared, weights_ready, weights_free):
    mbarrier.wait(weights_free, handed % 2 ^ 1)
    weights_shared.store(weights.to(weights_shared.dtype))
    factors_shared.store(factors)
    fence_async_shared()
    tl.debug_barrier()
    mbarrier.arrive(weights_ready)


@gluon.jit
def attend_left(
    queries, keys, ready, left_free, handing, loaded, handed, first, last, start, stop,
    full_from, full_to, row_lo, row_hi, scale_log2, R: gl.constexpr, ZERO_DEAD_KEYS: gl.constexpr,
    collecting=None, PAGE: gl.constexpr = 1, COLLECT: gl.constexpr = None,
):  # fmt: skip
    """Left warpgroup: scores tiles [first, last), passes on their weights, and accumulates the left half of the output.

    Args:
        loaded, handed: tiles loaded, and passed on, before these.
        ZERO_DEAD_KEYS: values of dead keys may be anything.
        collecting: where to store key scores: the plane, the pages of scores, a page's stride, which rows [TILE] count,
            and the factor on q.k.
        COLLECT: which rows count, see `kernels.paged_keys.KeyScores`; None: there are no key scores.

    Returns:
        The normalized left half, the base-2 LSE, and the new counts.
    """
    k_left, _, _ = keys
    weights_shared, factors_shared, weights_ready, weights_free = handing
    acc = gl.zeros([TILE, R // 2], gl.float32, layout=VALUES)
    scores = gl.zeros([TILE, TILE], gl.float32, layout=SCORES)
    total = gl.zeros([TILE], gl.float32, layout=gl.SliceLayout(1, SCORES))
    # Finite: -inf minus -inf would be NaN.
    peak = gl.full([TILE], -1.0e38, gl.float32, layout=gl.SliceLayout(1, SCORES))
    if first < last:
        scores = _score(queries, keys, ready, loaded, scores)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=[scores])
    # Peel the last tile: matmuls in flight across the end of an iteration would be waited for there.
    for tile in range(first, last - 1):
        key = tile * TILE
        slot = loaded % 2
        if COLLECT is not None:
            page = score_page_of(tile, collecting, PAGE, COLLECT)
            store_scores(key_scores_of(scores, collecting, 0, COLLECT), key, start, stop, page, collecting, PAGE)
        weights, rescale, total, peak = _weigh(scores, total, peak, scale_log2, key, full_from, full_to, row_lo, row_hi)
        if ZERO_DEAD_KEYS:
            if key < start:
                zero_dead_keys(k_left.index(slot), key, start, stop)
        _hand_over(weights, rescale, handed, weights_shared, factors_shared, weights_ready, weights_free)
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, VALUES))[:, None]
        acc = warpgroup_mma(weights_shared, k_left.index(slot), acc, is_async=True)
        handed += 1
        loaded += 1
        scores = _score(queries, keys, ready, loaded, scores)
        acc = warpgroup_mma_wait(num_outstanding=3, deps=[acc])
        tl.debug_barrier()
        mbarrier.arrive(left_free.index(slot))
        scores = warpgroup_mma_wait(num_outstanding=0, deps=[scores])
    if first < last:
        key = (last - 1) * TILE
        slot = loaded % 2
        if COLLECT is not None:
            page = score_page_of(last - 1, collecting, PAGE, COLLECT)
            store_scores(key_scores_of(scores, collecting, 0, COLLECT), key, start, stop, page, collecting, PAGE)
        weights, rescale, total, peak = _weigh(scores, total, peak, scale_log2, key, full_from, full_to, row_lo, row_hi)
        if ZERO_DEAD_KEYS:
            if (key < start) | (key + TILE > stop):
                zero_dead_keys(k_left.index(slot), key, start, stop)
        _hand_over(weights, rescale, handed, weights_shared, factors_shared, weights_ready, weights_free)
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, VALUES))[:, None]
        acc = warpgroup_mma(weights_shared, k_left.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
        tl.debug_barrier()
        mbarrier.arrive(left_free.index(slot))
        handed += 1
        loaded += 1

    empty = total == 0.0
    log2 = gl.where(empty, float("-inf"), peak + gl.log2(total))
    factor = 1.0 / gl.where(empty, 1.0, total)
    mbarrier.wait(weights_free, handed % 2 ^ 1)
    factors_shared.store(factor)
    tl.debug_barrier()
    mbarrier.arrive(weights_ready)
    handed += 1
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, VALUES))[:, None]
    return acc, log2, loaded, handed


@gluon.jit
def attend_right(
    k_right, right_ready, right_free, handing, loaded, handed, first, last, start, stop,
    R: gl.constexpr, ZERO_DEAD_KEYS: gl.constexpr,
):  # fmt: skip
    """Right warpgroup: accumulates the right half of the output over tiles [first, last) with the weights passed on.

    Returns the normalized half and the new counts, like `attend_left`.
    """
    weights_shared, factors_shared, weights_ready, weights_free = handing
    acc = gl.zeros([TILE, R // 2], gl.float32, layout=VALUES)
    for tile in range(first, last):
        slot = loaded % 2
        mbarrier.wait(right_ready.index(slot), loaded // 2 % 2)
        mbarrier.wait(weights_ready, handed % 2)
        rescale = factors_shared.load(gl.SliceLayout(1, VALUES))
        if ZERO_DEAD_KEYS:
            if (tile * TILE < start) | (tile * TILE + TILE > stop):
                zero_dead_keys(k_right.index(slot), tile * TILE, start, stop)
        acc = warpgroup_mma(weights_shared, k_right.index(slot), acc * rescale[:, None], is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
        tl.debug_barrier()
        mbarrier.arrive(weights_free)
        mbarrier.arrive(right_free.index(slot))
        loaded += 1
        handed += 1
    mbarrier.wait(weights_ready, handed % 2)
    factor = factors_shared.load(gl.SliceLayout(1, VALUES))
    tl.debug_barrier()
    mbarrier.arrive(weights_free)
    handed += 1
    return acc * factor[:, None], loaded, handed
