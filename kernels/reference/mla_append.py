"""mla_append in plain torch."""

from __future__ import annotations

import torch

from kernels.reference.kv_append import rotate
from kernels.reference.rms_norm import rms_norm


def mla_append(
    q: torch.Tensor,
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise, rotate, append, return the queries' part; shapes as in `kernels.mla_append.mla_append`."""
    page_size = cache.shape[1]
    latent = rms_norm(kv[:, : len(gain)], gain, eps)[0]
    key = rotate(kv[:, None, len(gain) :], cos, sin)[:, 0]
    mine = slots >= 0
    cache[slots[mine] // page_size, slots[mine] % page_size] = torch.cat((latent, key), -1)[mine]
    rotated = rotate(q, cos, sin)
    return rotated if out is None else out.copy_(rotated)
