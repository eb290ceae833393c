"""kv_append in plain torch."""

from __future__ import annotations

import torch

from kernels.reference.rms_norm import rms_norm
from kernels.scaled_keys import store


def kv_append(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    means: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotates, appends, returns the queries; shapes as in `kernels.attention.kv_append.kv_append`."""
    page_size, kv_heads = k_cache.shape[1:3]
    q, k, v = qkv.split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        q_norm, k_norm, eps = norms
        if means is None:
            q, k = rms_norm(q, q_norm, eps)[0], rms_norm(k, k_norm, eps)[0]
        else:
            of_q, of_k = torch.rsqrt(means + eps)[:, :, None, None].unbind(1)
            q, k = (q.float() * of_q).to(q.dtype) * q_norm, (k.float() * of_k).to(k.dtype) * k_norm
    mine = slots >= 0
    where = slots[mine] // page_size, slots[mine] % page_size
    for x, cache, scale in zip((rotate(k, cos, sin)[mine], v[mine]), (k_cache, v_cache), scales, strict=True):
        if scale is None:
            cache[where] = x
        else:
            store(x, cache, scale, slots[mine])
    return rotate(q, cos, sin)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the halves of x [N, heads, D] against each other by angles [N, D / 2], in fp32, rounded once."""
    a, b = x.float().chunk(2, dim=-1)
    c, s = cos.float()[:, None], sin.float()[:, None]
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1).to(x.dtype)
