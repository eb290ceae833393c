"""mla_decode in plain torch."""

from __future__ import annotations

import torch

from kernels.reference.flash_decode import flash_decode


def mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lo: torch.Tensor,
    hi: torch.Tensor,
    scale: float,
    latent: int,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode attention in latent space; shapes as in `kernels.mla.decode.mla_decode`."""
    slots = cache.unsqueeze(2)  # one KV head, whose values are taken whole and cut afterwards
    full, lse = flash_decode(q, slots, slots, block_table, lo, hi, scale, lse=lse)
    return full[..., :latent].contiguous() if out is None else out.copy_(full[..., :latent]), lse
