"""mla_decode in plain torch."""

from __future__ import annotations

import torch

from kernels.paged_keys import PagedKeys
from kernels.reference.flash_decode import flash_decode
from kernels.reference.paged import whole


def mla_decode(
    q: torch.Tensor,
    keys: PagedKeys,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends decode queries in latent space; shapes as in `kernels.mla.decode.mla_decode`."""
    full, lse = flash_decode(q, whole(keys), lse=lse)
    latent = keys.v.shape[-1]
    return full[..., :latent].contiguous() if out is None else out.copy_(full[..., :latent]), lse
