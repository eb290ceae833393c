"""mla_append in plain torch."""

from __future__ import annotations

import torch

from kernels.reference.kv_append import rotate
from kernels.reference.rms_norm import rms_norm
from kernels.scaled_keys import rounded_latents


def mla_append(
    q: torch.Tensor,
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    w_uk: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    scales: torch.Tensor | None = None,
    ropes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalises, rotates, appends, returns absorbed queries; shapes as in `kernels.mla.append.mla_append`."""
    latent = rms_norm(kv[:, : len(gain)], gain, eps)[0]
    key = rotate(kv[:, None, len(gain) :], cos, sin)[:, 0]
    mine = slots >= 0
    page, slot = slots[mine] // cache.shape[1], slots[mine] % cache.shape[1]
    if scales is None or ropes is None:
        cache[page, slot] = torch.cat((latent, key), -1)[mine]
    else:
        cache[page, slot], scales[page, :, slot] = rounded_latents(latent[mine])
        ropes[page, slot] = key[mine]
    nope = w_uk.shape[1]
    absorbed = torch.bmm(q[..., :nope].transpose(0, 1), w_uk).transpose(0, 1)
    return torch.cat((absorbed, rotate(q[..., nope:], cos, sin)), -1)
