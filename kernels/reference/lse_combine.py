"""lse_combine in plain torch."""

from __future__ import annotations

import torch


def lse_combine(
    partials: torch.Tensor,
    lse: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges partial attention outputs by their LSE; shapes as in `kernels.attention.lse_combine.lse_combine`."""
    out = torch.empty(partials.shape[1:], dtype=partials.dtype, device=partials.device) if out is None else out
    out_lse = torch.empty(lse.shape[1:], dtype=torch.float32, device=lse.device) if out_lse is None else out_lse
    empty = lse == -torch.inf
    peak = lse.amax(0)
    peak = peak.masked_fill(peak == -torch.inf, 0)
    weights = (lse - peak).exp()
    total = torch.zeros_like(peak)
    merged = torch.zeros(partials.shape[1:], dtype=torch.float32, device=partials.device)
    for source, weight, skip in zip(partials, weights, empty, strict=True):
        total += weight
        # Skipped, not multiplied by zero: the partial of an empty source may be NaN.
        merged += (source.float() * weight[..., None]).masked_fill_(skip[..., None], 0)
    out.copy_(merged / total.masked_fill(total == 0, 1)[..., None])
    out_lse.copy_(peak + total.log())  # log 0 = -inf
    return out, out_lse
