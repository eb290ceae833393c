"""Helpers of the warp-specialized Hopper kernels: tile layouts, stages in shared memory, zeroing of dead values."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # between global and shared memory


@gluon.jit
def add(a, b):
    """Returns a + b, for reductions and scans."""
    return a + b


@gluon.jit
def pair_barriers(STAGES: gl.constexpr):
    """Allocates the ready and free barriers of stages that one warp fills and two warpgroups read."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    return ready, free


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """Returns the next stage, and the phase of its barriers."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def zero_dead_keys(values, key, start, stop):
    """Zeroes the values of dead keys: the NaN of an unwritten slot would survive a weight of zero.

    Row i of `values`, in shared memory, is key `key` + i; keys of [start, stop) are live. Warpgroups that share the
    values may each call it before they read them: all write the same.
    """
    n = key + gl.arange(0, values.shape[0], layout=gl.SliceLayout(1, COPIED))
    live = (n >= start) & (n < stop)
    for c in gl.static_range(values.shape[1] // 64):
        piece = values.slice(c * 64, 64, dim=1)
        x = piece.load(COPIED)
        piece.store(gl.where(live[:, None], x, gl.zeros_like(x)))
    fence_async_shared()
    tl.debug_barrier()
