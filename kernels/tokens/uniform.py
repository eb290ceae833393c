"""Counter-based random numbers inside kernels, bitwise equal to those of `kernels.reference.uniform`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniform(seed, position, stream, index):
    """Draws fp64 in the open interval (0, 1) from four integer tensors, broadcast against each other."""
    golden: tl.constexpr = 0x9E3779B97F4A7C15
    x = _mix((seed.to(tl.uint64) + 1) * golden)
    x = _mix(x + position.to(tl.uint64) * golden)
    x = _mix(x + stream.to(tl.uint64) * golden)
    x = _mix(x + index.to(tl.uint64) * golden)
    return ((x >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52


@triton.jit
def gumbel(seed, position, stream, index):
    """Draws Gumbel noise, fp64."""
    return -tl.log(-tl.log(uniform(seed, position, stream, index)))
