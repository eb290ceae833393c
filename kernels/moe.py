"""The routed experts that a rank holds: gather, two grouped products, weighted sum."""

from __future__ import annotations

import torch

from kernels.reference.moe import moe as reference


def moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    first: int,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    limit: float | None = None,
) -> torch.Tensor:
    """Sum over a token's chosen local experts of weight * (down(act(gate_up x))); this rank's part of a sum.

    `act` is silu(gate) * up; with `limit` (gpt-oss) gate * sigmoid(1.702 gate) * (up + 1), gate clamped from above and
    up on both sides. Sums are fp32; the activations between the two products are rounded to x's dtype. Deterministic.

    Args:
        x: [N, H], last dim contiguous.
        ids: [N, k] int32, contiguous; those outside [first, first + E_local) count nothing.
        weights: [N, k] fp32, contiguous.
        gate_up: [E_local, 2 F, H] in x's dtype, contiguous; the gate's F rows before the others.
        down: [E_local, H, F] in x's dtype, contiguous.
        first: global id of local expert 0.
        gate_up_bias: [E_local, 2 F] in x's dtype, contiguous, or None.
        down_bias: [E_local, H], likewise; added once an expert, before its weight.
        limit: bound of the clamps, or None.

    Returns:
        [N, H] in x's dtype; zeros for a token without local experts.
    """
    return reference(x, ids, weights, gate_up, down, first, gate_up_bias, down_bias, limit)
