"""repeat_blocks in plain torch."""

from __future__ import annotations

import torch

SHARES = 1024  # to which a share is rounded
STRIDE = 7919  # a prime: a walk by it comes to every block of a range before it comes to one again


def repeat_blocks(
    table: torch.Tensor,
    block_table: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    positions: torch.Tensor,
    topk: int,
    repeat: float,
) -> None:
    """Chosen pages of a set pattern; shapes as in `kernels.sparse.repeat_blocks.repeat_blocks`."""
    renewed = round((1 - repeat) * topk * SHARES)
    lane = torch.arange(topk, device=table.device)
    head = torch.arange(table.shape[1], device=table.device)[:, None]
    for n in range(len(table)):
        begin, each = int(first[n]), (int(last[n]) - int(first[n])) // topk
        if each == 0:
            continue  # all are chosen, or nearly so
        turns = (int(positions[n]) * renewed // SHARES + topk - 1 - lane) // topk
        column = begin + lane * each + (turns + lane + head) * STRIDE % each
        table[n, :, begin : begin + topk] = block_table[n * len(block_table) // len(table)][column]
