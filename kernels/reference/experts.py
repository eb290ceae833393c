"""moe in plain torch, one expert at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.reference.silu_mul import silu_mul
from kernels.scaled import Matrix, as_tensor

ALPHA = 1.702  # of gpt-oss's gate


def moe(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Matrix, down: Matrix, first: int,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, clamp_at: float | None, addend: Tensor | None,
) -> Tensor:  # fmt: skip
    """Sums the outputs of the chosen local experts by weight; arguments and shapes as in
    `kernels.moe.experts.RoutedExperts`.
    """
    out = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    if addend is not None:
        out += addend
    for expert in range(len(gate_up)):
        token, slot = torch.where(ids == first + expert)
        into, out_of = as_tensor(gate_up[expert], x.dtype), as_tensor(down[expert], x.dtype)
        h = F.linear(x[token], into, None if gate_up_bias is None else gate_up_bias[expert])
        h = silu_mul(h) if clamp_at is None else clamped_swiglu(h, clamp_at)
        y = F.linear(h, out_of, None if down_bias is None else down_bias[expert])
        out.index_add_(0, token, (y * weights[token, slot, None]).to(out.dtype))
    return out.to(x.dtype)


def clamped_swiglu(gate_up: Tensor, clamp_at: float) -> Tensor:
    """Applies gpt-oss's gate to [N, 2 F] (the gate's columns first) -> [N, F] in the same dtype."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=clamp_at), up.clamp(-clamp_at, clamp_at)
    return (gate * torch.sigmoid(ALPHA * gate) * (up + 1)).to(gate_up.dtype)
