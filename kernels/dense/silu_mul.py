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
def step_swiglu(gate, up, clamp_at):
    """Applies Step-3.5's gate: SwiGLU with clamps after silu; by comparison, as above."""
    gate = gate / (1.0 + tl.exp(-gate))
    gate = tl.where(gate > clamp_at, clamp_at, gate)
    up = tl.where(up > clamp_at, clamp_at, tl.where(up < -clamp_at, -clamp_at, up))
    return gate * up


@triton.jit
def expert_swiglu(gate, up, clamp_at, CLAMP: tl.constexpr):
    """Applies the gate of experts that CLAMP names: see `clamp_of`."""
    if CLAMP == 0:
        y = swiglu(gate, up)
    elif CLAMP == 1:
        y = clamped_swiglu(gate, up, clamp_at)
    else:
        y = step_swiglu(gate, up, clamp_at)
    return y


def clamp_of(clamp_at: float | None, activation: str) -> tuple[float, int]:
    """Returns the bound, and `expert_swiglu`'s CLAMP: 0 for none, 1 for swigluoai (gpt-oss), 2 for swiglustep."""
    return (0.0, 0) if clamp_at is None else (clamp_at, {"swigluoai": 1, "swiglustep": 2}[activation])


@triton.jit
def _silu_mul_kernel(gate_up, out, row, F, clamp_at, CLAMP: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + n * row + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(gate_up + n * row + F + f, mask=f < F, other=0.0).to(tl.float32)
    tl.store(out + n * F + f, expert_swiglu(gate, up, clamp_at, CLAMP), mask=f < F)


def silu_mul(gate_up: torch.Tensor, clamp_at: float | None = None) -> torch.Tensor:
    """Computes silu(gate) * up [N, F] of gate_up [N, 2 F] (last dim contiguous), in fp32, rounded once.

    Args:
        clamp_at: upper limit of silu(gate), and limit of up on both sides; None: there is none.
    """
    if not dispatch.on_gpu(gate_up):
        return reference(gate_up, clamp_at)
    N, F = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty(N, F, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():  # a rank may have no columns
        block = min(1024, triton.next_power_of_2(F))
        bound, clamp = clamp_of(clamp_at, "swiglustep")
        _silu_mul_kernel[N, triton.cdiv(F, block)](
            gate_up, out, gate_up.stride(0), F, bound, CLAMP=clamp, BLOCK=block, num_warps=4
        )
    return out
