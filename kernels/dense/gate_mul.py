"""Output gate of attention and of shared experts: x * sigmoid(gate), or x * softplus(gate)."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.dense.reference import gate_mul as reference
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor


@triton.jit
def _gate_mul_kernel(
    x, gate, out, x_n, gate_n, F, each, SOFTPLUS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    wait_for_predecessor(PDL)
    start_successor(PDL)
    n = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + n * x_n + f, mask=f < F, other=0.0).to(tl.float32)
    g = tl.load(gate + n * gate_n + f // each, mask=f < F, other=0.0).to(tl.float32)
    if SOFTPLUS:
        value *= tl.where(g > 0, g, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(g)))
    else:
        value /= 1.0 + tl.exp(-g)
    tl.store(out + n * F + f, value, mask=f < F)


def gate_mul(x: torch.Tensor, gate: torch.Tensor, function: Literal["sigmoid", "softplus"] = "sigmoid") -> torch.Tensor:
    """Multiplies x [N, F] with function(gate) in fp32, rounded once; last dims contiguous.

    Args:
        gate: [N, G]; each gate is for F / G neighboring columns.
    """
    if not dispatch.on_gpu(x):
        return reference(x, gate, function)
    N, F = x.shape
    assert x.stride(1) == gate.stride(1) == 1 and F % max(gate.shape[1], 1) == 0
    out = torch.empty(N, F, dtype=x.dtype, device=x.device)
    if out.numel():  # a rank may have no columns
        block = min(1024, triton.next_power_of_2(F))
        _gate_mul_kernel[N, triton.cdiv(F, block)](
            x, gate, out, x.stride(0), gate.stride(0), F, F // gate.shape[1], SOFTPLUS=function == "softplus",
            BLOCK=block, num_warps=4, **pdl_options(x),
        )  # fmt: skip
    return out
