"""Helpers of the warp-specialised kernels for Hopper: tile layouts, and zeroing of dead values."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # between memory and shared memory


@gluon.jit
def silence(values, key, start, stop):
    """Zeroes the values of dead keys: the NaN of an unwritten slot would survive a weight of zero.

    Row i of `values`, in shared memory, belongs to key `key` + i; keys of [start, stop) are live. Groups of warps that
    share the values may each call it before they read them: all write the same.
    """
    n = key + gl.arange(0, values.shape[0], layout=gl.SliceLayout(1, COPIED))
    live = (n >= start) & (n < stop)
    for c in gl.static_range(values.shape[1] // 64):
        piece = values.slice(c * 64, 64, dim=1)
        x = piece.load(COPIED)
        piece.store(gl.where(live[:, None], x, gl.zeros_like(x)))
    fence_async_shared()
    tl.debug_barrier()
