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
    if len(q) == len(keys.table) and max_q == 1:  # pages of its own for each query, such as chosen tokens
        own_out, own_lse = attend(q[:, None], keys, keys.table, keys.lo[:, None], keys.hi[:, None])
        return out.copy_(own_out[:, 0]), lse.copy_(own_lse[:, 0])
    for i, (first, last) in enumerate(pairwise(cu_q.tolist())):
        for begin in range(first, last, QUERIES):
            part = slice(begin, min(begin + QUERIES, last))
            of_part = attend(q[None, part], keys, keys.table[i : i + 1], keys.lo[None, part], keys.hi[None, part])
            out[part], lse[part] = of_part[0][0], of_part[1][0]
    return out, lse
