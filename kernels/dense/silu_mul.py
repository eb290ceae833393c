"""SwiGLU: silu(gate) * up, as a kernel and as the epilogue of projections and experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.dense.reference import ALPHA
from kernels.dense.reference import silu_mul as reference

_ALPHA = tl.constexpr(ALPHA)


@triton.jit
def swiglu(gate, up):
    """Returns silu(gate) * up."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def rounded_swiglu(gate, up, dtype: tl.constexpr):
    """SwiGLU of inputs rounded to `dtype`, as the outputs of two projections would be."""
    gate = gate.to(dtype).to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up.to(dtype).to(tl.float32)


@triton.jit
def clamped_swiglu(gate, up, clamp_at):
    """Applies gpt-oss's gate; clamps by comparison, as a minimum would swallow NaN."""
    gate = tl.where(gate > clamp_at, clamp_at, gate)
    up = tl.where(up > clamp_at, clamp_at, tl.where(up < -clamp_at, -clamp_at, up))
    return gate / (1.0 + tl.exp(gate * -_ALPHA)) * (up + 1.0)


@triton.jit
def _silu_mul_kernel(gate_up, out, row, F, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + n * row + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(gate_up + n * row + F + f, mask=f < F, other=0.0).to(tl.float32)
    tl.store(out + n * F + f, swiglu(gate, up), mask=f < F)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Computes silu(gate) * up [N, F] of gate_up [N, 2 F] (last dim contiguous), in fp32, rounded once."""
    if not dispatch.on_gpu(gate_up):
        return reference(gate_up)
    N, F = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty(N, F, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():  # a rank may have no columns
        block = min(1024, triton.next_power_of_2(F))
        _silu_mul_kernel[N, triton.cdiv(F, block)](gate_up, out, gate_up.stride(0), F, BLOCK=block, num_warps=4)
    return out
