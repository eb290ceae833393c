"""select_blocks in plain torch."""

from __future__ import annotations

from itertools import pairwise

import torch

NONE = -(2**31)  # below every score
TILE = 32  # pages of a tile


def ordered(scores: torch.Tensor) -> torch.Tensor:
    """Maps fp32 to int32 of the same order; NaN is the highest."""
    bits = scores.contiguous().view(torch.int32)
    return torch.where(scores.isnan(), 2**31 - 1, bits ^ ((bits >> 31) & 0x7FFFFFFF))


def block_scores(q: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Scores pages for one query by upper bounds of q.k: the maximum over a KV head's query heads, fp32.

    Args:
        q: [Hq, D].
        bounds: [n, Hkv, 2, D], of n pages.

    Returns:
        [Hkv, n].
    """
    heads = bounds.shape[1]
    q = q.float().view(heads, -1, q.shape[-1])  # [Hkv, group, D]
    one, two = bounds.float().permute(2, 1, 3, 0)  # each [Hkv, D, n]
    found = q.clamp(min=0) @ one + q.clamp(max=0) @ two
    return found.amax(1)  # NaN propagates


def _bounds(bounds: torch.Tensor, entries: torch.Tensor, parts: int) -> torch.Tensor:
    """Looks up the bounds [n, Hkv, 2, D] of entries [Hkv, n], pages or parts."""
    head = torch.arange(len(entries), device=entries.device)[:, None]
    found = bounds[entries, head] if parts == 1 else bounds[entries // parts, head, entries % parts]
    return found.transpose(0, 1)


def _best(found: torch.Tensor, k: int) -> torch.Tensor:
    """Returns the places [Hkv, k] of the best scores, ascending; stable: ties go to the earlier page."""
    return found.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values


def _shares(begin: int, end: int, k: int, stretch: int | None) -> list[tuple[int, int, int]]:
    """Lists the stretches of the pages, from the first one on, and how many of the k each gives."""
    k = min(k, end - begin)
    if stretch is None or begin >= end:
        return [(0, end - begin, k)]
    first, tiles = begin // TILE, -(-end // TILE) - begin // TILE
    each = -(-tiles // -(-tiles // (stretch // TILE)))
    cuts = [max((first + tile) * TILE - begin, 0) for tile in range(0, tiles, each)] + [end - begin]
    return [(a, b, b * k // (end - begin) - a * k // (end - begin)) for a, b in pairwise(cuts)]


def select_blocks(
    q: torch.Tensor,
    bounds: torch.Tensor,
    block_table: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    pages: torch.Tensor,
    topk: int,
    width: int,
    counted: torch.Tensor,
    *,
    candidates: torch.Tensor | None = None,
    stretch: int | None = None,
) -> torch.Tensor:
    """Selects the pages that queries read; shapes as in `kernels.sparse.select_blocks.select_blocks`.

    Args:
        stretch: most pages of a stretch; None: one stretch.
    """
    N, T = len(q), len(q) // len(block_table)
    heads, parts = bounds.shape[1], bounds.shape[2] if bounds.dim() == 5 else 1
    table = torch.full((N, heads, width), -1, dtype=torch.int32, device=q.device)
    for n in range(N):
        row = block_table[n // T].expand(heads, -1)
        if parts > 1:
            row = (row[..., None] * parts + torch.arange(parts, device=row.device)).flatten(1)
        begin, end, held = int(first[n]), int(last[n]), int(pages[n])
        found = ordered(block_scores(q[n], _bounds(bounds, row[:, begin:end].long(), parts)))
        chosen = torch.cat(
            [at + _best(found[:, at:until], k) for at, until, k in _shares(begin, end, topk, stretch)], 1
        )
        sinks = torch.arange(begin, device=q.device).expand(heads, -1)
        local = torch.arange(end, held, device=q.device).expand(heads, -1)
        read = torch.cat([sinks, begin + chosen, local], 1)  # [Hkv, pages read]
        table[n, :, : read.shape[1]] = row.gather(1, read)
        counted += torch.tensor([read.numel(), heads], device=q.device)
        if candidates is not None:
            candidates[n] = NONE
            candidates[n, :, : chosen.shape[1], 0] = found.gather(1, chosen)
            candidates[n, :, : chosen.shape[1], 1] = begin + chosen.int()
    return table
