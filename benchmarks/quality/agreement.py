"""Compares a policy's steps with dense attention, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

MARGIN = 1.0  # lead of dense attention's top logit from which a step counts as sure
Z = 1.96


def wilson(hits: int, count: int) -> tuple[float, float]:
    """Returns Wilson's 95% interval for a share."""
    if count == 0:
        return 0.0, 1.0
    share, z2 = hits / count, Z * Z / count
    half = Z * math.sqrt(share * (1 - share) / count + z2 / count / 4) / (1 + z2)
    middle = (share + z2 / 2) / (1 + z2)
    return max(0.0, middle - half), min(1.0, middle + half)


def mean_range(values: Sequence[float]) -> tuple[float, float]:
    """Returns Student's 95% interval for the mean of two values or more.

    The quantile is Cornish and Fisher's expansion, 0.8% too low with 3 degrees of freedom.
    """
    n, mean = len(values), sum(values) / len(values)
    v, z = n - 1, Z
    t = z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    half = t * math.sqrt(sum((x - mean) ** 2 for x in values) / v / n)
    return mean - half, mean + half


def mcnemar(lost: int, won: int) -> float:
    """Returns the p-value of McNemar's exact two-sided test."""
    pairs = lost + won
    tail = sum(math.comb(pairs, i) for i in range(min(lost, won) + 1))
    return min(1.0, 2 * tail / 2**pairs)


def paired(right: Sequence[bool], dense: Sequence[bool]) -> dict[str, Any]:
    """Compares right answers with dense attention's to the same questions.

    `lost`: only dense attention is right; `won`: only the policy is.
    """
    hits = sum(right)
    lost = sum(theirs and not ours for ours, theirs in zip(right, dense, strict=True))
    won = sum(ours and not theirs for ours, theirs in zip(right, dense, strict=True))
    return {
        "count": len(right),
        "hits": hits,
        "hits_range": wilson(hits, len(right)),
        "lost": lost,
        "won": won,
        "p": mcnemar(lost, won),
    }


def compare(logits: Tensor, dense: Tensor, targets: Tensor) -> dict[str, Any]:
    """Compares a policy's logits [n, steps, V] with dense attention's, given the true next tokens [n, steps]."""
    ours, theirs = (x.double().log_softmax(-1) for x in (logits, dense))
    agrees = logits.argmax(-1) == dense.argmax(-1)  # ties, which occur in bf16, break the same way in both
    best = dense.topk(2, dim=-1).values
    margins = best[..., 0] - best[..., 1]
    sure = margins > MARGIN
    hits, sure_hits = int(agrees.sum()), int((agrees & sure).sum())
    nll = -ours.gather(-1, targets[..., None])[..., 0]
    kl = (theirs.exp() * (theirs - ours)).sum(-1)  # [n, steps]
    return {
        "steps": agrees.numel(),
        "agrees": hits / agrees.numel(),
        "agrees_range": wilson(hits, agrees.numel()),
        "agrees_by_window": agrees.double().mean(1).tolist(),
        "sure_steps": int(sure.sum()),
        "sure": sure_hits / max(1, int(sure.sum())),
        "sure_range": wilson(sure_hits, int(sure.sum())),
        "margins_of_misses": [round(x, 3) for x in sorted(margins[~agrees].tolist(), reverse=True)],
        "perplexity": float(nll.mean().exp()),
        "perplexity_by_window": nll.mean(1).exp().tolist(),
        "kl": float(kl.mean()),
        "kl_by_window": kl.mean(1).tolist(),
        "tv": float((theirs.exp() - ours.exp()).abs().sum(-1).mean() / 2),
    }


def common_prefix(ids: Tensor, others: Tensor) -> list[int]:
    """Returns the number of tokens in each row [n, steps] before the first difference."""
    return [int(same) for same in (ids == others).long().cumprod(1).sum(1)]
