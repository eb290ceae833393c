"""repeat_blocks in plain torch."""

from __future__ import annotations

import torch

SHARES = 1024  # a share is rounded to multiples of 1 / SHARES
STRIDE = 7919  # a prime: steps by it visit every block of a range before any block again


def repeat_blocks(
    table: torch.Tensor,
    block_table: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    positions: torch.Tensor,
    topk: int,
    repeat: float,
) -> None:
    """Overwrites chosen pages by a fixed pattern; shapes as in `kernels.sparse.repeat_blocks.repeat_blocks`."""
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
