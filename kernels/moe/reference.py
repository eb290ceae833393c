"""Plain torch reference of `kernels.moe`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dense.reference import clamped_swiglu, rounded_rows, silu_mul
from kernels.scaled import Matrix, ScaledMatrix, as_tensor


def route(
    logits: Tensor, top_k: int, scoring: str, bias: Tensor | None, groups: int, top_groups: int, group_score: int,
    normalize: bool, scale: float, shared_count: int, live: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Plain torch `kernels.moe.router.route`."""
    scores = logits.float()  # [N, E]
    if scoring == "softmax":
        scores = scores.softmax(-1)
    elif scoring == "sigmoid":
        scores = scores.sigmoid()
    choice = scores if bias is None else scores + bias
    if groups > 1:
        grouped = choice.unflatten(-1, (groups, -1))  # [N, groups, E / groups]
        best = _top(grouped.topk(group_score).values.sum(-1), top_groups)
        dropped = torch.ones(grouped.shape[:2], dtype=torch.bool, device=logits.device).scatter(1, best, False)
        # DeepSeek-V2 fills in zero; with a softmax, that changes at most which expert gets a weight of zero.
        choice = grouped.masked_fill(dropped[..., None], -torch.inf).flatten(1)
    ids = _top(choice, top_k)
    weights = scores.gather(1, ids)
    if scoring == "top_softmax":
        weights = weights.softmax(-1)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    shared_ids = torch.arange(shared_count, device=ids.device).expand(len(ids), -1)
    ids = torch.cat([ids + shared_count, shared_ids], 1).int()
    ids = ids if live is None else ids.masked_fill(~live[:, None], -1)
    return ids, F.pad(weights * scale, (0, shared_count), value=1.0)


def _top(scores: Tensor, k: int) -> Tensor:
    """Returns the columns of each row's k largest, best first, ties to the lowest (`topk` does not specify them)."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def moe(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Matrix, down: Matrix, first: int,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, clamp_at: float | None, activation: str,
    addend: Tensor | None,
) -> Tensor:  # fmt: skip
    """Plain torch `kernels.moe.experts.RoutedExperts`."""
    out = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    if addend is not None:
        out += addend
    for expert in range(len(gate_up)):
        token, slot = torch.where(ids == first + expert)
        into, out_of = as_tensor(gate_up[expert], x.dtype), as_tensor(down[expert], x.dtype)
        rows = rounded_rows(x[token], gate_up, len(x))
        h = F.linear(rows, into, None if gate_up_bias is None else gate_up_bias[expert])
        h = silu_mul(h, clamp_at) if clamp_at is None or activation == "swiglustep" else clamped_swiglu(h, clamp_at)
        weight = weights[token, slot, None]
        if isinstance(down, ScaledMatrix) and down.rounds(len(x)):  # h is rounded with its weight
            y = F.linear(rounded_rows((h * weight).to(h.dtype), down, len(x)), out_of)
            y = y if down_bias is None else y + down_bias[expert] * weight
        else:
            y = F.linear(h, out_of, None if down_bias is None else down_bias[expert]) * weight
        out.index_add_(0, token, y.to(out.dtype))
    return out.to(x.dtype)
