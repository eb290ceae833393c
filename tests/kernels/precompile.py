"""Precompiles kernels for sm_90 without a GPU; prints their number before and after, and the sum of what they wrote.

A separate program: the tests' process runs kernels in the interpreter, and cannot compile them.
"""

from __future__ import annotations

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels import dispatch
from kernels.dense import rms_norm, silu_mul
from kernels.precompile import precompile


class NoGPU:
    """A compile-only driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(*kernels: JITFunction) -> int:
    """Counts compiled kernels."""
    found = (kernel for function in kernels for kernel in function.device_caches[0][0].values())
    return sum(isinstance(kernel, CompiledKernel) for kernel in found)


if __name__ == "__main__":
    driver.set_active(NoGPU())
    dispatch.on_gpu = lambda t: True
    launch, functions = JITFunction.run, (rms_norm._rms_norm_kernel, silu_mul._silu_mul_kernel)
    with precompile():
        written = [
            silu_mul.silu_mul(rms_norm.rms_norm(torch.ones(2, H), torch.ones(H), 1e-6)[0]) for H in (64, 64, 200)
        ]
        before = compiled(*functions)
    assert launch is JITFunction.run
    print(before, compiled(*functions), sum(x.abs().sum().item() for x in written))
