"""mla_prefill in plain torch."""

from __future__ import annotations

import torch

from kernels.paged_keys import PagedKeys
from kernels.reference.flash_prefill import flash_prefill
from kernels.reference.paged import whole


def mla_prefill(
    q: torch.Tensor,
    keys: PagedKeys,
    cu_q: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends prompt chunks in latent space; shapes as in `kernels.mla.prefill.mla_prefill`."""
    full, lse = flash_prefill(q, whole(keys), cu_q, max_q, max_k, lse=lse)
    latent = keys.v.shape[-1]
    return full[..., :latent].contiguous() if out is None else out.copy_(full[..., :latent]), lse
