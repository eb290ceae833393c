"""fold_blocks in plain torch."""

from __future__ import annotations

import torch


def full_pages(length: int, start: int, *, kvp: int, kvp_rank: int, append_block: int, page_size: int) -> int:
    """Computes how many pages a sequence's first `length` tokens fill on a rank."""
    cycle = append_block * kvp
    rest = length % cycle - (kvp_rank - start) % kvp * append_block
    return (length // cycle * append_block + min(max(rest, 0), append_block)) // page_size


def fold_blocks(
    keys: torch.Tensor,
    scales: torch.Tensor | None,
    bounds: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    *,
    kvp: int,
    kvp_rank: int,
    append_block: int,
    part_bounds: torch.Tensor | None = None,
) -> None:
    """Writes the bounds of newly filled pages; shapes as in `kernels.sparse.block_bounds.fold_blocks`."""
    grid = {"kvp": kvp, "kvp_rank": kvp_rank, "append_block": append_block, "page_size": keys.shape[2]}
    for table, start, old, new in zip(tables, starts.tolist(), before.tolist(), after.tolist(), strict=True):
        pages = table[full_pages(old, start, **grid) : full_pages(new, start, **grid)].long()
        k = keys[:, pages].float()  # [layers, n, page_size, Hkv, D]
        if scales is not None:
            k *= scales[:, pages].transpose(2, 3)[..., None]
        if len(pages) == 0:
            continue
        bounds[:, pages] = torch.stack((k.amax(2), k.amin(2)), 3).to(bounds.dtype)
        if part_bounds is not None:
            parts = k.unflatten(2, (part_bounds.shape[3], -1))  # [layers, n, parts, tokens, Hkv, D]
            both = parts.amax(3), parts.amin(3)
            part_bounds[:, pages] = torch.stack(both, 4).transpose(2, 3).to(bounds.dtype)
