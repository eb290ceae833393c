"""write_back in plain torch."""

from __future__ import annotations

import torch

from kernels.hot_blocks import NOWHERE
from kernels.reference.block_bounds import full_pages


def write_back(
    places: torch.Tensor,
    host: torch.Tensor,
    place_of: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    first_row: int,
    ring_pages: int,
    **grid: int,
) -> None:
    """Writes filled pages to the host; shapes as in `kernels.tier.write_back.write_back`."""
    heads = place_of.shape[1]
    head = torch.arange(heads, device=places.device)
    lengths = zip(tables, starts.tolist(), before.tolist(), after.tolist(), strict=True)
    for row, (table, start, old, new) in enumerate(lengths, first_row):
        for column in range(full_pages(old, start, **grid), full_pages(new, start, **grid)):
            page = int(table[column])
            of_ring = (row * ring_pages + column % ring_pages) * heads
            host[:, page * heads : (page + 1) * heads] = places[:, of_ring + head].to(host.device)
            place_of[:, :, page] = NOWHERE
