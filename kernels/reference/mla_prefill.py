"""mla_prefill in plain torch."""

from __future__ import annotations

import torch

from kernels.reference.flash_prefill import flash_prefill


def mla_prefill(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_q: torch.Tensor,
    max_q: int,
    lo: torch.Tensor,
    hi: torch.Tensor,
    scale: float,
    latent: int,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prefill attention in latent space; shapes as in `kernels.mla.prefill.mla_prefill`."""
    slots = cache.unsqueeze(2)  # one KV head, whose values are taken whole and cut afterwards
    full, lse = flash_prefill(q, slots, slots, block_table, cu_q, max_q, lo, hi, scale, lse=lse)
    return full[..., :latent].contiguous() if out is None else out.copy_(full[..., :latent]), lse
