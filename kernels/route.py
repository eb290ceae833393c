"""Which experts a token goes to, and how much each counts."""

from __future__ import annotations

from typing import Literal

import torch

from kernels.reference.route import route as reference

Scoring = Literal["softmax", "top_softmax", "sigmoid"]


def route(
    logits: torch.Tensor,
    top_k: int,
    *,
    scoring: Scoring = "softmax",
    bias: torch.Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    group_score: int = 1,
    normalise: bool = False,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` best experts of each token, best first, ties by the lowest id; all in fp32.

    Args:
        logits: [N, E], any float dtype, last dim contiguous.
        top_k: experts a token, at most those of `top_groups` groups.
        scoring: `softmax` over all experts; `top_softmax`: over the chosen ones alone (gpt-oss); `sigmoid` of each
            logit (DeepSeek-V3).
        bias: [E] fp32, added to the scores for choosing alone.
        groups: contiguous groups of E / groups experts.
        top_groups: the best so many groups' experts may be chosen.
        group_score: a group counts as much as its best expert (1: DeepSeek-V2) or its best two together (2:
            DeepSeek-V3), bias included.
        normalise: the weights of a token sum to one.
        scale: factor on the weights in the end.

    Returns:
        Expert ids [N, top_k] int32 and weights [N, top_k] fp32.

    Source:
        DeepSeek-V2 (arXiv:2405.04434), section 2.2.2; DeepSeek-V3 (arXiv:2412.19437), section 2.1.2.
    """
    size = logits.shape[1] // groups
    assert logits.shape[1] == size * groups and group_score <= size and top_k <= size * top_groups <= size * groups
    return reference(logits, top_k, scoring, bias, groups, top_groups, group_score, normalise, scale)
