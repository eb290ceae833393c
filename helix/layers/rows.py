"""Exchange of rows around an FFN in mode dp: attention has a rank's own sequences, the FFN those of all ranks.

Before the FFN every rank gathers the normalised rows of all ranks; after it the ranks' parts are summed, and each rank
receives the sums of its own rows. Both messages of a rank have one size, that of the most rows on any rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from comm.base import Communicator
from comm.pending import PendingSum


def over_all_ranks(ffn: Callable[[Tensor], PendingSum], x: Tensor, counts: Sequence[int], comm: Communicator) -> Tensor:
    """Computes an FFN, whose summands are spread over all ranks, of this rank's rows; two collectives.

    Args:
        x: [n, H], own rows.
        counts: rows of each rank; empty: n on all of them. A rank with 0 has one row, which is padding.

    Returns:
        [n, H], summed over ranks.
    """
    most = max(counts, default=len(x))
    rows = comm.all_gather(F.pad(x, (0, 0, 0, most - len(x))) if len(x) < most else x)  # [W, most, H]
    if len({*counts}) < 2:
        parts = ffn(rows.flatten(0, 1)).compute().view(rows.shape)
    else:
        computed = ffn(torch.cat([of_rank[:n] for of_rank, n in zip(rows, counts, strict=True)])).compute()
        parts = torch.zeros_like(rows)
        for of_rank, part in zip(parts, computed.split(list(counts)), strict=True):
            of_rank[: len(part)] = part
    return comm.reduce_scatter(parts)[: len(x)]
