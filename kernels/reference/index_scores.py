"""index_scores in plain torch."""

from __future__ import annotations

import torch

from kernels.reference.choose_tokens import ordered


def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    tables: torch.Tensor,
    hi: torch.Tensor,
    cu_q: torch.Tensor | None,
    max_q: int,
    scores: torch.Tensor,
    scales: torch.Tensor | None = None,
    numbers: torch.Tensor | None = None,
) -> None:
    """Writes scores of keys; shapes as in `kernels.indexer.scores.index_scores`. Sums are the same on every grid."""
    page_size = cache.shape[1]
    begins = torch.arange(0, len(q) + 1, max_q).tolist() if cu_q is None else cu_q.tolist()
    for pages, begin, end in zip(tables, begins, begins[1:], strict=False):
        for n in range(begin, end):
            at = torch.arange(int(hi[n]), device=q.device)
            slots = pages[at // page_size].long(), at % page_size
            keys = cache[slots].to(q.dtype).double()  # [keys, D]
            if scales is not None:
                keys *= scales[slots][:, None]
            products = (keys @ q[n].double().T).relu()
            scores[n, : len(at)] = (products @ weights[n].double()).float()
            if numbers is not None:
                numbers[0, n] += (ordered(scores[n, : len(at)]) >> 24).bincount(minlength=256)
