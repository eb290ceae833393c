"""Plain torch reference of `kernels.dense`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.scaled import Matrix, ScaledMatrix, as_tensor
from kernels.scaled_keys import quantize_latents

ALPHA = 1.702  # of gpt-oss's gate


def embedding(tokens: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
    """Plain torch `kernels.dense.embedding.embedding`."""
    if len(weight) == 0:
        return weight.new_zeros(len(tokens), weight.shape[1])
    row = tokens - first
    mine = (row >= 0) & (row < len(weight))
    return F.embedding(row.clamp(0, len(weight) - 1), weight).masked_fill_(~mine[:, None], 0)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch `kernels.dense.rms_norm.rms_norm`."""
    total = x if residual is None else x + residual
    wide = total.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype), total


def angles(
    positions: torch.Tensor, inv_freq: torch.Tensor, factor: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch `kernels.dense.rotary.angles`."""
    angle = positions.float()[:, None] * inv_freq
    return (angle.cos() * torch.where(inv_freq == 0, 1.0, factor)).to(dtype), (angle.sin() * factor).to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Applies RoPE to x [N, heads, D] (half-split) by cos, sin [N, D / 2], in fp32, rounded once."""
    a, b = x.float().chunk(2, dim=-1)
    c, s = cos.float()[:, None], sin.float()[:, None]
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1).to(x.dtype)


def linear(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None, gated: bool, dtype: torch.dtype) -> torch.Tensor:
    """Plain torch `kernels.dense.linear.linear`; returns `dtype`."""
    x = rounded_rows(x, weight, len(x))
    y = F.linear(x.to(dtype), as_tensor(weight, dtype).to(dtype), bias)
    return silu_mul(y) if gated else y


def quantize_rows(x: torch.Tensor, planes: int, begin: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch `kernels.dense.quantize_rows.quantize_rows`."""
    x = F.pad(x.float(), (begin, -(begin + x.shape[1]) % 128))
    high, scales = quantize_latents(x)
    each = scales.repeat_interleave(128, 1)
    low = (x / each - high.float()).to(high.dtype)
    return torch.stack([high, low][:planes]), scales.mT.contiguous()


def rounded_rows(x: torch.Tensor, weight: Matrix, rows: int) -> torch.Tensor:
    """Rounds x [n, K] to e4m3 where a product of `rows` rows does."""
    if not (isinstance(weight, ScaledMatrix) and weight.rounds(rows)):
        return x
    (data,), scales = quantize_rows(x, 1, weight.begin)
    dequantized = data.float() * scales.mT.repeat_interleave(128, 1)
    return dequantized[:, weight.begin : weight.begin + x.shape[1]].to(x.dtype)


def silu_mul(gate_up: torch.Tensor, clamp_at: float | None = None) -> torch.Tensor:
    """Plain torch `kernels.dense.silu_mul.silu_mul`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate = F.silu(gate)
    if clamp_at is not None:
        gate, up = gate.clamp(max=clamp_at), up.clamp(-clamp_at, clamp_at)
    return (gate * up).to(gate_up.dtype)


def clamped_swiglu(gate_up: torch.Tensor, clamp_at: float) -> torch.Tensor:
    """Applies gpt-oss's gate to [N, 2 F] (gate columns first) -> [N, F] in the same dtype."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=clamp_at), up.clamp(-clamp_at, clamp_at)
    return (gate * torch.sigmoid(ALPHA * gate) * (up + 1)).to(gate_up.dtype)


def gate_mul(x: torch.Tensor, gate: torch.Tensor, function: str) -> torch.Tensor:
    """Plain torch `kernels.dense.gate_mul.gate_mul`."""
    if x.numel() == 0:
        return torch.empty_like(x)
    factor = F.softplus(gate.float()) if function == "softplus" else gate.float().sigmoid()
    return (x.float() * factor.repeat_interleave(x.shape[1] // gate.shape[1], 1)).to(x.dtype)
