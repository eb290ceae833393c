"""Output gate of attention and of shared experts: x * sigmoid(gate)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.dense.reference import sigmoid_mul as reference
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor


@triton.jit
def _sigmoid_mul_kernel(x, gate, out, x_n, gate_n, F, EACH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_predecessor(PDL)
    start_successor(PDL)
    n = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + n * x_n + f, mask=f < F, other=0.0).to(tl.float32)
    g = tl.load(gate + n * gate_n + (f if EACH else 0 * f), mask=f < F, other=0.0).to(tl.float32)
    tl.store(out + n * F + f, value / (1.0 + tl.exp(-g)), mask=f < F)


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Multiplies x [N, F] with sigmoid(gate), gate [N, F] or [N, 1], in fp32, rounded once; last dims contiguous."""
    if not dispatch.on_gpu(x):
        return reference(x, gate)
    N, F = x.shape
    assert x.stride(1) == gate.stride(1) == 1 and gate.shape[1] in (1, F)
    out = torch.empty(N, F, dtype=x.dtype, device=x.device)
    if out.numel():  # a rank may have no columns
        block = min(1024, triton.next_power_of_2(F))
        _sigmoid_mul_kernel[N, triton.cdiv(F, block)](
            x, gate, out, x.stride(0), gate.stride(0), F, EACH=gate.shape[1] == F, BLOCK=block, num_warps=4,
            **pdl_options(x),
        )  # fmt: skip
    return out
