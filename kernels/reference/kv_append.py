"""kv_append in plain torch."""

from __future__ import annotations

import torch


def kv_append(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write new keys and values into the cache; shapes as in `kernels.kv_append.kv_append`."""
    mine = slots >= 0
    page_size = k_cache.shape[1]
    where = slots[mine] // page_size, slots[mine] % page_size
    k_cache[where] = k[mine].to(k_cache.dtype)
    v_cache[where] = v[mine].to(v_cache.dtype)
