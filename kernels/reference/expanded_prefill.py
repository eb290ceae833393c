"""expanded_prefill in plain torch."""

from __future__ import annotations

from itertools import pairwise

import torch

ROWS = 256  # of one block: scores stay small, and products large


def expanded_prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    ropes: torch.Tensor,
    cu_q: torch.Tensor,
    max_q: int,
    hi: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends prompt chunks to expanded latents; shapes as in `kernels.mla.expanded_prefill.expanded_prefill`."""
    heads, nope = q.shape[1], q.shape[2] - ropes.shape[2]
    out = q.new_zeros(len(q), heads, keys.shape[3] - nope)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    for of_sequence, of_ropes, (first, last) in zip(keys, ropes, pairwise(cu_q.tolist()), strict=False):
        for begin in range(first, last, ROWS):
            rows = slice(begin, min(begin + ROWS, last))
            if (most := int(hi[rows].max())) == 0:
                continue
            k, v = of_sequence[:most].float().transpose(0, 1).split([nope, out.shape[2]], 2)  # [H, T, ..]
            of_q = q[rows].float().transpose(0, 1)
            scores = (of_q[..., :nope] @ k.mT + of_q[..., nope:] @ of_ropes[:most].float().mT) * scale
            beyond = torch.arange(most, device=q.device) >= hi[rows, None]
            scores.masked_fill_(beyond, -torch.inf)
            weights = scores.softmax(-1).masked_fill(hi[rows, None] == 0, 0.0)
            out[rows] = (weights @ v).transpose(0, 1).to(q.dtype)
            lse[rows] = scores.logsumexp(-1).T
    return out, lse
