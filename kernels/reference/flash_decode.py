"""flash_decode in plain torch."""

from __future__ import annotations

import torch

from kernels.paged_keys import PagedKeys
from kernels.reference.paged import attend


def flash_decode(
    q: torch.Tensor,
    keys: PagedKeys,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a few queries per sequence over paged keys; shapes as in `kernels.attention.flash_decode`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device) if lse is None else lse
    for b in range(q.shape[0]):
        row_out, row_lse = attend(q[b], keys, keys.table[b], keys.lo[b], keys.hi[b])
        out[b].copy_(row_out)
        lse[b].copy_(row_lse)
    return out, lse
