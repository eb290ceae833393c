"""keep_best in plain torch."""

from __future__ import annotations

import torch

from kernels.reference.select_blocks import NONE


def keep_best(
    offered: torch.Tensor,
    first: torch.Tensor,
    starts: torch.Tensor,
    table: torch.Tensor,
    kvp_rank: int,
    counted: torch.Tensor,
) -> None:
    """Drops pages that are not among the best of all ranks; shapes as in `kernels.sparse.keep_best.keep_best`."""
    ranks, _, _, topk, _ = offered.shape
    source = torch.arange(ranks, device=offered.device)[:, None, None, None]
    score, page = offered.long().unbind(-1)  # [K, N, Hkv, topk]
    block = page * ranks + (source - starts[:, None, None]) % ranks
    # Score and block in one number: of equal scores, the earlier block is better.
    value = score * (1 << 31) - block
    least = value.permute(1, 2, 0, 3).flatten(2).sort(descending=True).values[..., topk - 1]  # [N, Hkv]
    lost = (value[kvp_rank] < least[..., None]) & (score[kvp_rank] > NONE)
    n, head, i = lost.nonzero().unbind(1)
    table[n, head, first[n].long() + i] = -1
    counted[0] -= len(n)
