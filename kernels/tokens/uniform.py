"""Counter-based random numbers in kernels, bitwise equal to `kernels.tokens.reference`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _bits(seed, position, stream, index):
    golden: tl.constexpr = 0x9E3779B97F4A7C15
    x = _mix((seed.to(tl.uint64) + 1) * golden)
    x = _mix(x + position.to(tl.uint64) * golden)
    x = _mix(x + stream.to(tl.uint64) * golden)
    return _mix(x + index.to(tl.uint64) * golden)


@triton.jit
def uniform(seed, position, stream, index):
    """Returns fp64 in the open interval (0, 1) from four broadcast integer tensors."""
    return ((_bits(seed, position, stream, index) >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52


@triton.jit
def gumbel(seed, position, stream, index):
    """Returns Gumbel noise, fp64."""
    return -tl.log(-tl.log(uniform(seed, position, stream, index)))


@triton.jit
def gumbel_bound(seed, position, stream, index):
    """Returns an approximate fp32 upper bound of `gumbel`: at most 1e-3 too low, mostly not more too high."""
    upper = (_bits(seed, position, stream, index) >> 32).to(tl.uint32)
    # The u of `uniform` is less than `upper_bound`, and 1 - u more than `rest`.
    upper_bound = (upper.to(tl.float32) + 1.0) * 2.3283064365386963e-10  # 2^-32
    rest = (0xFFFFFFFF - upper).to(tl.float32) * 2.3283064365386963e-10
    near = rest * (1.0 + rest * (0.5 + rest * (0.3333333 + rest * 0.25)))  # -log(1 - rest)
    return -tl.log(tl.where(rest < 0.015625, near, -tl.log(upper_bound)))
