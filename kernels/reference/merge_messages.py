"""merge_messages in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch


def merge_messages(
    out: torch.Tensor, lse: torch.Tensor, to_out: torch.Tensor, to_lse: torch.Tensor, shares: Sequence[int]
) -> None:
    """Writes merged partials [N, Hq, D] and [N, Hq] into messages, as `kernels.attention.merge_messages` does.

    Args:
        out, lse: [N, sum(shares), D] and [N, sum(shares)].
        to_out, to_lse, shares: see there.
    """
    lanes = to_out.shape[2]
    k = head = 0
    for h, same in groupby(shares):  # balanced shares have at most two sizes: at most two rounds of copies
        n = len(list(same))
        run = slice(head, head + n * h)
        to_out[k : k + n, :, :h] = out[:, run].unflatten(1, (n, h)).transpose(0, 1)  # [N, n*h, D] -> [n, N, h, D]
        to_lse[k : k + n, :, :h] = lse[:, run].unflatten(1, (n, h)).transpose(0, 1)
        if h < lanes:  # padding reads as an empty shard
            to_out[k : k + n, :, h:] = 0
            to_lse[k : k + n, :, h:] = -torch.inf
        k, head = k + n, run.stop
