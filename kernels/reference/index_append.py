"""index_append in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.reference.kv_append import rotate
from kernels.scaled_keys import rounded


def index_append(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    gain: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    cache: torch.Tensor,
    slots: torch.Tensor,
    scales: torch.Tensor | None = None,
    numbers: torch.Tensor | None = None,
) -> None:
    """Normalises, rotates and appends keys, rotates queries; shapes as in `kernels.indexer.append.index_append`."""
    if numbers is not None:
        numbers.zero_()
    rope = 2 * cos.shape[1]
    normed = F.layer_norm(k.float(), gain.shape, gain.float(), bias.float(), eps)
    keys = torch.cat((rotate(normed[:, None, :rope], cos, sin)[:, 0], normed[:, rope:]), -1)
    mine = slots >= 0
    at = slots[mine] // cache.shape[1], slots[mine] % cache.shape[1]
    if scales is None:
        cache[at] = keys[mine].to(cache.dtype)
    else:
        cache[at], scales[at] = rounded(keys[mine])
    q[..., :rope] = rotate(q[..., :rope], cos, sin)
