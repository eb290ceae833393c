"""route in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def route(
    logits: Tensor, top_k: int, scoring: str, bias: Tensor | None, groups: int, top_groups: int, group_score: int,
    normalise: bool, scale: float, shared_count: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Chooses experts and their weights; arguments and shapes as in `kernels.moe.router.route`."""
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
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    everyone = torch.arange(shared_count, device=ids.device).expand(len(ids), -1)
    return torch.cat([ids + shared_count, everyone], 1).int(), F.pad(weights * scale, (0, shared_count), value=1.0)


def _top(scores: Tensor, k: int) -> Tensor:
    """Returns the columns of each row's k largest, best first, ties to the lowest (`topk` does not specify them)."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
