"""flash_decode in plain torch."""

from __future__ import annotations

import torch

from kernels.reference.paged import attend


def flash_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    lo: torch.Tensor,
    hi: torch.Tensor,
    scale: float,
    *,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a few queries per sequence over paged keys; shapes as in `kernels.attention.flash_decode`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device) if lse is None else lse
    for b in range(q.shape[0]):
        row_out, row_lse = attend(q[b], k_cache, v_cache, block_table[b], lo[b], hi[b], scale, sinks)
        out[b].copy_(row_out)
        lse[b].copy_(row_lse)
    return out, lse
