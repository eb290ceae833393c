"""flash_prefill in plain torch."""

from __future__ import annotations

from itertools import pairwise

import torch

from kernels.paged_keys import PagedKeys
from kernels.reference.paged import attend

QUERIES = 256  # Queries of one block: their scores against a block of keys stay small, and the matmuls stay large.


def flash_prefill(
    q: torch.Tensor,
    keys: PagedKeys,
    cu_q: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends prompt chunks to paged keys; shapes as in `kernels.attention.flash_prefill.flash_prefill`."""
    keys = keys.unpacked()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device) if lse is None else lse
    for pages, (first, last) in zip(keys.table, pairwise(cu_q.tolist()), strict=True):
        for begin in range(first, last, QUERIES):
            block = slice(begin, min(begin + QUERIES, last))
            block_out, block_lse = attend(q[block], keys, pages, keys.lo[block], keys.hi[block])
            out[block].copy_(block_out)
            lse[block].copy_(block_lse)
    return out, lse
